"""Bit planes of a field's symbols, without the blocks of 16 bytes that are zero (the scheme of FZ-GPU).

    the most frequent symbol | which blocks are not zero, a bit each | these blocks

A symbol counts as its distance from the most frequent one, small distances first: 0, -1, 1, -2 and so on. So the high
planes are mostly zero. A plane is filled up to whole blocks. Coded bytes decode to at most 128 times as many.

Reference: Zhang et al., "FZ-GPU: a fast and high-ratio lossy compressor for scientific computing applications on GPUs",
HPDC 2023, whose quantizer and predictor are left to the method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grace.core.errors import PayloadError
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array
from grace.core.wire.symbols import (
    bytes_of,
    counts_of,
    most_frequent,
    number,
    on_cpu,
    symbol_count,
    symbols_of,
)

if TYPE_CHECKING:
    from grace.core.ops.native import Native

_BLOCK = 16
_DAMAGED = "bitshuffle: expected as many blocks as the flags say, received another number; the payload is damaged."


def _blocks(count: Any) -> Any:
    """Return the number of blocks of one plane."""
    return (count + 8 * _BLOCK - 1) // (8 * _BLOCK)


@composite()
def bitshuffle_encode(ops: ArrayOps, data: Array, bits: int) -> Array:
    """Return the coded form of bytes that consist of symbols of 1 to 8 bits."""
    size, symbols = 1 << bits, symbols_of(ops, data, bits)
    most = most_frequent(ops, counts_of(ops, symbols, bits))
    apart = ops.bit_and(symbols - most + size, size - 1)
    folded = ops.where(apart < size // 2, 2 * apart, 2 * (size - apart) - 1)
    count = ops.length(symbols)
    each = _blocks(count)
    rows = ops.reshape(ops.concat([folded, ops.zeros(8 * _BLOCK * each - count, "int64")]), (1, -1))
    planes = ops.bit_and(ops.shift_right(rows, ops.reshape(ops.arange(bits, "int64"), (bits, 1))), 1)
    packed = ops.pack(ops.reshape(planes, (-1,)), 1)
    there = ops.max(ops.reshape(ops.cast(packed, "int64"), (bits * each, _BLOCK)), axis=1) > 0
    kept = ops.nonzero(_per_byte(ops, ops.cast(there, "int64"), bits * each) > 0)
    flags = ops.pack(ops.cast(there, "int64"), 1)
    return ops.concat([ops.cast(ops.reshape(most, (1,)), "uint8"), flags, ops.gather(packed, kept)])


def _per_byte(ops: ArrayOps, of_blocks: Array, blocks: Any) -> Array:
    """Return of each byte what its block has."""
    owner = ops.arange(blocks * _BLOCK, "int64") // _BLOCK
    return ops.gather(of_blocks, ops.cast(owner, "int32"))


@bitshuffle_encode.kernel()
def _(ops: Native, data: Array, bits: int) -> Array | None:
    if not on_cpu(ops, data):
        return None
    return ops.run("bitshuffle_encode", [data], [bits], outputs=["uint8"], lengths=[None])[0]


@composite()
def bitshuffle_decode(ops: ArrayOps, coded: Array, bits: int, n: Any) -> Array:
    """Return the n bytes of `bitshuffle_encode`. Raises PayloadError if they are no such code."""
    size, count, error = 1 << bits, symbol_count(n, bits), PayloadError(_DAMAGED)
    each = _blocks(count)
    blocks = bits * each
    begin = 1 + (blocks + 7) // 8
    coded = ops.require(number(ops, ops.length(coded)) >= number(ops, begin), error, coded)
    there = ops.unpack(coded[1:begin], 1, blocks)
    good = ops.sum(there) * _BLOCK == number(ops, ops.length(coded) - begin)
    there = ops.require(good, error, there)
    places = ops.nonzero(_per_byte(ops, there, blocks) > 0)
    packed = ops.scatter_add_(ops.zeros(blocks * _BLOCK, "int64"), places, ops.cast(coded[begin:], "int64"))
    planes = ops.reshape(ops.unpack(ops.cast(packed, "uint8"), 1, blocks * _BLOCK * 8), (bits, -1))
    folded = ops.sum(ops.shift_left(planes, ops.reshape(ops.arange(bits, "int64"), (bits, 1))), axis=0)[:count]
    odd = ops.bit_and(folded, 1)
    apart = ops.where(odd > 0, -ops.shift_right(folded + 1, 1), ops.shift_right(folded, 1))
    symbols = ops.bit_and(apart + ops.cast(coded[:1], "int64") + size, size - 1)
    return bytes_of(ops, symbols, bits, n)


@bitshuffle_decode.kernel()
def _(ops: Native, coded: Array, bits: int, n: Any) -> Array | None:
    if not on_cpu(ops, coded):
        return None
    return ops.run("bitshuffle_decode", [coded], [bits, n], outputs=["uint8"], lengths=[n])[0]
