"""Compact coding of ascending keys, for sketches."""

from __future__ import annotations

from grace.core.errors import PayloadError
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array


def encode_keys(ops: ArrayOps, keys: Array) -> tuple[Array, Array]:
    """Return ascending int64 keys as differences: the byte count of each less one, in 2 bits, and the bytes."""
    before = ops.concat([ops.zeros(1, "int64"), keys])[: ops.length(keys)]
    steps = keys - before
    more = [ops.cast(steps >= 1 << (8 * j), "int64") for j in (1, 2, 3)]
    widths = more[0] + more[1] + more[2] + 1
    starts = ops.cumsum(widths) - widths
    data = ops.zeros(ops.size(ops.sum(widths)), "int64")
    for j in range(4):
        wide = ops.nonzero(widths > j)
        bytes_ = ops.bit_and(ops.shift_right(ops.gather(steps, wide), 8 * j), 255)
        data = ops.scatter_add_(data, ops.cast(ops.gather(starts, wide) + j, "int32"), bytes_)
    return ops.pack(widths - 1, 2), ops.cast(data, "uint8")


def decode_keys(ops: ArrayOps, widths: Array, data: Array, count: int) -> Array:
    """Return the `count` keys of encode_keys. Raises PayloadError if the bytes are not those of `count` keys."""
    error = PayloadError(
        "keys: expected as many bytes as their widths say, received another number; the payload is damaged."
    )
    # A count below 0 may round up to no bytes.
    fits = ops.bit_and(count >= 0, ops.length(widths) == packed_size(count, 2))
    widths = ops.require(fits, error, widths)
    wide = ops.unpack(widths, 2, count) + 1
    wide = ops.require(ops.sum(wide) == ops.full(1, ops.length(data), "int64")[0], error, wide)
    starts = ops.cumsum(wide) - wide
    # Four bytes from every start; bytes of the next key are masked.
    padded = ops.cast(ops.concat([data, ops.zeros(3, "uint8")]), "int64")
    steps = ops.zeros(count, "int64")
    for j in range(4):
        byte = ops.gather(padded, ops.cast(starts + j, "int32"))
        steps = ops.bit_or(steps, ops.shift_left(ops.where(wide > j, byte, 0), 8 * j))
    return ops.cumsum(steps)
