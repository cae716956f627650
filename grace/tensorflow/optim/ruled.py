"""`Ruled`: an optimizer of Keras whose arithmetic is a pure step per tensor of `grace.core.optim`."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from grace.core.errors import ConfigError
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.optim.moments import Moments, signature_of
from grace.core.spec import State
from grace.tensorflow.gradients import device_of, inside, names_of
from grace.tensorflow.run import tensorflow_ops
from grace.tensorflow.typed import Optimizer

# The arguments of every optimizer of Keras, with their defaults.
_OF_KERAS: Mapping[str, Any] = {
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
    "name": None,
}


class Ruled(Optimizer):
    """An optimizer whose steps are those of `rule`, whose fields are arguments by the names of Keras."""

    rule: ClassVar[type[Moments]]
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "rule" in vars(cls):
            cls.__signature__ = signature_of(cls, Ruled, {**_options_of(cls.rule), **_OF_KERAS})

    def __init__(self, learning_rate: Any, options: dict[str, Any]) -> None:
        """Take the options of the rule, and those of Keras, out of `options`."""
        own = {name: options.pop(name, default) for name, default in _options_of(self.rule).items()}
        of_keras = {name: options.pop(name) for name in _OF_KERAS if name in options}
        if isinstance(learning_rate, int | float) and not learning_rate >= 0:
            raise ConfigError(f"{self._where}: learning_rate must not be negative, received {learning_rate!r}.")
        super().__init__(learning_rate=learning_rate, weight_decay=own["weight_decay"], **of_keras)
        first, second, eps = (own.pop(name) for name in ("beta_1", "beta_2", "epsilon"))
        # Keras knows no other weight decay.
        decoupled = {f.name: True for f in dataclasses.fields(self.rule) if f.name == "decoupled_weight_decay"}
        self._rule = self.rule(betas=(first, second), eps=eps, **decoupled, **own)
        self.beta_1 = first

    @property
    def _where(self) -> str:
        return f"grace.tensorflow.optim.{type(self).__name__}"

    def build(self, variables: Sequence[Any]) -> None:
        """Make the states of these variables."""
        if not self.built:
            super().build(variables)
            names = names_of(variables, ())
            self._slots = [self._slots_of(v, name) for v, name in zip(variables, names, strict=True)]

    def _slots_of(self, variable: Any, name: str) -> dict[str, Any]:
        """Return a variable for each state of a variable."""
        return {key: self._slot(variable, name, key, len(x)) for key, x in self._rule.init(*zeros_of(variable)).items()}

    def _slot(self, variable: Any, name: str, key: str, size: int) -> Any:
        shape = tuple(variable.shape) if size == math.prod(variable.shape) else (size,)
        return self.add_variable(shape=shape, dtype=work_dtype(variable), name=f"{name}_{key}".replace("/", "_"))

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Leave it to the rule, whose step includes it."""

    # --- one variable by its number -----------------------------------------------------------------------------------

    def _rule_of(self, i: int) -> Moments:
        decays = not self._rule.weight_decay or self._use_weight_decay(self._trainable_variables[i])
        return self._rule if decays else dataclasses.replace(self._rule, weight_decay=0.0)

    def _ops(self, i: int) -> ArrayOps:
        return tensorflow_ops(device_of(self._trainable_variables[i]))

    def _flat(self, i: int, x: Any = None) -> tf.Tensor:
        """Return a gradient, or the weights, as a flat array of the dtype in which moments are kept."""
        variable = self._trainable_variables[i]
        dense = inside(variable).read_value() if x is None else tf.convert_to_tensor(x)
        return tf.cast(tf.reshape(dense, [-1]), work_dtype(variable))

    def _read(self, i: int, keys: Collection[str] = ()) -> State:
        """Return the flat states of a variable, or some of them."""
        slots = self._slots[i]
        return {key: tf.reshape(inside(slots[key]), [-1]) for key in keys or slots}

    def _write(self, i: int, weights: tf.Tensor | None, state: State) -> None:
        variable = inside(self._trainable_variables[i])
        if weights is not None:
            variable.assign(tf.cast(tf.reshape(weights, variable.shape), variable.dtype))
        for key, x in state.items():
            slot = inside(self._slots[i][key])
            slot.assign(tf.reshape(x, slot.shape))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        rule = self._rule
        own = {name: getattr(rule, name) for name in _options_of(self.rule) if hasattr(rule, name)}
        return {**super().get_config(), "beta_1": rule.betas[0], "beta_2": rule.betas[1], "epsilon": rule.eps, **own}


def _options_of(rule: type[Moments]) -> dict[str, Any]:
    """Return the fields of a rule by the names of Keras, with their defaults."""
    found: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(rule) if f.name != "decoupled_weight_decay"}
    first, second = found.pop("betas")
    return {"beta_1": first, "beta_2": second, "epsilon": found.pop("eps"), **found}


def work_dtype(variable: Any) -> str:
    """Return the dtype of the moments of a variable."""
    return "float64" if tf.as_dtype(variable.dtype) == tf.float64 else "float32"


def zeros_of(variable: Any) -> tuple[ArrayOps, Any]:
    """Return array operations and flat weights of NumPy, for which a rule says what it keeps of a variable."""
    return get_ops("numpy"), np.zeros(tuple(variable.shape), work_dtype(variable)).reshape(-1)
