"""Outer steps of a Keras optimizer, which are those of `grace.core.session.outer_graph`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from grace.core.config.outer import OuterSteps
from grace.core.errors import ConfigError
from grace.core.session.outer_graph import GraphOuter, MakeVariable
from grace.core.session.outer_setup import rounds_of_states
from grace.core.spec import TensorSpec
from grace.tensorflow.gradients import inside
from grace.tensorflow.run import tensorflow_ops


def check_states(outer: OuterSteps, optimizer: Any, where: str) -> None:
    """Raise ConfigError if the states of a Keras optimizer should start again, and cannot."""
    if outer.state != "reset":
        return
    shared = {kind.__name__ for kind in type(optimizer).__mro__} & {"Nadam", "ScheduleFreeAdamW"}
    if shared:
        raise ConfigError(
            f"{where}: the states of {shared.pop()} cannot start again without what it keeps for all variables, "
            "received state = 'reset' in outer; use 'average' or 'local'."
        )
    if int(optimizer.iterations):
        raise ConfigError(
            f"{where}: state = 'reset' returns to the states before the first step, and the optimizer has taken "
            f"{int(optimizer.iterations)} steps; wrap it before, or use 'average' or 'local'."
        )


def states_of(optimizer: Any) -> list[tuple[str, int, tf.Variable]]:
    """Return what a Keras optimizer keeps of each variable: its name there, such as "momentum", and the index."""
    names = [getattr(v, "path", v.name) for v in optimizer._trainable_variables]
    starts = [name.replace("/", "_").replace(":", "_") + "_" for name in names]
    found = []
    for state in optimizer.variables:
        # Keras names a state after its variable, whose name may be the beginning of another one.
        start = max((x for x in starts if state.name.startswith(x)), key=len, default="")
        if start and len(state.shape) and state.dtype.startswith(("float", "bfloat")):
            found.append((state.name.removeprefix(start), starts.index(start), inside(state)))
    return found


def _first_value(key: str, state: tf.Variable, where: str) -> float:
    """Return the number that all elements of a state begin with. Raises ConfigError if they differ."""
    low, high = float(tf.reduce_min(state)), float(tf.reduce_max(state))
    if low < high:
        raise ConfigError(
            f"{where}: state = 'reset' needs states whose elements begin with one number, and those of {key} differ; "
            "use 'average' or 'local'."
        )
    return low


def buffers_of(model: Any) -> list[Any]:
    """Return the variables of a Keras model that no optimizer trains; frozen weights are not among them."""
    return [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]


class OuterVariables(GraphOuter):
    """The outer steps of a Keras optimizer, and the states with which it starts again.

    `make_variable(name, value)` makes a variable that is saved with the optimizer. Raises ConfigError for states that
    the optimizer does not have.
    """

    def __init__(
        self, outer: OuterSteps, specs: Sequence[TensorSpec], optimizer: Any, make_variable: MakeVariable, where: str
    ) -> None:
        states = states_of(optimizer)
        rounds = rounds_of_states(outer, [key for key, _, _ in states], optimizer._plain.__name__, where)
        weights = [inside(v) for v in optimizer._trainable_variables]
        meeting = [(v, rounds[key]) for key, _, v in states if key in rounds]
        # What all ranks know could be subtracted again.
        random = tf.random.Generator.from_non_deterministic_state() if outer.noise else None
        noise = None if random is None else lambda n, dtype: random.normal([n], dtype=dtype)
        super().__init__(outer, specs, weights, meeting, tensorflow_ops, make_variable, noise=noise)
        # The states that begin again, with their first values, and by fragment the inner steps until they do. The
        # average of weights is none of an optimizer's states.
        resets = states if outer.state == "reset" else []
        self._first = [(i, v, _first_value(key, v, where)) for key, i, v in resets if key != "average"]
        fragments = range(outer.count if outer.state == "reset" else 0)
        self._begun = [make_variable(f"outer_begun_{i}", tf.zeros([], tf.int64)) for i in fragments]

    def note_loss(self, loss: tf.Tensor) -> None:
        """Note the loss of an inner step."""
        loss = tf.cast(tf.reduce_mean(loss), tf.float64)
        super().note_loss(loss)
        if self.losses:
            told = "StepError: the periods of outer steps follow the square root of the loss, which is"
            tf.debugging.Assert((loss > 0) & tf.math.is_finite(loss), [told, loss])
            self.losses["total"].assign_add(loss)
            self.losses["number"].assign_add(1)

    def begun(self, i: int) -> tf.Tensor | None:
        """Return the number of inner steps before the states of a variable began, None if they never begin again."""
        if not self._begun:
            return None
        return self._begun[next(k for k, members in enumerate(self.fragments) if i in members)].read_value()

    def restart(self, members: Sequence[int], fragment: int, taken: tf.Tensor) -> None:
        """Let the inner optimizer keep of some variables what it kept at the start, if the option says so."""
        for i, v, first in self._first:
            if i in members:
                v.assign(tf.fill(v.shape, tf.cast(first, v.dtype)))
        if self._begun:
            self._begun[fragment].assign(taken)
