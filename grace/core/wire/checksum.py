"""Checksum of a wire buffer: 64 bits that are the same in every framework, from array operations alone.

The buffer is read as 32-bit words, with signs, in rows of 1,024. The checksum is

    sum_r b_r (sum_j a_j w_rj)   modulo 2^64,

where the weights a_j of the columns and b_r of the rows are fixed odd numbers that look random. The product of two odd
numbers is odd, so every change of one word changes the checksum, which includes every damaged bit and byte. Other
damage, such as exchanged words, goes unnoticed with probability 2^-64, or 2^-32 if only the signs of words differ. It
protects from accidents, not from forgery: the weights are known.
"""

from __future__ import annotations

from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array

CHECKSUM_BYTES = 8
_COLUMNS = 1024
# Rows that are multiplied at a time: their products, 8 bytes each, stay in a cache.
_ROWS = 64
# Odd constants of MurmurHash3's and splitmix64's finalizers, as signed integers.
_STEP, _MIX = -0x61C8864680B583EB, -0x40A7B892E31B1A47


def checksum(ops: ArrayOps, data: Array) -> Array:
    """Return the checksum of a uint8 array, whose length is a multiple of 4, as an int64 array of one element."""
    words = ops.from_bytes(data, "int32")
    n = ops.length(words)
    rows = n // _COLUMNS
    columns = ops.constant("columns of a checksum", lambda: _weights(ops, _COLUMNS))

    def row_sums(start: int, stop: int) -> Array:
        block = ops.reshape(words[start * _COLUMNS : stop * _COLUMNS], (-1, _COLUMNS))
        return ops.wrapping_sum(ops.cast(block, "int64") * columns, axis=1)

    # A graph is one pass over all rows, whose number it may learn only when it runs.
    starts = (0,) if ops.dynamic_shapes else range(0, rows, _ROWS)
    sums = [row_sums(start, rows if ops.dynamic_shapes else min(start + _ROWS, rows)) for start in starts]
    rest = words[rows * _COLUMNS :]
    sums.append(ops.wrapping_sum(ops.cast(rest, "int64") * columns[: n - rows * _COLUMNS]))
    # Small arrays are frequent, and to make their one weight takes longer than the rest.
    of_rows = (
        ops.constant("row of a checksum", lambda: _weights(ops, 1, _COLUMNS))
        if isinstance(rows, int) and not rows
        else _weights(ops, rows + 1, _COLUMNS)
    )
    return ops.reshape(ops.wrapping_sum(ops.concat(sums) * of_rows), (1,))


def _weights(ops: ArrayOps, n: int, first: int = 0) -> Array:
    """Return the weights `first` to `first + n - 1`: odd int64 numbers, as splitmix64 would draw them."""
    x = (ops.arange(n, "int64") + (first + 1)) * _STEP
    # Shifts keep the sign here; the mask makes this one the shift of an unsigned number.
    x = ops.bit_xor(x, ops.bit_and(ops.shift_right(x, 30), (1 << 34) - 1)) * _MIX
    x = ops.bit_xor(x, ops.bit_and(ops.shift_right(x, 27), (1 << 37) - 1))
    return ops.bit_or(x, 1)
