"""States of memories and compressors between steps, and their form in a checkpoint."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from grace.core.config.registry import compressors, memories
from grace.core.errors import StateError
from grace.core.memories.leftover import Leftover
from grace.core.methods.capabilities import Stateful
from grace.core.methods.memory import Memory
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan
from grace.core.plan.unit import Piece, Unit, offsets
from grace.core.spec import Array, Key, State

STATE_VERSION = 3


class Slots:
    """Everything that lives across steps: the step number and each unit's states of memory and compressor.

    The adapter owns it and saves it in its checkpoint. Notes about the last step are kept beside it, in no checkpoint.
    An adapter whose steps are traced into graphs overrides the accessors with ones on variables.
    """

    def __init__(self) -> None:
        self._step = 0
        self._states: dict[str, dict[str, State]] = {}
        self._notes: dict[tuple[str, str], Any] = {}

    @property
    def step(self) -> Any:
        """Step number: an int, or a 0-d integer array in a traced graph."""
        return self._step

    def go_to(self, step: Any) -> None:
        """Set the step number."""
        self._step = step

    def __contains__(self, name: str) -> bool:
        """Return whether the unit has states."""
        return name in self._states

    def read(self, name: str) -> dict[str, State]:
        """Return the states of a unit: {"memory": ..., "compressor": ...}."""
        return self._states[name]

    def write(self, name: str, states: dict[str, State]) -> None:
        """Commit new states of a unit."""
        self._states[name] = states

    def let_go(self, name: str) -> None:
        """Drop the state of a unit's memory; the step that has read it writes the next one."""
        self._states[name] = {**self._states[name], "memory": {}}

    def forget(self, name: str) -> None:
        """Drop the states of a unit."""
        self._states.pop(name, None)

    def note(self, kind: str, name: str, value: Any) -> None:
        """Store a number, or an array of at most one dimension, about the last step; None deletes it."""
        self._notes[kind, name] = value

    def noted(self, kind: str, name: str) -> Any:
        """Return the stored note; None if there is none."""
        return self._notes.get((kind, name))

    def numbers(self, kind: str, name: str) -> list[float]:
        """Return the elements of a stored array; none if there is no note. Not inside a traced graph."""
        noted = self.noted(kind, name)
        return [] if noted is None else [float(x) for x in noted]

    def save(self, units: Mapping[str, Unit]) -> dict[str, dict[str, Any]]:
        """Return each unit's states, and the names of its components and tensors."""
        return {
            name: {"components": names_of(unit), "of": tensors_of(unit), **self.read(name)}
            for name, unit in units.items()
        }

    def load(
        self,
        units: Mapping[str, Unit],
        saved: Mapping[str, dict[str, Any]],
        convert: Callable[[Array, Array], Array],
        ops: Callable[[str], ArrayOps],
        initial: Callable[[Unit], dict[str, State]] | None,
        resized: bool = False,
    ) -> None:
        """Load what `save` returned, all or nothing; with `initial`, memories start from its result instead.

        `resized` says that another number of ranks saved it, which may have cut the same tensors into other units.
        Raises StateError if the checkpoint belongs to other tensors, methods, shapes or dtypes, or is damaged.
        """
        if initial is not None and resized and set(saved) != set(units) and _same_tensors(saved, units):
            # Methods that share states between ranks do not depend on the number of ranks.
            self._states.update({name: initial(unit) for name, unit in units.items()})
            return
        if set(saved) != set(units):
            different = sorted(map(str, set(saved) ^ set(units)))
            raise StateError(
                f"checkpoint: the units of compression differ: {', '.join(different[:5])} "
                f"{'is' if len(different) == 1 else 'are'} only on one side. Use the configuration it was saved with, "
                "including granularity, bucket_bytes and split_bytes."
            )
        new: dict[str, dict[str, State]] = {}
        for name, unit in units.items():
            current = self.read(name)
            # What another rank holds of a unit that only its owner has a memory for may have another form.
            kinds = ["compressor"] if initial is not None and unit.owners is not None else list(current)
            check_entry(name, unit, saved[name], {kind: current[kind] if kind in kinds else None for kind in current})
            there = ops(unit.spec.device)
            new[name] = {kind: converted(name, saved[name][kind], current[kind], convert, there) for kind in kinds}
            if initial is not None and unit.memory.joint and not resized:
                raise alone(unit.memory)
            if initial is not None and not unit.memory.shared:
                new[name]["memory"] = initial(unit)["memory"]
        self._states.update(new)


