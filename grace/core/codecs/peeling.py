"""Sums of sparse vectors in a Count-Sketch and a Bloom filter, and their recovery by peeling."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Key

# Peeling n elements of four rows needs 1.295 n buckets.
ROWS = 4
# Sketches that can be peeled need fewer, as a rule.
ROUNDS = 64
# Standard deviations of the number of elements that pass the filter.
SLACK = 2.0
# The elements of a block have their places from the same word.
BLOCK = 16
# Bits of a counter of the filter on the way, on 4 to 7 ranks.
_COUNTER_BITS = 4
_MOST_FUNCTIONS = 16


class Sizes(NamedTuple):
    """Columns of each row of the sketch, hash functions of the filter, and counters of each of them."""

    columns: int
    functions: int
    counters: int

    @property
    def words(self) -> float:
        """Values of 32 bits that the sketch and the filter take on the way."""
        return ROWS * self.columns + self.functions * self.counters * _COUNTER_BITS / 32


@cache
def fewest_words(n: int, held: int, buckets_per_value: float) -> Sizes:
    """Return the sizes with the fewest words for `held` values among n elements.

    held / ln 2 counters per function leave half of them at 0, so that one of 2^functions other elements passes the
    filter. This is the best that a Bloom filter of this size can do. The sketch has room for these elements, too.
    """

    def of(functions: int) -> Sizes:
        passed = held + (n - held) / 2**functions
        passed += SLACK * math.sqrt(passed)
        return Sizes(_blocks(buckets_per_value * passed / ROWS), functions, _blocks(held / math.log(2)))

    return min(map(of, range(1, _MOST_FUNCTIONS + 1)), key=lambda sizes: sizes.words)


@cache
def spread(n: int) -> tuple[int, int]:
    """Return a factor and a modulus: multiplication by the factor permutes the n elements, filled up to whole blocks.

    Neighbours come into different blocks, because the number is about the golden section of the modulus.
    """
    length = _blocks(max(1, n))
    section = int(length * (math.sqrt(5) - 1) / 2)
    return next(factor for factor in range(section, length + 1) if math.gcd(factor, length) == 1), length


def _blocks(length: float) -> int:
    return BLOCK * math.ceil(length / BLOCK)


class Hashes(NamedTuple):
    """Random functions of blocks of elements: the columns of the rows, the signs of the rows, and the filter's.

    Elements are permuted first: see `spread`. Element 16 b + l of the new order is lane l of block b. Its place is
    c(b) xor l, where c(b) is uniform among all places. So elements of one block never meet, and others meet as often as
    with functions of elements. This is for speed, because the filter is asked about every element.
    """

    sizes: Sizes
    words: list[Array]

    @staticmethod
    def draw(ops: ArrayOps, n: int, sizes: Sizes, key: Key) -> Hashes:
        """Return the functions for n elements."""
        blocks, count = spread(n)[1] // BLOCK, 2 * ROWS + sizes.functions
        words = ops.words(count * blocks, key)
        return Hashes(sizes, [words[i * blocks : (i + 1) * blocks] for i in range(count)])

    def buckets(self, ops: ArrayOps, element: Array) -> tuple[Array, Array]:
        """Return the buckets of every element (int64), one row after another, and its signs there (float64)."""
        columns, lane = self.sizes.columns, ops.bit_and(element, BLOCK - 1)
        places = [self._place(ops, element, row, columns) + row * columns for row in range(ROWS)]
        odd = [ops.bit_and(ops.shift_right(self._word(ops, element, ROWS + row), lane), 1) for row in range(ROWS)]
        return ops.concat(places), 1.0 - 2.0 * ops.cast(ops.concat(odd), "float64")

    def counter(self, ops: ArrayOps, element: Array, function: int) -> Array:
        """Return the counter of every element (int64) for one function of the filter."""
        counters = self.sizes.counters
        return self._place(ops, element, 2 * ROWS + function, counters) + function * counters

    def passing(self, ops: ArrayOps, counts: Array, n: int) -> Array:
        """Return those of n elements (int64) in the new order that pass the filter: none of their counters is 0."""
        element = ops.arange(spread(n)[1], "int64")
        for function in range(self.sizes.functions):
            counted = ops.gather(counts, self.counter(ops, element, function)) != 0
            element = ops.gather(element, ops.nonzero(counted))
        return element

    def _place(self, ops: ArrayOps, element: Array, function: int, length: int) -> Array:
        column = ops.shift_right(self._word(ops, element, function) * length, 32)
        return ops.cast(ops.bit_xor(column, ops.bit_and(element, BLOCK - 1)), "int32")

    def _word(self, ops: ArrayOps, element: Array, function: int) -> Array:
        return ops.gather(self.words[function], ops.cast(ops.shift_right(element, BLOCK.bit_length() - 1), "int32"))


@composite(one_graph=True)
def sketch_sparse(
    ops: ArrayOps, values: Array, indices: Array, n: int, columns: int, functions: int, counters: int, key: Key
) -> tuple[Array, Array]:
    """Return the Count-Sketch of values at distinct indices below n, and the filter (int8) of those that are not 0.

    Each bucket is added in float64 and rounded once; a counter of the filter is 0 or 1.
    """
    sizes = Sizes(columns, functions, counters)
    factor, length = spread(n)
    element, drawn = ops.cast(indices, "int64") * factor % length, Hashes.draw(ops, n, sizes, key)
    places, signs = drawn.buckets(ops, element)
    signed = ops.concat([ops.cast(values, "float64")] * ROWS) * signs
    sketch = ops.cast(ops.segment_sum(signed, places, ROWS * columns), ops.dtype(values))
    there = ops.concat([ops.cast(values != 0, "float64")] * functions)
    counter = ops.concat([drawn.counter(ops, element, function) for function in range(functions)])
    return sketch, ops.cast(ops.segment_sum(there, counter, functions * counters) > 0, "int8")


@composite(one_graph=True)
def peel(
    ops: ArrayOps, sketch: Array, counts: Array, n: int, columns: int, functions: int, counters: int, key: Key
) -> Array:
    """Return n elements, recovered from a sum of sketches; those that do not pass the sum of the filters are 0.

    A bucket with only one element gives its value, which is subtracted from the other buckets of the element. These may
    then have only one element. This is done for all buckets at once, in at most `ROUNDS` rounds, until no bucket has
    only one element. An element that is left is estimated: the median over the rows of what its buckets hold then.
    """
    drawn = Hashes.draw(ops, n, Sizes(columns, functions, counters), key)
    element = drawn.passing(ops, counts, n)
    number, size, dtype = ops.length(element), ROWS * columns, ops.dtype(sketch)
    places, signs = drawn.buckets(ops, element)

    def rows(x: Array) -> list[Array]:
        return [x[row * number : (row + 1) * number] for row in range(ROWS)]

    def again(state: Array) -> Array:
        buckets, values, left = state[:size], state[size : size + number], state[size + number : -1]
        crowd = ops.segment_sum(ops.concat([left] * ROWS), places, size)
        held, alone = rows(ops.gather(buckets, places) * signs), rows(ops.gather(crowd, places) == 1)
        value, found = held[0], alone[0]
        for other, only in zip(held[1:], alone[1:], strict=True):
            value, found = ops.where(only, other, value), ops.bit_or(found, only)
        found = ops.bit_and(found, left > 0)
        # What is taken out of the buckets is what is returned: a value of the sketch's dtype.
        value = ops.where(found, ops.cast(ops.cast(value, dtype), "float64"), 0.0)
        buckets = buckets - ops.segment_sum(ops.concat([value] * ROWS) * signs, places, size)
        rounds = (state[-1] - 1.0) * ops.cast(ops.any(found), "float64")
        return ops.concat([buckets, values + value, ops.where(found, 0.0, left), ops.reshape(rounds, (1,))])

    # One array: what the buckets still hold, values, 1 for each element without a value, and the rounds to go.
    ones = ops.full(number, 1.0, "float64")
    state = ops.concat([ops.cast(sketch, "float64"), ones * 0.0, ones, ops.full(1, float(ROUNDS), "float64")])
    state = ops.while_loop(lambda state: state[-1] > 0, again, state)
    buckets, values, left = state[:size], state[size : size + number], state[size + number : -1]
    held = ops.sort(ops.stack(rows(ops.gather(buckets, places) * signs), axis=1))
    middle = (held[:, (ROWS - 1) // 2] + held[:, ROWS // 2]) * 0.5
    values = ops.cast(ops.where(left > 0, middle, values), dtype)
    factor, length = spread(n)
    index = ops.cast(element * pow(factor, -1, length) % length, "int32")
    # The last block may be longer than the tensor.
    return ops.scatter_add_(ops.zeros(length, dtype), index, values)[:n]
