"""Run lengths of a field's most frequent byte.

    the most frequent byte | a byte per other byte, combined with the most frequent one by exclusive or, which is not 0;
    per run of 1 to 255 of the most frequent one a 0, and the length

Longer runs are several. Coded bytes decode to at most 127.5 times as many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grace.core.errors import PayloadError
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array
from grace.core.wire.symbols import as_size, counts_of, most_frequent, number, on_cpu

if TYPE_CHECKING:
    from grace.core.ops.native import Native

_LONGEST = 255
_DAMAGED = (
    "run_length: expected runs of 1 to 255 bytes and as many bytes as the header says, received others; the payload is "
    "damaged."
)


@composite()
def run_length_encode(ops: ArrayOps, data: Array) -> Array:
    """Return the coded form of bytes."""
    n, wide = ops.length(data), ops.cast(data, "int64")
    most = most_frequent(ops, counts_of(ops, wide, 8))
    x = ops.bit_xor(wide, most)
    place, other = ops.arange(n, "int64"), x > 0
    others = ops.cast(ops.nonzero(other), "int64")
    # Of each byte, the places of the last other byte before it and of the next one: its run lies between them.
    before = ops.cast(ops.cumsum(ops.cast(other, "int64")), "int32")
    last = ops.gather(ops.concat([ops.full(1, -1, "int64"), others]), before)
    following = ops.gather(ops.concat([others, ops.full(1, n, "int64")]), before)
    in_run = place - last - 1
    begins = ops.bit_and(~other, in_run - in_run // _LONGEST * _LONGEST == 0)
    ends = ops.cumsum(ops.cast(other, "int64") + 2 * ops.cast(begins, "int64"))
    out = ops.zeros(as_size(ops, ops.max(ends)), "int64")
    runs = ops.nonzero(begins)
    counts = ops.clip(following - place, 0, _LONGEST)
    singles = ops.cast(others, "int32")
    out = ops.scatter_add_(out, ops.cast(ops.gather(ends, singles) - 1, "int32"), ops.gather(x, singles))
    out = ops.scatter_add_(out, ops.cast(ops.gather(ends, runs) - 1, "int32"), ops.gather(counts, runs))
    return ops.cast(ops.concat([ops.reshape(most, (1,)), out]), "uint8")


@run_length_encode.kernel()
def _(ops: Native, data: Array) -> Array | None:
    if not on_cpu(ops, data):
        return None
    return ops.run("run_length_encode", [data], outputs=["uint8"], lengths=[None])[0]


@composite()
def run_length_decode(ops: ArrayOps, coded: Array, n: Any) -> Array:
    """Return the n bytes, at least one, of `run_length_encode`. Raises PayloadError if they are no such code."""
    error = PayloadError(_DAMAGED)
    coded = ops.require(number(ops, ops.length(coded)) >= 2, error, coded)
    most, rest = ops.cast(coded[:1], "int64"), ops.cast(coded[1:], "int64")
    marks = rest == 0
    shifted = ops.concat([ops.zeros(1, "int64"), ops.cast(marks, "int64")])
    is_length = shifted[: ops.length(rest)] > 0
    single = ops.bit_and(~marks, ~is_length)
    ends = ops.cumsum(ops.where(is_length, rest, ops.cast(single, "int64")))
    # A run without a length, or of none.
    bad = ops.bit_or(ops.any(ops.bit_and(marks, is_length)), shifted[ops.length(rest)] > 0)
    good = ops.bit_and(~bad, ops.max(ends) == number(ops, n))
    ends = ops.require(good, error, ends)
    singles = ops.nonzero(single)
    places = ops.cast(ops.gather(ends, singles) - 1, "int32")
    out = ops.scatter_add_(ops.zeros(n, "int64"), places, ops.gather(rest, singles))
    return ops.cast(ops.bit_xor(out, most), "uint8")


@run_length_decode.kernel()
def _(ops: Native, coded: Array, n: Any) -> Array | None:
    if not on_cpu(ops, coded):
        return None
    return ops.run("run_length_decode", [coded], [n], outputs=["uint8"], lengths=[n])[0]