def alone(memory: Memory) -> StateError:
    """Return the error of a rank that would start from zero while others go on, with a memory that is `joint`."""
    return StateError(
        f"checkpoint: another rank saved it, and with the memory '{memories.name_of(memory)}' no rank can start from "
        "zero alone. Let every rank load its own file, or load no state of grace on any rank."
    )


def tensors_of(unit: Unit) -> list[str]:
    """Return the names of the tensors that a unit has elements of, each once."""
    return list(dict.fromkeys(piece.tensor for piece in unit.pieces))


def _same_tensors(saved: Mapping[str, dict[str, Any]], units: Mapping[str, Unit]) -> bool:
    """Return whether saved units have the same tensors as these, with the same methods."""
    found = set()
    for name, entry in saved.items():
        missing = {"components", "of"} - set(check_mapping(entry, f"tensor '{name}'"))
        if missing or not isinstance(entry["of"], Sequence):
            raise _unreadable(f"tensor '{name}'", "'components' and 'of'", "another kind")
        components = check_mapping(entry["components"], f"tensor '{name}', components")
        found |= {(str(tensor), *map(str, components.items())) for tensor in entry["of"]}
    # A saved unit may be one that an owner sent on, whose memory is another one.
    wanted = {
        (tensor, *map(str, names_of(unit).items()))
        for unit in units.values()
        if unit.owners is None
        for tensor in tensors_of(unit)
    }
    return wanted <= found and {tensor for tensor, *_ in wanted} == {tensor for tensor, *_ in found}


def carrying(units: Mapping[str, Unit]) -> frozenset[str]:
    """Return the tensors that carry the residual of an earlier method, which the memory `leftover` sends."""
    found = (unit for unit in units.values() if isinstance(unit.memory, Leftover))
    return frozenset(tensor for unit in found for tensor in tensors_of(unit))


def saved_carrying(saved: Mapping[str, Any]) -> frozenset[str]:
    """Return the same of saved states, which may be damaged in any way."""
    found: set[str] = set()
    for entry in saved.values():
        named, tensors = (entry.get(key) if isinstance(entry, Mapping) else None for key in ("components", "of"))
        leftover = isinstance(named, Mapping) and str(named.get("memory")) == memories.name_of(Leftover())
        if leftover and isinstance(tensors, Sequence):
            found.update(map(str, tensors))
    return frozenset(found)


def check_saved(state: Any) -> None:
    """Raise StateError unless this has the form of a result of `Engine.state_dict` of this version."""
    missing = {"version", "step", "rank", "size", "tensors"} - set(check_mapping(state, "the state of grace"))
    if missing:
        raise StateError(
            f"checkpoint: {', '.join(sorted(missing))} missing; expected a state written by grace. Check the file."
        )
    # A process outside of a process set has the rank -1. No kernel counts further than 63 bits.
    for name, least in (("version", 0), ("step", 0), ("rank", -1), ("size", 1)):
        check_number(state[name], name, least)
    if state["version"] != STATE_VERSION:
        raise StateError(
            f"checkpoint: expected state version {STATE_VERSION}, received {state['version']!r}; "
            "load it with the version of grace that wrote it."
        )
    check_mapping(state["tensors"], "tensors")


def check_number(value: Any, name: str, least: int = 0) -> None:
    """Raise StateError unless the value of a checkpoint is a whole number of at least `least` and below 2^63."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) < 2**63:
        raise _unreadable(name, f"a whole number from {least} on", shown(value))


def nonfinite(what: str) -> StateError:
    """Return the error of a saved state with NaN or infinity, which would spoil all further steps."""
    return StateError(
        f"checkpoint, {what}: expected finite numbers, received NaN or infinity. The file is damaged; load another one."
    )


def check_mapping(value: Any, what: str) -> Mapping[Any, Any]:
    """Return the value; raise StateError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise _unreadable(what, "a mapping", shown(value))
    return value


def _unreadable(what: str, expected: str, received: str) -> StateError:
    return StateError(
        f"checkpoint, {what}: expected {expected}, received {received}. The file is damaged, or was not "
        "written by grace; load another one."
    )


