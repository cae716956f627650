"""Integers that are added on the way: as many share a 32-bit word as the bits of their sum over all ranks allow.

Horovod adds integers of 32 and 64 bits in every framework, of 8 bits only in TensorFlow, of 16 bits in none. A word
with the integers c_0, c_1, ... in lanes of b bits is c_0 + 2^b c_1 + 2^2b c_2 + ..., so the sum of words is the word of
sums. It is exact, and no sum on the way overflows, if every lane holds the magnitude of the largest sum and a sign.
"""

from __future__ import annotations

from collections.abc import Sequence

from grace.core.ops.composites import ArrayOps
from grace.core.values.spec import Array, Field

_WORD = 32
# The largest magnitude of a sum.
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


def pack(ops: ArrayOps, x: Array, n: int, lanes: int) -> Array:
    """Return n integers as words (int32)."""
    bits, count = _WORD // lanes, words(n, lanes)
    x = ops.cast(x, "int32")
    if n < lanes * count:
        x = ops.concat([x, ops.zeros(lanes * count - n, "int32")])
    word = x[(lanes - 1) * count :]
    for lane in reversed(range(lanes - 1)):
        word = word * 2**bits + x[lane * count : (lane + 1) * count]
    return word


def unpack(ops: ArrayOps, word: Array, n: int, lanes: int) -> Array:
    """Return the n integers in a sum of words (int32)."""
    bits, found = _WORD // lanes, []
    half = 2 ** (bits - 1)
    for _ in range(lanes - 1):
        # With half a lane added, the lowest integer is not negative and borrows nothing from the next.
        low = ops.bit_and(word + half, 2**bits - 1) - half
        found.append(low)
        word = ops.shift_right(word - low, bits)
    return ops.concat([*found, word])[:n] if found else word
