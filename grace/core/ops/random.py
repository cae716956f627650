"""Counter-based random numbers and hashes over the array operations: the same bits in every framework.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A block of four
words is a pure function of (key, counter), so there is no state and no global generator: counter = (block, step,
stream, rank), key = the tensor's 64-bit seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from grace.core.spec import Array, Key

if TYPE_CHECKING:
    from grace.core.ops.composites import ArrayOps

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_FEISTEL_ROUNDS = 8
# Streams below this number are free for compressors; `sample` draws its round keys from above it.
_SAMPLE_STREAM = 1 << 16


def philox(
    ops: ArrayOps, counter: tuple[Array, Array, Array, Array], key: tuple[int, int]
) -> tuple[Array, Array, Array, Array]:
    """Return four int64 arrays of 32-bit words from four counters and two key words, by Philox4x32-10."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The low 64 bits of the product are right although int64 wraps; the mask drops the sign of the shift.
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        high0 = ops.bit_and(ops.shift_right(p0, 32), MASK)
        high1 = ops.bit_and(ops.shift_right(p1, 32), MASK)
        c0, c1, c2, c3 = (
            ops.bit_xor(ops.bit_xor(high1, c1), k0),
            ops.bit_and(p1, MASK),
            ops.bit_xor(ops.bit_xor(high0, c3), k1),
            ops.bit_and(p0, MASK),
        )
        k0 = (k0 + _WEYL[0]) & MASK
        k1 = (k1 + _WEYL[1]) & MASK
    return c0, c1, c2, c3


def words(ops: ArrayOps, n: int, key: Key, stream: int = 0) -> Array:
    """Return `n` random 32-bit words as int64; word i is lane i % 4 of block i // 4."""
    blocks = -(-n // 4)
    counter = (
        ops.arange(blocks, "int64"),
        ops.full(blocks, key.step & MASK, "int64"),
        ops.full(blocks, stream, "int64"),
        ops.full(blocks, key.rank, "int64"),
    )
    low, high = ops.bit_and(key.seed, MASK), ops.bit_and(ops.shift_right(key.seed, 32), MASK)
    lanes = philox(ops, counter, (low, high))
    return ops.reshape(ops.stack(lanes, axis=1), (4 * blocks,))[:n]


def uniform(ops: ArrayOps, n: int, key: Key, stream: int = 0) -> Array:
    """Return `n` float32 numbers in [0, 1), multiples of 2^-24."""
    return ops.cast(ops.shift_right(ops.words(n, key, stream), 8), "float32") * 2.0**-24


def sample(ops: ArrayOps, n: int, k: int, key: Key, stream: int = 0) -> Array:
    """Return `k` distinct indices of range(n) as int32, in random order; costs O(k), not O(n).

    Index i is the image of i under a keyed Feistel permutation of the next power of two, walked along its cycle until
    it falls below n (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    """
    bits = max(2, (n - 1).bit_length())
    low = bits // 2
    low_mask, high_mask = (1 << low) - 1, (1 << (bits - low)) - 1
    round_keys = ops.words(_FEISTEL_ROUNDS, key, stream + _SAMPLE_STREAM)

    def permute(index: Array) -> Array:
        left, right = ops.bit_and(index, low_mask), ops.shift_right(index, low)
        for r in range(0, _FEISTEL_ROUNDS, 2):
            left = ops.bit_xor(left, ops.bit_and(mix(ops, right, round_keys[r]), low_mask))
            right = ops.bit_xor(right, ops.bit_and(mix(ops, left, round_keys[r + 1]), high_mask))
        return left + ops.shift_left(right, low)

    index = ops.while_loop(
        lambda i: ops.any(i >= n),
        lambda i: ops.where(i >= n, permute(i), i),
        permute(ops.arange(k, "int64")),
    )
    return ops.cast(index, "int32")


def mix(ops: ArrayOps, value: Array, key: Array) -> Array:
    """Return a 32-bit word that depends on all bits of a value and a key below 2^32: integers or int64 arrays.

    It is the finalizer of MurmurHash3.
    """
    h = ops.bit_and(value * 0x9E3779B1 + key, MASK)
    h = ops.bit_xor(h, ops.shift_right(h, 16))
    h = ops.bit_and(h * 0x85EBCA6B, MASK)
    h = ops.bit_xor(h, ops.shift_right(h, 13))
    h = ops.bit_and(h * 0xC2B2AE35, MASK)
    return ops.bit_xor(h, ops.shift_right(h, 16))


def hash_words(ops: ArrayOps, items: Array, count: int, key: Key) -> list[Array]:
    """Return for each of `hash_functions` one 32-bit word per int64 item."""
    return [function(items) for function in hash_functions(ops, count, key)]


def hash_functions(ops: ArrayOps, count: int, key: Key) -> list[Callable[[Array], Array]]:
    """Return functions of int64 items whose 32-bit words are the upper half of a * item + b modulo 2^64.

    a and b are drawn from the key, so the words of two different items below 2^32 are independent (multiply-shift;
    Dietzfelbinger, "Universal hashing and k-wise independent random variables", STACS 1996).
    """
    parts = ops.reshape(ops.cast(ops.uniform(6 * count, key) * 2.0**24, "int64"), (2 * count, 3))
    high, middle = ops.shift_left(parts[:, 0], 40), ops.shift_left(parts[:, 1], 16)
    drawn = ops.bit_xor(ops.bit_xor(high, middle), ops.shift_right(parts[:, 2], 8))

    def word(items: Array, i: int) -> Array:
        # Products wrap around on purpose.
        return ops.bit_and(ops.shift_right(items * drawn[2 * i] + drawn[2 * i + 1], 32), MASK)

    return [functools.partial(word, i=i) for i in range(count)]
