"""Layout of a bucket's fields in its wire buffer; fixed before the first step as far as the data allow.

Gathered buckets travel as one uint8 buffer per rank:

    checksum if asked for | fixed fields, int32 counts, words of coded fields and stamp, widest dtype first
    one flag byte per guarded tensor
    padding to 8 | fields of run-time length, widest dtype first | coded fields, each padded to 4 | padding to 16

This aligns every field to its own width without padding between fields. The counts give the lengths of the rest, so a
receiver finds the end of each rank's buffer without another exchange, and a rank that selects nothing sends only a
header. The checksum is that of the rest of the rank's buffer; its 8 bytes leave all fields aligned.

Summed buckets travel as one flat buffer per dtype, because bytes cannot be added; their flags are float32 elements.
Integers of a known largest magnitude travel in int32 words, several of them in each (`grace.core.wire.lanes`). A
flag means that this rank's gradient was not finite. The stamp is the step number: random numbers follow from it, so
payloads of ranks at different steps (after only one of them loaded a checkpoint) must not be added.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from grace.core.errors import PayloadError
from grace.core.ops.composites import ArrayOps
from grace.core.spec import HALF_DTYPES, ITEMSIZE, Array, Field, Key, Payload, TensorSpec
from grace.core.wire import codings, indices
from grace.core.wire.checksum import CHECKSUM_BYTES, checksum
from grace.core.wire.lanes import pack_lanes, unpack_lanes, words

# Version of the layouts below: raise it when the bytes change, so that ranks of both versions do not mix.
WIRE_FORMAT = 4
ALIGNMENT = 16
_INT32 = 0x7FFFFFFF
_ALL_THERE = "a buffer that holds as many elements as its header says"
# Fields end to end of at most this many elements together are copied once more when they are sent.
_FEW = 1 << 14
# A field of at least this many bytes is written straight to the wire buffer. The copy of a shorter one takes no longer
# than to arrange that.
_LONG = 1 << 20
# Digests of the step in a summed bucket; two steps have all of them in common with probability 2^-24 on 256 ranks.
_DIGESTS = 3


def payload_bytes(fields: Sequence[Field]) -> int | None:
    """Return the bytes of one payload's fields on the wire, without header and padding; None if they vary."""
    total = 0
    for field in fields:
        if not field.wire:
            continue
        if isinstance(field.length, str) or field.coding not in codings.PLAIN:
            return None
        total += _fixed_bytes(field)
    return total


def _fixed_bytes(field: Field) -> int:
    """Return the bytes of a field of fixed length."""
    length = int(field.length)
    return 4 * words(length, field.lanes) if field.lanes else length * ITEMSIZE[field.dtype]


def sent_bytes(ops: ArrayOps, fields: Sequence[Field], payload: Payload) -> Any:
    """Return the bytes of this payload's fields on the wire: an int, or a 0-d array in a traced graph.

    Fields may be as they are, or as they travel (`codings.coded`).
    """
    total: Any = 0
    for f in fields:
        if f.wire and f.lanes:
            total = total + _fixed_bytes(f)
        elif f.wire and isinstance(payload[f.name], codings.Coded):
            total = total + payload[f.name].size
        elif f.wire and f.coding in codings.PLAIN:
            total = total + ops.length(payload[f.name]) * ITEMSIZE[f.dtype]
        elif f.wire:
            total = total + codings.encode(ops, f, payload[f.name]).size
    return total


def _align(offset: int, width: int) -> int:
    return (offset + width - 1) // width * width


# The run-time lengths of a bucket, by tensor and name: ints, or 0-d integer arrays in a traced graph.
Lengths: TypeAlias = dict[tuple[int, str], Any]


class _Slot(NamedTuple):
    """One field of one tensor of the bucket."""

    tensor: int
    field: Field


class _Run(NamedTuple):
    """Fields of one dtype and of fixed lengths that lie end to end, from `offset` on."""

    dtype: str
    offset: int
    slots: list[_Slot]
    lengths: list[int]

    @property
    def end(self) -> int:
        return self.offset + sum(self.lengths) * ITEMSIZE[self.dtype]


