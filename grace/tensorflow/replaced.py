"""The methods of Keras that grace replaces, because they decide on an optimizer that does not know of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import keras
import tensorflow as tf

from grace.core.errors import ConfigError
from grace.tensorflow.branches import always
from grace.tensorflow.exchange import Exchange
from grace.tensorflow.gradients import Gradient
from grace.tensorflow.optim.exchanging import Exchanging
from grace.tensorflow.optimizer import Distributed, innermost
from grace.tensorflow.outer import buffers_of
from grace.tensorflow.typed import do_not_convert


def _with_one_decision(keras_apply: Any) -> Any:
    """Return a `LossScaleOptimizer.apply` that makes one decision for all ranks if the inner optimizer is distributed.

    Keras skips the inner optimizer if it finds NaN or infinity. It may do so on some ranks only, while the others wait
    in a collective. So gradients are exchanged before Keras checks them: a bad gradient of one rank arrives as NaN on
    all ranks, and the residuals of that step are rolled back. With gradient accumulation, micro-steps exchange no
    gradients; then only the result of the check is exchanged.

    The class is changed because `model.compile` makes the LossScaleOptimizer itself.
    """

    @do_not_convert
    @wraps(keras_apply)
    def apply(self: Any, grads: Sequence[Gradient | None], trainable_variables: Sequence[Any] | None = None) -> None:
        inner = self.inner_optimizer
        if isinstance(inner, Exchanging):
            raise ConfigError(
                f"{inner._where}: dynamic loss scaling is not supported, because one rank could skip a step that "
                "others take; train in float32 or mixed_bfloat16, or pass auto_scale_loss=False to model.compile()."
            )
        if not isinstance(inner, Distributed) or (trainable_variables is None and not self.built):
            keras_apply(self, grads, trainable_variables)
            return
        if not self.built:
            assert trainable_variables is not None
            with keras.name_scope(self.name):
                self.build(list(trainable_variables))
        if inner.grace.config.outer is not None:
            # Ranks have scales of their own, and leave steps out on their own.
            scale = self.dynamic_scale.value.read_value()
            inner.apply_locally(list(grads), trainable_variables, partial(_apply_once, self, keras_apply), scale)
            return
        grads = inner._fill(list(grads), trainable_variables)
        if inner.gradient_accumulation_steps:
            factor = tf.where(inner.grace.graph.everywhere(self.check_finite(grads)), 1.0, float("nan"))
            keras_apply(self, _times(grads, factor), trainable_variables)
            return
        scale = self.dynamic_scale.value
        # Residuals must not depend on the current scale. Both products are exact while the scale is a power of two.
        merged = _times(inner.exchanged(_times(grads, 1.0 / scale), scale.read_value()), scale)
        with inner.after_exchange():
            keras_apply(self, merged, trainable_variables)

    return apply


def _apply_once(
    scaling: Any, keras_apply: Any, grads: Sequence[Gradient | None], variables: Sequence[Any] | None
) -> None:
    """Apply gradients, and check those of all passes of an inner step together, as a GradScaler of PyTorch does.

    If Keras checked each pass, the gradients of one that overflows would be missing in the sum. The sum of the passes
    is not finite if one of them is not, and the inner step is left out as a whole.
    """
    inner = scaling.inner_optimizer
    if not inner.gradient_accumulation_steps:
        keras_apply(scaling, grads, variables)
        return

    def last() -> None:
        factor = tf.where(scaling.check_finite(inner._accumulated_gradients), 1.0, float("nan"))
        keras_apply(scaling, _times(grads, factor), variables)
        inner._backend_reset_gradient_accumulators()

    before = partial(inner.apply, _times(grads, 1.0 / scaling.dynamic_scale.value), variables)
    tf.cond(inner.completes, always(last), always(before))


def _make_scale_loss(keras_scale: Any) -> Any:
    """Return a `LossScaleOptimizer.scale_loss` that notes the loss for outer steps, as the inner optimizer's does."""

    @wraps(keras_scale)
    def scale_loss(self: Any, loss: Any) -> Any:
        inner = innermost(self)
        if isinstance(inner, Distributed):
            inner.note_loss(loss)
        return keras_scale(self, loss)

    return scale_loss


def _times(grads: Sequence[Gradient | None], factor: tf.Tensor) -> list[Gradient | None]:
    return [g if g is None else keras.ops.multiply(g, factor) for g in grads]


# The functions that were made for an optimizer that exchanges.
_made: weakref.WeakSet[Any] = weakref.WeakSet()


def _without_old_functions(keras_make: Any) -> Any:
    """Return a `Model.make_train_function` that does not keep a function from before the optimizer was wrapped.

    `fit` and `train_on_batch` call it, and Keras then keeps the function that it has. If that has run with the plain
    optimizer, it is traced, and no gradient would be exchanged. The class is changed because only the model knows the
    function, and the optimizer does not know the model.
    """

    @wraps(keras_make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        inner = innermost(self.optimizer)
        exchanges = isinstance(inner, Distributed)
        if exchanges and not inner.grace._buffers:
            model = weakref.ref(self)
            inner.grace.note_buffers(lambda: buffers_of(model()))
        if exchanges and inner.grace.config.outer is not None and self.built and not inner.built:
            # Its `scale_loss` comes before its first step.
            inner.build(self.trainable_variables)
        keras_make(self, force or (exchanges and inner.wrapped_late and self.train_function not in _made))
        exchange: Exchange | None = getattr(inner, "grace", None)
        if exchange is not None and self.train_function not in _made:
            self.train_function = _make_train_function(self.train_function, weakref.ref(self), exchange, keras_make)
            _made.add(self.train_function)
        return self.train_function

    return make_train_function


def _make_train_function(train: Any, model: Callable[[], Any], exchange: Exchange, keras_make: Any) -> Any:
    """Return a train function of a model that lets the advisor of its exchange decide first, where no graph runs.

    After a change of the method, the function of Keras is traced again.
    """

    def train_function(*given: Any) -> Any:
        nonlocal train
        changes = len(exchange.history)
        if exchange.advisor is not None:
            exchange.advisor.decide()
        if len(exchange.history) != changes:
            trained = model()
            # A model may have put the function into one of its own.
            own = trained.train_function
            keras_make(trained, True)
            train, trained.train_function = trained.train_function, own
        # A train_step that is a tf.function would keep its graph.
        exchange.in_batch = not isinstance(model().train_step, tf.types.experimental.PolymorphicFunction)
        try:
            return train(*given)
        finally:
            exchange.in_batch = False

    return train_function


keras.optimizers.LossScaleOptimizer.apply = _with_one_decision(keras.optimizers.LossScaleOptimizer.apply)
keras.optimizers.LossScaleOptimizer.scale_loss = _make_scale_loss(keras.optimizers.LossScaleOptimizer.scale_loss)
keras.optimizers.LossScaleOptimizer.grace = property(lambda self: self.inner_optimizer.grace)
keras.Model.make_train_function = _without_old_functions(keras.Model.make_train_function)
