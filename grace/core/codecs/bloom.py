"""Bloom filters of sets of indices: every index of the set is found again, and a few others with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.ops.random import hash_functions
from grace.core.ops.table import composite
from grace.core.spec import Array, Key

if TYPE_CHECKING:
    from grace.core.ops.native import Native


class BloomFilter(NamedTuple):
    """Form of a filter: its bits, and the hash functions that set one of them each for an index.

    Without hash functions it is a bitmap, which has a bit for every index there is.
    """

    bits: int
    hashes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the filter."""
        return packed_size(self.bits, 1)


def filter_for(k: int, n: int, false_positives: float) -> BloomFilter:
    """Return the form for k of n indices; others are found with the probability `false_positives`, at most 1/2.

    k log2(1 / false_positives) / ln 2 bits, rounded up to bytes, and log2(1 / false_positives) hash functions are the
    fewest bits (Bloom, "Space/time trade-offs in hash coding with allowable errors", CACM 1970). Where a bitmap has no
    more bits, it takes the filter's place.
    """
    halvings = -math.log2(false_positives)
    bits = 8 * math.ceil(k * halvings / math.log(2) / 8)
    return BloomFilter(bits, round(halvings)) if bits < n else BloomFilter(n, 0)


def insert(ops: ArrayOps, form: BloomFilter, indices: Array, key: Key) -> Array:
    """Return the bytes of the filter of a set of indices."""
    bits = ops.zeros(form.bits, "uint8")
    items = ops.cast(indices, "int64")
    for places in _hashes(ops, form, key) if form.hashes else [lambda _: indices]:
        bits = ops.put_(bits, places(items), 1)
    return ops.pack(bits, 1)


@composite()
def filter_positions(ops: ArrayOps, form: BloomFilter, data: Array, n: int, key: Key) -> Array:
    """Return which of the indices 0 .. n-1 the bytes of a filter report, ascending."""
    bits = ops.unpack(data, 1, form.bits)
    if not form.hashes:
        return ops.nonzero(bits > 0)
    found = ops.arange(n, "int64")
    for places in _hashes(ops, form, key):
        # Each function leaves about half of the false ones to the next.
        found = ops.gather(found, ops.nonzero(ops.gather(bits, places(found)) > 0))
    return ops.cast(found, "int32")


@filter_positions.kernel()
def _(ops: Native, form: BloomFilter, data: Array, n: int, key: Key) -> Array | None:
    if not form.hashes or ops.kind(data) is None:
        return None
    integers = [form.bits, form.hashes, n, *ops.key_integers(key)]
    return ops.run("filter_positions", [data], integers, outputs=["int32"], lengths=[None])[0]


def smallest_conflict(ops: ArrayOps, form: BloomFilter, positions: Array, key: Key) -> Array:
    """Return for each reported position how many of them share its loneliest bit (float64).

    If it has a bit for itself, it is no false positive. A position that sets a bit twice counts twice there.
    """
    items = ops.cast(positions, "int64")
    places = [function(items) for function in _hashes(ops, form, key)]
    every = ops.concat(places)
    sharing = ops.segment_sum(ops.full(ops.length(every), 1.0, "float64"), every, form.bits)
    least = ops.gather(sharing, places[0])
    for place in places[1:]:
        others = ops.gather(sharing, place)
        least = ops.where(others < least, others, least)
    return least


def _hashes(ops: ArrayOps, form: BloomFilter, key: Key) -> list[Callable[[Array], Array]]:
    """Return the functions from int64 items to the bits that they set."""

    def placed(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return lambda items: ops.cast(ops.shift_right(function(items) * form.bits, 32), "int32")

    return [placed(function) for function in hash_functions(ops, form.hashes, key)]
