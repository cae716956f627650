"""Integers that are added on the way: as many share a 32-bit word as the bits of their sum over all ranks allow.

Every library of collectives adds integers of 32 bits, but not all add shorter ones. A word with the integers c_0, c_1,
... in lanes of b bits is c_0 + 2^b c_1 + 2^2b c_2 + ..., so the sum of words is the word of sums. It is exact, and no
sum on the way overflows, if every lane holds the magnitude of the largest sum and a sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Field

if TYPE_CHECKING:
    from grace.core.ops.native import Native

_WORD = 32
#: The largest magnitude of a sum of integers, which travels in words of 32 bits.
MOST = 2 ** (_WORD - 1) - 1


def in_lanes(fields: Sequence[Field], ranks: int) -> tuple[Field, ...]:
    """Return the fields as they travel in a sum over `ranks` ranks."""
    return tuple(f if f.most is None else f._replace(lanes=lanes(f.most * ranks)) for f in fields)


def lanes(most: int) -> int:
    """Return how many integers of at most this magnitude share a word; 1 if it is beyond `MOST`."""
    return max(1, _WORD // (most.bit_length() + 1))


def words(n: int, lanes: int) -> int:
    """Return the number of words that hold n integers."""
    return -(-n // lanes)


def dtype_of(lanes: int) -> str:
    """Return the dtype of the integers taken out of words: the narrowest that holds them."""
    return "int8" if lanes >= 4 else "int16" if lanes > 1 else "int32"


@composite(one_graph=True)
def pack_lanes(ops: ArrayOps, x: Array, n: int, lanes: int) -> Array:
    """Return n integers as words (int32): lane l of word i holds element l * words + i, or zero beyond the end."""
    bits, count = _WORD // lanes, words(n, lanes)
    x = ops.cast(x, "int32")
    if n < lanes * count:
        x = ops.concat([x, ops.zeros(lanes * count - n, "int32")])
    word = x[(lanes - 1) * count :]
    for lane in reversed(range(lanes - 1)):
        word = word * 2**bits + x[lane * count : (lane + 1) * count]
    return word


@pack_lanes.kernel()
def _(ops: Native, x: Array, n: int, lanes: int) -> Array | None:
    return ops.run("pack_lanes", [x], [lanes], outputs=["int32"], lengths=[words(n, lanes)])[0]


@composite(one_graph=True)
def unpack_lanes(ops: ArrayOps, word: Array, n: int, lanes: int) -> Array:
    """Return the n integers in a sum of words (int8 from four lanes on, int16 from two on, else int32)."""
    bits = _WORD // lanes
    half = 2 ** (bits - 1)
    # With half a lane added to each but the last, none of them is negative, so none borrows from the next.
    word = word + sum(half << lane * bits for lane in range(lanes - 1))
    found = [ops.bit_and(ops.shift_right(word, lane * bits), 2**bits - 1) - half for lane in range(lanes - 1)]
    last = ops.shift_right(word, (lanes - 1) * bits)
    return ops.cast(ops.concat([*found, last])[:n], dtype_of(lanes))


@unpack_lanes.kernel()
def _(ops: Native, word: Array, n: int, lanes: int) -> Array | None:
    return ops.run("unpack_lanes", [word], [lanes, n], outputs=[dtype_of(lanes)], lengths=[n])[0]
