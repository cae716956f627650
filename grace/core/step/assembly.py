"""Gradients to units and back: pieces are joined as they arrive and put back in place after the merge."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence

from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan
from grace.core.plan.unit import Piece, Unit
from grace.core.spec import Array

# For several pieces with fewer elements than this, a pass over all takes less time than a call for each.
_FEW = 1 << 14


class Incoming:
    """Gradients of one step, kept until every unit has all its pieces."""

    def __init__(self, plan: Plan, ops: Callable[[str], ArrayOps]) -> None:
        self._plan, self._ops = plan, ops
        self._waiting: dict[str, dict[Piece, Array]] = {}
        self.names: set[str] = set()

    def add(self, name: str, gradient: Sequence[Array]) -> list[tuple[Unit, Array]]:
        """Take a tensor's gradient and return the units that it completes, each with its flat gradient.

        The gradient may come in several flat parts, which lie apart in memory.
        """
        self.names.add(name)
        complete = []
        whole = len(gradient) == 1
        starts = [] if whole else [0, *itertools.accumulate(len(part) for part in gradient)]
        places = self._plan.places[name]
        for unit, _, piece in places:
            ops = self._ops(unit.spec.device)
            if not whole:
                x = _join(ops, gradient, starts, piece)
            elif len(places) > 1:
                x = ops.reshape(gradient[0], (-1,))[piece.start : piece.stop]
            else:
                x = gradient[0]
            if len(unit.pieces) == 1:
                complete.append((unit, ops.reshape(x, (-1,))))
                continue
            waiting = self._waiting.setdefault(unit.spec.name, {})
            waiting[piece] = x
            if len(waiting) == len(unit.pieces):
                complete.append((unit, ops.lay_out([waiting[piece] for piece in unit.pieces])))
                del self._waiting[unit.spec.name]
        return complete


def _join(ops: ArrayOps, parts: Sequence[Array], starts: Sequence[int], piece: Piece) -> Array:
    """Return a piece of a tensor that comes in parts, which begin at `starts`; a view if it lies in one part."""
    found = []
    for i in range(bisect.bisect_right(starts, piece.start) - 1, len(parts)):
        if starts[i] >= piece.stop:
            break
        low, high = max(piece.start, starts[i]) - starts[i], min(piece.stop, starts[i + 1]) - starts[i]
        if low < high:
            found.append(parts[i][low:high])
    return found[0] if len(found) == 1 else ops.lay_out(found)


class Outgoing:
    """Merged gradients of one step, as far as `rank` gets them.

    Those in `into` are written there if arrays can be changed in place. Of a tensor of which the rank gets only some
    elements (`Plan.windows`), both are flat arrays of these.
    """

    def __init__(self, plan: Plan, ops: Callable[[str], ArrayOps], into: Mapping[str, Array], rank: int) -> None:
        self._plan, self._ops, self._into, self._rank = plan, ops, into, rank
        self._windows = plan.windows(rank)
        self._pieces: dict[str, list[tuple[int, Array]]] = {}
        self._targets: dict[str, Array] = {}
        self._written: dict[str, int] = {}
        self.merged: dict[str, Array] = {}

    def target(self, unit: Unit) -> Array | None:
        """Return the array slice that receives the merged gradient of a unit, or None.

        There is one if the unit is one contiguous stretch of an array that can be written to.
        """
        piece = unit.pieces[0]
        spec, ops = self._plan.assignment_of[piece.tensor].spec, self._ops(unit.spec.device)
        if len(unit.pieces) > 1 or not self._writes_to_target(piece, ops) or spec.dtype != spec.work_dtype:
            return None
        start, stop = self._windows[piece.tensor]
        whole = self._target(piece.tensor, ops)
        return whole if piece.numel == stop - start else whole[piece.start - start : piece.stop - start]

    def add(self, unit: Unit, x: Array, factor: float, target: Array | None) -> None:
        """Take the merged gradient of a unit, x times the factor; consumes x, which may be the target."""
        ops = self._ops(unit.spec.device)
        if x is target and factor != 1:
            x, factor = ops.scale_(x, factor), 1.0
        if x is target:
            self._count(unit.pieces[0], ops)
            return
        direct = all(self._writes_to_target(piece, ops) for piece in unit.pieces)
        if factor != 1 and (not direct or unit.spec.numel < _FEW * (len(unit.pieces) - 1)):
            x, factor = ops.scale_(x, factor), 1.0
        # The most frequent case: most pieces are tensors. Shards cut one at each end.
        runs = [
            (whole, list(run))
            for whole, run in itertools.groupby(unit.pieces, lambda piece: factor == 1 and self._is_whole(piece, ops))
        ]
        parts = ops.split(x, [sum(piece.numel for piece in run) for _, run in runs])
        for (whole, run), part in zip(runs, parts, strict=True):
            if whole:
                tensors = {piece.tensor: self._into[piece.tensor] for piece in run}
                ops.place_all(list(tensors.values()), part)
                self.merged.update(tensors)
                continue
            for piece, own in zip(run, ops.split(part, [piece.numel for piece in run]), strict=True):
                self._put(ops, piece, own, factor)

    def _put(self, ops: ArrayOps, piece: Piece, x: Array, factor: float) -> None:
        """Take a piece, x times the factor."""
        if not self._writes_to_target(piece, ops):
            self._collect(ops, piece, x)
            return
        ops.place(self._target(piece.tensor, ops), piece.start - self._windows[piece.tensor][0], x, factor)
        self._count(piece, ops)

    def _is_whole(self, piece: Piece, ops: ArrayOps) -> bool:
        return ops.eager and piece.tensor in self._into and len(self._plan.places[piece.tensor]) == 1

    def _writes_to_target(self, piece: Piece, ops: ArrayOps) -> bool:
        return ops.eager and (piece.tensor in self._into or len(self._plan.places[piece.tensor]) > 1)

    def _target(self, tensor: str, ops: ArrayOps) -> Array:
        """Return the flat array that becomes the tensor's merged gradient."""
        if tensor not in self._targets:
            spec, given, numel = self._plan.assignment_of[tensor].spec, self._into.get(tensor), self._numel(tensor)
            self._targets[tensor] = ops.empty(numel, spec.dtype) if given is None else ops.reshape(given, (numel,))
        return self._targets[tensor]

    def _numel(self, tensor: str) -> int:
        start, stop = self._windows[tensor]
        return stop - start

    def _reshape(self, tensor: str, x: Array, ops: ArrayOps) -> Array:
        spec = self._plan.assignment_of[tensor].spec
        return ops.reshape(x, spec.shape) if self._numel(tensor) == spec.numel else x

    def _count(self, piece: Piece, ops: ArrayOps) -> None:
        tensor = piece.tensor
        written = self._written[tensor] = self._written.get(tensor, 0) + piece.numel
        if written == self._numel(tensor):
            given = self._into.get(tensor)
            self.merged[tensor] = self._reshape(tensor, self._target(tensor, ops), ops) if given is None else given

    def _collect(self, ops: ArrayOps, piece: Piece, x: Array) -> None:
        spec = self._plan.assignment_of[piece.tensor].spec
        pieces = self._pieces.setdefault(piece.tensor, [])
        pieces.append((piece.start, x))
        if len(pieces) == sum(unit.is_merged_by(self._rank) for unit, _, _ in self._plan.places[piece.tensor]):
            del self._pieces[piece.tensor]
            flat = ops.lay_out([x for _, x in sorted(pieces, key=lambda item: item[0])])
            self.merged[piece.tensor] = self._reshape(piece.tensor, ops.cast(flat, spec.dtype), ops)
