"""Range asymmetric numeral systems (rANS) of a field's symbols: within a few bytes of their entropy.

    which symbols occur, a bit each | their frequencies minus 1, 16 bits each | states | words, 16 bits each

Frequencies are multiples of 2^-15. Four lanes per 16,384 symbols take turns, so that a processor works on several at
once: lane j of L has the symbols j, j + L, j + 2 L and so on. A lane is a state of 32 bits, which takes a word from the
stream when it falls below 2^16. Numbers of 16 bits are packed as codes are: all low bytes, then all high bytes.

The states bound what coded bytes can decode to: 1,024 times as many.

Reference: Duda, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression rate of
arithmetic coding", arXiv:1311.2540, 2013; Giesen, "Interleaved entropy coders", arXiv:1402.3392, 2014.
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

_SCALE = 15
# A state lies between this and 2^32; where it starts is where it must end.
_LEAST = 1 << 16
_PER_LANES, _LANES = 16384, 4
_DAMAGED = (
    "rans: expected frequencies that add up to 32768, and states that return to their start when the words are used "
    "up, received others; the payload is damaged."
)


def _lanes(count: Any) -> Any:
    return _LANES * ((count + _PER_LANES - 1) // _PER_LANES)


def _frequencies(ops: ArrayOps, counts: Array, bits: int) -> Array:
    """Return the frequencies of all symbols: at least 1 if they occur, 2^15 in all."""
    size, present = 1 << bits, ops.cast(counts > 0, "int64")
    total, used = ops.clip(ops.sum(counts), 1, 1 << 62), ops.sum(present)
    scaled = present * (1 + counts * ((1 << _SCALE) - used) // total)
    # What rounding has left over goes to the most frequent symbol, of equal ones the lowest.
    keys = scaled * size + (size - 1 - ops.arange(size, "int64"))
    return scaled + ops.where(keys == ops.max(keys), (1 << _SCALE) - ops.sum(scaled), 0)


@composite()
def rans_encode(ops: ArrayOps, data: Array, bits: int) -> Array:
    """Return the coded form of bytes that consist of symbols of 3 to 8 bits."""
    symbols = symbols_of(ops, data, bits)
    counts, count = counts_of(ops, symbols, bits), ops.length(symbols)
    frequencies = _frequencies(ops, counts, bits)
    starts = ops.cumsum(frequencies) - frequencies
    lanes = _lanes(count)
    rows = (count + lanes - 1) // _at_least_one(ops, lanes)
    padded = ops.cast(ops.concat([symbols, ops.zeros(rows * lanes - count, "int64")]), "int32")
    each, lane = ops.arange(lanes, "int64"), ops.arange(lanes, "int32")

    def step(v: Array) -> Array:
        """Encode one row, from the last to the first. v: the row; the states; 1 + each word of each row, or 0."""
        row = as_size(ops, v[0])
        mine, x = padded[row * lanes : (row + 1) * lanes], v[1 : 1 + lanes]
        there = number(ops, row * lanes) + each < number(ops, count)
        frequency = ops.clip(ops.gather(frequencies, mine), 1, 1 << _SCALE)
        full = ops.bit_and(there, x >= ops.shift_left(frequency, 32 - _SCALE))
        word = ops.where(full, 1 + ops.bit_and(x, 0xFFFF), 0)
        less = ops.where(full, ops.shift_right(x, 16), x)
        quotient = less // frequency
        grown = ops.shift_left(quotient, _SCALE) + (less - quotient * frequency) + ops.gather(starts, mine)
        places = ops.concat([ops.arange(1 + lanes, "int32"), lane + (1 + lanes + row * lanes)])
        return ops.scatter_add_(v, places, ops.concat([ops.full(1, -1, "int64"), ops.where(there, grown - x, 0), word]))

    begin = [ops.full(1, rows - 1, "int64"), ops.full(lanes, _LEAST, "int64"), ops.zeros(rows * lanes, "int64")]
    done = ops.while_loop(lambda v: v[0] >= 0, step, ops.concat(begin))
    states, words = done[1 : 1 + lanes], done[1 + lanes :]
    stream = ops.gather(words, ops.nonzero(words > 0)) - 1
    present = ops.nonzero(counts > 0)
    head = ops.pack(ops.cast(counts > 0, "int64"), 1), ops.pack(ops.gather(frequencies, present) - 1, 16)
    both = ops.bit_and(states, 0xFFFF), ops.shift_right(states, 16)
    return ops.concat([*head, ops.pack(ops.concat([*both, stream]), 16)])


def _at_least_one(ops: ArrayOps, n: Any) -> Any:
    """Return a length, or 1 if it is 0."""
    return n + (1 - ops.min_size(n, 1))


@rans_encode.kernel()
def _(ops: Native, data: Array, bits: int) -> Array | None:
    if not on_cpu(ops, data):
        return None
    return ops.run("rans_encode", [data], [bits], outputs=["uint8"], lengths=[None])[0]


@composite()
def rans_decode(ops: ArrayOps, coded: Array, bits: int, n: Any) -> Array:
    """Return the n bytes, at least one, of `rans_encode`. Raises PayloadError if they are no such code."""
    size, count = 1 << bits, symbol_count(n, bits)
    lanes = _lanes(count)
    rows = (count + lanes - 1) // lanes
    error, flags = PayloadError(_DAMAGED), size // 8
    coded = ops.require(number(ops, ops.length(coded)) >= flags, error, coded)
    present = ops.nonzero(ops.unpack(coded[:flags], 1, size) > 0)
    used = ops.length(present)
    rest = ops.length(coded) - flags - 2 * used
    enough = ops.bit_and(number(ops, rest) >= 4 * number(ops, lanes), ops.bit_and(number(ops, rest), 1) == 0)
    coded = ops.require(enough, error, coded)
    given = ops.unpack(coded[flags : flags + 2 * used], 16, used) + 1
    frequencies = ops.scatter_add_(ops.zeros(size, "int64"), present, given)
    ends = ops.cumsum(frequencies)
    right = ops.max(ends) == 1 << _SCALE
    numbers = ops.unpack(ops.require(right, error, coded[flags + 2 * used :]), 16, rest // 2)
    states = numbers[:lanes] + ops.shift_left(numbers[lanes : 2 * lanes], 16)
    # A zero stands for the words after the last one; a stream that needs it is refused at the end.
    words, there = ops.concat([numbers[2 * lanes :], ops.zeros(1, "int64")]), number(ops, rest // 2 - 2 * lanes)
    each, lane = ops.arange(lanes, "int64"), ops.arange(lanes, "int32")

    def step(v: Array) -> Array:
        """Decode one row. v: words used so far; the row; the states; the symbols."""
        before, row, x = v[0], as_size(ops, v[1]), v[2 : 2 + lanes]
        slot = ops.bit_and(x, (1 << _SCALE) - 1)
        symbol = ops.cast(ops.clip(ops.cast(ops.search_sorted(ends, slot), "int64"), 0, size - 1), "int32")
        frequency = ops.gather(frequencies, symbol)
        less = frequency * ops.shift_right(x, _SCALE) + slot - (ops.gather(ends, symbol) - frequency)
        active = number(ops, row * lanes) + each < number(ops, count)
        low = ops.cast(ops.bit_and(active, less < _LEAST), "int64")
        place = ops.cast(ops.clip(before + ops.cumsum(low) - low, 0, there), "int32")
        grown = ops.where(low > 0, ops.shift_left(less, 16) + ops.gather(words, place), less)
        places = ops.concat([ops.arange(2 + lanes, "int32"), lane + (2 + lanes + row * lanes)])
        change = [ops.reshape(ops.sum(low), (1,)), ops.full(1, 1, "int64"), ops.where(active, grown - x, 0)]
        return ops.scatter_add_(v, places, ops.concat([*change, ops.cast(symbol, "int64")]))

    begin = ops.concat([ops.zeros(2, "int64"), states, ops.zeros(rows * lanes, "int64")])
    done = ops.while_loop(lambda v: v[1] < number(ops, rows), step, begin)
    at_start = ~ops.any(done[2 : 2 + lanes] != _LEAST)
    good = ops.bit_and(done[0] == there, at_start)
    return bytes_of(ops, ops.require(good, error, done[2 + lanes :])[:count], bits, n)


@rans_decode.kernel()
def _(ops: Native, coded: Array, bits: int, n: Any) -> Array | None:
    if not on_cpu(ops, coded):
        return None
    return ops.run("rans_decode", [coded], [bits, n], outputs=["uint8"], lengths=[n])[0]
