"""Outer steps of a Keras optimizer, which are those of `grace.core.session.outer_graph`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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


def outer_variables(
    outer: OuterSteps, specs: Sequence[TensorSpec], optimizer: Any, make_variable: MakeVariable, where: str
) -> GraphOuter:
    """Return the outer steps of a Keras optimizer.

    `make_variable(name, value)` makes a variable that is saved with the optimizer. Raises ConfigError for states that
    the optimizer does not have.
    """
    states = states_of(optimizer)
    rounds = rounds_of_states(outer, [key for key, _, _ in states], optimizer._plain.__name__, where)
    weights = [inside(v) for v in optimizer._trainable_variables]
    averaged = [(v, rounds[key]) for key, _, v in states if key in rounds]
    # The average of weights is none of an optimizer's states.
    again = [(key, i, v) for key, i, v in states if outer.state == "reset" and key != "average"]
    resets = [(i, partial(_fill, v, _first_value(key, v, where))) for key, i, v in again]
    # What all ranks know could be subtracted again.
    random = tf.random.Generator.from_non_deterministic_state() if outer.noise else None
    noise = None if random is None else lambda n, dtype: random.normal([n], dtype=dtype)
    return GraphOuter(outer, specs, weights, averaged, tensorflow_ops, make_variable, resets=resets, noise=noise)


def _fill(v: tf.Variable, value: float) -> None:
    v.assign(tf.fill(v.shape, tf.cast(value, v.dtype)))
