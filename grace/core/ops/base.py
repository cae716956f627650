"""The closed list of primitive array operations; what is made of them is in `grace.core.ops.composites`.

Conventions: arrays are flat unless a method says otherwise; indices are int32; a trailing underscore consumes the
first argument, and the caller uses the result; `+ - * /` and comparisons are the arrays' own operators. Nothing in
a compressor branches on an array's value, so that the same code can be traced into a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import ClassVar

from grace.core.spec import Array


class Primitives(ABC):
    """What every framework defines, on one device."""

    name: ClassVar[str]
    # Whether arrays can be changed, so that results may be written where the caller wants them.
    in_place: ClassVar[bool] = True
    device: str = "cpu"

    def __init__(self) -> None:
        self._constants: dict[Hashable, Array] = {}
        self._offered: Array | None = None

    # --- create and convert -------------------------------------------------------------------------------------

    @abstractmethod
    def zeros(self, n: int, dtype: str) -> Array:
        """`n` zeros."""

    def empty(self, n: int, dtype: str) -> Array:
        """`n` elements to be written."""
        return self.zeros(n, dtype)

    @abstractmethod
    def full(self, n: int, value: Array, dtype: str) -> Array:
        """`n` copies of a number or 0-d array."""

    @abstractmethod
    def arange(self, n: int, dtype: str) -> Array:
        """0 .. n-1."""

    @abstractmethod
    def cast(self, x: Array, dtype: str) -> Array:
        """x in another dtype; x itself if it has it already.

        Floats become integers by truncation, and float64 becomes 16 bits by way of float32, as in most frameworks.
        """

    @abstractmethod
    def copy(self, x: Array) -> Array:
        """x in memory of its own."""

    @abstractmethod
    def dtype(self, x: Array) -> str:
        """Name of the dtype, as in `spec.ITEMSIZE`."""

    @abstractmethod
    def to_bytes(self, x: Array) -> Array:
        """The memory of x as uint8."""

    @abstractmethod
    def from_bytes(self, data: Array, dtype: str) -> Array:
        """Inverse of to_bytes; the data must be aligned to the dtype."""

    # --- shape --------------------------------------------------------------------------------------------------

    @abstractmethod
    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """x in another shape of equal size, without a copy where possible."""

    @abstractmethod
    def concat(self, arrays: Sequence[Array]) -> Array:
        """One flat array from several of one dtype."""

    def lay_out(self, arrays: Sequence[Array]) -> Array:
        """Arrays of one dtype end to end, without a copy where they lie so already; to be read only."""
        return arrays[0] if len(arrays) == 1 else self.concat(arrays)

    def offer(self, out: Array | None) -> None:
        """Let the next sum of payloads, or cast from 16 bits, be written to this flat array if it is of that form.

        Otherwise it takes new memory; the caller sees from the result which. None takes the offer back.
        """
        self._offered = out

    def _withdraw(self) -> Array | None:
        out, self._offered = self._offered, None
        return out

    def place(self, out: Array, start: int, x: Array, factor: float) -> None:
        """Write x * factor, rounded to the dtype of the flat `out`, into it from `start` on. Only where `in_place`."""
        raise TypeError(f"arrays of {self.name} are not written in place")

    @abstractmethod
    def stack(self, arrays: Sequence[Array], axis: int) -> Array:
        """Arrays of equal shape along a new axis."""

    @abstractmethod
    def length(self, x: Array) -> int:
        """Number of elements: an int, or a 0-d tensor in a traced graph."""

    @abstractmethod
    def count(self, x: Array) -> float:
        """The number of elements to compute with: a float, or a 0-d float64 tensor in a traced graph."""

    @abstractmethod
    def size(self, x: Array) -> int:
        """A 0-d integer array as something that can be used in a slice."""

    @abstractmethod
    def min_size(self, a: int, b: int) -> int:
        """The smaller of two sizes, either of which may come from length()."""

    # --- arithmetic ---------------------------------------------------------------------------------------------

    @abstractmethod
    def abs(self, x: Array) -> Array:
        """Magnitudes."""

    @abstractmethod
    def floor(self, x: Array) -> Array:
        """Largest integers not above x, in x's dtype."""

    @abstractmethod
    def where(self, condition: Array, a: Array, b: Array) -> Array:
        """a where the condition holds, else b; either may be a number."""

    @abstractmethod
    def clip(self, x: Array, low: Array, high: Array) -> Array:
        """x limited to [low, high]."""

    def bit_and(self, a: Array, b: Array) -> Array:
        """Bitwise and of integers, or logical and of conditions."""
        return a & b

    def bit_or(self, a: Array, b: Array) -> Array:
        """Bitwise or of integers, or logical or of conditions."""
        return a | b

    def bit_xor(self, a: Array, b: Array) -> Array:
        """Bitwise exclusive or of integers."""
        return a ^ b

    def shift_left(self, a: Array, bits: int) -> Array:
        """Integers shifted left."""
        return a << bits

    def shift_right(self, a: Array, bits: int | Array) -> Array:
        """Integers shifted right, keeping the sign."""
        return a >> bits

    # --- reduce -------------------------------------------------------------------------------------------------
    # Sums run in float64 and are rounded once, so that frameworks with different orders of summation agree.

    @abstractmethod
    def sum(self, x: Array, axis: int | None = None) -> Array:
        """Sum, in x's dtype."""

    @abstractmethod
    def max(self, x: Array, axis: int | None = None) -> Array:
        """Largest element; 0 of an empty array."""

    @abstractmethod
    def norm(self, x: Array, axis: int | None = None) -> Array:
        """Euclidean norm, in x's dtype."""

    @abstractmethod
    def finite(self, x: Array) -> Array:
        """Whether no element is NaN or infinite, as a 0-d condition."""

    @abstractmethod
    def any(self, condition: Array) -> Array:
        """Whether the condition holds anywhere, as a 0-d condition."""

    # --- select -------------------------------------------------------------------------------------------------

    @abstractmethod
    def nonzero(self, condition: Array) -> Array:
        """Indices where the condition holds, ascending."""

    @abstractmethod
    def top_indices(self, x: Array, k: int) -> Array:
        """Indices of the k largest magnitudes, ascending; among equal ones the lower index wins."""

    @abstractmethod
    def gather(self, x: Array, indices: Array) -> Array:
        """x at the indices."""

    @abstractmethod
    def put_(self, x: Array, indices: Array, value: float) -> Array:
        """x with one value at the indices; consumes x."""

    @abstractmethod
    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        """x with the values added at distinct indices; consumes x."""

    @abstractmethod
    def scatter_min_(self, x: Array, indices: Array, values: Array) -> Array:
        """The smaller of x and all values given for an index, which may repeat; consumes x."""

    @abstractmethod
    def segment_sum(self, values: Array, segments: Array, n: int) -> Array:
        """Per segment 0 .. n-1 the sum of its values, added in float64 and rounded once; segments may repeat."""

    # --- order --------------------------------------------------------------------------------------------------

    @abstractmethod
    def sort(self, x: Array) -> Array:
        """x ascending; of a matrix every row (last axis) by itself."""

    @abstractmethod
    def search_sorted(self, edges: Array, x: Array) -> Array:
        """For every element of x how many of the ascending edges are at most x (int32)."""

    @abstractmethod
    def cumsum(self, x: Array) -> Array:
        """Sums of the first 1, 2, ... elements of a flat int64 array."""

    # --- consuming arithmetic -----------------------------------------------------------------------------------

    @abstractmethod
    def add_(self, x: Array, y: Array) -> Array:
        """x + y; consumes x."""

    @abstractmethod
    def sub_(self, x: Array, y: Array) -> Array:
        """x - y; consumes x."""

    @abstractmethod
    def scale_(self, x: Array, factor: float) -> Array:
        """x * factor; consumes x."""

    # --- linear algebra (two dimensions) ------------------------------------------------------------------------

    @abstractmethod
    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        """Matrix product, of the transposed matrices where so said; the order of its sums is the framework's own."""

    @abstractmethod
    def transpose(self, a: Array) -> Array:
        """Matrix transpose."""

    @abstractmethod
    def svd(self, a: Array) -> tuple[Array, Array, Array]:
        """u, s, v with a = u diag(s) v^T, s descending, as many columns as the smaller side of a.

        Signs and, of equal singular values, the vectors themselves differ between frameworks.
        """

    # The bodies of control and of bits suit frameworks that compute at once; one that traces graphs overrides them.

    # --- constants ----------------------------------------------------------------------------------------------

    def constant(self, name: Hashable, make: Callable[[], Array]) -> Array:
        """make(), an array that depends on `name` only and is never changed; kept where operations compute at once."""
        if name not in self._constants:
            self._constants[name] = make()
        return self._constants[name]

    # --- control ------------------------------------------------------------------------------------------------

    def choose(self, condition: Array, a: Callable[[], Array], b: Callable[[], Array]) -> Array:
        """a() if the 0-d condition holds, else b(); both return an array, or a list of arrays, alike in shape."""
        return a() if condition else b()

    def while_loop(self, condition: Callable[[Array], Array], body: Callable[[Array], Array], x: Array) -> Array:
        """Apply body to x while the 0-d condition holds."""
        while condition(x):
            x = body(x)
        return x

    def require(self, condition: Array, error: Exception) -> None:
        """Raise the error unless the 0-d condition holds."""
        if not condition:
            raise error


def unknown(wanted: str, dtypes: Iterable[str], x: Array) -> str:
    """The message for what is no array of a framework, or of none of its dtypes."""
    return f"expected {wanted} of {', '.join(dtypes)} or bool, received {type(x)} of {getattr(x, 'dtype', 'no dtype')}."


def packed_size(n: int, bits: int) -> int:
    """Bytes of n packed codes of 1 to 16 bits."""
    return n + packed_size(n, bits - 8) if bits > 8 else -(-n * bits // 8)
