"""`VariableRun`: the plans and states of a run in variables, with all stages of a schedule in one graph."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from grace.core.errors import StateError, StepError
from grace.core.methods.memory import Memory
from grace.core.observe.statistics import statistics
from grace.core.observe.timeline import Times
from grace.core.ops import get_ops
from grace.core.plan.plan import Plan
from grace.core.plan.unit import Unit
from grace.core.spec import Array, Ranks
from grace.core.state.carry import carry, move
from grace.core.state.checkpoint import entry_of
from grace.core.state.checks import STATE_VERSION, alone, check_saved, show
from grace.core.state.merge import Merge
from grace.core.state.run import StagesCarrying
from grace.core.state.states import Stages, States, UnitStates, initial, initial_states
from grace.tensorflow.branches import always, never
from grace.tensorflow.saved import check_finite
from grace.tensorflow.stage import Stage, StateVariable

#: Returns the array operations of a device.
tensorflow_ops = functools.partial(get_ops, "tensorflow")
_STALE = (
    "StepError: the step was traced before grace.change(), or before elastic Horovod restarted; "
    "trace it again: make a new tf.function, or call model.compile()."
)


class VariableRun:
    """The plans and states of a run in variables, which `grace.core.state.run.Run` has as values.

    A graph contains all stages, which share variables, and selects one by the step number. `make_variable(name, value)`
    makes the variables of a checkpoint. Stages count the steps of each tensor, which takes part in one of `turns`.
    """

    def __init__(
        self,
        stages: Stages,
        make_variable: Callable[[str, tf.Tensor], tf.Variable],
        *,
        seed: int,
        rank: int,
        ranks: Ranks,
        turns: int = 1,
    ) -> None:
        self.ranks, self._seed, self.turns = ranks, seed, turns
        # The rank and the number of ranks to which the memories belong.
        self.place = rank, ranks.size
        self._make = make_variable
        self._counter = make_variable("step", tf.zeros([], tf.int64))
        #: The rank that these memories belong to, and the number of ranks. -1: no rank yet.
        self.origin = make_variable("origin", tf.constant([-1, 0], tf.int32))
        #: The states of all stages, by the names of their variables.
        self.states: dict[str, StateVariable] = {}
        # Those of memories that differ between ranks.
        self._own: dict[str, tf.Variable] = {}
        # The memories with which no rank can start from zero alone.
        self._joint: set[Memory] = set()
        self._stages: list[Stage] = []
        for first, plan in stages:
            self._add(first * turns, plan)
        #: The stages of the steps from now on. After `change`, that is only the last one.
        self.live = [*self._stages]
        # The number of stages. A graph that was traced before `change` compares it and raises an error.
        self._count = tf.Variable(len(self._stages), trainable=False)
        # The step of the last change, and the stage before it.
        self._changed = -1, self._stages[0]

    def _add(self, first: int, plan: Plan) -> Stage:
        """Add a stage, and make its variables. Raises IncompatibleError if the ranks cannot run it."""
        number = len(self._stages)
        plan.check_ranks(self.ranks.size)

        def make(unit: str, kind: str, key: str, value: tf.Tensor) -> StateVariable:
            for stage in self._stages:
                # All stages share what is alike.
                state = stage.variables.get(unit, {}).get(kind, {}).get(key)
                if state is not None and (state.variable.shape, state.variable.dtype) == (value.shape, value.dtype):
                    return state
            name = f"{unit}/{kind}/{key}" + (f"/stage{number}" if number else "")
            self.states[name] = StateVariable(name, unit, kind, key, self._make(name, value))
            return self.states[name]

        # All ranks make the same variables, also for what only one of them keeps.
        stage = Stage(first, plan, initial_states(plan, tensorflow_ops, self._seed, rank=None), make)
        shared = {unit.spec.name for unit in plan.units if unit.memory.across_ranks == "equal"}
        self._own |= {
            state.name: state.variable
            for unit, states in stage.variables.items()
            for state in states["memory"].values()
            if unit not in shared
        }
        self._joint |= {unit.memory for unit in plan.stateful.values() if unit.memory.across_ranks == "joint"}
        self._stages.append(stage)
        return stage

    # --- plans and steps ----------------------------------------------------------------------------------------

    @property
    def plans(self) -> list[Plan]:
        """The plan of every stage."""
        return [stage.plan for stage in self._stages]

    @property
    def plan(self) -> Plan:
        """The plan of the next step."""
        return self._at(self.step).plan

    @property
    def step(self) -> int:
        """Number of the next step."""
        return int(self._counter)

    @property
    def full_round(self) -> bool:
        """True if the next step is a full round, which takes the gradients of all data."""
        return self.plan.is_full(self._seed, self.step)

    @property
    def counter(self) -> tf.Tensor:
        """Number of the next step, in a graph."""
        return self._counter.read_value()

    def in_cycle(self, step: Any) -> Any:
        """Return a step number from the begin of the schedule, which may begin again and again."""
        cycle = self.live[0].plan.cycle * self.turns
        return step % cycle if cycle else step

    def _at(self, step: int) -> Stage:
        return next(stage for stage in reversed(self.live) if stage.first <= self.in_cycle(step))

    @property
    def stage(self) -> Stage:
        """The stage that the states belong to."""
        return self._after(self.step)

    def _after(self, step: int) -> Stage:
        """Return the stage of the states before a step, which carries those of the stage before over when it begins."""
        return self._at(max(0, step - 1))

    def check_idle(self, call: str) -> None:
        """Raise StepError inside a graph, when the call is not possible."""
        if not tf.executing_eagerly():
            raise StepError(f"{call}() was called inside tf.function; call it outside, between two steps.")

    def go_to(self, step: Any) -> None:
        """Set the step number."""
        self._counter.assign(tf.cast(step, tf.int64))

    def _own_from(self, step: int) -> None:
        """Go on at a step with states that have become those of this rank."""
        self.go_to(step)
        self.origin.assign(self.place)

    # --- change -------------------------------------------------------------------------------------------------

    def change(self, plan: Plan) -> None:
        """Replace the plan. Graphs that were traced earlier raise an error from now on."""
        # Until the next step, statistics describe the last step of the old plan.
        self._changed = self.step, self.stage
        before, stage = self._at(self.step), self._add(0, plan)
        self.live = [stage]
        self._carry(before, stage)
        self._count.assign(len(self._stages))

    def _carry(self, before: Stage, after: Stage) -> None:
        """Carry the states of one stage over to another."""
        size = self.ranks.size
        after.write(carry(before.plan, after.plan, before.read(), self._fresh, tensorflow_ops, size))

    def _fresh(self, unit: Unit) -> UnitStates:
        return initial(unit, tensorflow_ops(unit.spec.device), self._seed, rank=None)

    # --- other ranks --------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Let graphs that were traced for these stages raise an error."""
        self._count.assign(0)

    def move(self, old: VariableRun, *, average: bool) -> None:
        """Go on after a run that this rank had among others; see `grace.core.state.carry.move`."""
        before, after, sizes = old.stage, self._after(old.step), (old.ranks.size, self.ranks.size)
        plans = before.plan, after.plan
        after.write(move(*plans, before.read(), self._fresh, tensorflow_ops, sizes, average=average))
        self._own_from(old.step)

    def reset_memories(self) -> None:
        """Let the memories of this rank restart."""
        stage = self.stage
        units = [unit for unit in stage.plan.stateful.values() if unit.memory.across_ranks != "equal"]
        stage.write({unit.spec.name: {"memory": self._fresh(unit)["memory"]} for unit in units})
        self.origin.assign(self.place)

    # --- variables ----------------------------------------------------------------------------------------------

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables of a checkpoint, in the order in which they were made."""
        return [self._counter, self.origin, *(state.variable for state in self.states.values())]

    @property
    def of_this_rank(self) -> list[tf.Variable]:
        """The variables that differ between ranks: the memories of all stages."""
        return [*self._own.values()]

    @property
    def shared_variables(self) -> list[tf.Variable]:
        """The variables of a checkpoint that are equal on all ranks."""
        return [self._counter, *self.shared_states.values()]

    @property
    def shared_states(self) -> dict[str, tf.Variable]:
        """The states that are equal on all ranks, by a name that says what they are."""
        return {
            f"{key} of the {kind} of {unit}": variable
            for name, unit, kind, key, variable in self.states.values()
            if name not in self._own
        }

    def is_foreign(self) -> tf.Tensor:
        """Return whether the memories come from the checkpoint of another rank, or of another number of ranks."""
        origin = self.origin.read_value()
        return tf.logical_and(origin[0] >= 0, tf.reduce_any(origin != tf.constant(self.place, tf.int32)))

    def belong_to_this_rank(self) -> None:
        """Set the memories to zero if they come from the checkpoint of another rank, or of another number of ranks.

        Asserts that a rank does not do so alone with a memory whose ranks belong together. It is traced into a graph.
        """
        (rank, size), origin, foreign = self.place, self.origin.read_value(), self.is_foreign()

        def forget() -> None:
            tf.print(
                "grace: rank", origin[0], "of", origin[1], "saved this checkpoint, and rank", rank, "of", size,
                "loads it: residuals start from zero. To continue exactly, save and load one file per rank.",
                output_stream=sys.stderr,
            )  # fmt: skip
            _clear(*self.of_this_rank)

        for memory in self._joint:
            error = alone(memory)
            # With another number of ranks, all of them start from zero.
            allowed = tf.logical_or(tf.logical_not(foreign), origin[1] != size)
            tf.debugging.Assert(allowed, [f"{type(error).__name__}: {error}"])
        if self.of_this_rank:
            tf.cond(foreign, always(forget), never)
        self.origin.assign(self.place)

    # --- one step -----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Carry the states over if a stage begins with the next step, also if that is skipped. It is traced."""
        step = self.counter
        again = [(self.live[-1], self.live[0])] if self.live[0].plan.cycle else []
        for before, stage in [*itertools.pairwise(self.live), *again]:
            now = (step > 0) & tf.equal(self.in_cycle(step), stage.first)
            tf.cond(now, always(functools.partial(self._carry, before, stage)), never)

    def select(self, make: Callable[[Stage], Any]) -> Any:
        """Return make(stage), one tensor or several, for the stage of the next step. It is traced into a graph."""
        if len(self.live) == 1:
            return make(self.live[0])
        begun = self.in_cycle(self.counter) >= tf.constant([stage.first for stage in self.live[1:]], tf.int64)
        branches = [functools.partial(make, stage) for stage in self.live]
        return tf.switch_case(tf.reduce_sum(tf.cast(begun, tf.int32)), branches)

    def check_full(self, full: bool) -> tf.Tensor:
        """Return what raises StepError unless the next step is a full round as `full` says, if there are such rounds.

        It is traced into a graph.
        """

        def differs(stage: Stage) -> tf.Tensor:
            plan = stage.plan
            if not plan.period:
                return tf.constant(0)
            return tensorflow_ops("cpu").computed(lambda step: plan.is_full(self._seed, step) != full, self.counter)

        given = "none" if full else "some"
        error = StepError(
            "a memory takes second gradients in each step that is no full round, and none in a full round, received "
            f"{given} in the other kind of step; ask full_round of the exchange before each step."
        )
        found = self.select(differs)
        return tensorflow_ops("cpu").require(found == 0, error, found)

    def check_current(self) -> tf.Operation:
        """Return the operation that raises an error in a graph that is no longer valid. It is traced into a graph."""
        return tf.debugging.Assert(tf.equal(self._count.read_value(), len(self._stages)), [_STALE])

    def stats(self, times: Times, norms: bool) -> dict[str, Any]:
        """Return the statistics of the last step; see `grace.core.state.run.Run.stats`."""
        changed, before = self._changed
        stage = before if self.step == changed else self.stage
        now = States([(0, stage.plan)], self.step, stage.read())
        return statistics(stage.plan, stage.notes, now, times, tensorflow_ops, norms)

    # --- checkpoint ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the states of this rank, as arrays of NumPy by the names of their variables."""
        tensors = {name: state.variable.numpy() for name, state in self.states.items()}
        rank, size = self.place
        return {"version": STATE_VERSION, "step": self.step, "rank": rank, "size": size, "tensors": tensors}

    def _entries(self, stage: Stage, rank: int, tensors: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
        """Return arrays by the names of their variables as a checkpoint of the core has those of a stage."""
        # All ranks have variables for what only one of them keeps.
        return {
            name: entry_of(
                unit,
                {
                    kind: {key: tensors[state.name] for key, state in states.items()}
                    if kind != "memory" or unit.is_kept_by(rank)
                    else {}
                    for kind, states in stage.variables[name].items()
                },
            )
            for name, unit in stage.plan.stateful.items()
        }

    def merge_state_dicts(
        self, states: Sequence[Mapping[str, Any]], before: VariableRun, *, average: bool
    ) -> list[str]:
        """Load the states of all ranks of a run, as `before`; return what could not be continued.

        Raises StateError if they are damaged; then nothing was loaded.
        """
        for state in states:
            before._check_shapes(state["tensors"])
        step, (rank, size) = int(states[0]["step"]), self.place
        old, stage = before._after(step), self._after(step)
        merge = Merge(
            old.plan,
            stage.plan,
            [{"tensors": before._entries(old, i, state["tensors"])} for i, state in enumerate(states)],
            lambda saved, current: np.array(saved, current.dtype),
            lambda device: get_ops("numpy"),
            seed=self._seed,
            rank=max(rank, 0),
            size=size,
            average=average,
        )
        new = merge.states()
        _clear(*self.of_this_rank)
        stage.write(new)
        self._own_from(step)
        return list(merge.lost)

    def load_state_dict(
        self, state: dict[str, Any], convert: Callable[[Array, Array], Array], stages: StagesCarrying | None = None
    ) -> bool:
        """Load step and states; see `grace.core.state.run.Run.load_state_dict`.

        It does not ask for other `stages`: the variables of a graph are those of its own plans.
        """
        check_saved(state)
        self._check_shapes(state["tensors"])
        for name in self.states:
            check_finite(name, state["tensors"][name])
        mine = (state["rank"], state["size"]) == self.place
        for memory in self._joint:
            if not mine and state["size"] == self.place[1]:
                raise alone(memory)
        for name, (*_, variable) in self.states.items():
            if mine or name not in self._own:
                variable.assign(convert(state["tensors"][name], variable))
            else:
                _clear(variable)
        self._own_from(int(state["step"]))
        return mine

    def _check_shapes(self, saved: Mapping[str, Any]) -> None:
        """Raise StateError if a checkpoint has other arrays than these stages, by the names of their variables."""
        expected = {name: f"{v.dtype.name} {tuple(v.shape)}" for name, (*_, v) in self.states.items()}
        found = {name: show(value) for name, value in saved.items()}
        if found != expected:
            raise StateError(
                f"checkpoint: expected states {expected}, received {found}; use the configuration it was saved with, "
                "and the changes that were made since."
            )


def _clear(*variables: tf.Variable) -> None:
    for variable in variables:
        variable.assign(tf.zeros_like(variable))
