"""States at rest: what memories and compressors keep between steps, and how a checkpoint carries it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grace.core.errors import StateError
from grace.core.ops.composites import ArrayOps
from grace.core.plan import Part, Plan
from grace.core.registry import compressors, memories
from grace.core.spec import Array, Key, State

STATE_VERSION = 1


class Slots:
    """What lives across steps, owned by the adapter and part of its checkpoint: the number of the step, and per tensor
    the states of its memory and its compressor. Notes about the last step are kept beside it, in no checkpoint.

    An adapter whose steps are traced into graphs overrides the accessors with ones on variables.
    """

    def __init__(self) -> None:
        self._step = 0
        self._states: dict[str, dict[str, State]] = {}
        self._notes: dict[tuple[str, str], Any] = {}

    @property
    def step(self) -> Any:
        """The number of the step: an int, or a 0-d integer array in a traced graph."""
        return self._step

    def go_to(self, step: Any) -> None:
        """Set the number of the step."""
        self._step = step

    def __contains__(self, name: str) -> bool:
        """Whether the tensor has states."""
        return name in self._states

    def read(self, name: str) -> dict[str, State]:
        """The states of a tensor: {"memory": ..., "compressor": ...}."""
        return self._states[name]

    def write(self, name: str, states: dict[str, State]) -> None:
        """Commit new states of a tensor."""
        self._states[name] = states

    def note(self, kind: str, name: str, value: Any) -> None:
        """Remember a number, or a 0-d array, about the last step; None forgets it."""
        self._notes[kind, name] = value

    def noted(self, kind: str, name: str) -> Any:
        """What was noted; None if nothing was."""
        return self._notes.get((kind, name))

    def save(self, parts: Mapping[str, Part]) -> dict[str, dict[str, Any]]:
        """Per tensor its states and the names of the parts they belong to."""
        return {name: {"parts": _names(part), **self.read(name)} for name, part in parts.items()}

    def load(
        self,
        parts: Mapping[str, Part],
        saved: Mapping[str, dict[str, Any]],
        convert: Callable[[Array, Array], Array],
        initial: Callable[[Part], dict[str, State]] | None,
    ) -> None:
        """Take over what `save` returned, all or nothing; with `initial`, memories start from there instead.

        Raises StateError if the checkpoint is of other tensors, parts or shapes.
        """
        if set(saved) != set(parts):
            different = sorted(set(saved) ^ set(parts))
            raise StateError(
                f"checkpoint: the compressed tensors differ, {', '.join(different[:5])} "
                f"{'is' if len(different) == 1 else 'are'} only on one side; use the configuration it was saved with."
            )
        new: dict[str, dict[str, State]] = {}
        for name, part in parts.items():
            if saved[name]["parts"] != _names(part):
                raise StateError(
                    f"checkpoint, tensor '{name}': expected {_names(part)}, received {saved[name]['parts']}; "
                    "use the configuration it was saved with."
                )
            current = self.read(name)
            new[name] = {kind: _convert(name, saved[name][kind], current[kind], convert) for kind in current}
            if initial is not None and not part.memory.shared:
                new[name]["memory"] = initial(part)["memory"]
        self._states.update(new)


def check_saved(state: Mapping[str, Any]) -> None:
    """Raise StateError unless this is what `Engine.state_dict` writes, of this version."""
    missing = {"version", "step", "rank", "size", "tensors"} - set(state)
    if missing:
        raise StateError(f"checkpoint: {', '.join(sorted(missing))} missing; it is no state written by grace.")
    if state["version"] != STATE_VERSION:
        raise StateError(
            f"checkpoint: expected state version {STATE_VERSION}, received {state['version']!r}; "
            "load it with the version of grace that wrote it."
        )


def prepare(slots: Slots, plan: Plan, ops: Callable[[str], ArrayOps], seed: int) -> None:
    """Write the states with which a run begins, where there are none yet; needs no transport."""
    for bucket in plan.buckets:
        for part in bucket.parts:
            if part.spec.name not in slots:
                slots.write(part.spec.name, initial(part, ops(part.spec.device), seed))


def initial(part: Part, ops: ArrayOps, seed: int) -> dict[str, State]:
    """The states of a tensor with which a run begins."""
    return {
        "memory": part.memory.init(part.spec, ops),
        "compressor": part.compressor.init(part.spec, ops, Key.derive(seed, part.spec.name)),
    }


def carried(old: Part, new: Part, states: dict[str, State], fresh: dict[str, State], ops: ArrayOps) -> dict[str, State]:
    """The states of a tensor after a change of its parts: what fits goes on, the rest begins as `fresh`.

    The residual goes on from any memory to any other that has one, in the other's units.
    """
    same = compressors.name_of(old.compressor) == compressors.name_of(new.compressor)
    kept = {
        "memory": _fitting(states["memory"], fresh["memory"]),
        "compressor": _fitting(states["compressor"], fresh["compressor"]) if same else fresh["compressor"],
    }
    factor = new.memory.residual_scale / old.memory.residual_scale
    if factor != 1 and "residual" in states["memory"] and "residual" in kept["memory"]:
        kept["memory"]["residual"] = kept["memory"]["residual"] * ops.cast(factor, new.spec.work_dtype)
    return kept


def _fitting(old: State, fresh: State) -> State:
    return {key: old[key] if key in old and _alike(old[key], value) else value for key, value in fresh.items()}


def _alike(a: Array, b: Array) -> bool:
    return tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype


def _names(part: Part) -> dict[str, str]:
    return {"memory": memories.name_of(part.memory), "compressor": compressors.name_of(part.compressor)}


def _convert(name: str, saved: State, current: State, convert: Callable[[Array, Array], Array]) -> State:
    shapes = {key: tuple(value.shape) for key, value in saved.items()}
    expected = {key: tuple(value.shape) for key, value in current.items()}
    if shapes != expected:
        raise StateError(f"checkpoint, tensor '{name}': expected states {expected}, received {shapes}.")
    return {key: convert(value, current[key]) for key, value in saved.items()}
