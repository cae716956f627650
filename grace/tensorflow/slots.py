"""The states of a run in TensorFlow variables, for steps that are traced into graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from grace.core.methods.memory import Memory
from grace.core.observe.statistics import Notes
from grace.core.plan.plan import Plan
from grace.core.plan.unit import Unit, offsets
from grace.core.spec import Array, State
from grace.core.state.checks import alone
from grace.core.state.states import UnitStates
from grace.core.transport.collectives import KINDS


class VariableSlots:
    """The step number and the states of all units, in variables.

    `make(name, initial value)` makes each variable when it is first written. Each stage of a schedule has its own
    slots; `stage` selects them. Stages share the variables of states with the same shape and dtype. Statistics that are
    known only when the graph runs are in variables too, which no checkpoint contains.
    """

    def __init__(self, make: Callable[[str, tf.Tensor], tf.Variable]) -> None:
        self.stage = 0
        # Stage and name of the tensors whose memories are equal on all ranks.
        self.shared: set[tuple[int, str]] = set()
        # The memories with which no rank can start from zero alone.
        self.joint: set[Memory] = set()
        self._make = make
        self._counter = make("step", tf.zeros([], tf.int64))
        # The rank that these memories belong to, and the number of ranks. -1: no rank yet.
        self.origin = make("origin", tf.constant([-1, 0], tf.int32))
        # The variables of all states, by the names that they were made with.
        self.states: dict[str, tf.Variable] = {}
        self._variables: dict[tuple[int, str], dict[str, dict[str, tf.Variable]]] = {}
        # Notes by stage, kind and name, and the variables of those that are known only when the graph runs.
        self._notes: dict[tuple[int, str, str], Any] = {}
        self._counts: dict[tuple[int, str, str], tf.Variable] = {}

    @property
    def step(self) -> Array:
        """Number of the next step."""
        return self._counter.read_value()

    def go_to(self, step: Any) -> None:
        """Set the step number."""
        self._counter.assign(tf.cast(step, tf.int64))

    def __contains__(self, name: str) -> bool:
        """Return whether the unit has states in the stage."""
        return (self.stage, name) in self._variables

    def read(self, name: str) -> dict[str, State]:
        """Return the states of a unit in the stage."""
        return {
            kind: {key: variable.read_value() for key, variable in state.items()}
            for kind, state in self._variables[self.stage, name].items()
        }

    def write(self, name: str, states: UnitStates) -> None:
        """Assign new states of a unit in the stage; the first time, make their variables."""
        if name not in self:
            self._variables[self.stage, name] = {
                kind: {key: self._variable(name, kind, key, value) for key, value in state.items()}
                for kind, state in states.items()
            }
            return
        for kind, state in states.items():
            for key, value in state.items():
                self._variables[self.stage, name][kind][key].assign(value)

    def _variable(self, name: str, kind: str, key: str, value: tf.Tensor) -> tf.Variable:
        """Return the variable of an earlier stage if it has this shape and dtype, else a new one."""
        for stage in range(self.stage):
            variable = self._variables.get((stage, name), {}).get(kind, {}).get(key)
            if variable is not None and variable.shape == value.shape and variable.dtype == value.dtype:
                return variable
        of_stage = f"/stage{self.stage}" if self.stage else ""
        made = f"{name}/{kind}/{key}{of_stage}"
        self.states[made] = self._make(made, value)
        return self.states[made]

    def names(self, name: str) -> dict[str, dict[str, str]]:
        """Return the names in `states` of a unit's variables, by kind and key, as `read` returns their values."""
        made = {id(variable): place for place, variable in self.states.items()}
        return {
            kind: {key: made[id(variable)] for key, variable in state.items()}
            for kind, state in self._variables[self.stage, name].items()
        }

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables of a checkpoint, in the order in which they were made."""
        return [self._counter, self.origin, *self.states.values()]

    @property
    def shared_variables(self) -> list[tf.Variable]:
        """The variables of a checkpoint that are equal on all ranks."""
        return [self._counter, *self.shared_states.values()]

    @property
    def of_this_rank(self) -> list[tf.Variable]:
        """The variables that differ between ranks: the memories of all stages."""
        every = [
            variable
            for place, states in self._variables.items()
            if place not in self.shared
            for variable in states["memory"].values()
        ]
        return list({id(variable): variable for variable in every}.values())

    @property
    def shared_states(self) -> dict[str, tf.Variable]:
        """The states that are equal on all ranks, by a name that says what they are."""
        own = {id(variable) for variable in self.of_this_rank}
        return {
            f"{key} of the {kind} of {name}": variable
            for (_, name), states in self._variables.items()
            for kind, state in states.items()
            for key, variable in state.items()
            if id(variable) not in own
        }

    def snapshot(self, *, memories: bool = True) -> list[tuple[str, tf.Variable, tf.Tensor]]:
        """Return unit name, variable and current value of all states in all stages, or of all but those of memories."""
        places = {
            id(variable): (name, variable)
            for (_, name), states in self._variables.items()
            for kind, state in states.items()
            for variable in state.values()
            if memories or kind != "memory"
        }
        return [(name, variable, variable.read_value()) for name, variable in places.values()]

    def restore(self, snapshot: list[tuple[str, tf.Variable, tf.Tensor]], *, memories: bool = True) -> tf.Tensor:
        """Write the states of a snapshot back; without `memories`, those of memories start from zero.

        Return False, because a branch of a graph must return a tensor.
        """
        of_memories = {id(v): v for states in self._variables.values() for v in states["memory"].values()}
        for _, variable, value in snapshot:
            if memories or id(variable) not in of_memories:
                variable.assign(value)
        for variable in () if memories else of_memories.values():
            variable.assign(tf.zeros_like(variable))
        return tf.constant(False)

    def restore_tensors(
        self, snapshot: list[tuple[str, tf.Variable, tf.Tensor]], names: set[str], units: Mapping[str, Unit]
    ) -> None:
        """Write the states of some tensors back, even if their units also contain other tensors."""
        for unit, variable, value in snapshot:
            pieces = units[unit].pieces
            of_them = [piece.tensor in names for piece in pieces]
            if all(of_them):
                variable.assign(value)
            elif any(of_them) and variable.shape == (units[unit].spec.numel,):
                now = variable.read_value()
                rows = [
                    (value if old else now)[start : start + piece.numel]
                    for old, (piece, start) in zip(of_them, offsets(units[unit]), strict=True)
                ]
                variable.assign(tf.concat(rows, axis=0))

    def belong_to(self, rank: int, size: int) -> None:
        """Set the memories to zero if they come from the checkpoint of another rank, or of another number of ranks.

        Asserts that a rank does not do so alone with a memory whose ranks belong together.
        """
        here, origin = tf.constant([rank, size], tf.int32), self.origin.read_value()

        def forget() -> tf.Tensor:
            tf.print(
                "grace: rank", origin[0], "of", origin[1], "saved this checkpoint, and rank", rank, "of", size,
                "loads it: residuals start from zero. To continue exactly, save and load one file per rank.",
                output_stream=sys.stderr,
            )  # fmt: skip
            for variable in self.of_this_rank:
                variable.assign(tf.zeros_like(variable))
            return tf.constant(True)

        foreign = tf.logical_and(origin[0] >= 0, tf.reduce_any(origin != here))
        for memory in self.joint:
            error = alone(memory)
            # With another number of ranks, all of them start from zero.
            allowed = tf.logical_or(tf.logical_not(foreign), origin[1] != size)
            tf.debugging.Assert(allowed, [f"{type(error).__name__}: {error}"])
        if self.of_this_rank:
            tf.cond(foreign, forget, lambda: tf.constant(False))
        self.origin.assign(here)

    def expect_notes(self, plan: Plan, norms: bool, rows: Sequence[str]) -> None:
        """Make the variables for statistics that are known only when the graph runs.

        `rows` names the tensors that are sent as rows. The variables are made before tracing, because TensorFlow traces
        a function twice if it makes variables.
        """
        for bucket in plan.buckets:
            by_data = [unit for unit in bucket.units if any(u.wire_bytes is None for u in (unit, *unit.chain))]
            places = [(kind, bucket.name) for kind in ("bucket", *KINDS) if not bucket.route.fixed]
            places += [("unit", unit.spec.name) for unit in by_data]
            for kind, name in places:
                self._expect(kind, name, [], tf.int64)
            for unit in bucket.units:
                count = len(unit.pieces)
                if count > 1 and any(u.lists_entries for u in (unit, *unit.chain)):
                    self._expect("entries", unit.spec.name, [count], tf.int64)
                for kind in ("size", "error") if norms else ():
                    self._expect(kind, unit.spec.name, [count], tf.float64)
        for name in rows:
            self._expect("rows", name, [], tf.int64)

    def _expect(self, kind: str, name: str, shape: Sequence[int], dtype: tf.DType) -> None:
        self._counts[self.stage, kind, name] = tf.Variable(tf.zeros(shape, dtype), trainable=False)

    def note(self, kind: str, name: str, value: Any) -> None:
        """Store a number, or an array of at most one dimension, about the last step in the stage."""
        place = self.stage, kind, name
        if place in self._counts:
            variable = self._counts[place]
            variable.assign(tf.cast(value, variable.dtype))
            value = variable
        self._notes[place] = value

    @property
    def notes(self) -> Notes:
        """The notes about the last step in the stage, outside of graphs."""
        return {
            (kind, name): value.numpy() if isinstance(value, tf.Variable) else value
            for (stage, kind, name), value in self._notes.items()
            if stage == self.stage
        }
