"""`Stages`: the plans and states for all stages of a schedule, in one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace.core.config.config import Config
from grace.core.errors import StateError, StepError
from grace.core.observe.statistics import statistics
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan, make_plans, next_plan
from grace.core.plan.unit import Assignment, Unit
from grace.core.spec import Array, Ranks, TensorSpec
from grace.core.state.carry import carry, move
from grace.core.state.checkpoint import entry_of
from grace.core.state.checks import STATE_VERSION, alone, check_saved, show
from grace.core.state.merge import Merge
from grace.core.state.run import StagesCarrying
from grace.core.state.states import States, UnitStates, initial
from grace.core.step.step import Step
from grace.tensorflow.gradients import Gradient, nbytes
from grace.tensorflow.saved import check_finite
from grace.tensorflow.slots import VariableSlots
from grace.tensorflow.times import GraphTimes
from grace.tensorflow.transport import HorovodTransport

_STALE = (
    "StepError: the step was traced before grace.change(), or before elastic Horovod started anew; "
    "trace it again: make a new tf.function, or call model.compile()."
)


class Stages:
    """The stages of a schedule, each with its plan. They share variables.

    A graph contains all stages and selects one by the step number. Tensors in `rows` are sent as rows, uncompressed.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        config: Config,
        make_variable: Callable[[str, tf.Tensor], tf.Variable],
        *,
        sparse_as_dense: bool,
        rank: int,
        ranks: Ranks,
        rows: Sequence[str] = (),
    ) -> None:
        self._specs, self.ranks = specs, ranks
        # The rank and the number of ranks to which the memories belong.
        self._place = rank, ranks.size
        self.track_norms, self.times = False, GraphTimes()
        self._seed, self._rollback = config.seed, config.rollback
        # The first step and the plan of each stage, by its number. After `change`, only the last stage is live.
        self._stages = dict(enumerate(make_plans(specs, config, ranks=ranks, prefix="bucket", delegate=_delegated)))
        self._live = list(self._stages)
        always = set.intersection(*({item.spec.name for item in plan.delegated} for plan in self.plans))
        self.rows = frozenset(() if sparse_as_dense else always)
        self.slots = VariableSlots(make_variable)
        for number in self._stages:
            self._prepare(number)
        # The number of the last stage. A graph that was traced before `change` compares it and raises an error.
        self._last = tf.Variable(max(self._stages), trainable=False)
        # Set by `start`.
        self._transport: HorovodTransport | None = None
        self._done = -1, 0
        # The tensors whose gradients are known to be rows.
        self.known_rows = rows

    @property
    def plans(self) -> list[Plan]:
        """The plan of every stage."""
        return [plan for _, plan in self._stages.values()]

    @property
    def schedule(self) -> list[tuple[int, Plan]]:
        """The plans of the steps from now on, each with its first step."""
        return [self._stages[number] for number in self._live]

    @property
    def units(self) -> dict[str, Unit]:
        """The units of all stages by name. A unit is compressed as a whole."""
        return {name: unit for plan in self.plans for name, unit in plan.stateful.items()}

    @property
    def plan(self) -> Plan:
        """The plan of the next step."""
        return self._stages[self._number_at(int(self.slots.step))][1]

    @property
    def step(self) -> int:
        """Number of the next step."""
        return int(self.slots.step)

    @property
    def shared_states(self) -> dict[str, tf.Variable]:
        """The states that are equal on all ranks, by a name that says what they are."""
        return self.slots.shared_states

    def check_idle(self, call: str) -> None:
        """Raise StepError inside a graph, when the call is not possible."""
        if not tf.executing_eagerly():
            raise StepError(f"{call}() was called inside tf.function; call it outside, between two steps.")

    def _number_at(self, step: int) -> int:
        return next(number for number in reversed(self._live) if self._stages[number][0] <= step)

    def _prepare(self, number: int) -> None:
        """Make the variables of a stage."""
        self.slots.stage = number
        self.slots.shared |= {(number, unit.spec.name) for unit in self._stages[number][1].units if unit.memory.shared}
        self.slots.joint |= {u.memory for u in self._stages[number][1].stateful.values() if u.memory.joint}
        # All ranks make the same variables, also for what only one of them keeps.
        for name, unit in self._stages[number][1].stateful.items():
            if name not in self.slots:
                self.slots.write(name, self._fresh(unit))

    def start(
        self,
        transport: HorovodTransport,
        rows: Sequence[str],
        *,
        op: int,
        predivide: float,
        track_norms: bool,
        times: GraphTimes,
    ) -> None:
        """Connect the ranks, after they have met. `rows` names the tensors whose gradients are rows."""
        self._transport, self.known_rows, self._op = transport, rows, op
        self._place = transport.rank, transport.size
        self._predivide, self.track_norms, self.times = predivide, track_norms, times
        for number in self._live:
            self._engage(number)

    def _engage(self, number: int) -> None:
        plan = self._stages[number][1]
        for item in plan.assignments:
            item.compressor.check_ranks(self._transport.size)
        self.slots.stage = number
        self.slots.expect_notes(plan, self.track_norms, self.known_rows)
        self.times.expect(plan)

    # --- change -------------------------------------------------------------------------------------------------

    def plan_of(self, config: Config) -> Plan:
        """Return the plan for `change` under a changed configuration. Raises ConfigError if the ranks cannot run it."""

        def delegated(item: Assignment) -> bool:
            return _delegated(item) or item.spec.name in self.known_rows

        prefix = f"bucket.change{len(self._stages)}"
        plan = next_plan(self._specs, config, self.plan, ranks=self.ranks, prefix=prefix, delegate=delegated)
        for item in plan.assignments if self._transport else ():
            item.compressor.check_ranks(self._transport.size)
        return plan

    def change(self, plan: Plan) -> None:
        """Replace the plan. Graphs that were traced earlier raise an error from now on."""
        step, number = int(self.slots.step), len(self._stages)
        before = self._number_at(step)
        # Until the next step, statistics describe the last step of the old plan.
        self._done = step, self._number_at(max(0, step - 1))
        # The tensors that are sent as rows are known since the first step, and the new plan takes them into account.
        self.rows &= {item.spec.name for item in plan.delegated}
        self._stages[number] = 0, plan
        self._live = [number]
        self._prepare(number)
        self._carry_on(before, number)
        self._last.assign(number)
        if self._transport:
            self._engage(number)

    def _carry_on(self, before: int, number: int) -> None:
        """Carry the states of one stage over to another."""
        old, new = (self._stages[stage][1] for stage in (before, number))
        self._write(number, carry(old, new, self._read(before), self._fresh, _ops, self.ranks.size))

    def _read(self, number: int) -> dict[str, UnitStates]:
        """Return the states of a stage."""
        self.slots.stage = number
        return {name: self.slots.read(name) for name in self._stages[number][1].stateful}

    def _write(self, number: int, units: Mapping[str, UnitStates]) -> None:
        """Write states of units in a stage."""
        self.slots.stage = number
        for name, states in units.items():
            self.slots.write(name, states)

    def _fresh(self, unit: Unit) -> UnitStates:
        return initial(unit, _ops(unit.spec.device), self._seed, rank=None)

    # --- other ranks --------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Let graphs that were traced for these stages raise an error."""
        self._last.assign(-1)

    def move(self, old: Stages, *, average: bool) -> None:
        """Go on after stages that this rank had among others; see `grace.core.state.carry.move`."""
        number = self._arrived_at(old.step)
        before, after, sizes = old._stages[number][1], self._stages[number][1], (old.ranks.size, self.ranks.size)
        self._write(number, move(before, after, old._read(number), self._fresh, _ops, sizes, average=average))
        self.slots.go_to(old.step)
        self.slots.origin.assign(self._place)

    def hold_nothing_back(self) -> None:
        """Let the memories of this rank start anew."""
        self.slots.stage = self._arrived_at(self.step)
        for name, unit in self._stages[self.slots.stage][1].stateful.items():
            if not unit.memory.shared:
                self.slots.write(name, {"memory": self._fresh(unit)["memory"]})
        self.slots.origin.assign(self._place)

    def _arrived_at(self, step: int) -> int:
        """Return the stage that the states belong to: a step carries those of the stage before over when it begins."""
        return self._number_at(max(0, step - 1))

    # --- one step -----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Carry the states over if a stage begins with the next step. It is traced into a graph.

        It must run before a snapshot for a rollback is taken, because it stays in effect even if the step is skipped.
        """
        step = self.slots.step
        for number in self._live[1:]:
            tf.cond(tf.equal(step, self._stages[number][0]), self._entering(number), lambda: tf.constant(False))

    def _entering(self, number: int) -> Callable[[], tf.Tensor]:
        def enter() -> tf.Tensor:
            self._carry_on(number - 1, number)
            return tf.constant(True)

        return enter

    def check_current(self) -> tf.Operation:
        """Return the operation that raises an error in a graph that is no longer valid. It is traced into a graph."""
        return tf.debugging.Assert(tf.equal(self._last.read_value(), self._live[-1]), [_STALE])

    def run(self, gradients: Sequence[Gradient], lr: tf.Tensor | None) -> list[Gradient]:
        """Exchange one gradient per tensor. `lr` is the learning rate if it is known. It is traced into a graph."""
        step = self.slots.step
        if len(self._live) == 1:
            return self._exchanged(self._live[0], gradients, lr)
        firsts = tf.constant([self._stages[number][0] for number in self._live[1:]], tf.int64)
        branches = [self._branch(number, gradients, lr) for number in self._live]
        return list(tf.switch_case(tf.reduce_sum(tf.cast(step >= firsts, tf.int32)), branches))

    def _branch(self, number: int, gradients: Sequence[Gradient], lr: tf.Tensor | None) -> Callable[[], list[Gradient]]:
        return lambda: self._exchanged(number, gradients, lr)

    def _exchanged(self, number: int, gradients: Sequence[Gradient], lr: tf.Tensor | None) -> list[Gradient]:
        assert self._transport is not None
        plan = self._stages[number][1]
        names = [spec.name for spec in self._specs]
        mine = dict(zip(names, gradients, strict=True))
        merged: dict[str, Gradient] = {}
        for item in plan.delegated:
            name = item.spec.name
            if isinstance(mine[name], tf.IndexedSlices):
                self.slots.stage = number
                self.slots.note("rows", name, nbytes(mine[name]))
            merged[name] = self._transport.average(
                mine[name], op=self._op, predivide=self._predivide, name=f"dense.{names.index(name)}"
            )
        step = Step(
            States([(0, plan)], self.slots.step, self._read(number)),
            _ops,
            self._transport,
            seed=self._seed,
            average=self._op == hvd.Average,
            rollback=self._rollback,
            track_norms=self.track_norms,
            times=self.times,
        )
        for item in plan.exchanged:
            step.ready(item.spec.name, mine[item.spec.name], lr)
        outcome = step.finish()
        merged.update(outcome.merged)
        self._write(number, outcome.states.units)
        self.slots.go_to(outcome.states.step)
        for (kind, name), value in outcome.notes.items():
            self.slots.note(kind, name, value)
        # A stage may be a branch of the graph.
        self._transport.end_turn()
        return [merged[name] for name in names]

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the last step; see `grace.core.state.run.Run.stats`.

        Raises StepError before the first step.
        """
        if self._transport is None:
            raise StepError("stats() describes the last step, and there is none yet; call it after the first step.")
        step, (changed, number) = int(self.slots.step), self._done
        number = number if step == changed else self._number_at(max(0, step - 1))
        plan, states = self._stages[number][1], self._read(number)
        stats = statistics(plan, self.slots.notes, states, step, self.times, _ops, self.track_norms)
        for name, tensor in stats["tensors"].items():
            rows = self.slots.notes.get(("rows", name))
            if rows is not None:
                stats["wire_bytes"] += int(rows) - tensor["wire_bytes"]
                tensor["wire_bytes"] = int(rows)
        return stats

    # --- checkpoint ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the states of this rank, as arrays of NumPy by the names of their variables."""
        tensors = {name: variable.numpy() for name, variable in self.slots.states.items()}
        rank, size = self._place
        return {"version": STATE_VERSION, "step": self.step, "rank": rank, "size": size, "tensors": tensors}

    def entries(self, number: int, rank: int, tensors: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
        """Return arrays by the names of their variables as a checkpoint has those of a stage, for one rank."""
        self.slots.stage = number
        return {
            name: entry_of(
                unit,
                {
                    # All ranks have variables for what only one of them keeps.
                    kind: {key: tensors[made] for key, made in state.items()}
                    if kind != "memory" or unit.kept_by(rank)
                    else {}
                    for kind, state in self.slots.names(name).items()
                },
            )
            for name, unit in self._stages[number][1].stateful.items()
        }

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]], before: Stages, *, average: bool) -> list[str]:
        """Load the states of all ranks of a run that had the stages `before`; return what could not be continued.

        Raises StateError if they are damaged; then nothing was loaded.
        """
        expected = {name: show(variable.numpy()) for name, variable in before.slots.states.items()}
        for state in states:
            check_shown({name: show(value) for name, value in state["tensors"].items()}, expected)
        step, (rank, size) = int(states[0]["step"]), self._place
        number = self._arrived_at(step)
        merge = Merge(
            before._stages[number][1],
            self._stages[number][1],
            [{"tensors": before.entries(number, i, state["tensors"])} for i, state in enumerate(states)],
            lambda saved, current: np.array(saved, current.dtype),
            lambda device: get_ops("numpy"),
            seed=self._seed,
            rank=max(rank, 0),
            size=size,
            average=average,
        )
        new = merge.states()
        for variable in self.slots.of_this_rank:
            variable.assign(tf.zeros_like(variable))
        self._write(number, new)
        self.slots.go_to(step)
        self.slots.origin.assign(self._place)
        return list(merge.lost)

    def load_state_dict(
        self, state: dict[str, Any], convert: Callable[[Array, Array], Array], stages: StagesCarrying | None = None
    ) -> bool:
        """Load step and states; see `grace.core.state.run.Run.load_state_dict`.

        It does not ask for other `stages`: the variables of a graph are those of its own plans.
        """
        check_saved(state)
        expected, found = (
            {name: show(value) for name, value in saved.items()}
            for saved in (self.state_dict()["tensors"], state["tensors"])
        )
        check_shown(found, expected)
        mine = (state["rank"], state["size"]) == self._place
        for name in self.slots.states:
            check_finite(name, state["tensors"][name])
        for memory in self.slots.joint:
            if not mine and state["size"] == self._place[1]:
                raise alone(memory)
        own = {id(variable) for variable in self.slots.of_this_rank}
        for name, variable in self.slots.states.items():
            keep = mine or id(variable) not in own
            variable.assign(convert(state["tensors"][name], variable) if keep else tf.zeros_like(variable))
        self.slots.go_to(int(state["step"]))
        self.slots.origin.assign(self._place)
        return mine


def check_shown(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise StateError if a checkpoint has other arrays than expected, by name."""
    if found != expected:
        raise StateError(
            f"checkpoint: expected states {expected}, received {found}; use the configuration it was saved with, "
            "and the changes that were made since."
        )


def _ops(device: str) -> ArrayOps:
    return get_ops("tensorflow", device)


def _delegated(item: Assignment) -> bool:
    """Return whether Horovod reduces the tensor: it is dense, and Horovod can add its dtype."""
    return item.dense and item.spec.dtype != "bfloat16" and not item.spec.complex
