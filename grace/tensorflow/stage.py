"""`Stage`: a plan of a run with the states of its units in TensorFlow variables, for steps that are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from grace.core.observe.statistics import Notes
from grace.core.plan.plan import Plan
from grace.core.state.states import UnitStates
from grace.tensorflow.gradients import before_graphs


class StateVariable(NamedTuple):
    """A variable with a state of a unit, for one stage or several, and the name that it was made with."""

    name: str
    unit: str
    kind: str
    key: str
    variable: tf.Variable


def made_outside(shape: Any, dtype: tf.DType) -> tf.Variable:
    """Return a variable of zeros that belongs to no graph."""
    with before_graphs():
        return tf.Variable(tf.zeros(shape, dtype), trainable=False)


class Stage:
    """A plan, the step from which it is used, and the states of its units.

    `make(unit, kind, key, value)` makes the variable of a state from its initial value. Statistics that are known only
    when the graph runs are in variables too, which no checkpoint contains.
    """

    def __init__(
        self,
        first: int,
        plan: Plan,
        initial: Mapping[str, UnitStates],
        make: Callable[[str, str, str, tf.Tensor], StateVariable],
    ) -> None:
        self.first, self.plan = first, plan
        #: By unit, kind and key, as `read` returns their values.
        self.variables = {
            name: {kind: {key: make(name, kind, key, x) for key, x in state.items()} for kind, state in states.items()}
            for name, states in initial.items()
        }
        self._notes: Notes = {}

    def read(self) -> dict[str, UnitStates]:
        """Return the states of all units."""
        return {name: self.read_unit(name) for name in self.variables}

    def read_unit(self, name: str) -> UnitStates:
        """Return the states of a unit."""
        states = self.variables[name]
        return {kind: {key: x.variable.read_value() for key, x in state.items()} for kind, state in states.items()}

    def write(self, units: Mapping[str, UnitStates]) -> None:
        """Assign new states of units."""
        for name, states in units.items():
            for kind, state in states.items():
                for key, value in state.items():
                    self.variables[name][kind][key].variable.assign(value)

    def note(self, notes: Notes) -> None:
        """Store notes about the last step."""
        for place, value in notes.items():
            if not tf.is_tensor(value):
                self._notes[place] = value
                continue
            if place not in self._notes:
                self._notes[place] = made_outside(value.shape, value.dtype)
            self._notes[place].assign(value)

    @property
    def notes(self) -> Notes:
        """The notes about the last step, outside of graphs."""
        return {place: x.numpy() if isinstance(x, tf.Variable) else x for place, x in self._notes.items()}
