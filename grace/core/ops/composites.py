"""All array operations for compressors and memories: the primitives, and composites made of them.

The reference implementation of a composite is here or in the base classes (`helpers`, `codings`), over primitives only;
a framework or a kernel may override it with one that gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from grace.core.ops.codings import Codings
from grace.core.ops.random import hash_words
from grace.core.values.spec import Array, Key

# A Count-Sketch hashes blocks of this many consecutive elements; its columns are a multiple of it.
SKETCH_BLOCK = 16


class ArrayOps(Codings):
    """Array operations of one framework on one device; this class adds the selections and the sketches."""

    # --- selections -----------------------------------------------------------------------------------------------

    def select(self, x: Array, bound: Array, strict: bool, nonzero: bool = False) -> tuple[Array, Array]:
        """Return values and ascending indices where |x| > bound (`strict`) or |x| >= bound.

        `nonzero` leaves out zeros. The bound is a number or an array of one element and of x's dtype.
        """
        magnitude = self.abs(x)
        passed = magnitude > bound if strict else magnitude >= bound
        if nonzero:
            passed = self.bit_and(passed, magnitude > 0)
        indices = self.nonzero(passed)
        return self.gather(x, indices), indices

    def top_of_sides(self, x: Array, ratio: float) -> tuple[Array, Array, Array]:
        """Return the means and indices of the largest elements of each sign.

        Of p positive elements these are the max(1, int(ratio * p)) largest (none if p is 0), and likewise for the
        negative ones. Returns the two means in x's dtype, positive first, and the two lists of ascending indices. Among
        equal magnitudes the lower index is taken.
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
        # In float64, because a sum of large float32 numbers can overflow even if their mean does not.
        mean = self.sum(self.cast(values, "float64")) / kept
        return self.gather(indices, best), self.cast(mean, self.dtype(x))

    # --- sketches -------------------------------------------------------------------------------------------------

    def count_sketch(self, x: Array, rows: int, columns: int, key: Key) -> Array:
        """Return rows of `columns` buckets, one after another: S[j, h_j(i)] += s_j(i) x_i, with hashes from the key.

        Element 16 b + l is lane l of block b. Blocks are hashed, not elements. This is for speed and not in the paper:
        a block is one place in memory, while 16 elements with separate hashes have 16. A word of `hash_words` for b
        gives a column c_j(b), uniform in [0, columns) (up to 2^-32), and h_j(i) = c_j(b) xor l: the 16 elements take
        the 16 columns around c_j(b), each its own. s_j(i) is bit 16 + l of another word, negative where it is set.
        Elements of one block never collide. Elements of two blocks collide if c_j(b') = c_j(b) xor l xor l', which has
        probability 1 / columns because the words of two blocks are independent. The signs of any two elements are
        independent, too, and signs are independent of columns. Therefore a row's error has mean 0 and variance (|x|^2 -
        |block of i|^2) / columns, no more than with hashes of the elements; only the errors of neighbors are
        correlated.
        A bucket is added in float64 and rounded once. Raises ValueError unless columns is a multiple of 16.
        """
        hashes = self._hashes(self.length(x), rows, columns, key)
        return self.concat([self.segment_sum(self.where(odd, -x, x), bucket, columns) for bucket, odd in hashes])

    def sketch_estimate(self, sketch: Array, n: int, rows: int, columns: int, key: Key) -> Array:
        """Return median_j s_j(i) S[j, h_j(i)] for n elements, from an odd number of rows.

        The result is finite: a median that overflowed or is NaN counts as large (1e38, in float64 1e307).
        """
        found = []
        for j, (bucket, odd) in enumerate(self._hashes(n, rows, columns, key)):
            values = self.gather(sketch[j * columns : (j + 1) * columns], bucket)
            found.append(self.where(odd, -values, values))
        median = self.sort(self.stack(found, axis=1))[:, rows // 2]
        # The order of 0 and -0 differs between sorts.
        median = self.where(median == 0, 0.0, median)
        most = 1e38 if self.dtype(sketch) == "float32" else 1e307
        return self.where(self.abs(median) < most, median, most)

    def _hashes(self, n: int, rows: int, columns: int, key: Key) -> Iterator[tuple[Array, Array]]:
        """Yield for each row the bucket of every element, and whether its sign is negative."""
        if columns % SKETCH_BLOCK != 0:
            raise ValueError(f"sketch: expected a multiple of {SKETCH_BLOCK} columns, received {columns}.")
        element = self.arange(n, "int64")
        lane, block = self.bit_and(element, SKETCH_BLOCK - 1), self.shift_right(element, SKETCH_BLOCK.bit_length() - 1)
        words = hash_words(self, block, 2 * rows, key)
        for column, signs in zip(words[:rows], words[rows:], strict=True):
            bucket = self.bit_xor(self.shift_right(column * columns, 32), lane)
            sign = self.bit_and(self.shift_right(signs, SKETCH_BLOCK + lane), 1)
            yield self.cast(bucket, "int32"), sign == 1
