"""The states of units in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grace.core.config.registry import memories
from grace.core.errors import StateError
from grace.core.memories.leftover import Leftover
from grace.core.ops.composites import ArrayOps
from grace.core.plan.unit import Unit
from grace.core.spec import Array
from grace.core.state.checks import (
    alone,
    check_entry,
    check_mapping,
    convert_state,
    names_of,
    tensors_of,
    unreadable,
)
from grace.core.state.states import UnitStates


def entry_of(unit: Unit, states: UnitStates) -> dict[str, Any]:
    """Return the states of a unit with the names of its components and tensors, as a checkpoint has them."""
    return {"components": names_of(unit), "of": tensors_of(unit), **states}


def load_units(
    units: Mapping[str, Unit],
    saved: Mapping[str, dict[str, Any]],
    current: Mapping[str, UnitStates],
    convert: Callable[[Array, Array], Array],
    ops: Callable[[str], ArrayOps],
    initial: Callable[[Unit], UnitStates] | None,
    resized: bool = False,
) -> dict[str, UnitStates]:
    """Return saved states in the form of the current ones; with `initial`, its result in place of saved memories.

    `resized` says that another number of ranks saved them, which may have cut the same tensors into other units.
    Raises StateError if the checkpoint belongs to other tensors, methods, shapes or dtypes, or is damaged.
    """
    if initial is not None and resized and set(saved) != set(units) and _have_same_tensors(saved, units):
        # Methods that share states between ranks do not depend on the number of ranks.
        return {name: initial(unit) for name, unit in units.items()}
    if set(saved) != set(units):
        different = sorted(map(str, set(saved) ^ set(units)))
        raise StateError(
            f"checkpoint: the units of compression differ: {', '.join(different[:5])} "
            f"{'is' if len(different) == 1 else 'are'} only on one side. Use the configuration it was saved with, "
            "including granularity, bucket_bytes and split_bytes."
        )
    new: dict[str, UnitStates] = {}
    for name, unit in units.items():
        now = current[name]
        # What another rank holds of a unit that only its owner has a memory for may have another form.
        kinds = ["compressor"] if initial is not None and unit.owners is not None else list(now)
        check_entry(name, unit, saved[name], {kind: now[kind] if kind in kinds else None for kind in now})
        there = ops(unit.spec.device)
        loaded = {kind: convert_state(name, saved[name][kind], now[kind], convert, there) for kind in kinds}
        if initial is not None and unit.memory.across_ranks == "joint" and not resized:
            raise alone(unit.memory)
        if initial is not None and unit.memory.across_ranks != "equal":
            loaded["memory"] = initial(unit)["memory"]
        new[name] = loaded
    return new


def _have_same_tensors(saved: Mapping[str, dict[str, Any]], units: Mapping[str, Unit]) -> bool:
    """Return whether saved units have the same tensors as these, with the same methods."""
    found = set()
    for name, entry in saved.items():
        missing = {"components", "of"} - set(check_mapping(entry, f"tensor '{name}'"))
        if missing or not isinstance(entry["of"], Sequence):
            raise unreadable(f"tensor '{name}'", "'components' and 'of'", "another kind")
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


def carried_tensors(units: Mapping[str, Unit]) -> frozenset[str]:
    """Return the tensors that carry the residual of an earlier method, which the memory `leftover` sends."""
    found = (unit for unit in units.values() if isinstance(unit.memory, Leftover))
    return frozenset(tensor for unit in found for tensor in tensors_of(unit))


def saved_carried_tensors(saved: Mapping[str, Any]) -> frozenset[str]:
    """Return the same of saved states, which may be damaged in any way."""
    found: set[str] = set()
    for entry in saved.values():
        named, tensors = (entry.get(key) if isinstance(entry, Mapping) else None for key in ("components", "of"))
        leftover = isinstance(named, Mapping) and str(named.get("memory")) == memories.name_of(Leftover())
        if leftover and isinstance(tensors, Sequence):
            found.update(map(str, tensors))
    return frozenset(found)
