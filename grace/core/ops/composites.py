"""The array operations that methods share: the primitives, and composites made of them.

What only one method or two need is in the table of composites (`grace.core.ops.table`), beside the method. The
reference body of a composite is written over other operations; a framework or a kernel may replace it with one that
gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from grace.core.errors import PayloadError
from grace.core.ops import random
from grace.core.ops.base import Primitives, packed_size
from grace.core.ops.table import Composite
from grace.core.spec import Array, Key

R = TypeVar("R")


def plus(ops: ArrayOps, onto: Array | None, values: Array) -> Array:
    """Return onto + values, or values if there is nothing to add to; consumes `onto`."""
    return values if onto is None else ops.add_(onto, values)


class ArrayOps(Primitives):
    """Array operations of one framework on one device: sums, random numbers, the helpers of the GRACE paper (IV-B)."""

    def compute(self, composite: Composite[..., R], args: tuple[Any, ...], options: dict[str, Any]) -> R:
        """Return the result of the reference body of a composite of the table."""
        return composite.body(self, *args, **options)

    # --- arithmetic -----------------------------------------------------------------------------------------------

    def weighted_sum(self, x: Array, a: float, y: Array, b: float) -> Array:
        """Return a x + b y as a new array; each product is rounded before the sum."""
        # In a graph, factors may be arrays.
        second = y if isinstance(b, int | float) and b == 1 else y * self.cast(b, self.dtype(y))
        if isinstance(a, int | float) and a == 1:
            return x + second
        return self.add_(x * self.cast(a, self.dtype(x)), second)

    def finite_sum(self, x: Array, a: float, y: Array, b: float, out: Array | None = None) -> tuple[Array, Array]:
        """Return a x + b y as `weighted_sum` does, and whether all of it is finite, as a 0-d condition.

        Kernels may write the sum to `out`, which may be x.
        """
        total = self.weighted_sum(x, a, y, b)
        return total, self.finite(total)

    def half_sum(self, rows: Sequence[Array], factor: float = 1.0) -> Array:
        """Return factor times the sum of flat arrays of 16-bit floats, in their dtype.

        Every row is multiplied in float32, the products are added in float32 in row order, and the sum is rounded once.
        So the sum of two float16 equals that of float16 arithmetic, and a mean is no larger than its terms.
        """
        by = self.cast(factor, "float32")
        total = self.cast(rows[0], "float32") * by
        for row in rows[1:]:
            total = self.add_(total, self.cast(row, "float32") * by)
        return self.cast(total, self.dtype(rows[0]))

    def max_abs(self, x: Array) -> Array:
        """Return the largest magnitude, in x's dtype; 0 for an empty array."""
        return self.max(self.abs(x))

    def flat_max_abs(self, x: Array) -> Array:
        """Return the largest magnitude as an array of one element."""
        return self.reshape(self.max_abs(x), (1,))

    def norm_max(self, x: Array) -> tuple[Array, Array]:
        """Return the Euclidean norm and the largest magnitude of a flat array, in x's dtype."""
        return self.norm(x), self.max_abs(x)

    def flat_product(self, a: Array, b: Array, r: int, out: Array | None = None) -> Array:
        """Return A B^T, flat, of flat arrays a and b with the rows of matrices of r columns.

        Kernels may write it to `out`.
        """
        product = self.matmul(self.reshape(a, (-1, r)), self.reshape(b, (-1, r)), transpose_b=True)
        return self.reshape(product, (-1,))

    def sub_product_(self, x: Array, a: Array, b: Array, r: int, out: Array | None = None) -> tuple[Array, Array]:
        """Return x - A B^T and A B^T, as `flat_product`; consumes the flat array x."""
        product = self.flat_product(a, b, r, out)
        return self.sub_(x, product), product

    # --- random -------------------------------------------------------------------------------------------------

    def words(self, n: int, key: Key, stream: int = 0) -> Array:
        """Return n random 32-bit words (int64); `stream` separates several uses of one key."""
        return random.words(self, n, key, stream)

    def uniform(self, n: int, key: Key, stream: int = 0) -> Array:
        """Return n float32 numbers in [0, 1), multiples of 2^-24, from the words of the same stream."""
        return random.uniform(self, n, key, stream)

    def sample(self, n: int, k: int, key: Key, stream: int = 0) -> Array:
        """Return k distinct indices of range(n), in random order."""
        return random.sample(self, n, k, key, stream)

    # --- the helpers of the GRACE paper -----------------------------------------------------------------------------

    def quantize(self, x: Array, scale: Array, levels: int, key: Key | None) -> Array:
        """Return signed levels l in [-levels, levels] with E[l] = levels * x / scale, by stochastic rounding (int64).

        x and scale have equal shape or broadcast; where scale is 0 the level is 0. Without a key, l is the level
        nearest to levels * x / scale, and of two the one farther from zero.
        """
        u: Array = 0.5
        if key is not None:
            n = self.length(self.reshape(x, (-1,)))
            # A number of rows may be known only at run time.
            shape = tuple(-1 if size is None else size for size in x.shape)
            u = self.cast(self.reshape(self.uniform(n, key), shape), self.dtype(x))
        safe = self.where(scale > 0, scale, 1.0)
        magnitude = self.clip(self.floor(self.abs(x) / safe * levels + u), 0, levels)
        magnitude = self.where(scale > 0, magnitude, 0.0)
        return self.cast(self.where(x < 0, -magnitude, magnitude), "int64")

    def dequantize(self, codes: Array, scale: Array, levels: int, dtype: str) -> Array:
        """Return codes * scale / levels."""
        return self.cast(codes, dtype) * (self.cast(scale, dtype) / levels)

    def sparsify(self, x: Array, k: int) -> tuple[Array, Array]:
        """Return the k largest magnitudes: values and ascending indices."""
        indices = self.top_indices(x, k)
        return self.gather(x, indices), indices

    def top_bound(self, x: Array, k: int) -> Array:
        """Return the k-th largest magnitude (x's dtype, (1,)), 1 <= k <= elements."""
        values, _ = self.sparsify(x, k)
        return self.reshape(-self.max(-self.abs(values)), (1,))

    def desparsify(self, values: Array, indices: Array, n: int, out: Array | None = None) -> Array:
        """Return a dense array of n with the values at distinct indices. Raises PayloadError for an invalid index."""
        return self.sparse_sum([values], [indices], n, out=out)

    def sparse_sum(
        self,
        values: Sequence[Array],
        indices: Sequence[Array],
        n: int,
        onto: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """Add one payload after the other at its distinct indices, to zeros or to `onto`; consumes `onto`.

        Without `onto`, kernels may write the sum to `out`. Raises PayloadError for an index out of range.
        """
        # Indices are distinct within one payload only: one scatter per payload keeps the order of addition, and
        # with it the sum, the same on every rank and device.
        total = self.zeros(n, self.dtype(values[0])) if onto is None else onto
        for value, index in zip(values, indices, strict=True):
            outside = self.bit_or(index < 0, index >= n)
            error = PayloadError(
                f"sparse payload: expected indices from 0 to {n - 1}, received others; the payload is damaged."
            )
            inside = self.require(self.sum(self.cast(outside, "int32")) == 0, error, index)
            total = self.scatter_add_(total, inside, value)
        return total

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

    def pack(self, codes: Array, bits: int) -> Array:
        """Pack unsigned integers below 2^bits into ceil(n * bits / 8) bytes, little-endian; 1 <= bits <= 16.

        Above 8 bits the low bytes come first, then the packed high parts.
        """
        if bits == 8:
            return self.cast(codes, "uint8")
        if bits > 8:
            wide = self.cast(codes, "int64")
            low = self.cast(self.bit_and(wide, 255), "uint8")
            return self.concat([low, self.pack(self.shift_right(wide, 8), bits - 8)])
        n = self.length(codes)
        groups = -(-n // 8)
        wide = self.concat([self.cast(codes, "int64"), self.zeros(8 * groups - n, "int64")])
        wide = self.reshape(wide, (groups, 8))
        word = wide[:, 0]
        for j in range(1, 8):
            word = self.bit_or(word, self.shift_left(wide[:, j], bits * j))
        columns = [self.bit_and(self.shift_right(word, 8 * j), 255) for j in range(bits)]
        data = self.cast(self.reshape(self.stack(columns, axis=1), (groups * bits,)), "uint8")
        return data[: packed_size(n, bits)]

    def unpack(self, data: Array, bits: int, n: int) -> Array:
        """Return the n int64 codes of `pack`."""
        if bits == 8:
            return self.cast(data, "int64")
        if bits > 8:
            high = self.unpack(data[n:], bits - 8, n)
            return self.bit_or(self.cast(data[:n], "int64"), self.shift_left(high, 8))
        groups = -(-n // 8)
        padding = self.zeros(groups * bits - packed_size(n, bits), "uint8")
        columns = self.reshape(self.cast(self.concat([data, padding]), "int64"), (groups, bits))
        word = columns[:, 0]
        for j in range(1, bits):
            word = self.bit_or(word, self.shift_left(columns[:, j], 8 * j))
        codes = [self.bit_and(self.shift_right(word, bits * j), (1 << bits) - 1) for j in range(8)]
        return self.reshape(self.stack(codes, axis=1), (groups * 8,))[:n]
