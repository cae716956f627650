"""Huffman's code of a field's symbols, with words of at most 12 bits.

    lengths of the words, 4 bits per symbol of the alphabet | words, the first bit of each first

The words are canonical: shorter ones first, and among those of one length the lower symbol. So the lengths say all. The
lengths are the best ones of at most 12 bits (the package-merge algorithm). A field of only one symbol takes a bit per
symbol, so coded bytes decode to at most 8 times as many.

Reference: Huffman, "A method for the construction of minimum-redundancy codes", Proceedings of the IRE, 1952; Larmore
and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", Journal of the ACM, 1990.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grace.core.errors import PayloadError
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array
from grace.core.wire.symbols import as_size, bytes_of, counts_of, number, on_cpu, symbol_count, symbols_of

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# The most bits of a word.
LONGEST = 12
# More than any field has symbols; sums of it and an item's number below 2^10 fit into 64 bits.
_ABSENT = 1 << 40
_DAMAGED = (
    "huffman: expected lengths of a complete code, and words that end where the bytes end, received others; the "
    "payload is damaged."
)


def _lengths(ops: ArrayOps, counts: Array, bits: int) -> Array:
    """Return the lengths of the words of all symbols; 0 for symbols that do not occur."""
    size = 1 << bits
    present = counts > 0
    # Weight and number in one integer: ties are broken by the number, leaves before packages.
    leaves = ops.sort(ops.where(present, counts, _ABSENT) * 1024 + ops.arange(size, "int64"))
    level, is_leaf = leaves, []
    for _ in range(LONGEST):
        is_leaf.append(ops.bit_and(level, 1023) < 512)
        pairs = ops.length(level) // 2
        weights = ops.sum(ops.reshape(ops.shift_right(level, 10)[: 2 * pairs], (pairs, 2)), axis=1)
        packages = ops.clip(weights, 0, _ABSENT) * 1024 + 512 + ops.arange(pairs, "int64")
        level = ops.sort(ops.concat([leaves, packages]))
    used = ops.sum(ops.cast(present, "int64"))
    ranks, by_rank = ops.arange(size, "int64"), ops.cast(present, "int64") * 0
    taken = 2 * used - 2
    for flags in reversed(is_leaf):
        first = ops.arange(ops.length(flags), "int64") < taken
        of_leaves = ops.sum(ops.cast(ops.bit_and(flags, first), "int64"))
        by_rank = by_rank + ops.cast(ranks < of_leaves, "int64")
        taken = 2 * (taken - of_leaves)
    by_symbol = ops.scatter_add_(ops.zeros(size, "int64"), ops.cast(ops.bit_and(leaves, 1023), "int32"), by_rank)
    return ops.where(used == 1, ops.cast(present, "int64"), by_symbol)


def _canonical(ops: ArrayOps, lengths: Array, bits: int) -> tuple[Array, Array, Array, Array]:
    """Return the symbols in the order of their words, their lengths, and where their windows begin and end.

    A window has the next 12 bits of a stream; each word has those that begin with it.
    """
    size = 1 << bits
    keys = ops.sort(ops.where(lengths > 0, lengths, 64) * 1024 + ops.arange(size, "int64"))
    ordered, length = ops.bit_and(keys, 1023), ops.shift_right(keys, 10)
    windows = ops.shift_left(ops.full(size, 1, "int64"), LONGEST - ops.clip(length, 0, LONGEST))
    windows = ops.where(length <= LONGEST, windows, 0)
    ends = ops.cumsum(windows)
    return ordered, ops.where(length <= LONGEST, length, 0), ends - windows, ends


@composite()
def huffman_encode(ops: ArrayOps, data: Array, bits: int) -> Array:
    """Return the coded form of bytes that consist of symbols of 3 to 8 bits."""
    size, symbols = 1 << bits, symbols_of(ops, data, bits)
    lengths = _lengths(ops, counts_of(ops, symbols, bits), bits)
    ordered, _, begins, _ = _canonical(ops, lengths, bits)
    words = ops.scatter_add_(ops.zeros(size, "int64"), ops.cast(ordered, "int32"), begins)
    places = ops.cast(symbols, "int32")
    ends = ops.cumsum(ops.gather(lengths, places))
    bit = ops.arange(as_size(ops, ops.max(ends)), "int64")
    owner = ops.search_sorted(ends, bit)
    starts = ends - ops.gather(lengths, places)
    mine = ops.gather(ops.gather(words, places), owner)
    stream = ops.bit_and(ops.shift_right(mine, LONGEST - 1 - (bit - ops.gather(starts, owner))), 1)
    return ops.concat([ops.pack(lengths, 4), ops.pack(stream, 1)])


@huffman_encode.kernel()
def _(ops: Native, data: Array, bits: int) -> Array | None:
    if not on_cpu(ops, data):
        return None
    return ops.run("huffman_encode", [data], [bits], outputs=["uint8"], lengths=[None])[0]


@composite()
def huffman_decode(ops: ArrayOps, coded: Array, bits: int, n: Any) -> Array:
    """Return the n bytes, at least one, of `huffman_encode`. Raises PayloadError if they are no such code."""
    table, count = 1 << (bits - 1), symbol_count(n, bits)
    error = PayloadError(_DAMAGED)
    coded = ops.require(number(ops, ops.length(coded)) >= table, error, coded)
    lengths = ops.unpack(coded[:table], 4, 2 * table)
    ordered, length, _, ends = _canonical(ops, lengths, bits)
    used = ops.sum(ops.cast(lengths > 0, "int64"))
    full = ops.bit_and(ops.max(lengths) <= LONGEST, ops.max(ends) == 1 << LONGEST)
    alone = ops.bit_and(used == 1, ops.max(lengths) == 1)
    stream = ops.require(ops.bit_or(full, alone), error, coded[table:])
    total = 8 * ops.length(stream)
    there = ops.concat([ops.unpack(stream, 1, total), ops.zeros(LONGEST, "int64")])
    windows = ops.shift_left(there[: total + 1], LONGEST - 1)
    for j in range(1, LONGEST):
        windows = windows + ops.shift_left(there[j : j + total + 1], LONGEST - 1 - j)
    # Of a single word, every window is the first.
    rank = ops.cast(ops.clip(ops.cast(ops.search_sorted(ends, windows), "int64"), 0, used - 1), "int32")
    after = ops.arange(total + 1, "int64") + ops.gather(length, rank)
    # Where each word begins: twice as many words per round, by jumps over twice as many.
    jump = ops.cast(ops.clip(after, 0, number(ops, total)), "int32")
    begins = ops.zeros(1, "int32")
    for _ in range((count - 1).bit_length() if isinstance(count, int) else 31):
        begins = ops.concat([begins, ops.gather(jump, begins)])[:count]
        jump = ops.gather(jump, jump)
    end = ops.gather(after, begins[count - 1 : count])[0]
    good = ops.shift_right(end + 7, 3) == number(ops, ops.length(stream))
    # A word that would begin at the end of the bytes lacks all of its bits.
    good = ops.bit_and(good, ops.cast(begins[count - 1], "int64") < number(ops, total))
    good = ops.bit_and(good, end <= number(ops, total))
    symbols = ops.gather(ops.gather(ordered, rank), ops.require(good, error, begins))
    return bytes_of(ops, symbols, bits, n)


@huffman_decode.kernel()
def _(ops: Native, coded: Array, bits: int, n: Any) -> Array | None:
    if not on_cpu(ops, coded):
        return None
    return ops.run("huffman_decode", [coded], [bits, n], outputs=["uint8"], lengths=[n])[0]