def shown(value: Any) -> str:
    """Return a short text on a value: dtype and shape of an array, else its type and its beginning."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is None or not isinstance(shape, Sequence):
        text = repr(value)
        return f"{type(value).__name__} {text if len(text) < 40 else text[:36] + ' ...'}"
    # PyTorch's names have the module's name in front.
    return f"{str(dtype).rpartition('.')[2]} {tuple(shape)}"


def prepare(slots: Slots, plan: Plan, ops: Callable[[str], ArrayOps], seed: int, rank: int | None) -> None:
    """Write the initial states of units that have none yet; needs no transport."""
    for name, unit in plan.stateful.items():
        if name not in slots:
            slots.write(name, initial(unit, ops(unit.spec.device), seed, rank))


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
    return unit.memory.init(unit.spec, ops) if rank is None or unit.kept_by(rank) else {}


def carried(
    before: Plan,
    after: Plan,
    read: Callable[[str], dict[str, State]],
    fresh: Callable[[Unit], dict[str, State]],
    ops: Callable[[str], ArrayOps],
    size: int,
    same_ranks: bool = True,
) -> dict[str, dict[str, State]]:
    """Return the states of all units `after` a change: states that fit are kept, the others start as `fresh`.

    A residual passes from one memory to any other that has one, in the units of the new one. State that a memory holds
    per element is kept even if the units are cut differently. What only the owners of a unit hold back of a mean over
    `size` ranks goes into their own residuals, unless they own the same unit again. A memory that needs an owner's
    memory continues only if that one does. Without `same_ranks` no owner is the same as before.
    """
    old_scales, new_scales = scales(before), scales(after)

    def factor(old: Unit, unit: Unit) -> float:
        return new_scales[unit.spec.name] / old_scales[old.spec.name]

    new = _carried_units(before.units, after.units, read, fresh, ops, factor)
    for name, unit in after.stateful.items():
        if unit.owners is not None:
            old = before.stateful.get(name)
            again = same_ranks and old is not None and (old.owners, old.pieces) == (unit.owners, unit.pieces)
            new[name] = _continued(old, unit, read(name), fresh(unit), ops, factor) if old and again else fresh(unit)
    for name, unit in after.stateful.items():
        if unit.memory.at_owner is not None and not _keeps_owner(before, unit):
            # The ranks follow a mean that their owner no longer has: all start anew, except for the residual.
            start, kept = fresh(unit)["memory"], new[name]["memory"]
            memory = {key: kept[key] if key == "residual" else value for key, value in start.items()}
            new[name] = {**new[name], "memory": memory}
    for unit in before.units:
        for onward, scale in held_onward(unit):
            name, owners = onward.spec.name, onward.owners or ()
            residual = read(name)["memory"].get("residual")
            other = after.stateful.get(name)
            goes_on = (
                same_ranks and other is not None and (other.owners, other.pieces) == (onward.owners, onward.pieces)
            )
            if residual is not None and not (goes_on and "residual" in new[name]["memory"]):
                _hand_back(unit, residual * (size / len(owners) / scale), after.units, new, ops)
    return new


def moved(
    before: Plan,
    after: Plan,
    read: Callable[[str], dict[str, State]],
    fresh: Callable[[Unit], dict[str, State]],
    ops: Callable[[str], ArrayOps],
    sizes: tuple[int, int],
    *,
    average: bool,
) -> dict[str, dict[str, State]]:
    """Return the states of all units of a rank that goes on; `sizes` are the numbers of ranks before and now.

    The residuals are scaled so that their share in the mean stays as it was. If ranks add gradients, they stay as they
    were. What the rank held back as an owner goes to its own residuals.
    """
    new, factor = carried(before, after, read, fresh, ops, sizes[0], same_ranks=False), 1.0
    if average:
        factor = sizes[1] / sizes[0]
    for name, unit in after.stateful.items():
        memory = {key: x * factor if key in unit.memory.additive else x for key, x in new[name]["memory"].items()}
        new[name] = {**new[name], "memory": memory}
    return new


def _keeps_owner(before: Plan, unit: Unit) -> bool:
    """Return whether the same rank owned the mean of a unit before."""
    assert unit.onward is not None
    old = before.stateful.get(unit.onward.spec.name)
    return old is not None and (old.owners, old.pieces) == (unit.onward.owners, unit.onward.pieces)


def held_onward(unit: Unit) -> Iterator[tuple[Unit, float]]:
    """Yield the units with which the mean of a unit is sent on, each with the unit of its residual in gradients.

    A memory sees the gradient as the memory before it has scaled it. The gain reverses this scale at the end.
    """
    before, scale = unit, 1.0
    for onward in unit.chain:
        scale /= before.memory.gain
        yield onward, scale * onward.memory.residual_scale
        before = onward


def scales(plan: Plan) -> dict[str, float]:
    """Return the unit of each residual of a plan in gradients, by the unit of compression."""
    found = {}
    for unit in plan.units:
        found[unit.spec.name] = unit.memory.residual_scale
        found |= {onward.spec.name: scale for onward, scale in held_onward(unit)}
    return found


def _hand_back(
    old: Unit,
    residual: Array,
    units: Sequence[Unit],
    new: dict[str, dict[str, State]],
    ops: Callable[[str], ArrayOps],
) -> None:
    """Add a residual, in units of the gradient, to those that the new units hold for the same elements."""
    for unit in units:
        memory = new[unit.spec.name]["memory"]
        if "residual" not in memory:
            continue
        for piece, offset in offsets(unit):
            for start, stop, _, place in holders([old], piece):
                total, low = memory["residual"], offset + start - piece.start
                high = low + stop - start
                added = residual[place : place + stop - start] * unit.memory.residual_scale
                rows = [total[:low], total[low:high] + added, total[high:]]
                memory = {**memory, "residual": ops(unit.spec.device).concat(rows)}
        new[unit.spec.name] = {**new[unit.spec.name], "memory": memory}


def _carried_units(
    before: Sequence[Unit],
    after: Sequence[Unit],
    read: Callable[[str], dict[str, State]],
    fresh: Callable[[Unit], dict[str, State]],
    ops: Callable[[str], ArrayOps],
    factor: Callable[[Unit, Unit], float],
) -> dict[str, dict[str, State]]:
    old = {unit.pieces: unit for unit in before}
    new = {}
    for unit in after:
        states = fresh(unit)
        if unit.pieces in old:
            states = _continued(old[unit.pieces], unit, read(old[unit.pieces].spec.name), states, ops, factor)
        else:
            states["memory"] = _recut(before, unit, read, states["memory"], ops(unit.spec.device), factor)
        new[unit.spec.name] = states
    return new


def _continued(
    old: Unit,
    new: Unit,
    states: dict[str, State],
    fresh: dict[str, State],
    ops: Callable[[str], ArrayOps],
    factor: Callable[[Unit, Unit], float],
) -> dict[str, State]:
    same = compressors.name_of(old.compressor) == compressors.name_of(new.compressor)
    kept = {
        "memory": _fitting(states["memory"], fresh["memory"]),
        "compressor": _fitting(states["compressor"], fresh["compressor"]) if same else fresh["compressor"],
    }
    if "residual" in states["memory"] and "residual" in kept["memory"]:
        residual = kept["memory"]["residual"]
        kept["memory"]["residual"] = _rescaled(residual, factor(old, new), ops(new.spec.device))
    return kept


def _rescaled(residual: Array, factor: float, ops: ArrayOps) -> Array:
    return residual if factor == 1 else residual * ops.cast(factor, ops.dtype(residual))


def _recut(
    before: Sequence[Unit],
    unit: Unit,
    read: Callable[[str], dict[str, State]],
    fresh: State,
    ops: ArrayOps,
    factor: Callable[[Unit, Unit], float],
) -> State:
    """Return the state that the memories of other units hold for the elements of this one."""
    made = {}
    for key, initial_value in fresh.items():
        if tuple(initial_value.shape) != (unit.spec.numel,):
            made[key] = initial_value
            continue
        rows = []
        for piece, offset in offsets(unit):
            at = piece.start
            for start, stop, old, place in holders(before, piece):
                state = read(old.spec.name)["memory"].get(key)
                if state is None or tuple(state.shape) != (old.spec.numel,) or state.dtype != initial_value.dtype:
                    continue
                rows.append(initial_value[offset + at - piece.start : offset + start - piece.start])
                held = state[place : place + stop - start]
                rows.append(_rescaled(held, factor(old, unit), ops) if key == "residual" else held)
                at = stop
            rows.append(initial_value[offset + at - piece.start : offset + piece.numel])
        made[key] = ops.concat(rows)
    return made


def holders(before: Sequence[Unit], piece: Piece) -> list[tuple[int, int, Unit, int]]:
    """Return the units that hold elements of a piece, in element order, as (from, to, unit, offset in the unit)."""
    found = []
    for unit in before:
        for other, offset in offsets(unit):
            start, stop = max(piece.start, other.start), min(piece.stop, other.stop)
            if other.tensor == piece.tensor and start < stop:
                found.append((start, stop, unit, offset + start - other.start))
    return sorted(found, key=lambda holder: holder[0])


def ranges_of(unit: Unit, tensors: Collection[str]) -> list[tuple[int, int]]:
    """Return the ranges of a unit's elements that belong to some tensors; adjacent ones are joined."""
    ranges: list[tuple[int, int]] = []
    for piece, start in offsets(unit):
        if piece.tensor in tensors:
            first = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((first, start + piece.numel))
    return ranges


