"""`Stage`: a plan of a run with the states of its units in TensorFlow variables, for steps that are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from grace.core.observe.statistics import Notes
from grace.core.plan.plan import Plan
from grace.core.state.states import UnitStates
from grace.core.transport.collectives import KINDS


class StateVariable(NamedTuple):
    """A variable with a state of a unit, for one stage or several, and the name that it was made with."""

    name: str
    unit: str
    kind: str
    key: str
    variable: tf.Variable


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
        self._counts: dict[tuple[str, str], tf.Variable] = {}
        self._notes: Notes = {}

    def read(self) -> dict[str, UnitStates]:
        """Return the states of all units."""
        return {
            name: {kind: {key: x.variable.read_value() for key, x in state.items()} for kind, state in states.items()}
            for name, states in self.variables.items()
        }

    def write(self, units: Mapping[str, UnitStates]) -> None:
        """Assign new states of units."""
        for name, states in units.items():
            for kind, state in states.items():
                for key, value in state.items():
                    self.variables[name][kind][key].variable.assign(value)

    def expect_notes(self, norms: bool, rows: Sequence[str]) -> None:
        """Make the variables for statistics that are known only when the graph runs.

        `rows` names the tensors that are sent as rows. The variables are made before tracing, because TensorFlow traces
        a function twice if it makes variables.
        """
        for bucket in self.plan.buckets:
            for kind in ("bucket", *KINDS) if not bucket.route.fixed else ():
                self._expect(kind, bucket.name, [], tf.int64)
            for unit in bucket.units:
                chain, count = (unit, *unit.chain), len(unit.pieces)
                if any(each.wire_bytes is None for each in chain):
                    self._expect("unit", unit.spec.name, [], tf.int64)
                if count > 1 and any(each.lists_entries for each in chain):
                    self._expect("entries", unit.spec.name, [count], tf.int64)
                for kind in ("size", "error") if norms else ():
                    self._expect(kind, unit.spec.name, [count], tf.float64)
        for name in rows:
            self._expect("rows", name, [], tf.int64)

    def _expect(self, kind: str, name: str, shape: Sequence[int], dtype: tf.DType) -> None:
        self._counts[kind, name] = tf.Variable(tf.zeros(shape, dtype), trainable=False)

    def note(self, notes: Notes) -> None:
        """Store notes about the last step."""
        for place, value in notes.items():
            variable = self._counts.get(place)
            if variable is not None:
                variable.assign(tf.cast(value, variable.dtype))
            self._notes[place] = value if variable is None else variable

    @property
    def notes(self) -> Notes:
        """The notes about the last step, outside of graphs."""
        return {place: x.numpy() if isinstance(x, tf.Variable) else x for place, x in self._notes.items()}
