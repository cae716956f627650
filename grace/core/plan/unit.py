"""Assignments of tensors to methods, and units: pieces of one or more tensors that are compressed as one."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from grace.core.config.config import Method, dense_method
from grace.core.methods.capabilities import Learning, Negotiating, Tuning, proposed_fields, ratio_of
from grace.core.methods.communicator import Communicator
from grace.core.methods.compressor import Compressor, keep_count, sparsifies
from grace.core.methods.fusions import Fused, find_fusions
from grace.core.methods.memory import Memory, keeps_nothing
from grace.core.spec import HALF_DTYPES, ITEMSIZE, Field, TensorSpec
from grace.core.wire.codings import PLAIN
from grace.core.wire.lanes import in_lanes
from grace.core.wire.layout import GatherLayout, payload_bytes

# Smallest number of elements of a cut tensor in a unit; pieces start at multiples of it.
GRAIN = 4096
# The same for the shards of a unit, of which each rank owns one.
SHARD_GRAIN = 512


class Piece(NamedTuple):
    """Elements start to stop of a flat tensor."""

    tensor: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Assignment:
    """Tensor with the method that exchanges it.

    `reason` says why the method is not the configuration's own; empty if it is.
    """

    spec: TensorSpec
    method: Method
    reason: str = ""
    index_coding: str = "int32"
    # It carries a residual of an earlier plan.
    holding: bool = False

    # What steps ask for is looked up once: for small tensors, the answers took as long as the kernels.

    @cached_property
    def compressor(self) -> Compressor:
        """Compressor of its payload."""
        return self.method.compressor

    @cached_property
    def memory(self) -> Memory:
        """Memory that keeps its error."""
        return self.method.memory

    @cached_property
    def communicator(self) -> Communicator:
        """Communicator that carries its payload."""
        return self.method.communicator

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Fields of its payload."""
        fields = self.compressor.wire(self.spec)
        return tuple(self._coded(f) for f in fields) if self.communicator.any_length else fields

    def _coded(self, field: Field) -> Field:
        coding = self.method.coding.of(field)
        if coding is None and field.below is not None and field.wire:
            coding = self.index_coding
        return field if coding is None else field._replace(coding=coding)

    @cached_property
    def proposed(self) -> tuple[Field, ...]:
        """Fields that the ranks negotiate before they compress."""
        return proposed_fields(self.compressor, self.spec)

    @cached_property
    def negotiated_bytes(self) -> int:
        """Bytes per step of its proposal."""
        return payload_bytes(self.proposed) or 0

    @property
    def wire_bytes(self) -> int | None:
        """Bytes per step of its fields and its proposal; None if they depend on the data."""
        return None if self.field_bytes is None else self.field_bytes + self.negotiated_bytes

    @property
    def expected_bytes(self) -> int | None:
        """Bytes per step, or about how many if the method aims at a ratio; None if unknown."""
        if self.wire_bytes is not None:
            return self.wire_bytes
        sent, ratio = [f for f in self.fields if f.wire], ratio_of(self.compressor)
        if ratio is None or any(f.length != "kept" or f.coding not in PLAIN for f in sent):
            return None
        return keep_count(ratio, self.spec.numel) * sum(ITEMSIZE[f.dtype] for f in sent)

    @cached_property
    def dense(self) -> bool:
        """True if the gradient is summed as it is, without memory."""
        method, dense = self.method, dense_method()
        alike = (method.compressor, method.memory, method.coding) == (dense.compressor, dense.memory, dense.coding)
        return alike and (bool(self.communicator.external_name) or self.communicator == dense.communicator)

    @property
    def flat(self) -> bool:
        """True if it may be cut."""
        return self.compressor.flat and "tensor" not in self.memory.needs

    @property
    def joins(self) -> bool:
        """True if it may be joined with others, whose learning rates may differ."""
        return self.flat and self.compressor.joins and "lr" not in self.memory.needs

    @cached_property
    def guarded(self) -> bool:
        """True if a flag must announce NaN and infinity, because the payload or a memory would lose them."""
        return not (self.compressor.nonfinite == "carried" and keeps_nothing(self.memory))

    @cached_property
    def fused(self) -> Fused:
        """The fusions of its compressor and memory that serve it."""
        found = find_fusions(self.compressor, self.memory)
        if self.proposed:
            found = found._replace(compress_checked=None, compress_sum=None, compress_feedback=None)
        # A memory needs to know of NaN earlier.
        return found if self.guarded and keeps_nothing(self.memory) else found._replace(compress_checked=None)

    @cached_property
    def shows(self) -> bool:
        """True if the payload tells of NaN and infinity, and nothing needs to know of them earlier."""
        return self.compressor.nonfinite == "shown" and keeps_nothing(self.memory) and not self.proposed

    @cached_property
    def proposal_shows(self) -> bool:
        """True if what a rank proposes tells of NaN and infinity."""
        return bool(self.proposed) and isinstance(self.compressor, Negotiating) and self.compressor.proposal_shows

    @cached_property
    def overflowing(self) -> tuple[str, ...]:
        """Fields of floats that a step must look at: they may be infinite although the compressed array is not."""
        if not self.guarded:
            return ()
        # A sparsifier's values are elements of the array, which was looked at.
        exact = ("values",) if sparsifies(self.compressor) and not self.shows else ()
        floats = [f.name for f in self.fields if f.dtype.startswith(("float", "bfloat"))]
        return tuple(name for name in floats if name not in exact)

    @cached_property
    def field_bytes(self) -> int | None:
        """Bytes per step of its fields; None if they depend on the data."""
        return payload_bytes(self.fields)

    @cached_property
    def local_fields(self) -> tuple[str, ...]:
        """Fields that do not travel."""
        return tuple(f.name for f in self.fields if not f.wire)

    @cached_property
    def learning(self) -> Learning | None:
        """Compressor if it learns from what all ranks sent of the tensor."""
        return self.compressor if isinstance(self.compressor, Learning) else None

    @cached_property
    def tuning(self) -> Tuning | None:
        """Compressor if it tunes a value across all tensors."""
        return self.compressor if isinstance(self.compressor, Tuning) else None

    @cached_property
    def half_sum(self) -> bool:
        """True if the payload is summed in 16 bits; it is then averaged on the way and not divided afterwards."""
        return self.communicator.adds and any(f.dtype in HALF_DTYPES for f in self.fields)


