"""`ModuleEngines`: the engines of a model that its framework exchanges module by module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from grace.core.errors import StateError
from grace.core.guards.waiting import bucket_of, explained
from grace.core.observe.timeline import Times
from grace.core.plan.plan import Plan
from grace.core.spec import Array
from grace.core.state.state import STATE_VERSION, check_mapping, check_saved
from grace.core.step.engine import Engine, Plans, Snapshot

T = TypeVar("T")
_SUMMED = ("wire_bytes", "dense_bytes", "compressed_dense_bytes", "compressed_wire_bytes")


class ModuleTimes(Times):
    """Moments of the last step of every module."""

    def finish(self, step: Any, plan: Plan, sent: Callable[[str], Any]) -> None:
        marks, self._marks = self._marks, {}
        self._last = {**self._last, **marks}
        self.write(int(step), plan, marks, sent)


class ModuleSnapshot(NamedTuple):
    """The states of all engines between two steps."""

    step: int
    engines: dict[str, Snapshot]


class ModuleEngines:
    """One engine per module, each with a step count of its own, used like a single engine.

    A framework may reduce a module several times in a backward pass, or not at all; then residuals wait for the
    module's next step. The engines share a transport and `ModuleTimes`.
    """

    def __init__(self, engines: Mapping[str, Engine], times: ModuleTimes) -> None:
        self._engines, self.times = engines, times
        self._tensors = {name: {a.spec.name for a in engine.plan.assignments} for name, engine in engines.items()}
        self.transport = next(iter(engines.values())).transport
        self.transport.explain = self._explained

    def of(self, module: str) -> Engine:
        """Return the engine of a module."""
        return self._engines[module]

    def _explained(self, name: str) -> str:
        for module, engine in self._engines.items():
            if bucket_of(engine.plan, name) is not None:
                return explained(engine.plan, int(engine.step), name, module)
        return explained(self.plan, self.step, name)

    @property
    def track_norms(self) -> bool:
        """True if steps measure the norms of compressed gradients and of their errors, for `stats`."""
        return any(engine.track_norms for engine in self._engines.values())

    @track_norms.setter
    def track_norms(self, value: bool) -> None:
        for engine in self._engines.values():
            engine.track_norms = value

    @property
    def plan(self) -> Plan:
        """The plans of all modules for their next steps, as one."""
        plans = [engine.plan for engine in self._engines.values()]
        return Plan(
            tuple(bucket for plan in plans for bucket in plan.buckets),
            tuple(item for plan in plans for item in plan.exchanged),
            tuple(item for plan in plans for item in plan.delegated),
            tuple(dict.fromkeys(text for plan in plans for text in plan.warnings)),
        )

    @property
    def step(self) -> int:
        """The largest number of a step under way."""
        return max(int(engine.step) for engine in self._engines.values())

    @property
    def completed(self) -> int:
        """The largest number of steps that a module's engine has completed; see `Engine`."""
        return max(engine.completed for engine in self._engines.values())

    def count_anew(self) -> None:
        """Count completed steps from 0; see `Engine.count_anew`."""
        for engine in self._engines.values():
            engine.count_anew()

    @property
    def shared_states(self) -> dict[str, Array]:
        """The states that are equal on all ranks, by a name that says what they are."""
        return {name: x for engine in self._engines.values() for name, x in engine.shared_states.items()}

    def check_idle(self, call: str) -> None:
        """Raise StepError if a step is under way, when the call is not possible."""
        for engine in self._engines.values():
            engine.check_idle(call)

    def change(self, plan: Plan) -> None:
        """Continue with another plan for the same tensors; see `Engine.change`."""
        for name, engine in self._engines.items():
            engine.change(plan.only(self._tensors[name]))

    def snapshot(self) -> ModuleSnapshot:
        """Return plans, steps and states as they are now; see `Engine.snapshot`."""
        return ModuleSnapshot(self.step, {name: engine.snapshot() for name, engine in self._engines.items()})

    def before_step(self) -> ModuleSnapshot:
        """Return a snapshot to drop the next step; see `Engine.before_step`."""
        return ModuleSnapshot(self.step, {name: engine.before_step() for name, engine in self._engines.items()})

    def restore(self, before: ModuleSnapshot) -> None:
        """Go back to a snapshot, and drop steps under way."""
        for name, engine in self._engines.items():
            engine.restore(before.engines[name])

    def undo(self, before: ModuleSnapshot) -> None:
        """Go back to the states of a snapshot, since which no optimizer has applied anything; steps stay counted."""
        for name, engine in self._engines.items():
            engine.undo(before.engines[name])

    def put_back(self, before: ModuleSnapshot, tensors: Collection[str]) -> None:
        """Give the memories of some tensors the states of a snapshot; see `Engine.put_back`."""
        for name, engine in self._engines.items():
            engine.put_back(before.engines[name], tensors)

    def stats(self) -> dict[str, Any]:
        """Return the sums over the last step of every module; see `Engine.stats`.

        The phases of a bucket are relative to the first gradient of its module.
        """
        parts = [engine.stats() for engine in self._engines.values()]
        return {
            "step": self.step,
            "collectives": {kind: sum(part["collectives"][kind] for part in parts) for kind in parts[0]["collectives"]},
            **{key: sum(part[key] for part in parts) for key in _SUMMED},
            **{key: {name: x for part in parts for name, x in part[key].items()} for key in ("buckets", "tensors")},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the states of this rank, as `Engine.state_dict`, and the steps of all modules."""
        parts = {name: engine.state_dict() for name, engine in self._engines.items()}
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "rank": self.transport.rank,
            "size": self.transport.size,
            "tensors": {unit: states for part in parts.values() for unit, states in part["tensors"].items()},
            "modules": {name: part["step"] for name, part in parts.items()},
        }

    def load_state_dict(
        self, state: dict[str, Any], convert: Callable[[Array, Array], Array], plans: Plans | None = None
    ) -> bool:
        """Load what `state_dict` has returned, all or nothing; see `Engine.load_state_dict`."""
        return all(
            self._load(
                [state],
                lambda name, engine, parts: engine.load_state_dict(parts[0], convert, self._plans_of(name, plans)),
            )
        )

    def _plans_of(self, module: str, plans: Plans | None) -> Plans | None:
        """Return the part of plans with the tensors of a module."""
        if plans is None:
            return None
        tensors = self._tensors[module]
        return lambda carrying: [(first, plan.only(tensors)) for first, plan in plans(carrying)]

    def merge_state_dicts(
        self,
        states: Sequence[Mapping[str, Any]],
        before: Plan,
        convert: Callable[[Array, Array], Array],
        plans: Plans | None = None,
    ) -> list[str]:
        """Load the states of all ranks of a run with another number of ranks; see `Engine.merge_state_dicts`."""
        lost = self._load(
            states,
            lambda name, engine, parts: engine.merge_state_dicts(
                parts, before.only(self._tensors[name]), convert, self._plans_of(name, plans)
            ),
        )
        return list(dict.fromkeys(text for of_module in lost for text in of_module))

    def _load(
        self, states: Sequence[Mapping[str, Any]], load: Callable[[str, Engine, list[dict[str, Any]]], T]
    ) -> list[T]:
        """Call `load` with each module's part of the states; if one fails, nothing was loaded."""
        parts = [self._parts(state) for state in states]
        before = self.snapshot()
        try:
            return [load(name, engine, [part[name] for part in parts]) for name, engine in self._engines.items()]
        except Exception:
            self.restore(before)
            raise

    def _parts(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the states of the modules, each in the form of `Engine.state_dict`."""
        check_saved(state)
        steps = check_mapping(state.get("modules"), "modules")
        if set(steps) != set(self._engines):
            different = ", ".join(sorted(repr(name) for name in set(steps) ^ set(self._engines))[:5])
            raise StateError(
                f"checkpoint: the modules differ: {different} only on one side. Shard the same modules as the run that "
                "saved it."
            )
        parts = {name: {**state, "step": steps[name], "tensors": {}} for name in self._engines}
        module_of = {tensor: name for name, tensors in self._tensors.items() for tensor in tensors}
        # What belongs to no tensor of the model is refused by the first module.
        first = next(iter(parts))
        for unit, entry in state["tensors"].items():
            of = check_mapping(entry, f"tensor '{unit}'").get("of")
            tensor = str(of[0]) if isinstance(of, Sequence) and of else ""
            parts[module_of.get(tensor, first)]["tensors"][unit] = entry
        return parts
