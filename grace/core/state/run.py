"""`Run`: the plans and states of a run, from step to step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from grace.core.errors import StateError, StepError
from grace.core.guards.waiting import bucket_of, explain
from grace.core.observe.statistics import Notes, statistics
from grace.core.observe.timeline import Times
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan, join
from grace.core.plan.unit import Unit
from grace.core.spec import Array, State
from grace.core.state.carry import carry, move, splice_units
from grace.core.state.checkpoint import carried_tensors, entry_of, load_units, saved_carried_tensors
from grace.core.state.checks import STATE_VERSION, check_mapping, check_saved
from grace.core.state.merge import Merge
from grace.core.state.states import Stages, States, UnitStates, first_memory, initial, initial_states, plan_at
from grace.core.step.step import Outcome, Step
from grace.core.transport.transport import Transport

#: The stages of a run in which these tensors carry a residual of an earlier method.
StagesCarrying: TypeAlias = Callable[[frozenset[str]], Stages]
#: The states of a run, by module.
Savepoint: TypeAlias = Mapping[str, States]

_SUMMED = ("wire_bytes", "dense_bytes", "compressed_dense_bytes", "compressed_wire_bytes")
# The module of a model that is exchanged as a whole.
_WHOLE = ""


def step_of(states: Savepoint) -> Any:
    """Return the number of the next step from these states; of several modules the largest."""
    steps = [now.step for now in states.values()]
    return steps[0] if len(steps) == 1 else max(steps)


class Run:
    """Stages of plans over a transport, and the states between their steps.

    `current` is the step under way. It changes no state: `commit` takes its outcome, and `discard` forgets it. Without
    `rollback`, it takes the memories out of the states unit by unit, and memories start from zero after `discard`.

    `ops(device)` returns the array operations. `average=False` leaves sums undivided. `times` records moments.
    `modules` has the tensors of each module, if the framework reduces a model module by module: each has steps of its
    own, because it may be reduced several times in a backward pass, or not at all.
    """

    def __init__(
        self,
        stages: Stages,
        ops: Callable[[str], ArrayOps],
        transport: Transport,
        *,
        seed: int = 0,
        average: bool = True,
        rollback: bool = True,
        modules: Mapping[str, Collection[str]] | None = None,
        times: Times | None = None,
    ) -> None:
        self.transport = transport
        transport.explain = self._explain
        self.times = times or Times()
        # It is called several times per unit and step, and looks at the environment each time.
        #: The array operations of a device.
        self.ops = self._ops = functools.cache(ops)
        self._seed, self._average, self._rollback, self._modules = seed, average, rollback, modules
        #: True if a step measures the norms of compressed gradients and of their errors, for `stats`.
        self.track_norms = False
        #: True if a step keeps what this rank has contributed, for `Outcome.own`.
        self.keeps_own = False
        self._check_ranks(plan for _, plan in stages)
        self._current: dict[str, Step] = {}
        self._completed: dict[str, int] = {}
        self._states = {module: self._states_at(own, 0) for module, own in self._divide(stages).items()}
        # The plan and the notes of the last step of each module, which the statistics describe.
        self._last: dict[str, tuple[Plan, Notes]] = {m: (now.plan, {}) for m, now in self._states.items()}
        # The modules whose memories only this run has: a step without roll-back may write over them.
        self._owned = set(self._states)

    # --- plans and steps ----------------------------------------------------------------------------------------

    @property
    def stages(self) -> Stages:
        """The plans, each with its first step."""
        rows = zip(*(now.stages for now in self._states.values()), strict=True)
        return [(row[0][0], join([plan for _, plan in row])) for row in rows]

    @property
    def plan(self) -> Plan:
        """The plan of the next step; of several modules, the plans of their next steps as one."""
        return join([now.plan for now in self._states.values()])

    @property
    def step(self) -> Any:
        """Number of the next step: an int, or a 0-d integer array in a traced graph; of several modules the largest."""
        return step_of(self._states)

    @property
    def full_round(self) -> bool:
        """True if the next step is a full round, which takes the gradients of all data."""
        return any(now.plan.is_full(self._seed, now.step) for now in self._states.values())

    @property
    def completed(self) -> int:
        """Number of steps that were completed in this process since `reset_completed`; of modules, the largest.

        Unlike `step`, this number is equal on all ranks if only some have loaded a checkpoint.
        """
        return max(self._completed.values(), default=0)

    def reset_completed(self) -> None:
        """Count completed steps from 0. All ranks must do so together; some may not have completed the last step."""
        self._completed.clear()

    def exchanges(self, name: str) -> bool:
        """Return whether the next step exchanges the tensor, rather than the adapter."""
        return any(name in now.plan.assignment_of for now in self._states.values())

    @property
    def current(self) -> Step:
        """The step under way; it begins with the first call."""
        return self.current_of(_WHOLE)

    def current_of(self, module: str) -> Step:
        """Return the step of a module that is under way; it begins with the first call."""
        if module not in self._current:
            self._current[module] = Step(
                self._states[module],
                self._ops,
                self.transport,
                seed=self._seed,
                average=self._average,
                rollback=self._rollback,
                owned=not self._rollback and module in self._owned,
                track_norms=self.track_norms,
                keeps_own=self.keeps_own,
                first=not any(step.begun for step in self._current.values()),
                times=self.times,
            )
        return self._current[module]

    def poll(self) -> bool:
        """Advance the steps under way by what has arrived; see `Step.poll`."""
        return any(list(map(Step.poll, self._current.values())))

    def check_idle(self, call: str) -> None:
        """Raise StepError if a step is under way, when the call is not possible."""
        if any(step.begun for step in self._current.values()):
            raise StepError(f"{call}() was called while gradients are being exchanged; call it after step().")

    def finish(
        self,
        into: Mapping[str, Array] | None = None,
        unused: Iterable[str] = (),
        module: str = _WHOLE,
    ) -> dict[str, Array]:
        """Finish the step under way as `Step.finish` does, commit it, and return the merged gradients."""
        outcome = self.current_of(module).finish(into, unused)
        self.commit(outcome, module)
        return outcome.merged

    def commit(self, outcome: Outcome, module: str = _WHOLE) -> None:
        """Go on with the states of a completed step, in the stage of the next one."""
        old, new, done = self._states[module], outcome.states, self._current[module]
        if len(new.stages) > 1 and new.plan is not old.plan:
            new = new._replace(units=self._carry(old.plan, new.plan, new.units))
        self._states = {**self._states, module: new}
        self._last[module] = done.plan, outcome.notes
        self._completed[module] = self._completed.get(module, 0) + 1
        self._owned.add(module)
        del self._current[module]

    def discard(self, before: Savepoint | None = None) -> None:
        """Drop the steps under way, and return to a savepoint, or to the states before these steps.

        Without roll-back, all memories start from zero.
        """
        self._go_to({m: self._fill(now) for m, now in (self.savepoint if before is None else before).items()})

    # --- states -------------------------------------------------------------------------------------------------

    @property
    def states(self) -> Savepoint:
        """Plans, step and states as they are now; the arrays are the live ones, and never changed."""
        # A step without roll-back would write over them.
        self._owned.clear()
        return self._states

    @property
    def units(self) -> dict[str, UnitStates]:
        """The states of all units by name, in `states`."""
        return {name: states for now in self.states.values() for name, states in now.units.items()}

    @property
    def savepoint(self) -> Savepoint:
        """The states to return to if the step under way is dropped: `states`, without memories if no roll-back."""
        if self._rollback:
            return self._states
        return {
            module: now._replace(units={name: {"compressor": s["compressor"]} for name, s in now.units.items()})
            for module, now in self._states.items()
        }

    def put_back(self, before: Savepoint, tensors: Collection[str] | None = None) -> None:
        """Give the memories of some tensors the states of a savepoint, as if these had taken no part in steps since.

        Without `tensors`, all states return, as if no optimizer had applied the steps since, and a step under way is
        dropped. The steps stay counted, and if the plan has changed since, states are carried over to the new one.
        Without roll-back, memories start from zero. Raises StepError in the middle of a step.
        """
        if tensors is not None:
            self.check_idle("put_back")
        new = {}
        for module, now in self._states.items():
            old = self._fill(before[module])
            units = old.units if old.plan is now.plan else self._carry(old.plan, now.plan, old.units)
            if tensors is not None:
                memories, units = {name: {"memory": s["memory"]} for name, s in units.items()}, dict(now.units)
                splice_units(now.plan, units, memories, tensors, self._ops)
            new[module] = now._replace(units=units)
        self._go_to(new)

    @property
    def shared_states(self) -> dict[str, Array]:
        """The states that are equal on all ranks, by a name that says what they are."""
        found: dict[str, Array] = {}
        for now in self._states.values():
            for unit in now.plan.units:
                for kind, state in now.units[unit.spec.name].items():
                    if kind == "compressor" or unit.memory.across_ranks == "equal":
                        found |= {f"{key} of the {kind} of {unit.spec.name}": value for key, value in state.items()}
        return found

    def memories(self) -> dict[str, State]:
        """Return the states of the memories that may differ between ranks, by unit."""
        stateful, units = self.plan.stateful, self.units
        return {name: units[name]["memory"] for name, unit in stateful.items() if unit.memory.across_ranks != "equal"}

    def put_memories(self, memories_of: Mapping[str, State]) -> None:
        """Write the result of `memories`."""
        self._go_to(
            {
                module: now._replace(
                    units={name: {**s, "memory": memories_of.get(name, s["memory"])} for name, s in now.units.items()}
                )
                for module, now in self._states.items()
            }
        )

    def reset(self) -> None:
        """Start over at step 0 with initial states."""
        self._go_to({module: self._states_at(now.stages, 0) for module, now in self._states.items()})

    def change(self, plan: Plan) -> None:
        """Go on with another plan for the same tensors; residuals and other states that fit are carried over.

        Raises StepError in the middle of a step.
        """
        self.check_idle("change")
        self._check_ranks([plan])
        new = {}
        for module, stages in self._divide([(0, plan)]).items():
            now, ((_, after),) = self._states[module], stages
            new[module] = States(stages, now.step, self._carry(now.plan, after, now.units))
        self._go_to(new, keep_last=True)

    def move(self, stages: Stages, before: int) -> None:
        """Go on with the ranks that the transport has now, with plans for them, after `before` other ranks.

        `grace.core.state.carry.move` says what this rank keeps. Drops a step under way.
        """
        self._check_ranks(plan for _, plan in stages)
        sizes, new = (before, self.transport.size), {}
        for module, divided in self._divide(stages).items():
            now = self._states[module]
            plan = plan_at(divided, now.step)
            units = move(now.plan, plan, now.units, self._initial, self._ops, sizes, average=self._average)
            new[module] = States(divided, now.step, units)
        self.reset_completed()
        self._go_to(new)

    def _go_to(self, states: Savepoint, keep_last: bool = False) -> None:
        """Go on with states that others may have, and drop the steps under way."""
        for module, now in states.items():
            if not keep_last and now.plan is not self._states[module].plan:
                self._last[module] = now.plan, {}
        self._states = dict(states)
        self._current.clear()
        self._owned.clear()
        self.times.drop()

    def _divide(self, stages: Stages) -> dict[str, Stages]:
        """Return the part of each module in the plans."""
        if self._modules is None:
            return {_WHOLE: stages}
        return {
            module: [(first, plan.only(tensors)) for first, plan in stages] for module, tensors in self._modules.items()
        }

    def _states_at(self, stages: Stages, step: int) -> States:
        plan = plan_at(stages, step)
        return States(stages, step, initial_states(plan, self._ops, self._seed, self.transport.rank))

    def _fill(self, states: States) -> States:
        """Return states in which memories start from zero if they are missing."""
        units = {}
        for name, unit in states.plan.stateful.items():
            held = states.units[name]
            if "memory" not in held:
                held = {"memory": first_memory(unit, self._ops(unit.spec.device), self.transport.rank), **held}
            units[name] = held
        return states._replace(units=units)

    def _carry(self, before: Plan, after: Plan, units: Mapping[str, UnitStates]) -> dict[str, UnitStates]:
        return carry(before, after, units, self._initial, self._ops, self.transport.size)

    def _initial(self, unit: Unit) -> dict[str, State]:
        return initial(unit, self._ops(unit.spec.device), self._seed, self.transport.rank)

    def _check_ranks(self, plans: Iterable[Plan]) -> None:
        for plan in plans:
            plan.check_ranks(self.transport.size)

    def _explain(self, name: str) -> str:
        for module, now in self._states.items():
            if self._modules is not None and bucket_of(now.plan, name) is not None:
                return explain(now.plan, now.step, name, module)
        return explain(self.plan, self.step, name)

    # --- statistics ---------------------------------------------------------------------------------------------

    @property
    def notes(self) -> Notes:
        """The notes of the last step, of which `stats` is made."""
        return {place: x for _, notes in self._last.values() for place, x in notes.items()}

    def stats(self) -> dict[str, Any]:
        """Return what the last step sent; bytes are those that this rank passed to collectives.

        `wire_bytes` counts whole buffers (fields, header, padding, proposals) and delegated tensors, `dense_bytes` the
        same tensors uncompressed, `compressed_*` both without the dense tensors, and `collectives` the bytes by the
        kind of collective that carries them. Each tensor has `wire_bytes` of fields and proposals: its share of each
        unit that holds it, by the entries that a sparsifier sends of it, with other methods by its elements. It also
        has `residual_norm` |e| and `relative_error` |x - C(x)| / |x|, both over its own elements, which are None unless
        `track_norms` was set before the step. `volume` is what all tensors of a method that tunes its volume have sent,
        over what was asked of them until now; None for other methods.

        Each bucket has its `tensors`, `wire_bytes`, and its phases as [begin, end] in seconds since the first gradient
        of the step. A phase is None if it is unknown, as before the first step and in a graph that does not track
        times. `ready`: from its first gradient to its last. `compress`: from the start of its first unit, error
        feedback included, until the payloads are passed to the transport (in a graph: until they exist). `negotiate`, a
        part of `compress`: from sending proposals to their result; None if the method has none. `send`: until this rank
        waits for what it sent; it does other work meanwhile. `wait`: until arrival. (A graph never blocks; its wait
        starts when the payloads of all buckets exist.) `merge`: until the last gradient is in place. These are host
        times: work of a GPU counts when it is enqueued. Of several modules, the result has the sums over the last step
        of each, and phases are relative to the first gradient of the module.
        """
        parts = [
            statistics(*self._last[module], now, self.times, self._ops, self.track_norms)
            for module, now in self._states.items()
        ]
        if len(parts) == 1:
            return parts[0]
        return {
            "step": self.step,
            "collectives": {kind: sum(part["collectives"][kind] for part in parts) for kind in parts[0]["collectives"]},
            **{key: sum(part[key] for part in parts) for key in _SUMMED},
            **{key: {name: x for part in parts for name, x in part[key].items()} for key in ("buckets", "tensors")},
        }

    # --- checkpoint ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the step and states of this rank; the arrays are the live ones and are never changed in place.

        Of several modules, it has the steps of each. Raises StepError in the middle of a step if there is no roll-back.
        """
        if not self._rollback:
            self.check_idle("state_dict")
        stateful, units = self.plan.stateful, self.units
        state = {
            "version": STATE_VERSION,
            "step": int(self.step),
            "rank": self.transport.rank,
            "size": self.transport.size,
            "tensors": {name: entry_of(unit, units[name]) for name, unit in stateful.items()},
        }
        if self._modules is None:
            return state
        return {**state, "modules": {module: int(now.step) for module, now in self._states.items()}}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        convert: Callable[[Array, Array], Array],
        stages: StagesCarrying | None = None,
    ) -> bool:
        """Load step and states; `convert(saved, current)` returns the saved array in the form of the current one.

        If other tensors than in the plans of now carry a residual of an earlier method, it goes on with the plans that
        `stages` returns for these tensors: their residual may not have been sent yet. Drops a step under way.

        States of another rank, or of a run with another number of ranks, cannot be continued exactly. Then only values
        that are equal on all ranks are loaded (step, compressor states), the memories start from zero, and the result
        is False. Raises StateError if the checkpoint belongs to other tensors, methods, shapes or dtypes, or is
        damaged; then nothing was loaded.
        """
        check_saved(state)
        resized = state["size"] != self.transport.size
        exact = state["rank"] == self.transport.rank and not resized
        new = {}
        for module, saved in self._split(state).items():
            now = self._states_for(module, saved, stages)
            units = load_units(
                now.plan.stateful,
                saved["tensors"],
                now.units,
                convert,
                self._ops,
                None if exact else self._initial,
                resized,
            )
            new[module] = now._replace(units=units)
        self._go_to(new)
        return exact

    def merge_state_dicts(
        self,
        states: Sequence[Mapping[str, Any]],
        before: Plan,
        convert: Callable[[Array, Array], Array],
        stages: StagesCarrying | None = None,
    ) -> list[str]:
        """Load the states of all ranks of a run with another number of ranks, which had the plan `before`.

        Return what could not be continued. Raises the errors of `load_state_dict`; then nothing was loaded.
        """
        parts = [self._split(state) for state in states]
        new, lost = {}, list[str]()
        for module, ((_, old),) in self._divide([(0, before)]).items():
            saved = [part[module] for part in parts]
            now = self._states_for(module, saved[0], stages)
            merge = Merge(
                old,
                now.plan,
                saved,
                convert,
                self._ops,
                seed=self._seed,
                rank=self.transport.rank,
                size=self.transport.size,
                average=self._average,
            )
            new[module] = now._replace(units=merge.states())
            lost += merge.lost
        self._go_to(new)
        return list(dict.fromkeys(lost))

    def _states_for(self, module: str, saved: Mapping[str, Any], stages: StagesCarrying | None) -> States:
        """Return states of a module at a saved step, in the stages whose tensors carry residuals as the saved ones."""
        now, step, found = self._states[module], int(saved["step"]), saved_carried_tensors(saved["tensors"])
        own = now.stages
        if stages is not None and found != carried_tensors(plan_at(own, step).stateful):
            own = self._divide(stages(found))[module]
        if plan_at(own, step) is now.plan:
            return States(own, step, now.units)
        return self._states_at(own, step)

    def _split(self, state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Return the states of the modules, each as `state_dict` returns those of a run without modules."""
        if self._modules is None:
            return {_WHOLE: state}
        check_saved(state)
        steps = check_mapping(state.get("modules"), "modules")
        if set(steps) != set(self._modules):
            different = ", ".join(sorted(repr(name) for name in set(steps) ^ set(self._modules))[:5])
            raise StateError(
                f"checkpoint: the modules differ: {different} only on one side. Shard the same modules as the run that "
                "saved it."
            )
        parts: dict[str, dict[str, Any]] = {
            module: {**state, "step": steps[module], "tensors": {}} for module in self._modules
        }
        module_of = {tensor: module for module, tensors in self._modules.items() for tensor in tensors}
        # What belongs to no tensor of the model is refused by the first module.
        first = next(iter(parts))
        for unit, entry in state["tensors"].items():
            of = check_mapping(entry, f"tensor '{unit}'").get("of")
            tensor = str(of[0]) if isinstance(of, Sequence) and of else ""
            parts[module_of.get(tensor, first)]["tensors"][unit] = entry
        return parts
