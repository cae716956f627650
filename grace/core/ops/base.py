"""Closed list of primitive array operations; `grace.core.ops.composites` combines them.

Conventions: arrays are flat unless a method says otherwise; indices are int32; a trailing underscore consumes the first
argument, and the caller uses the result; `+ - * /` and comparisons are the arrays' own operators. A 0-d condition is an
array of one bool, or a Python bool where the host knows it without waiting; combine conditions by `bit_and`, `bit_or`
and `bit_not`. Nothing in a compressor branches on an array's value, so that the same code can be traced into a graph.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import ClassVar, TypeVar

from grace.core.spec import Array

Ops = TypeVar("Ops", bound="Primitives")


class Primitives(ABC):
    """Operations that every framework defines, on one device."""

    #: The name of the framework, as `grace.register_backend` announces it.
    name: ClassVar[str]
    #: True if operations compute at once, in arrays that can be changed: results may be written where the caller wants.
    eager: ClassVar[bool] = True
    #: True if operations can run inside a graph that is traced once. An error in a graph is one of the framework.
    traced: ClassVar[bool] = False
    #: True if lengths may be known only when a graph runs: `length` and `size` then return 0-d arrays.
    dynamic_shapes: ClassVar[bool] = False
    # True if composites of the table may run their bodies by kernels.
    runs_kernels: ClassVar[bool] = False
    #: "module:Class" of the class that replaces this one where it has kernels; it derives from `Native`, too.
    kernels: ClassVar[str | None] = None

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._constants: dict[Hashable, Array] = {}

    @property
    def products(self) -> str:
        """Name of what computes matrix products of few columns; another gives other last bits."""
        return f"the library of {self.name}"

    # --- create and convert -------------------------------------------------------------------------------------

    @abstractmethod
    def zeros(self, n: int, dtype: str) -> Array:
        """Return `n` zeros."""

    def empty(self, n: int, dtype: str) -> Array:
        """Return `n` uninitialized elements."""
        return self.zeros(n, dtype)

    @abstractmethod
    def full(self, n: int, value: Array, dtype: str) -> Array:
        """Return `n` copies of a number or 0-d array."""

    @abstractmethod
    def arange(self, n: int, dtype: str) -> Array:
        """Return 0 .. n-1."""

    def numbers(self, values: Sequence[Array], dtype: str) -> Array:
        """Return a few numbers, conditions or 0-d arrays as a flat array."""
        return self.concat([self.full(1, value, dtype) for value in values])

    @abstractmethod
    def cast(self, x: Array, dtype: str) -> Array:
        """Return x in another dtype; x itself if it already has it.

        Floats become integers by truncation, and float64 becomes 16 bits by way of float32, as in most frameworks.
        """

    @abstractmethod
    def copy(self, x: Array) -> Array:
        """Return a copy of x."""

    @abstractmethod
    def dtype(self, x: Array) -> str:
        """Return the name of the dtype, such as "float32"."""

    @abstractmethod
    def to_bytes(self, x: Array) -> Array:
        """Return the memory of x as uint8."""

    @abstractmethod
    def from_bytes(self, data: Array, dtype: str) -> Array:
        """Return bytes as an array of `dtype`, the inverse of to_bytes; the data must be aligned to the dtype."""

    # --- shape --------------------------------------------------------------------------------------------------

    @abstractmethod
    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return x in another shape of equal size, without a copy where possible."""

    @abstractmethod
    def concat(self, arrays: Sequence[Array]) -> Array:
        """Return one flat array of several arrays of one dtype."""

    def split(self, x: Array, lengths: Sequence[int]) -> list[Array]:
        """Return the parts of a flat array that have these lengths, one after another; the inverse of `concat`."""
        if len(lengths) == 1:
            return [x]
        ends = list(itertools.accumulate(lengths))
        return [x[end - length : end] for length, end in zip(lengths, ends, strict=True)]

    def lay_out(self, arrays: Sequence[Array]) -> Array:
        """Return arrays of one dtype end to end, without a copy if they already lie so; the result is read-only."""
        return arrays[0] if len(arrays) == 1 else self.concat(arrays)

    def room(self, nbytes: int) -> Array | None:
        """Return uninitialized bytes, to parts of which kernels can write (`out`); None if kernels cannot."""
        return None

    def is_same(self, x: Array, y: Array) -> bool:
        """Return whether two flat, contiguous arrays are the same memory. Only if `eager`."""
        raise TypeError(f"arrays of {self.name} have no address; use is_same only if eager is True")

    def place(self, out: Array, start: int, x: Array, factor: float) -> None:
        """Write x * factor, rounded to the dtype of the flat `out`, to `out` from `start` on. Only if `eager`."""
        raise TypeError(f"arrays of {self.name} cannot be written in place; use place only if eager is True")

    def place_all(self, outs: Sequence[Array], x: Array) -> None:
        """Write the parts of the flat x, one after another, to contiguous arrays that they fill. Only if `eager`."""
        for out, part in zip(outs, self.split(x, [self.length(out) for out in outs]), strict=True):
            self.place(self.reshape(out, (-1,)), 0, part, 1.0)

    @abstractmethod
    def stack(self, arrays: Sequence[Array], axis: int) -> Array:
        """Return arrays of equal shape stacked along a new axis."""

    @abstractmethod
    def length(self, x: Array) -> int:
        """Return the number of elements: an int, or a 0-d tensor in a traced graph."""

    @abstractmethod
    def count(self, x: Array) -> float:
        """Return the number of elements for arithmetic: a float, or a 0-d float64 tensor in a traced graph."""

    @abstractmethod
    def size(self, x: Array) -> int:
        """Return a 0-d integer array as a size for slices."""

    def sizes(self, x: Array, n: int) -> list[int]:
        """Return the n elements of a flat integer array as sizes for slices."""
        return [self.size(x[i]) for i in range(n)]

    @abstractmethod
    def min_size(self, a: int, b: int) -> int:
        """Return the smaller of two sizes, either of which may come from length()."""

    # --- arithmetic ---------------------------------------------------------------------------------------------

    @abstractmethod
    def abs(self, x: Array) -> Array:
        """Return magnitudes."""

    @abstractmethod
    def floor(self, x: Array) -> Array:
        """Return the largest integers not above x, in x's dtype."""

    @abstractmethod
    def sqrt(self, x: Array) -> Array:
        """Return square roots of floats, in x's dtype; those of float64 may differ in the last bit."""

    @abstractmethod
    def where(self, condition: Array, a: Array, b: Array) -> Array:
        """Return a where the condition holds, else b; either may be a number."""

    @abstractmethod
    def clip(self, x: Array, low: Array, high: Array) -> Array:
        """Return x limited to [low, high]."""

    def bit_and(self, a: Array, b: Array) -> Array:
        """Return the bitwise and of integers, or the logical and of conditions."""
        return a & b

    def bit_or(self, a: Array, b: Array) -> Array:
        """Return the bitwise or of integers, or the logical or of conditions."""
        return a | b

    def bit_xor(self, a: Array, b: Array) -> Array:
        """Return the bitwise exclusive or of integers."""
        return a ^ b

    def bit_not(self, a: Array) -> Array:
        """Return the bitwise complement of integers, or the negation of a condition."""
        return not a if isinstance(a, bool) else ~a

    def shift_left(self, a: Array, bits: int) -> Array:
        """Return integers shifted left."""
        return a << bits

    def shift_right(self, a: Array, bits: int | Array) -> Array:
        """Return integers shifted right, keeping the sign."""
        return a >> bits

    # --- reduce -------------------------------------------------------------------------------------------------
    # Sums run in float64 and are rounded once, so that frameworks with different orders of summation agree.

    @abstractmethod
    def sum(self, x: Array, axis: int | None = None) -> Array:
        """Return the sum, in x's dtype."""

    @abstractmethod
    def wrapping_sum(self, x: Array, axis: int | None = None) -> Array:
        """Return the sum of int64 numbers modulo 2^64, for checksums."""

    @abstractmethod
    def max(self, x: Array, axis: int | None = None) -> Array:
        """Return the largest element; 0 for an empty array."""

    def min(self, x: Array) -> Array:
        """Return the smallest element of an array; 0 for an empty array."""
        return -self.max(-x)

    @abstractmethod
    def norm(self, x: Array, axis: int | None = None) -> Array:
        """Return the Euclidean norm, in x's dtype."""

    @abstractmethod
    def finite(self, x: Array) -> Array:
        """Return whether no element is NaN or so large that sums may overflow, as a 0-d condition."""

    @abstractmethod
    def any(self, condition: Array) -> Array:
        """Return whether the condition holds anywhere, as a 0-d condition."""

    def conditions(self, x: Array, n: int) -> list[Array]:
        """Return the n elements of a flat array of bools, each as a 0-d condition."""
        return [x[i] for i in range(n)]

    # --- select -------------------------------------------------------------------------------------------------

    @abstractmethod
    def nonzero(self, condition: Array) -> Array:
        """Return the indices where the condition holds, ascending."""

    @abstractmethod
    def top_indices(self, x: Array, k: int) -> Array:
        """Return the indices of the k largest magnitudes, ascending; among equal ones the lower index wins."""

    @abstractmethod
    def gather(self, x: Array, indices: Array) -> Array:
        """Return the elements of x at the indices."""

    @abstractmethod
    def put_(self, x: Array, indices: Array, value: float) -> Array:
        """Set the elements at the indices to one value; consumes x."""

    @abstractmethod
    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        """Add the values at distinct indices; consumes x."""

    @abstractmethod
    def scatter_min_(self, x: Array, indices: Array, values: Array) -> Array:
        """Take the smaller of x and all values for an index, which may repeat; consumes x."""

    @abstractmethod
    def segment_sum(self, values: Array, segments: Array, n: int) -> Array:
        """Return for each segment 0 .. n-1 the sum of its values, added in float64 and rounded once.

        `segments` holds the segment of each value.
        """

    # --- order --------------------------------------------------------------------------------------------------

    @abstractmethod
    def sort(self, x: Array) -> Array:
        """Sort x in ascending order; in a matrix every row (last axis) by itself."""

    @abstractmethod
    def search_sorted(self, edges: Array, x: Array) -> Array:
        """Return for every element of x how many of the ascending edges are at most x (int32)."""

    @abstractmethod
    def cumsum(self, x: Array) -> Array:
        """Return the cumulative sums of a flat int64 array."""

    def scaled(self, x: Array, factor: float) -> Array:
        """Return x * factor."""
        return x * factor

    # --- consuming arithmetic -----------------------------------------------------------------------------------

    @abstractmethod
    def add_(self, x: Array, y: Array) -> Array:
        """Return x + y; consumes x."""

    @abstractmethod
    def sub_(self, x: Array, y: Array) -> Array:
        """Return x - y; consumes x."""

    @abstractmethod
    def scale_(self, x: Array, factor: float) -> Array:
        """Return x * factor; consumes x."""

    # --- linear algebra (two dimensions) ------------------------------------------------------------------------

    @abstractmethod
    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        """Return the matrix product, with transposed matrices if asked; the framework orders the sums."""

    @abstractmethod
    def transpose(self, a: Array) -> Array:
        """Return the matrix transpose."""

    @abstractmethod
    def svd(self, a: Array) -> tuple[Array, Array, Array]:
        """Return u, s, v with a = u diag(s) v^T, s descending, as many columns as the smaller side of a.

        Signs differ between frameworks, and so do the vectors of equal singular values. If a is not finite, s is NaN.
        """

    # The bodies of control and bit operations suit frameworks that compute at once; one that traces graphs overrides
    # them.

    # --- constants ----------------------------------------------------------------------------------------------

    def constant(self, name: Hashable, make: Callable[[], Array]) -> Array:
        """Return make(), cached under `name` if the framework computes at once.

        The array must depend on `name` only and is never changed.
        """
        if name not in self._constants:
            self._constants[name] = make()
        return self._constants[name]

    # --- control ------------------------------------------------------------------------------------------------

    def choose(self, condition: Array, a: Callable[[], Array], b: Callable[[], Array]) -> Array:
        """Return a() if the 0-d condition holds, else b(); both return an array, or a list, of equal shapes."""
        return a() if condition else b()

    def computed(self, function: Callable[..., float], *numbers: Array, dtype: str = "int32") -> Array:
        """Return the number function(*numbers); in a traced graph, it is a 0-d array of a dtype.

        Python computes it whenever the graph runs.
        """
        return function(*numbers)

    def while_loop(self, condition: Callable[[Array], Array], body: Callable[[Array], Array], x: Array) -> Array:
        """Apply body to x while the 0-d condition holds."""
        while condition(x):
            x = body(x)
        return x

    def require(self, condition: Array, error: Exception, then: Array = None) -> Array:
        """Raise the error unless the 0-d condition holds, and return `then`.

        A graph runs in any order that the data allow: only what uses the result is certain to wait for the check.
        """
        if not condition:
            raise error
        return then


def unknown(wanted: str, dtypes: Iterable[str], x: Array) -> str:
    """Return the error message for a value that is no array of a framework, or has none of its dtypes."""
    return f"expected {wanted} of {', '.join(dtypes)} or bool, received {type(x)} of {getattr(x, 'dtype', 'no dtype')}."


def packed_size(n: int, bits: int) -> int:
    """Return the bytes of n packed codes of 1 to 16 bits."""
    return n + packed_size(n, bits - 8) if bits > 8 else -(-n * bits // 8)
