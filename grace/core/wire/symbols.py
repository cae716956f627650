"""Symbols of entropy coders: the packed codes in a field's bytes, or the bytes themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array

if TYPE_CHECKING:
    from grace.core.ops.native import Native


def symbol_bits(bits: int) -> int:
    """Return the width of the symbols of packed codes: codes that straddle bytes stay whole, others share bytes."""
    return 8 if bits > 8 or 8 % bits == 0 else bits


def symbol_count(n: Any, bits: int) -> Any:
    """Return the number of symbols in n bytes."""
    return (8 * n + bits - 1) // bits


def symbols_of(ops: ArrayOps, data: Array, bits: int) -> Array:
    """Return the symbols of bytes, as int64; the last one is filled up with zero bits."""
    n = ops.length(data)
    count = symbol_count(n, bits)
    return ops.unpack(ops.concat([data, ops.zeros(packed_size(count, bits) - n, "uint8")]), bits, count)


def bytes_of(ops: ArrayOps, symbols: Array, bits: int, n: Any) -> Array:
    """Return the n bytes of the symbols."""
    return ops.pack(symbols, bits)[:n]


def counts_of(ops: ArrayOps, symbols: Array, bits: int) -> Array:
    """Return how often each of the 2^bits symbols occurs, as int64."""
    ones = ops.full(ops.length(symbols), 1, "float64")
    return ops.cast(ops.segment_sum(ones, ops.cast(symbols, "int32"), 1 << bits), "int64")


def most_frequent(ops: ArrayOps, counts: Array) -> Array:
    """Return the most frequent symbol as a 0-d int64 array; of equally frequent ones the lowest."""
    size = ops.length(counts)
    best = ops.max(counts * size + (size - 1 - ops.arange(size, "int64")))
    return size - 1 - ops.bit_and(best, size - 1)


def number(ops: ArrayOps, n: Any) -> Array:
    """Return a length as a 0-d int64 array, for conditions that a graph can trace."""
    return ops.full(1, n, "int64")[0]


def as_size(ops: ArrayOps, n: Array) -> Any:
    """Return a 0-d integer array as a size for slices."""
    return ops.size(ops.cast(n, "int32"))


def on_cpu(ops: Native, data: Array) -> bool:
    """Return whether kernels serve these bytes: coders of one stream run on the CPU."""
    return ops.device.startswith("cpu") and ops.kind(data) == "uint8" and len(data.shape) == 1