@dataclass(frozen=True)
class Unit(Assignment):
    """Pieces of tensors, laid end to end and compressed as one; `spec` describes them as one flat tensor."""

    pieces: tuple[Piece, ...] = ()
    #: The unit as which a communicator sends the mean of this one on; None if every rank makes the mean itself.
    onward: Unit | None = None
    #: The ranks that exchange this unit and keep a memory for it; None if every rank does.
    owners: tuple[int, ...] | None = None
    #: The number of ranks whose payloads are added on the way; 0 if none are.
    addends: int = 0
    #: The only rank that merges this unit and gets its mean; None if every rank does.
    merged_by: int | None = None

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Fields of its payload, as they travel."""
        fields = super().fields
        return in_lanes(fields, self.addends) if self.addends else fields

    def is_merged_by(self, rank: int) -> bool:
        """Return whether a rank gets the mean of this unit."""
        return self.merged_by in (None, rank)

    def is_kept_by(self, rank: int) -> bool:
        """Return whether a rank keeps a memory for this unit."""
        return self.owners is None or rank in self.owners

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The number of elements up to the end of each piece."""
        return tuple(itertools.accumulate(piece.numel for piece in self.pieces))

    @cached_property
    def lists_entries(self) -> bool:
        """True if the payload lists the elements that it carries, in ascending order, and nothing else."""
        return sparsifies(self.compressor) and any(f.below == self.spec.numel for f in self.fields)

    def without_memory(self) -> Unit:
        """Return the same unit without a memory."""
        return dataclasses.replace(self, method=dataclasses.replace(self.method, memory=dense_method().memory))

    @property
    def chain(self) -> Iterator[Unit]:
        """The units with which the mean of this one is sent on, one after another."""
        onward = self.onward
        while onward is not None:
            yield onward
            onward = onward.onward


def whole(item: Assignment) -> Unit:
    """Return a tensor as one unit, in its own shape."""
    piece = Piece(item.spec.name, 0, item.spec.numel)
    return Unit(item.spec, item.method, item.reason, item.index_coding, item.holding, (piece,))


