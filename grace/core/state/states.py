"""`States`: everything that lives from step to step, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from grace.core.methods.capabilities import Stateful
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan
from grace.core.plan.unit import Unit
from grace.core.spec import Key, State
from grace.core.state.stored import narrow

#: The states of a unit: {"memory": ..., "compressor": ...}.
UnitStates: TypeAlias = Mapping[str, State]
#: Plans, each with its first step, in ascending order.
Stages: TypeAlias = Sequence[tuple[int, Plan]]


class States(NamedTuple):
    """The stages of a run, the number of its next step, and the states of each unit of the plan of that step.

    No step changes the arrays. Only without roll-back, a step takes the memories out of `units`. The step is an int,
    or a 0-d integer array in a traced graph, which has one stage.
    """

    stages: Stages
    step: Any
    units: dict[str, UnitStates]

    @property
    def plan(self) -> Plan:
        """The plan of the next step."""
        return plan_at(self.stages, self.step)


def plan_at(stages: Stages, step: Any) -> Plan:
    """Return the plan of a step."""
    if cycle := stages[0][1].cycle:
        step %= cycle
    return stages[0][1] if len(stages) == 1 else next(plan for first, plan in reversed(stages) if first <= step)


def initial_states(plan: Plan, ops: Callable[[str], ArrayOps], seed: int, rank: int | None) -> dict[str, UnitStates]:
    """Return the initial states of all units on a rank; without a rank, those that their owners have."""
    return {name: initial(unit, ops(unit.spec.device), seed, rank) for name, unit in plan.stateful.items()}


def initial(unit: Unit, ops: ArrayOps, seed: int, rank: int | None) -> dict[str, State]:
    """Return the initial states of a unit on a rank; without a rank, those that its owner has."""
    compressor = unit.compressor
    return {
        "memory": first_memory(unit, ops, rank),
        "compressor": compressor.init(unit.spec, ops, Key.derive(seed, unit.spec.name))
        if isinstance(compressor, Stateful)
        else {},
    }


def first_memory(unit: Unit, ops: ArrayOps, rank: int | None) -> State:
    """Return the initial state of a unit's memory on a rank; without a rank, the one that its owner has."""
    return narrow(unit, unit.memory.init(unit.spec, ops), ops) if rank is None or unit.is_kept_by(rank) else {}