def spliced(unit: Unit, memory: State, other: State, ranges: Sequence[tuple[int, int]], ops: ArrayOps) -> State:
    """Return the state of a unit's memory with what another state has for ranges of elements.

    If they are all of the unit's elements, it is the other state.
    """
    if ranges == [(0, unit.spec.numel)]:
        return other
    made = dict(memory)
    for key, value in memory.items():
        if tuple(value.shape) == (unit.spec.numel,) and key in other:
            rows, at = [], 0
            for start, stop in ranges:
                rows += [value[at:start], other[key][start:stop]]
                at = stop
            made[key] = ops.concat([*rows, value[at:]])
    return made


def _fitting(old: State, fresh: State) -> State:
    """Return the old arrays, and fresh ones where there is no old one of this shape and dtype."""
    return {key: old[key] if key in old and _alike(old[key], value) else value for key, value in fresh.items()}


def _alike(a: Array, b: Array) -> bool:
    return tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype


def names_of(unit: Unit) -> dict[str, str]:
    """Return the names of a unit's components."""
    return {"memory": memories.name_of(unit.memory), "compressor": compressors.name_of(unit.compressor)}


def check_entry(name: str, unit: Unit, entry: Any, expected: Mapping[str, State | None]) -> None:
    """Raise StateError unless what was saved of a unit has these states, with their shapes and dtypes; None: any."""
    missing = {"components", "of", *expected} - set(check_mapping(entry, f"tensor '{name}'"))
    if missing:
        raise _unreadable(f"tensor '{name}'", ", ".join(sorted(missing)), "nothing of this name")
    named = check_mapping(entry["components"], f"tensor '{name}', components")
    if {kind: str(other) for kind, other in named.items()} != names_of(unit):
        raise StateError(
            f"checkpoint, tensor '{name}': expected {names_of(unit)}, received {dict(named)}; "
            "use the configuration it was saved with."
        )
    tensors = entry["of"]
    if not isinstance(tensors, Sequence) or [*map(str, tensors)] != tensors_of(unit):
        raise _unreadable(f"tensor '{name}', of", str(tensors_of(unit)), shown(tensors))
    for kind, state in expected.items():
        if state is None:
            continue
        found = {key: shown(value) for key, value in check_mapping(entry[kind], f"tensor '{name}'").items()}
        wanted = {key: shown(value) for key, value in state.items()}
        if found != wanted:
            raise StateError(
                f"checkpoint, tensor '{name}': expected states {wanted}, received {found}; "
                "use the configuration it was saved with."
            )


def converted(
    name: str, saved: State, current: State, convert: Callable[[Array, Array], Array], ops: ArrayOps
) -> State:
    """Return the saved arrays of a unit in the form of the current ones.

    Raises StateError if they are no arrays, or if one has NaN or infinity: no step that has seen any is committed.
    """
    try:
        made = {key: convert(saved[key], value) for key, value in current.items()}
        for key, value in made.items():
            floats = ops.dtype(value).startswith(("float", "bfloat"))
            if floats and bool(ops.any(ops.bit_not(ops.abs(value) < math.inf))):
                raise nonfinite(f"tensor '{name}', '{key}'")
        return made
    except StateError:
        raise
    except Exception as error:
        # An array library refuses by errors of many classes: for sparse arrays, for example.
        expected = {key: shown(value) for key, value in current.items()}
        raise _unreadable(f"tensor '{name}'", f"arrays such as {expected}", f"another kind ({error})") from error
