"""Local steps: each rank steps on its own, and every few steps the ranks exchange the change of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.core.errors import ConfigError
from grace.tensorflow.exchange import Exchange

_WHERE = "grace.tensorflow.DistributedOptimizer"

# Keras 3.12, the last one for Python 3.10, has none.
MULTI_OPTIMIZER: type | tuple[()] = getattr(keras.optimizers, "MultiOptimizer", ())


def check_local(optimizer: Any, exchange: Exchange, local_steps: int, passes: int) -> None:
    """Raise ConfigError if an argument cannot be combined with local steps."""
    if local_steps < 1:
        raise ConfigError(f"{_WHERE}: local_steps must be at least 1, received {local_steps!r}.")
    if exchange.op != hvd.Average or exchange.gradient_predivide_factor != 1.0:
        raise ConfigError(
            f"{_WHERE}: local_steps averages the change of the weights and needs op=hvd.Average and "
            "gradient_predivide_factor=1; leave both arguments out."
        )
    if passes != 1 or isinstance(optimizer, MULTI_OPTIMIZER) or optimizer.gradient_accumulation_steps:
        raise ConfigError(
            f"{_WHERE}: local_steps cannot be combined with gradient accumulation or a MultiOptimizer; "
            "leave local_steps out, or use a plain optimizer."
        )
    needing = [stage.method.memory for _, stage in exchange.config.stages if stage.method.memory.needs_lr]
    if needing:
        raise ConfigError(
            f"{_WHERE}: with local_steps the residual already includes the learning rate, and {needing[0]} would "
            "correct it for the learning rate again; leave lr_correction out."
        )


def step_locally(optimizer: Any, apply: Callable[[], None], trainable_variables: Sequence[Any] | None) -> None:
    """Apply this rank's gradients, and exchange the weights after every `_local_steps`-th step.

    Each rank sends d = (weights after the last exchange - weights now), compressed with error feedback. All ranks then
    set their weights to (weights after the last exchange - mean of the decoded d). The residual is in units of the
    weights. Momentum stays local. Basu et al., "Qsparse-local-SGD", NeurIPS 2019, Algorithm 1.
    """
    optimizer._known(trainable_variables)
    variables, met, exchange = optimizer._trainable_variables, optimizer._met, optimizer.grace
    variables = [getattr(v, "value", v) for v in variables]
    # The first call contacts the other ranks. That must happen outside of the conditional branches below.
    exchange.filled([tf.zeros_like(v) for v in variables])

    def remember() -> tf.Tensor:
        # The weights may have been loaded or broadcast since the last exchange.
        for weights, v in zip(met, variables, strict=True):
            weights.assign(v)
        return tf.constant(True)

    def meet() -> tf.Tensor:
        moved = exchange([weights - v for weights, v in zip(met, variables, strict=True)])
        for weights, v, mean in zip(met, variables, moved, strict=True):
            v.assign(weights - tf.convert_to_tensor(mean))
        return tf.constant(True)

    done = optimizer._iterations.value
    tf.cond(done % optimizer._local_steps == 0, remember, lambda: tf.constant(False))
    optimizer._exchanged = True
    try:
        apply()
    finally:
        optimizer._exchanged = False
    tf.cond(done % optimizer._local_steps == 0, meet, lambda: tf.constant(False))
