"""States of all ranks of a run, merged into those of another number of ranks: what they hold back is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any

from grace.core.config.registry import compressors, memories
from grace.core.errors import StateError
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan
from grace.core.plan.unit import Piece, Unit, offsets
from grace.core.spec import Array, State
from grace.core.state.carry import holders, scales
from grace.core.state.checks import check_entry, check_mapping, check_saved, convert_state, show, tensors_of
from grace.core.state.states import UnitStates, first_memory, initial
from grace.core.state.stored import narrow, widen

# Elements of an array.
Elements = slice | EllipsisType
# What a memory is in the chain of a unit: its name, and its number among the memories of this name.
Role = tuple[str, int]


def sort_by_rank(states: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the states of all ranks of one run in the order of the ranks.

    Raises StateError if one is damaged, missing or there twice, or if they are of different runs or steps.
    """
    for state in states:
        check_saved(state)
    sizes, steps = (sorted({int(state[key]) for state in states}) for key in ("size", "step"))
    ranks = sorted(int(state["rank"]) for state in states)
    # The size is compared first: a damaged one must not decide how much memory this takes.
    if sizes != [len(states)] or ranks != list(range(len(states))):
        expected = f"the ranks 0 to {sizes[0] - 1}" if len(sizes) == 1 else "all ranks of one run"
        received = ", ".join(f"{state['rank']} of {state['size']}" for state in states) or "none"
        raise StateError(
            f"checkpoint: expected the states of {expected}, each once, received ranks {received}; pass one state per "
            "rank of the run that saved it."
        )
    if len(steps) > 1:
        raise StateError(
            f"checkpoint: the ranks saved their states at the steps {', '.join(map(str, steps))}; pass states of one "
            "step."
        )
    return sorted(states, key=lambda state: int(state["rank"]))


def optimizer_state(state: Any, rank: int) -> dict[str, Any]:
    """Return the state that an optimizer of this rank loads, from one state or from a list with those of all ranks.

    From a list, it takes the state of this rank, or any state if the number of ranks differs. The key 'grace' then
    has the parts of grace of all ranks.
    """
    if not isinstance(state, list):
        return dict(check_mapping(state, "the optimizer"))
    every = [check_mapping(each, "the optimizer") for each in state]
    parts = [each.get("grace") for each in every]
    first = sort_by_rank(parts)[rank % len(parts)]
    return {**next(each for each in every if each["grace"] is first), "grace": parts}


