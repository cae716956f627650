"""Lossless coding of 3LC: five ternary digits per byte, and runs of zeros in one byte, over the primitives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grace.core.values.errors import PayloadError
from grace.core.values.spec import Array

if TYPE_CHECKING:
    from grace.core.ops.base import Primitives

DIGITS = 5
POWERS = (81, 27, 9, 3, 1)
# Five zeros, written as the digits 1 1 1 1 1; bytes above 242 stand for 2 to 14 of this one.
ZERO_BYTE = 121
FIRST_RUN = 243
LONGEST_RUN = 14


def coded_size(n: int) -> int:
    """Return the bytes of n ternary digits before the coding of runs."""
    return -(-n // DIGITS)


def to_bytes(ops: Primitives, digits: Array) -> Array:
    """Return one number 0 to 242 (int64) per five digits 0 to 2 (int64), most significant first, padded with ones."""
    n = ops.length(digits)
    filled = ops.concat([digits, ops.full(DIGITS * coded_size(n) - n, 1, "int64")])
    columns = ops.reshape(filled, (coded_size(n), DIGITS))
    value = columns[:, 0] * POWERS[0]
    for j in range(1, DIGITS):
        value = value + columns[:, j] * POWERS[j]
    return value


def from_bytes(ops: Primitives, values: Array, n: int) -> Array:
    """Return the n digits of to_bytes."""
    columns = ops.stack([values // power % 3 for power in POWERS], axis=1)
    return ops.reshape(columns, (DIGITS * coded_size(n),))[:n]


def encode_runs(ops: Primitives, values: Array) -> Array:
    """Replace runs of 2 to 14 times ZERO_BYTE by one code each (uint8); split longer runs after every 14."""
    n = ops.length(values)
    zero = ops.cast(values == ZERO_BYTE, "int64")
    before = ops.concat([ops.zeros(1, "int64"), zero])[:n]
    first = zero * (1 - before)
    # The start of the run that contains an element; not used outside of runs.
    starts = ops.concat([ops.zeros(1, "int32"), ops.nonzero(first > 0)])
    offset = ops.arange(n, "int32") - ops.gather(starts, ops.cumsum(first))
    heads = ops.nonzero(ops.bit_or(zero == 0, offset % LONGEST_RUN == 0))
    # A head covers the elements up to the next head; outside of runs this is one element.
    ends = ops.concat([heads, ops.full(1, n, "int32")])[1:]
    reach = ops.cast(ends - heads, "int64")
    return ops.cast(ops.where(reach > 1, reach + (FIRST_RUN - 2), ops.gather(values, heads)), "uint8")


def decode_runs(ops: Primitives, codes: Array, n: int) -> Array:
    """Return the n numbers (int64) of encode_runs. Raises PayloadError if the codes give another count."""
    wide = ops.cast(codes, "int64")
    reach = ops.where(wide >= FIRST_RUN, wide - (FIRST_RUN - 2), 1)
    error = PayloadError(
        f"3lc: expected codes for {n} bytes of digits, received codes for another number; the payload is damaged."
    )
    reach = ops.require(ops.sum(reach) == n, error, reach)
    starts = ops.cast(ops.cumsum(reach) - reach, "int32")
    rest = ops.where(wide >= FIRST_RUN, 0, wide - ZERO_BYTE)
    return ops.scatter_add_(ops.full(n, ZERO_BYTE, "int64"), starts, rest)
