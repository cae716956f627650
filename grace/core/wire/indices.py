"""Codings of the indices of sparse payloads: unchanged, as packed gaps, or as a bitmap.

    int32    4 bytes per index
    delta    the gaps between ascending indices, in as many bits as the widest gap needs, bit plane after bit plane:
             width * ceil(k / 8) bytes
    golomb   the low bits of the gaps, packed like this, and what remains of each gap in unary: as many zeros, then a
             one (Golomb and Rice). With r low bits, ceil(r k / 8 + (k + sum of gap / 2^r) / 8) bytes. For indices
             chosen at random this is within 2 % of the entropy, because r is about log2(mean gap / 2)
    bitmap   one bit per element of the tensor: ceil(n / 8) bytes
    smallest the shortest of the four, for each tensor and step

A word of the header names the coding and its numbers, so that a receiver can find the next field: the coding in 2 bits;
then for delta the width, and for golomb r in 5 bits and the bytes of the unary part in 24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grace.core.errors import PayloadError
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array

if TYPE_CHECKING:
    from grace.core.ops.native import Native

CODINGS = ("int32", "delta", "golomb", "bitmap", "smallest")
_INT32, _DELTA, _BITMAP, _GOLOMB = range(4)
# The most low bits of a gap, and the most bytes of a unary part.
_MOST_LOW, _MOST_UNARY = 16, 2**24 - 1


def _gaps(ops: ArrayOps, indices: Array) -> Array:
    """Return the number of elements between neighboring indices."""
    wide = ops.cast(indices, "int64")
    return wide - ops.concat([ops.full(1, -1, "int64"), wide])[: ops.length(wide)] - 1


@composite()
def gap_facts(ops: ArrayOps, indices: Array, low: Any) -> Array:
    """Return the widest gap between ascending indices, and the sum of all gap / 2^low, each rounded down, in int64."""
    gaps = ops.concat([ops.zeros(1, "int64"), _gaps(ops, indices)])
    widest, quotients = ops.max(gaps), ops.sum(ops.shift_right(gaps, low))
    return ops.concat([ops.reshape(widest, (1,)), ops.reshape(quotients, (1,))])


@gap_facts.kernel()
def _(ops: Native, indices: Array, low: Any) -> Array | None:
    if not _has_kernel(ops, indices):
        return None
    return ops.run("gap_facts", [indices], [low], outputs=["int64"], lengths=[2])[0]


@composite()
def encode_gaps(ops: ArrayOps, indices: Array, low: Any, unary: Any, planes: int) -> Array:
    """Return the `low` bits of the gaps of ascending indices, plane by plane, and `unary` bytes with what remains.

    `planes` is at least `low`, which may be an array in a graph. Without unary bytes nothing may remain.
    """
    k = ops.length(indices)
    m = (k + 7) // 8
    gaps = _gaps(ops, indices)
    rows = ops.reshape(ops.concat([gaps, ops.zeros(8 * m - k, "int64")]), (1, -1))
    bits = ops.bit_and(ops.shift_right(rows, ops.reshape(ops.arange(planes, "int64"), (planes, 1))), 1)
    packed = ops.pack(ops.reshape(bits, (-1,)), 1)[: low * m]
    ones = ops.cumsum(ops.shift_right(gaps, low)) + ops.arange(k, "int64")
    # Room for k ones, so that they have a place even if no byte of them is sent.
    marks = ops.put_(ops.zeros(8 * unary + 8 * m, "uint8"), ops.cast(ones, "int32"), 1)
    return ops.concat([packed, ops.pack(marks, 1)[:unary]])


@encode_gaps.kernel()
def _(ops: Native, indices: Array, low: Any, unary: Any, planes: int) -> Array | None:
    if not _has_kernel(ops, indices):
        return None
    length = low * ((ops.length(indices) + 7) // 8) + unary
    return ops.run("encode_gaps", [indices], [low, unary], outputs=["uint8"], lengths=[length])[0]


@composite()
def decode_gaps(ops: ArrayOps, data: Array, low: Any, unary: Any, k: int, planes: int) -> Array:
    """Return the k indices of `encode_gaps`. Raises PayloadError for a unary part with another number of gaps."""
    m = (k + 7) // 8
    # Not the length of data: TensorFlow's graph optimizer confuses it with that of the other branch.
    padded = ops.concat([data[: low * m], ops.zeros((planes - low) * m, "uint8")])
    quotients = _quotients(ops, data[low * m : low * m + unary], unary, k)
    # Plane after plane: all at once would take as many times the memory, which a damaged header may ask for.
    steps = ops.full(k, 1, "int64")
    for j in range(planes):
        steps = ops.add_(steps, ops.shift_left(ops.unpack(padded[j * m : (j + 1) * m], 1, k), j))
    return ops.cast(ops.add_(ops.cumsum(steps), ops.shift_left(quotients, low)) - 1, "int32")


def _quotients(ops: ArrayOps, data: Array, unary: Any, k: int) -> Array:
    """Return the sums of what remained of the gaps; zeros without unary bytes."""
    at_once = ops.full(k, 1, "int64")[: ops.min_size(k, k * (1 - ops.min_size(unary, 1)))]
    marks = ops.concat([ops.unpack(data, 1, 8 * unary), at_once])
    fits = ops.sum(marks) == ops.full(1, k, "int64")[0]
    ones = ops.nonzero(ops.require(fits, PayloadError(_OTHER_NUMBER), marks) > 0)
    return ops.cast(ones, "int64") - ops.arange(k, "int64")


@decode_gaps.kernel()
def _(ops: Native, data: Array, low: Any, unary: Any, k: int, planes: int) -> Array | None:
    if not _has_kernel(ops, data):
        return None
    return ops.run("decode_gaps", [data], [low, unary, k], outputs=["int32"], lengths=[k])[0]


def _has_kernel(ops: Native, x: Array) -> bool:
    """Return whether kernels code these indices; there are few, so on a GPU its own operations are fast enough."""
    return ops.device.startswith("cpu") and ops.kind(x) is not None


_OTHER_NUMBER = (
    "indices: expected as many bits of the bitmap as the header says, received another number; the payload is damaged."
)


def _planes(below: int) -> int:
    return max(1, (below - 1).bit_length())


def _width(ops: ArrayOps, widest: Array, below: int) -> Array:
    """Return the bits of the widest gap, as a 0-d int64 array."""
    return ops.sum(ops.cast(widest >= _powers(ops, _planes(below)), "int64"))


def _powers(ops: ArrayOps, count: int) -> Array:
    return ops.shift_left(ops.full(count, 1, "int64"), ops.arange(count, "int64"))


def _low_bits(ops: ArrayOps, indices: Array, below: int) -> Array:
    """Return r of golomb as a 0-d int64 array: the least with 2^r >= 0.481 * mean gap.

    Then one low bit more would cost as much as it saves: 0.481 is the logarithm of the golden ratio.
    """
    k = ops.length(indices)
    last = ops.max(ops.concat([ops.full(1, -1, "int64"), ops.cast(indices, "int64")]))
    most = min(_MOST_LOW, _planes(below))
    return ops.sum(ops.cast(_powers(ops, most) * 1000 * k < 481 * (last + 1 - k), "int64"))


def choose(ops: ArrayOps, indices: Array, below: int, coding: str) -> Array:
    """Return the header word for ascending indices below `below`, as a 0-d int64 array.

    Indices that golomb cannot code, because the unary part is too long, stay int32.
    """
    plain, bitmap = (ops.full(1, tag, "int64")[0] for tag in (_INT32, _BITMAP))
    if coding in ("int32", "bitmap"):
        return plain if coding == "int32" else bitmap
    k, low = ops.length(indices), _low_bits(ops, indices, below)
    facts = gap_facts(ops, indices, ops.size(ops.cast(low, "int32")))
    delta = _width(ops, facts[0], below) * 4 + _DELTA
    unary = ops.shift_right(facts[1] + k + 7, 3)
    golomb = ops.where(unary <= _MOST_UNARY, unary * 128 + low * 4 + _GOLOMB, plain)
    if coding != "smallest":
        return delta if coding == "delta" else golomb
    best = plain
    for word in (bitmap, delta, golomb):
        shorter = nbytes(ops, word, k, below) < nbytes(ops, best, k, below)
        best = ops.where(shorter, word, best)
    return best


def _low(ops: ArrayOps, word: Array) -> Array:
    """Return how many low bits of a gap a header word names: all for delta, r for golomb."""
    rest = ops.shift_right(word, 2)
    return ops.where(ops.bit_and(word, 3) == _GOLOMB, ops.bit_and(rest, 31), rest)


def _unary(ops: ArrayOps, word: Array) -> Array:
    """Return the bytes of the unary part that a header word names."""
    return ops.where(ops.bit_and(word, 3) == _GOLOMB, ops.shift_right(word, 7), 0)


def is_known(ops: ArrayOps, word: Array, below: int) -> Array:
    """Return whether a header word names a coding, and a width that gaps below `below` can have."""
    return ops.bit_and(word >= 0, _low(ops, word) <= _planes(below))


def nbytes(ops: ArrayOps, word: Array, k: int, below: int) -> Array:
    """Return the bytes of k indices under a header word, as a 0-d int64 array."""
    tag = ops.bit_and(word, 3)
    # In int64: TensorFlow counts in int32, in which the bytes of a damaged header could wrap around.
    count, whole = (ops.full(1, n, "int64")[0] for n in (k, (below + 7) // 8))
    packed = ops.where(tag == _BITMAP, whole, _low(ops, word) * ((count + 7) // 8) + _unary(ops, word))
    return ops.where(tag == _INT32, 4 * count, packed)


def size(ops: ArrayOps, word: Array, k: int, below: int) -> int:
    """Return `nbytes` as a size for slices; it must be below 2^31."""
    return ops.size(ops.cast(nbytes(ops, word, k, below), "int32"))


def encode(ops: ArrayOps, indices: Array, word: Array, below: int) -> Array:
    """Return the bytes of ascending indices under a header word."""

    def gaps() -> Array:
        low, unary = (ops.size(ops.cast(number(ops, word), "int32")) for number in (_low, _unary))
        return encode_gaps(ops, indices, low, unary, _planes(below))

    def bitmap() -> Array:
        return ops.pack(ops.put_(ops.zeros(below, "uint8"), indices, 1), 1)

    tag = ops.bit_and(word, 3)
    return ops.choose(tag == _INT32, lambda: ops.to_bytes(indices), lambda: ops.choose(tag == _BITMAP, bitmap, gaps))


def decode(ops: ArrayOps, data: Array, word: Array, k: int, below: int) -> Array:
    """Return the k indices. Raises PayloadError for a bitmap with another number of indices."""

    def gaps() -> Array:
        low, unary = (ops.size(ops.cast(number(ops, word), "int32")) for number in (_low, _unary))
        return decode_gaps(ops, data, low, unary, k, _planes(below))

    def bitmap() -> Array:
        bits = ops.unpack(data, 1, below)
        # Not the length of the result, which TensorFlow's graph optimizer infers from the other branches.
        fits = ops.sum(bits) == ops.full(1, k, "int64")[0]
        return ops.nonzero(ops.require(fits, PayloadError(_OTHER_NUMBER), bits) > 0)

    tag = ops.bit_and(word, 3)
    return ops.choose(
        tag == _INT32, lambda: ops.from_bytes(data, "int32"), lambda: ops.choose(tag == _BITMAP, bitmap, gaps)
    )
