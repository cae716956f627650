"""All array operations that compressors and memories are written in: the primitives, and composites made of them.

A composite has its reference body here or in the classes that it derives from (`helpers`, `codings`), over primitives
only; a framework or a kernel may override it by one that gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from grace.core.ops.codings import Codings
from grace.core.ops.random import hash_words
from grace.core.spec import Array, Key


class ArrayOps(Codings):
    """Array operations of one framework on one device; here the selections and the sketches."""

    # --- selections -----------------------------------------------------------------------------------------------

    def select(self, x: Array, bound: Array, strict: bool, nonzero: bool = False) -> tuple[Array, Array]:
        """Values and ascending indices where |x| > bound (`strict`) or |x| >= bound, with `nonzero` not those of 0.

        The bound is a number or an array of one element and of x's dtype.
        """
        magnitude = self.abs(x)
        passed = magnitude > bound if strict else magnitude >= bound
        if nonzero:
            passed = self.bit_and(passed, magnitude > 0)
        indices = self.nonzero(passed)
        return self.gather(x, indices), indices

    def top_of_sides(self, x: Array, ratio: float) -> tuple[Array, Array, Array]:
        """Of p positive elements the max(1, int(ratio p)) largest (none of none), of the negative ones as many.

        Returns the two means in x's dtype, positive first, and the two lists of ascending indices; among equal
        magnitudes the lower index is taken.
        """
        positive, high = self._top_of_side(x, x > 0, ratio)
        negative, low = self._top_of_side(x, x < 0, ratio)
        return self.stack([high, low], axis=0), positive, negative

    def _top_of_side(self, x: Array, side: Array, ratio: float) -> tuple[Array, Array]:
        indices = self.nonzero(side)
        count = self.sum(self.cast(side, "float64"))
        kept = self.floor(count * ratio)
        kept = self.where(kept < 1, 1.0, kept)
        size = self.size(self.cast(self.where(kept < count, kept, count), "int32"))
        values, best = self.sparsify(self.gather(x, indices), size)
        # In float64, because a sum of large float32 numbers overflows where their mean does not.
        mean = self.sum(self.cast(values, "float64")) / kept
        return self.gather(indices, best), self.cast(mean, self.dtype(x))

    # --- sketches -------------------------------------------------------------------------------------------------

    def count_sketch(self, x: Array, rows: int, columns: int, key: Key) -> Array:
        """Rows of `columns` buckets, one after another: S[j, h_j(i)] += s_j(i) x_i, with hashes drawn from the key.

        Buckets and signs are words of `hash_words`; a bucket is added in float64 and rounded once.
        """
        hashes = self._hashes(self.length(x), rows, columns, key)
        return self.concat([self.segment_sum(self.where(odd, -x, x), bucket, columns) for bucket, odd in hashes])

    def sketch_estimate(self, sketch: Array, n: int, rows: int, columns: int, key: Key) -> Array:
        """median_j s_j(i) S[j, h_j(i)] for n elements, from an odd number of rows."""
        found = []
        for j, (bucket, odd) in enumerate(self._hashes(n, rows, columns, key)):
            values = self.gather(sketch[j * columns : (j + 1) * columns], bucket)
            found.append(self.where(odd, -values, values))
        median = self.sort(self.stack(found, axis=1))[:, rows // 2]
        # Which of several zeros comes first, 0 or -0, differs between sorts.
        return self.where(median == 0, 0.0, median)

    def _hashes(self, n: int, rows: int, columns: int, key: Key) -> Iterator[tuple[Array, Array]]:
        """Per row the bucket of every element, and whether its sign is negative."""
        words = hash_words(self, self.arange(n, "int64"), 2 * rows, key)
        for bucket, sign in zip(words[:rows], words[rows:], strict=True):
            yield self.cast(self.shift_right(bucket * columns, 32), "int32"), sign >= 2**31
