"""Codings of the indices of sparse payloads: unchanged, as packed gaps, or as a bitmap.

    int32    4 bytes per index
    delta    the gaps between ascending indices, in as many bits as the widest gap needs, bit plane after bit plane:
             width * ceil(k / 8) bytes
    bitmap   one bit per element of the tensor: ceil(n / 8) bytes
    smallest the shortest of the three, for each tensor and step

A word of the header names the coding and the width, so that a receiver can find the next field.
"""

from __future__ import annotations

from grace.core.ops.composites import ArrayOps
from grace.core.values.errors import PayloadError
from grace.core.values.spec import Array

CODINGS = ("int32", "delta", "bitmap", "smallest")
_INT32, _DELTA, _BITMAP = range(3)


def _gaps(ops: ArrayOps, indices: Array) -> Array:
    """Return the number of elements between neighboring indices."""
    wide = ops.cast(indices, "int64")
    return wide - ops.concat([ops.full(1, -1, "int64"), wide])[: ops.length(wide)] - 1


def _planes(below: int) -> int:
    return max(1, (below - 1).bit_length())


def _width(ops: ArrayOps, gaps: Array, below: int) -> Array:
    """Return the bits of the widest gap, as a 0-d int64 array."""
    powers = ops.shift_left(ops.full(_planes(below), 1, "int64"), ops.arange(_planes(below), "int64"))
    return ops.sum(ops.cast(ops.max(gaps) >= powers, "int64"))


def choose(ops: ArrayOps, indices: Array, below: int, coding: str) -> Array:
    """Return the header word for ascending indices below `below`, as a 0-d int64 array.

    Its low 2 bits are the coding, the others the width.
    """
    if coding == "int32":
        return ops.full(1, _INT32, "int64")[0]
    if coding == "bitmap":
        return ops.full(1, _BITMAP, "int64")[0]
    delta = _width(ops, _gaps(ops, indices), below) * 4 + _DELTA
    if coding == "delta":
        return delta
    words = [ops.full(1, _INT32, "int64")[0], ops.full(1, _BITMAP, "int64")[0], delta]
    best = words[0]
    for word in words[1:]:
        shorter = nbytes(ops, word, ops.length(indices), below) < nbytes(ops, best, ops.length(indices), below)
        best = ops.where(shorter, word, best)
    return best


def is_known(ops: ArrayOps, word: Array, below: int) -> Array:
    """Return whether a header word names a coding, and a width that gaps below `below` can have."""
    tag = ops.bit_and(word, 3)
    narrow = ops.bit_and(word >= 0, ops.shift_right(word, 2) <= _planes(below))
    return ops.bit_and(tag <= _BITMAP, narrow)


def nbytes(ops: ArrayOps, word: Array, k: int, below: int) -> Array:
    """Return the bytes of k indices under a header word, as a 0-d int64 array."""
    tag = ops.bit_and(word, 3)
    # In int64: TensorFlow counts in int32, in which the bytes of a damaged header could wrap around.
    count, whole = (ops.full(1, n, "int64")[0] for n in (k, (below + 7) // 8))
    packed = ops.where(tag == _DELTA, ops.shift_right(word, 2) * ((count + 7) // 8), whole)
    return ops.where(tag == _INT32, 4 * count, packed)


def size(ops: ArrayOps, word: Array, k: int, below: int) -> int:
    """Return `nbytes` as a size for slices; it must be below 2^31."""
    return ops.size(ops.cast(nbytes(ops, word, k, below), "int32"))


def encode(ops: ArrayOps, indices: Array, word: Array, below: int) -> Array:
    """Return the bytes of ascending indices under a header word."""

    def delta() -> Array:
        k, planes = ops.length(indices), _planes(below)
        m = (k + 7) // 8
        gaps = ops.concat([_gaps(ops, indices), ops.zeros(8 * m - k, "int64")])
        rows = ops.reshape(gaps, (1, -1))
        bits = ops.bit_and(ops.shift_right(rows, ops.reshape(ops.arange(planes, "int64"), (planes, 1))), 1)
        data = ops.pack(ops.reshape(bits, (-1,)), 1)
        return data[: ops.size(ops.shift_right(word, 2)) * m]

    def bitmap() -> Array:
        return ops.pack(ops.put_(ops.zeros(below, "uint8"), indices, 1), 1)

    tag = ops.bit_and(word, 3)
    return ops.choose(tag == _INT32, lambda: ops.to_bytes(indices), lambda: ops.choose(tag == _DELTA, delta, bitmap))


def decode(ops: ArrayOps, data: Array, word: Array, k: int, below: int) -> Array:
    """Return the k indices. Raises PayloadError for a bitmap of another number."""

    def delta() -> Array:
        planes, m = _planes(below), (k + 7) // 8
        # Not the length of data: TensorFlow's graph optimizer confuses it with that of the other branch.
        padded = ops.concat([data, ops.zeros(planes * m - size(ops, word, k, below), "uint8")])
        # Plane after plane: all at once would take as many times the memory, which a damaged header may ask for.
        steps = ops.full(k, 1, "int64")
        for j in range(planes):
            steps = ops.add_(steps, ops.shift_left(ops.unpack(padded[j * m : (j + 1) * m], 1, k), j))
        return ops.cast(ops.cumsum(steps) - 1, "int32")

    def bitmap() -> Array:
        bits = ops.unpack(data, 1, below)
        error = PayloadError(
            "indices: expected as many bits of the bitmap as the header says, received another number; "
            "the payload is damaged."
        )
        # Not the length of the result, which TensorFlow's graph optimizer infers from the other branches.
        fits = ops.sum(bits) == ops.full(1, k, "int64")[0]
        return ops.nonzero(ops.require(fits, error, bits) > 0)

    tag = ops.bit_and(word, 3)
    return ops.choose(
        tag == _INT32, lambda: ops.from_bytes(data, "int32"), lambda: ops.choose(tag == _DELTA, delta, bitmap)
    )