class Buffer(NamedTuple):
    """Wire buffer of a rank that exists before its payloads, and by unit the place in it for the longest field."""

    data: Array
    places: dict[str, Array]


class Received(NamedTuple):
    """Received contents of a bucket.

    Each unit has its payloads to merge (one per rank, or one sum) and the flags of guarded ones, which are 0-d
    conditions. The conditions `in_step` all hold if every rank is at the same step.
    """

    payloads: list[list[Payload]]
    flags: list[list[Array]]
    in_step: list[Array]


class GatherLayout:
    """Layout of a bucket whose payloads are gathered or broadcast: one byte buffer per rank.

    `specs`, `fields` and `guarded` have an entry per unit. `checksum` gives every buffer a checksum.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        fields: Sequence[Sequence[Field]],
        guarded: Sequence[bool],
        checksum: bool = False,
    ) -> None:
        self.specs = tuple(specs)
        self.fields = tuple(tuple(f) for f in fields)
        self.guarded = tuple(guarded)
        self._by_name = [{f.name: f for f in own} for own in self.fields]
        self._start = CHECKSUM_BYTES if checksum else 0
        counts: dict[tuple[int, str], None] = {}
        self._coded: list[tuple[int, Field]] = []
        fixed: list[tuple[int, int, Field]] = []
        variable: list[tuple[int, int, Field]] = []
        for i, tensor_fields in enumerate(self.fields):
            for f in tensor_fields:
                if not f.wire:
                    continue
                if isinstance(f.length, str):
                    counts[i, f.length] = None
                if f.coding not in codings.PLAIN:
                    self._coded.append((i, f))
                elif isinstance(f.length, str):
                    variable.append((-ITEMSIZE[f.dtype], i, f))
                else:
                    fixed.append((-ITEMSIZE[f.dtype], i, f))
        self.counts = list(counts)
        fixed.sort(key=lambda entry: entry[0])
        variable.sort(key=lambda entry: entry[0])
        split = sum(width <= -4 for width, _, _ in fixed)
        self._wide = _runs(fixed[:split], self._start)
        self._counts_offset = _align(self._wide[-1].end if self._wide else self._start, 4)
        offset = self._counts_offset + 4 * (len(self.counts) + len(self._coded) + 1)
        self._narrow = _runs(fixed[split:], offset)
        self._flags_offset = self._narrow[-1].end if self._narrow else offset
        self._flagged = [i for i, guard in enumerate(self.guarded) if guard]
        self._fixed_end = self._flags_offset + len(self._flagged)
        self._variable = [_Slot(i, f) for _, i, f in variable]
        self._long = {} if self._start or not self.fixed else _long([*self._wide, *self._narrow])

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer of one rank, with every run-time length taken as zero."""
        return _align(self._open_end, ALIGNMENT)

    @property
    def has_checksum(self) -> bool:
        """True if every buffer has a checksum."""
        return self._start > 0

    @property
    def fixed(self) -> bool:
        """True if the buffers of all ranks have one length, because nothing depends on the data."""
        return not self.counts and not self._coded

    @property
    def _open_end(self) -> int:
        """Start of the part whose length depends on the data."""
        return _align(self._fixed_end, 8) if self.counts or self._coded else self._fixed_end

    def buffer(self, ops: ArrayOps) -> Buffer | None:
        """Return a buffer whose places kernels can write long fields to, for `encode`; None if that does not pay."""
        data = ops.room(self.nbytes) if self._long else None
        if data is None:
            return None
        places = {}
        for i, (offset, field) in self._long.items():
            places[self.specs[i].name] = ops.from_bytes(data[offset : offset + _fixed_bytes(field)], field.dtype)
        return Buffer(data, places)

    def encode(
        self,
        ops: ArrayOps,
        payloads: Sequence[Payload],
        flags: Sequence[Array],
        stamp: int,
        buffer: Buffer | None = None,
    ) -> Array:
        """Return the buffer of this rank at the step `stamp`, flat and uint8; fields may be coded already.

        It is `buffer.data` if all long fields are in their places there. Raises PayloadError if a payload is not what
        `wire` announced.
        """
        lengths: Lengths = {}
        for i, (tensor_fields, payload) in enumerate(zip(self._by_name, payloads, strict=True)):
            _check_payload(ops, self.specs[i], tensor_fields, payload, lengths, i)
        pieces: list[Array] = []
        position: int = self._start

        def pad(offset: int) -> None:
            nonlocal position
            gap = offset - position
            if not (isinstance(gap, int) and gap == 0):
                pieces.append(ops.zeros(gap, "uint8"))
            position = offset

        def put(piece: Array, length: Any = None) -> None:
            nonlocal position
            pieces.append(piece)
            position = position + (ops.length(piece) if length is None else length)

        def put_fixed(runs: Sequence[_Run]) -> None:
            for run in runs:
                pad(run.offset)
                fields = [payloads[slot.tensor][slot.field.name] for slot in run.slots]
                n = sum(run.lengths)
                if len(fields) > 1 and n <= _FEW:
                    # A copy of a few elements takes less time than an operation for each field.
                    fields = [ops.concat(fields)]
                for field, length in zip(fields, run.lengths if len(fields) > 1 else [n], strict=True):
                    put(ops.to_bytes(ops.reshape(field, (length,))))

        put_fixed(self._wide)
        pad(self._counts_offset)
        if self._coded:
            payloads = [codings.coded(ops, own, payload) for own, payload in zip(self.fields, payloads, strict=True)]
        coded = [payloads[i][f.name] for i, f in self._coded]
        numbers = (*(lengths[key] for key in self.counts), *(one.word for one in coded), stamp & _INT32)
        put(ops.to_bytes(ops.numbers(numbers, "int32")))
        put_fixed(self._narrow)
        if self._flagged:
            put(ops.numbers([flags[i] for i in self._flagged], "uint8"))
        pad(self._open_end)
        for slot in self._variable:
            put(ops.to_bytes(payloads[slot.tensor][slot.field.name]))
        for one in coded:
            pad(_align(position, 4))
            # TensorFlow's graph optimizer infers a wrong length for the result of the branches.
            put(one.data, one.size)
        pad(_align(position, ALIGNMENT))
        if buffer is not None and self._in_place(ops, payloads, buffer):
            offset = 0
            for piece in pieces:
                length = ops.length(piece)
                if not ops.is_same(piece, buffer.data[offset : offset + length]):
                    ops.place(buffer.data, offset, piece, 1.0)
                offset += length
            return buffer.data
        body = ops.concat(pieces)
        return ops.concat([ops.to_bytes(checksum(ops, body)), body]) if self._start else body

    def _in_place(self, ops: ArrayOps, payloads: Sequence[Payload], buffer: Buffer) -> bool:
        """Return whether kernels have written all long fields to their places in a buffer."""
        long = [(self.specs[i].name, payloads[i][field.name]) for i, (_, field) in self._long.items()]
        return all(ops.is_same(array, buffer.places[name]) for name, array in long)

    @functools.cached_property
    def header(self) -> GatherLayout:
        """Layout of the buffer of a rank that sends nothing, with the same checksum: the stamp alone."""
        return GatherLayout((), (), (), self.has_checksum)

    def decode(
        self, ops: ArrayOps, data: Array, size: int, stamp: int, absent: Sequence[Any] = (), nothing: Array = None
    ) -> Received:
        """Return the contents of `size` buffers, which `data` holds as flat uint8 in a row, or as a list of them.

        `absent` has a condition for each of them: where it holds, the buffer is a header, and its contents are those of
        the buffer `nothing`. Raises PayloadError, with the rank whose buffer it is, for a buffer that is damaged in a
        way that can be recognized.
        """
        rows = decode_rows(ops, data, [self] * size, stamp, absent, nothing)
        return Received(
            [[row.payloads[i][0] for row in rows] for i in range(len(self.specs))],
            [[flag for row in rows for flag in row.flags[i]] for i in range(len(self.specs))],
            [in_step for row in rows for in_step in row.in_step],
        )

    def empty(self) -> Received:
        """Return contents with nothing in them yet."""
        return Received([[] for _ in self.specs], [[] for _ in self.specs], [])

    def decode_rank(self, ops: ArrayOps, data: Array, base: int, received: Received, stamp: Array, rank: int) -> int:
        """Add the contents of the buffer that begins at `base` to `received`; return where it ends."""
        mine: list[Payload] = [{} for _ in self.specs]
        total = ops.length(data)
        require = functools.partial(_require, ops, rank)
        fits = base + self._open_end <= total
        data = require(fits, "a buffer that holds all fields of fixed length", total, data)

        def take(offset: int, dtype: str, length: int) -> Array:
            return ops.from_bytes(data[offset : offset + length * ITEMSIZE[dtype]], dtype)

        end = base + self._open_end
        of_fields = len(self.counts) + len(self._coded)
        values = take(base + self._counts_offset, "int32", of_fields + 1)
        there = ops.sizes(values[: len(self.counts)], len(self.counts)) if self.counts else []
        counts = dict(zip(self.counts, there, strict=True))
        for key, length in counts.items():
            counts[key] = require(length >= 0, "lengths from 0 on", length, length)
        # The header tells where everything lies: check that all of it is there before reading any of it.
        slots: list[tuple[_Slot, int, int]] = []
        for slot in self._variable:
            length = counts[slot.tensor, str(slot.field.length)]
            # Check before the product: TensorFlow counts in int32, which could wrap around to a length that fits.
            data = require(length <= (total - end) // ITEMSIZE[slot.field.dtype], _ALL_THERE, total, data)
            slots.append((slot, end, length))
            end = end + length * ITEMSIZE[slot.field.dtype]
        coded: list[tuple[int, Field, int, int, Array, int]] = []
        for j, (i, f) in enumerate(self._coded, len(self.counts)):
            end, below = _align(end, 4), int(f.below or 0)
            k = counts[i, f.length] if isinstance(f.length, str) else f.length
            if f.below is None:
                length, k = self._coded_length(ops, require, f, ops.size(values[j]), k, total - end)
                coded.append((i, f, end, length, values[j], k))
                end = end + length
                continue
            # Gaps of 0 bits take no bytes, so that only the tensor bounds the number of indices, not the buffer.
            k = require(k <= below, f"at most {below} indices, which differ and are below it", k, k)
            word = ops.cast(values[j], "int64")
            word = require(indices.is_known(ops, word, below), f"a coding of indices below {below}", word, word)
            fits = indices.nbytes(ops, word, k, below) <= ops.cast(total - end, "int64")
            data = require(fits, _ALL_THERE, total, data)
            length = indices.size(ops, word, k, below)
            coded.append((i, f, end, length, word, k))
            end = end + length
        end = _align(end, ALIGNMENT)
        if self._start:
            data = require(end <= total, _ALL_THERE, total, data)
            right = take(base, "int64", 1)[0] == checksum(ops, data[base + self._start : end])[0]
            data = require(right, "a buffer that gives the checksum in its header", None, data)
        received.in_step.extend(ops.conditions(values[of_fields:] == stamp, 1))
        for run in (*self._wide, *self._narrow):
            n = sum(run.lengths)
            # Gives the fields static lengths even if the length of the whole buffer is known only at run time.
            fields = ops.split(ops.reshape(take(base + run.offset, run.dtype, n), (n,)), run.lengths)
            for slot, field in zip(run.slots, fields, strict=True):
                mine[slot.tensor][slot.field.name] = field
        if self._flagged:
            first = base + self._flags_offset
            bad = ops.conditions(data[first : first + len(self._flagged)] > 0, len(self._flagged))
            for j, i in enumerate(self._flagged):
                received.flags[i].append(bad[j])
        for slot, offset, length in slots:
            mine[slot.tensor][slot.field.name] = take(offset, slot.field.dtype, length)
        for i, f, offset, length, word, k in coded:
            piece = take(offset, "uint8", length)
            if f.below is None:
                found = codings.decode(ops, f, piece, length, k)
            else:
                found = indices.decode(ops, piece, word, k, f.below)
            # A graph loses the length, which is known.
            mine[i][f.name] = found if isinstance(f.length, str) else ops.reshape(found, (f.length,))
        for i, payload in enumerate(mine):
            received.payloads[i].append(payload)
        return end

    @staticmethod
    def _coded_length(ops: ArrayOps, require: Any, f: Field, length: Any, k: Any, rest: Any) -> tuple[Any, Any]:
        """Return the bytes of a coded field and the number of its elements, after checking them.

        `rest` is the number of bytes that are left. What the elements may take is bounded by what is there.
        """
        length = require(length >= 0, "lengths from 0 on", length, length)
        length = require(length <= rest, _ALL_THERE, length, length)
        most = f"at most {codings.MOST_BYTES_PER_BYTE} bytes of '{f.name}' per coded byte, and at least as many"
        width = ITEMSIZE[f.dtype]
        # Products only below the check: TensorFlow counts in int32, which could wrap around.
        k = require(k <= _INT32 // width, most, k, k)
        k = require(k * width // codings.MOST_BYTES_PER_BYTE <= length, most, k, k)
        length = require(length <= k * width, most, length, length)
        short = ops.bit_or(length == k * width, k * width <= codings.MOST_BYTES)
        return length, require(short, f"at most {codings.MOST_BYTES} coded bytes", k, k)


def _runs(fields: Sequence[tuple[int, int, Field]], offset: int) -> list[_Run]:
    """Return the fields as they lie end to end from an offset on."""
    runs: list[_Run] = []
    for _, i, f in fields:
        if not runs or runs[-1].dtype != f.dtype:
            runs.append(_Run(f.dtype, runs[-1].end if runs else offset, [], []))
        runs[-1].slots.append(_Slot(i, f))
        runs[-1].lengths.append(int(f.length))
    return runs


def _long(runs: Sequence[_Run]) -> dict[int, tuple[int, Field]]:
    """Return the longest field of each unit that has a long one, with its offset."""
    found: dict[int, tuple[int, Field]] = {}
    for run in runs:
        offset = run.offset
        for slot, length in zip(run.slots, run.lengths, strict=True):
            nbytes = length * ITEMSIZE[run.dtype]
            if nbytes >= max(_LONG, _fixed_bytes(found[slot.tensor][1]) if slot.tensor in found else 0):
                found[slot.tensor] = offset, slot.field
            offset += nbytes
    return found


def decode_rows(
    ops: ArrayOps,
    data: Array,
    layouts: Sequence[GatherLayout],
    stamp: int,
    absent: Sequence[Any] = (),
    nothing: Array = None,
) -> list[Received]:
    """Return the contents of buffers in a row, or in a list; one per rank, each of its own layout.

    `absent` and `nothing` are as for `GatherLayout.decode`. Raises PayloadError, with the rank whose buffer it is, for
    a buffer that is damaged in a way that can be recognized.
    """
    rows, base, mine = [], 0, ops.full(1, stamp & _INT32, "int32")
    ends: list[tuple[int, Array, Any]] = []
    for rank, layout in enumerate(layouts):
        rows.append(layout.empty())
        buffer, start = (data[rank], 0) if isinstance(data, list) else (data, base)
        if absent and absent[rank] is not False:
            base = _decode_if_there(ops, buffer, start, layout, rows[-1], mine, rank, absent[rank], nothing)
        else:
            base = layout.decode_rank(ops, buffer, start, rows[-1], mine, rank)
        if isinstance(data, list) or rank == len(layouts) - 1:
            ends.append((rank, buffer, base))
    for rank, buffer, end in ends if layouts[0].has_checksum else ():
        total, in_step = ops.length(buffer), rows[rank].in_step
        require = functools.partial(_require, ops, rank)
        # Nothing reads the bytes after the last buffer. A graph checks them if something waits for the check.
        in_step[-1] = require(end == total, f"{end} bytes in all", total, in_step[-1])
    return rows


def _decode_if_there(
    ops: ArrayOps,
    buffer: Array,
    start: Any,
    layout: GatherLayout,
    received: Received,
    stamp: Array,
    rank: int,
    is_absent: Any,
    nothing: Array,
) -> Any:
    """Do what `decode_rank` does; where a rank is absent, check its header and take the contents of `nothing`."""
    header = layout.header

    def checked() -> list[Array]:
        found = header.empty()
        header.decode_rank(ops, buffer, start, found, stamp, rank)
        return found.in_step

    if isinstance(is_absent, bool):
        received.in_step.extend(checked())
        layout.decode_rank(ops, nothing, 0, received, stamp, rank)
        return start + header.nbytes
    # A traced graph has one program for both.
    start_array = ops.full(1, start, "int32")[0]
    received.in_step.extend(ops.choose(is_absent, checked, lambda: [ops.full(1, 0, "int32")[0] == 0]))
    chosen, begin = ops.choose(is_absent, lambda: [nothing, start_array * 0], lambda: [buffer, start_array])
    end = layout.decode_rank(ops, chosen, begin, received, stamp, rank)
    return ops.where(is_absent, start_array + header.nbytes, end)


class SumLayout:
    """Layout of a bucket whose payloads are summed on the way: one flat buffer per dtype.

    `specs`, `fields` and `guarded` have an entry per unit.
    """

    def __init__(self, specs: Sequence[TensorSpec], fields: Sequence[Sequence[Field]], guarded: Sequence[bool]) -> None:
        self.specs = tuple(specs)
        self.fields = tuple(tuple(f) for f in fields)
        self.guarded = tuple(guarded)
        self._by_name = [{f.name: f for f in own} for own in self.fields]
        self.groups: dict[str, list[tuple[int, Field]]] = {}
        for i, tensor_fields in enumerate(self.fields):
            for f in tensor_fields:
                if f.wire:
                    assert f.most is None or f.lanes, f"integers '{f.name}' may overflow; divide() of allreduce widens"
                    self.groups.setdefault("int32" if f.lanes else f.dtype, []).append((i, f))
        self._flagged = [i for i, guard in enumerate(self.guarded) if guard]
        if self._flagged:
            self.groups.setdefault("float32", [])

    @property
    def fixed(self) -> bool:
        """True if nothing depends on the data."""
        return all(isinstance(f.length, int) for group in self.groups.values() for _, f in group)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of one rank, with every run-time length taken as zero."""
        fields = sum(_fixed_bytes(f) for group in self.groups.values() for _, f in group if isinstance(f.length, int))
        return fields + (4 * (sum(self.guarded) + 2 * _DIGESTS) if any(self.guarded) else 0)

    def encode(
        self, ops: ArrayOps, payloads: Sequence[Payload], flags: Sequence[Array], stamp: int, size: int
    ) -> tuple[dict[str, Array], Lengths]:
        """Return one flat buffer per dtype, for one of `size` ranks at the step `stamp`, and the run-time lengths.

        Raises PayloadError if a payload is not what `wire` announced.
        """
        lengths: Lengths = {}
        for i, (tensor_fields, payload) in enumerate(zip(self._by_name, payloads, strict=True)):
            _check_payload(ops, self.specs[i], tensor_fields, payload, lengths, i)
        buffers: dict[str, Array] = {}
        for dtype, group in self.groups.items():
            pieces = [_pack(ops, f, payloads[i][f.name]) for i, f in group]
            if dtype == "float32" and self._flagged:
                pieces.append(ops.numbers([flags[i] for i in self._flagged], "float32"))
                digests = ops.cast(_digests(ops, stamp, size), "float32")
                pieces += [digests, digests * digests]
            # A single payload is sent as it is if no transport overwrites it.
            alone = len(pieces) == 1 and dtype in HALF_DTYPES
            buffers[dtype] = pieces[0] if alone else ops.concat(pieces)
        return buffers, lengths

    def decode(self, ops: ArrayOps, buffers: Mapping[str, Array], size: int, lengths: Lengths) -> Received:
        """Return the contents of buffers summed over `size` ranks; `lengths` are those of this rank's payloads."""
        payloads: list[list[Payload]] = [[{}] for _ in self.specs]
        flags: list[list[Array]] = [[] for _ in self.specs]
        in_step: list[Array] = []
        for dtype, group in self.groups.items():
            offset: int = 0
            for i, f in group:
                length = lengths[i, f.length] if isinstance(f.length, str) else f.length
                there = words(length, f.lanes) if f.lanes else length
                piece = buffers[dtype][offset : offset + there]
                payloads[i][0][f.name] = unpack_lanes(ops, piece, length, f.lanes) if f.lanes else piece
                offset = offset + there
            if dtype == "float32" and self._flagged:
                count = len(self._flagged)
                bad = ops.conditions(buffers[dtype][offset : offset + count] > 0, count)
                for j, i in enumerate(self._flagged):
                    flags[i].append(bad[j])
                offset = offset + count
                # Equal if and only if all ranks sent the same digests (Cauchy-Schwarz).
                sums = ops.cast(buffers[dtype][offset : offset + 2 * _DIGESTS], "float64")
                total, squares = sums[:_DIGESTS], sums[_DIGESTS:]
                in_step.append(~ops.any(size * squares != total * total))
        return Received(payloads, flags, in_step)


def _pack(ops: ArrayOps, field: Field, x: Array) -> Array:
    return pack_lanes(ops, x, int(field.length), field.lanes) if field.lanes else x


def _require(ops: ArrayOps, rank: int, condition: Any, expected: str, received: Any, then: Any) -> Any:
    """Return `then`; raise PayloadError, which blames the buffer of `rank`, unless the condition holds.

    The message shows `received` if it is a number now, not in a traced graph.
    """
    if isinstance(condition, bool) and condition:
        return then
    shown = f": {received}" if isinstance(received, int) else ""
    error = PayloadError(
        f"wire buffer of rank {rank}: expected {expected}, received another{shown}. "
        "The buffer is truncated or damaged, or comes from another version or configuration; check all ranks."
    )
    if isinstance(condition, bool):
        raise error
    return ops.require(condition, error, then)


def _digests(ops: ArrayOps, stamp: int, size: int) -> Array:
    """Return random numbers that tell steps apart: int64, 11 bits each on 4 ranks, 8 on 256.

    Their squares, summed over all ranks, are exact in float32.
    """
    bits = (24 - (size - 1).bit_length()) // 2
    return ops.bit_and(ops.words(_DIGESTS, Key(Key.derive(0, "stamp"), stamp & _INT32)), (1 << bits) - 1)


def _check_payload(
    ops: ArrayOps,
    spec: TensorSpec,
    fields: Mapping[str, Field],
    payload: Payload,
    lengths: Lengths,
    index: int,
) -> None:
    """Compare a payload with its declared fields, and fill in the run-time lengths."""
    if payload.keys() != fields.keys():
        raise PayloadError(
            f"tensor '{spec.name}': compress returned the fields {sorted(payload)}, "
            f"but wire announced {sorted(fields)}; make the two agree."
        )
    for name, f in fields.items():
        array = payload[name]
        if isinstance(array, codings.Coded):
            # Checked when it was coded, which the buffer of another owner may share.
            if isinstance(f.length, str):
                lengths.setdefault((index, f.length), array.length)
            continue
        length, dtype = ops.length(array), ops.dtype(array)
        expected = lengths.setdefault((index, f.length), length) if isinstance(f.length, str) else f.length
        # Lengths that a traced graph knows only at run time cannot be compared here.
        differ = isinstance(length, int) and isinstance(expected, int) and length != expected
        if dtype != f.dtype or differ or len(array.shape) != 1:
            raise PayloadError(
                f"tensor '{spec.name}', field '{f.name}': expected a flat {f.dtype} array of {expected} elements as "
                f"announced by wire, received {dtype} of shape {tuple(array.shape)}."
            )