def cut(item: Assignment, most_bytes: int) -> list[Unit]:
    """Split a tensor into units of about equal length with at most `most_bytes` of its gradient, if it can be cut."""
    spec, uncut = item.spec, whole(item)
    if not item.flat or spec.nbytes <= most_bytes:
        return [uncut]
    count = -(-spec.nbytes // most_bytes)
    width = -(-spec.numel // count // GRAIN) * GRAIN
    units = [
        _unit([uncut], (Piece(spec.name, start, min(start + width, spec.numel)),))
        for start in range(0, spec.numel, width)
    ]
    unfit = any(item.compressor.unfit(unit.spec) for unit in units)
    return [uncut] if unfit or len(units) == 1 else units


def fuse(units: Sequence[Unit]) -> list[Unit]:
    """Join the units of one bucket that have the same method, where joining is allowed and the result fits."""
    groups: list[list[Unit]] = []
    # The last group of a kind, and its number of elements.
    last: dict[object, tuple[list[Unit], int]] = {}
    for i, unit in enumerate(units):
        key = (unit.method, unit.spec.dtype, unit.index_coding) if unit.joins else i
        group, numel = last.get(key, ([], 0))
        numel += unit.spec.numel
        if group and unit.compressor.unfit(dataclasses.replace(unit.spec, shape=(numel,))):
            group, numel = [], unit.spec.numel
        if not group:
            groups.append(group)
        group.append(unit)
        last[key] = group, numel
    return [
        group[0] if len(group) == 1 else _unit(group, tuple(piece for unit in group for piece in unit.pieces))
        for group in groups
    ]


def _unit(units: Sequence[Unit], pieces: tuple[Piece, ...]) -> Unit:
    ends = [f"{p.tensor}[{p.start}:{p.stop}]" for p in (pieces[0], pieces[-1])]
    name = ends[0] if len(pieces) == 1 else f"{ends[0]} to {ends[1]}, {len(pieces)} pieces"
    if len(pieces) > 2:
        # States, checkpoints and random numbers use the name: other pieces between the same ends are another unit.
        name += f" ({zlib.crc32(repr([tuple(piece) for piece in pieces]).encode()):08x})"
    spec = dataclasses.replace(
        units[0].spec,
        name=name,
        shape=(sum(piece.numel for piece in pieces),),
        sparse=any(unit.spec.sparse for unit in units),
    )
    return dataclasses.replace(units[0], spec=spec, pieces=pieces, holding=any(unit.holding for unit in units))


def shards(unit: Unit, count: int) -> list[Unit]:
    """Return a unit as at most `count` units of about equal length."""
    width = -(-unit.spec.numel // (count * SHARD_GRAIN)) * SHARD_GRAIN
    if width >= unit.spec.numel:
        return [unit]
    return [
        _unit([unit], tuple(_part(unit, start, min(start + width, unit.spec.numel))))
        for start in range(0, unit.spec.numel, width)
    ]


def scatter(unit: Unit, chunks: Mapping[str, int], ranks: int) -> list[Unit]:
    """Return a unit as one unit per rank, which merges it: its part of each tensor has `chunks[tensor]` elements.

    The last parts of a tensor may be shorter, or missing.
    """
    parts = []
    for rank in range(ranks):
        pieces = []
        for piece in unit.pieces:
            chunk = chunks[piece.tensor]
            low, high = max(piece.start, rank * chunk), min(piece.stop, (rank + 1) * chunk)
            # An empty tensor belongs to rank 0.
            if low < high or (rank == 0 and not piece.numel):
                pieces.append(Piece(piece.tensor, low, high))
        if pieces:
            parts.append(dataclasses.replace(_unit([unit], tuple(pieces)), merged_by=rank))
    return parts


def empty_shard(unit: Unit, number: int) -> Unit:
    """Return a unit with no elements of this one, for a rank that takes part in its exchange with nothing."""
    spec = dataclasses.replace(unit.spec, name=f"{unit.spec.name}, empty shard {number}", shape=(0,))
    last = unit.pieces[-1]
    return dataclasses.replace(unit, spec=spec, pieces=(Piece(last.tensor, last.stop, last.stop),))


def layout_of(units: Sequence[Unit], checksum: bool, guarded: Sequence[bool] | None = None) -> GatherLayout:
    """Return the layout of the buffer in which a rank sends the fields of units; `guarded` says which have a flag.

    By default these are those that need one.
    """
    flags = [unit.guarded for unit in units] if guarded is None else guarded
    return GatherLayout([unit.spec for unit in units], [unit.fields for unit in units], flags, checksum)


def _part(unit: Unit, start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces of elements start to stop of a unit."""
    for piece, offset in offsets(unit):
        low, high = max(start, offset), min(stop, offset + piece.numel)
        # An empty tensor lies at one place, too.
        here = start <= offset < stop or offset == stop == unit.spec.numel
        if low < high or (here and not piece.numel):
            yield Piece(piece.tensor, piece.start + low - offset, piece.start + high - offset)


def offsets(unit: Unit) -> Iterator[tuple[Piece, int]]:
    """Yield the pieces of a unit, each with its start in the unit."""
    start = 0
    for piece in unit.pieces:
        yield piece, start
        start += piece.numel
