"""`Exchanging`: an optimizer of Keras that exchanges what it needs itself.

It takes the place of a plain optimizer and of what makes it distributed. Gradients travel as they are, and momenta by
the method of the configuration, as a step of its exchange.
"""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.core.config.config import Config, refuse_typos
from grace.core.config.recommended import Optimizer, warn_of_pairs
from grace.core.errors import StepError
from grace.core.observe.announcement import warn
from grace.core.optim.moments import ONE_BIT, freeze_step_of
from grace.core.plan.plan import early_warnings
from grace.tensorflow.gradients import Gradient, inside
from grace.tensorflow.optim.ruled import Ruled, work_dtype
from grace.tensorflow.optimizer import Exchanges, OptimizerExchange, arrange
from grace.tensorflow.typed import do_not_convert


class Momenta(OptimizerExchange):
    """The exchange of momenta, which are float32 or float64."""

    takes_outer = False
    takes_auto = False
    _optimizer: Exchanging

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks."""
        return {**super().settings(), **self._optimizer.settings()}

    def _dtype_of(self, variable: Any) -> str:
        return work_dtype(variable)

    def _weights(self) -> dict[str, tf.Variable]:
        return self._optimizer.equal_variables(super()._weights())

    @property
    def of_this_rank(self) -> list[tf.Variable]:
        """The variables that differ between ranks. A broadcast must not change them."""
        return [*super().of_this_rank, *self._optimizer.own_variables()]


class Exchanging(Exchanges, Ruled):
    """Base of optimizers that exchange their gradients and momenta."""

    # The step after which the second moment is frozen; None if it is not known yet.
    _freeze_step: int | None

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        freeze_step: int | None = None,
        total_steps: int | None = None,
        process_set: Any = hvd.global_process_set,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, options)
        refuse_typos(options, type(self), self._where)
        self._freeze_step = freeze_step_of(freeze_step, total_steps, self._where)
        if config is None and "compressor" not in options:
            options = {**ONE_BIT, **options}
        self.grace = exchange = Momenta(config, process_set=process_set, **options)
        exchange.attach(self)
        # Its gradients come uncompressed.
        exchange.optimizers = [Optimizer.of(type(self), self._rule.betas[0])._replace(adaptive=False)]
        if exchange._rank_of_ranks()[0] == 0:
            warn_of_pairs(exchange.config, exchange.optimizers[0])
            warn(early_warnings(exchange.config), exchange.warned)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the states and the exchange of these variables."""
        if not self.built:
            super().build(variables)
            self._make_numbers()
            # Momenta are dense, also those of embeddings.
            self.grace.build(variables, list(map(inside, variables)))

    def _make_numbers(self) -> None:
        """Make the numbers that it keeps besides."""

    def _number(self, name: str, value: float, dtype: str = "int64") -> tf.Variable:
        start = keras.initializers.Constant(value)
        return inside(self.add_variable(shape=(), initializer=start, dtype=dtype, name=name))

    def settings(self) -> dict[str, Any]:
        """Return what must be equal on all ranks besides the configuration."""
        return {
            "optimizer": type(self).__name__,
            "freeze_step": self._freeze_step,
            "options": {**dataclasses.asdict(self._rule), "betas": list(self._rule.betas)},
        }

    def equal_variables(self, weights: dict[str, tf.Variable]) -> dict[str, tf.Variable]:
        """Return the variables that are equal on all ranks before a step, the weights included, by name."""
        names = self.grace.names
        return weights | {
            f"{key} of {name}": inside(slot)
            for name, slots in zip(names, self._slots, strict=True)
            for key, slot in slots.items()
        }

    def own_variables(self) -> list[tf.Variable]:
        """Return the variables that differ between ranks."""
        return []

    # --- steps --------------------------------------------------------------------------------------------------------

    # AutoGraph would take longer than the tracing, and is not needed.
    @do_not_convert
    def apply(self, grads: Sequence[Gradient | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """Exchange gradients or momenta, and update the variables; all ranks must call it equally often.

        Raises StepError unless there is a gradient, or None, for each variable.
        """
        grads = list(grads)
        if trainable_variables is None and not self.built:
            # Keras raises its error.
            super().apply(grads, trainable_variables)
        variables = self._variables_of_call(trainable_variables)
        if len(self._places(grads, variables)) != len(self._trainable_variables):
            raise StepError(
                f"{self._where}: expected gradients of all {len(self._trainable_variables)} variables, received "
                f"{len(grads)}; make a new optimizer after you freeze layers, and one per set of variables."
            )
        # Moments are dense, and another rank may have a gradient where this one has none.
        dense = [
            tf.zeros(v.shape, v.dtype) if g is None else tf.convert_to_tensor(g)
            for g, v in zip(grads, variables, strict=True)
        ]
        # The first call contacts the other ranks. That must happen outside of conditional branches.
        self.grace.fill([tf.zeros(spec.shape, spec.dtype) for spec in self.grace._specs])
        super().apply(dense, variables)

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        places = self._places(grads, trainable_variables)
        ordered = arrange(grads, places, len(places))
        number = tf.cast(tf.convert_to_tensor(self.iterations), tf.int64) + 1
        gradients = [self._flat(i, gradient) for i, gradient in enumerate(ordered)]
        self._advance(gradients, tf.cast(learning_rate, tf.float64), number)

    @abstractmethod
    def _advance(self, gradients: list[tf.Tensor], lr: tf.Tensor, number: tf.Tensor) -> None:
        """Exchange, and update the weights, by the flat gradients of this rank."""

    def _merge(self, sent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the flat means over all ranks, by the method of the configuration."""
        specs = self.grace._specs
        merged = self.grace([tf.reshape(x, spec.shape) for x, spec in zip(sent, specs, strict=True)])
        return [tf.reshape(tf.convert_to_tensor(x), [-1]) for x in merged]

    # --- files --------------------------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, and what makes the exchange again."""
        return {**super().get_config(), "freeze_step": self._freeze_step, "exchange": self.grace.saved()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """Make the optimizer from the result of `get_config`."""
        # This must not contact other ranks, because a single process may load a model.
        given = dict(config)
        saved = given.pop("exchange")
        made = super().from_config({**given, "config": saved["grace"]["config"]}, custom_objects)
        made.grace.restore(saved)
        return made
