"""Carrying states over when the plan, the ranks or the tensors that train change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from grace.core.config.registry import compressors
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan
from grace.core.plan.unit import Piece, Unit, offsets
from grace.core.spec import Array, State
from grace.core.state.states import UnitStates
from grace.core.state.stored import narrow, widen


def carry(
    before: Plan,
    after: Plan,
    states: Mapping[str, UnitStates],
    fresh: Callable[[Unit], UnitStates],
    ops: Callable[[str], ArrayOps],
    size: int,
    same_ranks: bool = True,
) -> dict[str, UnitStates]:
    """Return the states of all units `after` a change: states that fit are kept, the others start as `fresh`.

    A residual passes from one memory to any other that has one, in the units of the new one. State that a memory holds
    per element is kept even if the units are cut differently. What only the owners of a unit hold back of a mean over
    `size` ranks goes into their own residuals, unless they own the same unit again. A memory that needs an owner's
    memory continues only if that one does. Without `same_ranks` no owner is the same as before.
    """
    old_scales, new_scales = scales(before), scales(after)
    states = {name: _widen(unit, states[name], ops) for name, unit in before.stateful.items()}

    def first(unit: Unit) -> UnitStates:
        return _widen(unit, fresh(unit), ops)

    def factor(old: Unit, unit: Unit) -> float:
        return new_scales[unit.spec.name] / old_scales[old.spec.name]

    new = _carry_units(before.units, after.units, states, first, ops, factor)
    for name, unit in after.stateful.items():
        if unit.owners is not None:
            old = before.stateful.get(name)
            again = same_ranks and old is not None and (old.owners, old.pieces) == (unit.owners, unit.pieces)
            new[name] = _continue(old, unit, states[name], first(unit), ops, factor) if old and again else first(unit)
    for name, unit in after.stateful.items():
        if unit.memory.at_owner is not None and not _keeps_owner(before, unit):
            # The ranks follow a mean that their owner no longer has: all restart, except for the residual.
            start, kept = first(unit)["memory"], new[name]["memory"]
            memory = {key: kept[key] if key == "residual" else value for key, value in start.items()}
            new[name] = {**new[name], "memory": memory}
    for unit in before.units:
        for onward, scale in iterate_chain(unit):
            name, owners = onward.spec.name, onward.owners or ()
            residual = states[name]["memory"].get("residual")
            other = after.stateful.get(name)
            goes_on = (
                same_ranks and other is not None and (other.owners, other.pieces) == (onward.owners, onward.pieces)
            )
            if residual is not None and not (goes_on and "residual" in new[name]["memory"]):
                _hand_back(unit, residual * (size / len(owners) / scale), after.units, new, ops)
    return {
        name: {**new[name], "memory": narrow(unit, new[name]["memory"], ops(unit.spec.device))}
        for name, unit in after.stateful.items()
    }


def _widen(unit: Unit, states: UnitStates, ops: Callable[[str], ArrayOps]) -> UnitStates:
    return {**states, "memory": widen(unit, states["memory"], ops(unit.spec.device))}


def move(
    before: Plan,
    after: Plan,
    states: Mapping[str, UnitStates],
    fresh: Callable[[Unit], UnitStates],
    ops: Callable[[str], ArrayOps],
    sizes: tuple[int, int],
    *,
    average: bool,
) -> dict[str, UnitStates]:
    """Return the states of all units of a rank that goes on; `sizes` are the numbers of ranks before and now.

    The residuals are scaled so that their share in the mean stays as it was. If ranks add gradients, they stay as they
    were. What the rank held back as an owner goes to its own residuals.
    """
    new, factor = carry(before, after, states, fresh, ops, sizes[0], same_ranks=False), 1.0
    if average:
        factor = sizes[1] / sizes[0]
    for name, unit in after.stateful.items():
        there = ops(unit.spec.device)
        held = widen(unit, new[name]["memory"], there)
        memory = {key: x * factor if key in unit.memory.additive else x for key, x in held.items()}
        new[name] = {**new[name], "memory": narrow(unit, memory, there)}
    return new


def _keeps_owner(before: Plan, unit: Unit) -> bool:
    """Return whether the same rank owned the mean of a unit before."""
    assert unit.onward is not None
    old = before.stateful.get(unit.onward.spec.name)
    return old is not None and (old.owners, old.pieces) == (unit.onward.owners, unit.onward.pieces)


def iterate_chain(unit: Unit) -> Iterator[tuple[Unit, float]]:
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
        found |= {onward.spec.name: scale for onward, scale in iterate_chain(unit)}
    return found


def _hand_back(
    old: Unit,
    residual: Array,
    units: Sequence[Unit],
    new: dict[str, UnitStates],
    ops: Callable[[str], ArrayOps],
) -> None:
    """Add a residual, in units of the gradient, to those that the new units hold for the same elements."""
    for unit in units:
        memory, to = new[unit.spec.name]["memory"], ops(unit.spec.device)
        if "residual" not in memory:
            continue
        for piece, offset in offsets(unit):
            for start, stop, _, position in holders([old], piece):
                total, low = memory["residual"], offset + start - piece.start
                high = low + stop - start
                added = residual[position : position + stop - start] * unit.memory.residual_scale
                memory = {**memory, "residual": to.concat([total[:low], total[low:high] + added, total[high:]])}
        new[unit.spec.name] = {**new[unit.spec.name], "memory": memory}


def _carry_units(
    before: Sequence[Unit],
    after: Sequence[Unit],
    states: Mapping[str, UnitStates],
    fresh: Callable[[Unit], UnitStates],
    ops: Callable[[str], ArrayOps],
    factor: Callable[[Unit, Unit], float],
) -> dict[str, UnitStates]:
    old = {unit.pieces: unit for unit in before}
    new: dict[str, UnitStates] = {}
    for unit in after:
        start = fresh(unit)
        if unit.pieces in old:
            same = old[unit.pieces]
            new[unit.spec.name] = _continue(same, unit, states[same.spec.name], start, ops, factor)
        else:
            memory = _recut(before, unit, states, start["memory"], ops(unit.spec.device), factor)
            new[unit.spec.name] = {**start, "memory": memory}
    return new


def _continue(
    old: Unit,
    new: Unit,
    states: UnitStates,
    fresh: UnitStates,
    ops: Callable[[str], ArrayOps],
    factor: Callable[[Unit, Unit], float],
) -> UnitStates:
    same = compressors.name_of(old.compressor) == compressors.name_of(new.compressor)
    kept = {
        "memory": _keep_fitting(states["memory"], fresh["memory"]),
        "compressor": _keep_fitting(states["compressor"], fresh["compressor"]) if same else fresh["compressor"],
    }
    if "residual" in states["memory"] and "residual" in kept["memory"]:
        residual = kept["memory"]["residual"]
        kept["memory"]["residual"] = _rescale(residual, factor(old, new), ops(new.spec.device))
    return kept


def _rescale(residual: Array, factor: float, ops: ArrayOps) -> Array:
    return residual if factor == 1 else residual * ops.cast(factor, ops.dtype(residual))


def _recut(
    before: Sequence[Unit],
    unit: Unit,
    states: Mapping[str, UnitStates],
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
            done = piece.start
            for start, stop, old, position in holders(before, piece):
                state = states[old.spec.name]["memory"].get(key)
                if state is None or tuple(state.shape) != (old.spec.numel,) or state.dtype != initial_value.dtype:
                    continue
                rows.append(initial_value[offset + done - piece.start : offset + start - piece.start])
                held = state[position : position + stop - start]
                rows.append(_rescale(held, factor(old, unit), ops) if key == "residual" else held)
                done = stop
            rows.append(initial_value[offset + done - piece.start : offset + piece.numel])
        made[key] = ops.concat(rows)
    return made


def splice_units(
    plan: Plan,
    states: dict[str, UnitStates],
    others: Mapping[str, UnitStates],
    tensors: Collection[str],
    ops: Callable[[str], ArrayOps],
) -> None:
    """Write what other states hold for some tensors into the states of the units of a plan."""
    for name, other in others.items():
        unit = plan.stateful[name]
        if ranges := ranges_of(unit, tensors):
            to, now = ops(unit.spec.device), states[name]
            spliced = {kind: splice(unit, now[kind], state, ranges, to) for kind, state in other.items()}
            states[name] = {**now, **spliced}


def _keep_fitting(old: State, fresh: State) -> State:
    """Return the old arrays, and fresh ones where there is no old one of this shape and dtype."""
    return {key: old[key] if key in old and _alike(old[key], value) else value for key, value in fresh.items()}


def _alike(a: Array, b: Array) -> bool:
    return tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype


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


def splice(unit: Unit, memory: State, other: State, ranges: Sequence[tuple[int, int]], ops: ArrayOps) -> State:
    """Return the state of a unit's memory or compressor with what another state has for ranges of elements.

    If they are all of the unit's elements, it is the other state.
    """
    if ranges == [(0, unit.spec.numel)]:
        return other
    memory, other = (widen(unit, state, ops) for state in (memory, other))
    made = dict(memory)
    for key, value in memory.items():
        if tuple(value.shape) == (unit.spec.numel,) and key in other:
            rows, done = [], 0
            for start, stop in ranges:
                rows += [value[done:start], other[key][start:stop]]
                done = stop
            made[key] = ops.concat([*rows, value[done:]])
    return narrow(unit, made, ops)