def shares(number: int, count: int, before: int) -> list[tuple[int, float]]:
    """Return the ranks of `before` that rank `number` of `count` continues, with weights that add up to 1.

    Every rank stands for an equal part of the whole, before and after. So the mean over the ranks is kept.
    """
    low, high = number * before, (number + 1) * before
    return [
        (old, (min(high, (old + 1) * count) - max(low, old * count)) / before)
        for old in range(low // count, -(-high // count))
    ]


def units_by_role(plan: Plan) -> dict[Role, list[Unit]]:
    """Return the units of a plan, and those with which their means are sent on, by the roles of their memories.

    With another number of ranks, a communicator may give the same memories to other places of a chain.
    """
    found: dict[Role, list[Unit]] = {}
    for unit in plan.units:
        names: list[str] = []
        for each in (unit, *unit.chain):
            name = memories.name_of(each.memory)
            found.setdefault((name, names.count(name)), []).append(each)
            names.append(name)
    return found


class Merge:
    """Merger of the states `saved` by the ranks of the plan `before`, for rank `rank` of `size` and its plan `after`.

    Rank j of M continues the ranks [j N / M, (j + 1) N / M) of N: each array becomes their mean, so the mean over all
    ranks is kept. Where the ranks add their gradients up (`average` is False), the sum of `Memory.additive` is kept.
    Owners of means do the same among themselves. `lost` names what could not be continued.
    """

    def __init__(
        self,
        before: Plan,
        after: Plan,
        saved: Sequence[Mapping[str, Any]],
        convert: Callable[[Array, Array], Array],
        ops: Callable[[str], ArrayOps],
        *,
        seed: int,
        rank: int,
        size: int,
        average: bool,
    ) -> None:
        self._before, self._after, self._saved, self._convert = before, after, saved, convert
        self._ops, self._seed, self._rank, self._size = ops, seed, rank, size
        self._growth = 1.0 if average else len(saved) / size
        self._scales = scales(before), scales(after)
        # The states of one unit that were stored in fewer bits, by rank.
        self._wide: tuple[Unit | None, dict[int, State]] = None, {}
        # In order, each once.
        self.lost: dict[str, None] = {}

    def states(self) -> dict[str, UnitStates]:
        """Return the states of all units of the new plan. Raises StateError if a saved state does not fit the old."""
        keys = self._check()
        old, new = units_by_role(self._before), units_by_role(self._after)
        made: dict[str, UnitStates] = {}
        for role, units in new.items():
            before = old.get(role, [])
            same = {unit.pieces: unit for unit in before}
            for unit in units:
                ops = self._ops(unit.spec.device)
                fresh = initial(unit, ops, self._seed, self._rank)
                memory = {
                    key: self._continue_memory(unit, before, same.get(unit.pieces), key, start)
                    for key, start in widen(unit, fresh["memory"], ops).items()
                }
                compressor = self._merge_compressor_state(unit, fresh["compressor"])
                made[unit.spec.name] = {"memory": memory, "compressor": compressor}
        for role, units in old.items():
            continued = {piece.tensor for unit in new.get(role, ()) for piece in unit.pieces}
            for unit in units:
                for piece, offset in offsets(unit):
                    if piece.numel and piece.tensor not in continued:
                        for key in keys[unit.spec.name]:
                            if key != "residual" or not self._hand_over(unit, piece, offset, made):
                                self._lose(unit, key)
        return {
            name: {**made[name], "memory": narrow(unit, made[name]["memory"], self._ops(unit.spec.device))}
            for name, unit in self._after.stateful.items()
        }

    def _check(self) -> dict[str, list[str]]:
        """Return the keys of each memory of the old plan. Raises StateError if a saved state does not fit it."""
        keys = {}
        for rank, state in enumerate(self._saved):
            different = sorted(map(str, set(state["tensors"]) ^ set(self._before.stateful)))
            if different:
                raise StateError(
                    f"checkpoint: the units of compression differ: {', '.join(different[:5])} only on one side, rank "
                    f"{rank} of {len(self._saved)} or rank 0. Load the states of all ranks of one run."
                )
        for name, unit in self._before.stateful.items():
            theirs = initial(unit, self._ops(unit.spec.device), self._seed, None)
            keys[name] = list(widen(unit, theirs["memory"], self._ops(unit.spec.device)))
            for rank, state in enumerate(self._saved):
                expected = theirs if unit.is_kept_by(rank) else {**theirs, "memory": {}}
                check_entry(name, unit, state["tensors"][name], expected)
        return keys

    def _merge_compressor_state(self, unit: Unit, fresh: State) -> State:
        """Return the state of a compressor, which is equal on all ranks."""
        name, old = unit.spec.name, self._before.stateful.get(unit.spec.name)
        if old is None or compressors.name_of(old.compressor) != compressors.name_of(unit.compressor):
            return fresh
        return convert_state(
            name, self._saved[0]["tensors"][name]["compressor"], fresh, self._convert, self._ops(unit.spec.device)
        )

    def _continue_memory(self, unit: Unit, before: Sequence[Unit], same: Unit | None, key: str, fresh: Array) -> Array:
        """Return one array of a memory's state; `same` is the unit that had the same pieces before."""
        if same is not None:
            found = self._merge_elements(unit, same, key, fresh, ...)
            return self._lose(unit, key, fresh) if found is None else found
        if tuple(fresh.shape) != (unit.spec.numel,):
            return self._agree(unit, before, key, fresh)
        rows = []
        for piece, offset in offsets(unit):
            done = offset
            for start, stop, old, position in holders(before, piece):
                low, high = offset + start - piece.start, offset + stop - piece.start
                found = self._merge_elements(unit, old, key, fresh[low:high], slice(position, position + stop - start))
                rows += [fresh[done:low], self._lose(unit, key, fresh[low:high]) if found is None else found]
                done = high
            rows.append(fresh[done : offset + piece.numel])
        return self._ops(unit.spec.device).concat(rows)

    def _agree(self, unit: Unit, before: Sequence[Unit], key: str, fresh: Array) -> Array:
        """Return a state of no element, such as a counter, if all old units that hold parts of this one agree on it."""
        parts = {old.spec.name: old for piece in unit.pieces for _, _, old, _ in holders(before, piece)}
        found = [self._merge_elements(unit, old, key, fresh, ...) for old in parts.values()]
        if any(x is None or not self._equal(unit, x, found[0]) for x in found):
            return self._lose(unit, key, fresh)
        return found[0] if found else fresh

    def _merge_elements(self, unit: Unit, old: Unit, key: str, like: Array, elements: Elements) -> Array | None:
        """Return what this rank continues of these elements of an old array; None if that cannot be merged."""
        owners, owners_before = self._owners(unit, self._size), self._owners(old, len(self._saved))
        weights = shares(owners.index(self._rank), len(owners), len(owners_before))
        arrays = [self._read_elements(old, owners_before[i], key, like, elements) for i, _ in weights]
        if any(array is None for array in arrays):
            return None
        ops, total = self._ops(unit.spec.device), arrays[0]
        dtype = ops.dtype(total)
        # What the ranks agree on stays as it is. So it is equal on all of them again.
        if not all(self._equal(unit, array, arrays[0]) for array in arrays[1:]):
            if not dtype.startswith("float"):
                return None
            total = ops.cast(total, dtype) * ops.cast(weights[0][1], dtype)
            for array, (_, weight) in zip(arrays[1:], weights[1:], strict=True):
                total = total + ops.cast(array, dtype) * ops.cast(weight, dtype)
        if self._growth != 1 and key in unit.memory.additive:
            total = total * ops.cast(self._growth, dtype)
        return total

    def _owners(self, unit: Unit, size: int) -> Sequence[int]:
        return range(size) if unit.owners is None else unit.owners

    def _read_elements(self, old: Unit, rank: int, key: str, like: Array, elements: Elements) -> Array | None:
        """Return elements of a saved array in the form of `like`; None if they have another shape or dtype."""
        state, ops = self._saved[rank]["tensors"][old.spec.name]["memory"], self._ops(old.spec.device)
        if old.memory.residual_dtype is not None:
            if self._wide[0] is not old:
                self._wide = old, {}
            wide = self._wide[1]
            if rank not in wide:
                stored = convert_state(old.spec.name, state, first_memory(old, ops, None), self._convert, ops)
                wide[rank] = widen(old, stored, ops)
            state = wide[rank]
        if show(state[key][elements]) != show(like):
            return None
        return convert_state(old.spec.name, {key: state[key][elements]}, {key: like}, self._convert, ops)[key]

    def _equal(self, unit: Unit, a: Array, b: Array) -> bool:
        return not bool(self._ops(unit.spec.device).any(a != b))

    def _lose(self, unit: Unit, key: str, fresh: Array = None) -> Array:
        first, *others = tensors_of(unit)
        more = f" and {len(others)} more" if others else ""
        self.lost[f"'{key}' of the memory '{memories.name_of(unit.memory)}' (tensor '{first}'{more})"] = None
        return fresh

    def _hand_over(self, old: Unit, piece: Piece, offset: int, made: Mapping[str, UnitStates]) -> bool:
        """Add a part of a residual, whose memory the new plan lacks, to the first residual of each chain.

        Return False if a chain has none, and some of it is lost.
        """
        start = self._empty(old)["residual"]
        owners, taken = self._owners(old, len(self._saved)), True
        before, after = self._scales
        for begin, end, unit, _ in holders(self._after.units, piece):
            takers = [each for each in (unit, *unit.chain) if "residual" in self._empty(each)]
            if not takers:
                elements = slice(offset + begin - piece.start, offset + end - piece.start)
                parts = [self._read_elements(old, rank, "residual", start[elements], elements) for rank in owners]
                taken = taken and all(self._equal(old, part, start[elements]) for part in parts)
            for low, high, taker, position in holders(takers[:1], Piece(piece.tensor, begin, end)):
                if not taker.is_kept_by(self._rank):
                    continue
                elements = slice(offset + low - piece.start, offset + high - piece.start)
                ops, total = self._ops(taker.spec.device), made[taker.spec.name]["memory"]["residual"]
                factor = self._growth * after[taker.spec.name] / before[old.spec.name] / len(owners)
                part, dtype = total[position : position + high - low], ops.dtype(total)
                for rank in owners:
                    held = self._read_elements(old, rank, "residual", start[elements], elements)
                    part = part + ops.cast(held, dtype) * ops.cast(factor, dtype)
                rows = [total[:position], part, total[position + high - low :]]
                made[taker.spec.name]["memory"]["residual"] = ops.concat(rows)
        return taken

    def _empty(self, unit: Unit) -> State:
        return unit.memory.init(unit.spec, self._ops(unit.spec.device))
