"""Dynamic loss scaling with one decision for all ranks, by an extension of Keras' LossScaleOptimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import keras
import tensorflow as tf

from grace.core.errors import ConfigError
from grace.tensorflow.exchange import Exchange
from grace.tensorflow.gradients import Gradient
from grace.tensorflow.optimizer import Distributed


def _scale_alike(keras_apply: Any) -> Any:
    """Return a `LossScaleOptimizer.apply` that makes one decision for all ranks if the inner optimizer is distributed.

    Keras skips the inner optimizer if it finds NaN or infinity. It may do so on some ranks only, while the others wait
    in a collective. So gradients are exchanged before Keras checks them: a bad gradient of one rank arrives as NaN on
    all ranks, and the residuals of that step are rolled back. With gradient accumulation, micro-steps exchange no
    gradients; then only the result of the check is exchanged.

    The class is changed because `model.compile` makes the LossScaleOptimizer itself.
    """

    @tf.autograph.experimental.do_not_convert
    @wraps(keras_apply)
    def apply(self: Any, grads: Sequence[Gradient | None], trainable_variables: Sequence[Any] | None = None) -> None:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed) or (trainable_variables is None and not self.built):
            keras_apply(self, grads, trainable_variables)
            return
        if not self.built:
            with keras.name_scope(self.name):
                self.build(list(trainable_variables))
        if inner._local_steps > 1:
            raise ConfigError(
                "grace.tensorflow: local_steps cannot be combined with dynamic loss scaling, because ranks may skip "
                "different steps; train in float32 or bfloat16."
            )
        grads = inner._filled(list(grads), trainable_variables)
        if inner.gradient_accumulation_steps:
            factor = tf.where(inner.grace.everywhere(self.check_finite(grads)), 1.0, float("nan"))
            keras_apply(self, _times(grads, factor), trainable_variables)
            return
        scale = self.dynamic_scale.value
        # Residuals must not depend on the current scale. Both products are exact while the scale is a power of two.
        merged = _times(inner.exchanged(_times(grads, 1.0 / scale), inner._call.places, scale.read_value()), scale)
        inner._exchanged = True
        try:
            keras_apply(self, merged, trainable_variables)
        finally:
            inner._exchanged = False

    return apply


def _times(grads: Sequence[Gradient | None], factor: tf.Tensor) -> list[Gradient | None]:
    return [g if g is None else keras.ops.multiply(g, factor) for g in grads]


def _inner_exchange(scaling: keras.optimizers.LossScaleOptimizer) -> Exchange:
    """Return the exchange of the optimizer inside a LossScaleOptimizer."""
    return scaling.inner_optimizer.grace


if not hasattr(keras.optimizers.LossScaleOptimizer, "grace"):
    keras.optimizers.LossScaleOptimizer.apply = _scale_alike(keras.optimizers.LossScaleOptimizer.apply)
    keras.optimizers.LossScaleOptimizer.grace = property(_inner_exchange)
