"""Array operations on NumPy: the reference backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from grace.core.ops.base import unknown
from grace.core.ops.composites import ArrayOps
from grace.core.spec import ITEMSIZE, MAX_MAGNITUDE, Array

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in ITEMSIZE
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {np.dtype(bool): "bool"}


class NumpyOps(ArrayOps):
    """NumPy arrays in main memory; bfloat16 is the dtype of the package ml_dtypes."""

    name: ClassVar[str] = "numpy"
    kernels: ClassVar[str | None] = "grace.core.ops.native_numpy:NativeNumpyOps"

    def zeros(self, n: int, dtype: str) -> Array:
        return np.zeros(n, DTYPES[dtype])

    def empty(self, n: int, dtype: str) -> Array:
        return np.empty(n, DTYPES[dtype])

    def full(self, n: int, value: Array, dtype: str) -> Array:
        x = np.empty(n, DTYPES[dtype])
        x[...] = value
        return x

    def numbers(self, values: Sequence[Array], dtype: str) -> Array:
        return np.array(values, DTYPES[dtype])

    def arange(self, n: int, dtype: str) -> Array:
        return np.arange(n, dtype=DTYPES[dtype])

    def cast(self, x: Array, dtype: str) -> Array:
        x, target = np.asarray(x), DTYPES[dtype]
        if x.dtype == target:
            return x
        if x.dtype.kind != "f" or x.itemsize <= target.itemsize:
            return x.astype(target)
        # A value too large for a narrow float becomes infinite, as in the other frameworks, without a warning.
        with np.errstate(over="ignore"):
            # NumPy would round float64 to float16 directly.
            return (x.astype(np.float32) if target == np.float16 else x).astype(target)

    def half_sum(self, rows: Sequence[Array], factor: float = 1.0) -> Array:
        # As for a cast; also, infinities of both signs add to NaN without a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            return super().half_sum(rows, factor)

    def copy(self, x: Array) -> Array:
        return x.copy()

    def dtype(self, x: Array) -> str:
        try:
            return _NAMES[x.dtype]
        except (AttributeError, KeyError):
            raise TypeError(unknown("a NumPy array", DTYPES, x)) from None

    def to_bytes(self, x: Array) -> Array:
        return np.ascontiguousarray(x).reshape(-1).view(np.uint8)

    def from_bytes(self, data: Array, dtype: str) -> Array:
        return data.view(DTYPES[dtype])

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        # The array itself, by which a step knows that a result lies in the gradient. A scalar becomes an array.
        return x if shape and x.shape == shape else x.reshape(shape)

    def concat(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate([a.reshape(-1) for a in arrays])

    def is_same(self, x: Array, y: Array) -> bool:
        return bool(x.nbytes == y.nbytes and x.__array_interface__["data"][0] == y.__array_interface__["data"][0])

    def place(self, out: Array, start: int, x: Array, factor: float) -> None:
        np.multiply(x, factor, out=out[start : start + x.size], casting="unsafe")

    def stack(self, arrays: Sequence[Array], axis: int) -> Array:
        # np.stack gives the same, but takes as long as a small kernel.
        return np.array(arrays) if axis == 0 else np.stack(arrays, axis=axis)

    def length(self, x: Array) -> int:
        return int(x.size)

    def count(self, x: Array) -> float:
        return float(x.size)

    def size(self, x: Array) -> int:
        return int(x)

    def sizes(self, x: Array, n: int) -> list[int]:
        return x.tolist()  # type: ignore[no-any-return]

    def min_size(self, a: int, b: int) -> int:
        return min(a, b)

    def abs(self, x: Array) -> Array:
        return np.abs(x)

    def floor(self, x: Array) -> Array:
        return np.floor(x)

    def sqrt(self, x: Array) -> Array:
        return np.sqrt(x)

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        return np.where(condition, a, b)

    def clip(self, x: Array, low: Array, high: Array) -> Array:
        return x.clip(low, high)

    def sum(self, x: Array, axis: int | None = None) -> Array:
        if x.dtype.kind in "biu":
            return np.asarray(np.add.reduce(x, axis=axis, dtype=np.float64).astype(x.dtype))
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(np.add.reduce(x, axis=axis, dtype=np.float64).astype(x.dtype))

    def wrapping_sum(self, x: Array, axis: int | None = None) -> Array:
        return np.asarray(np.add.reduce(x, axis=axis))

    def max(self, x: Array, axis: int | None = None) -> Array:
        if x.size == 0:
            return np.zeros(() if axis is None else np.delete(x.shape, axis), x.dtype)
        return np.asarray(x.max(axis=axis))

    def min(self, x: Array) -> Array:
        return np.asarray(x.min()) if x.size else np.zeros((), x.dtype)

    def norm(self, x: Array, axis: int | None = None) -> Array:
        wide = x.astype(np.float64)
        with np.errstate(over="ignore"):
            return np.asarray(np.sqrt(np.sum(wide * wide, axis=axis)).astype(x.dtype))

    def finite(self, x: Array) -> Array:
        # A comparison with NaN is false.
        with np.errstate(invalid="ignore"):
            return np.all(np.abs(x) <= MAX_MAGNITUDE[self.dtype(x)])

    def any(self, condition: Array) -> Array:
        return np.any(condition)

    def conditions(self, x: Array, n: int) -> list[Array]:
        return x.tolist()  # type: ignore[no-any-return]

    def nonzero(self, condition: Array) -> Array:
        return condition.reshape(-1).nonzero()[0].astype(np.int32)

    def top_indices(self, x: Array, k: int) -> Array:
        n = x.size
        if k >= n:
            return np.arange(n, dtype=np.int32)
        if k == 0:
            return np.zeros(0, np.int32)
        magnitude = np.abs(x)
        bound = np.partition(magnitude, n - k)[n - k]
        above = np.flatnonzero(magnitude > bound)
        ties = np.flatnonzero(magnitude == bound)[: k - above.size]
        return np.sort(np.concatenate([above, ties])).astype(np.int32)

    def gather(self, x: Array, indices: Array) -> Array:
        return x[indices]

    def put_(self, x: Array, indices: Array, value: float) -> Array:
        x[indices] = value
        return x

    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        x[indices] += values
        return x

    def scatter_min_(self, x: Array, indices: Array, values: Array) -> Array:
        np.minimum.at(x, indices, values)
        return x

    def segment_sum(self, values: Array, segments: Array, n: int) -> Array:
        return np.bincount(segments, values.astype(np.float64), n).astype(values.dtype)

    def sort(self, x: Array) -> Array:
        return np.sort(x)

    def search_sorted(self, edges: Array, x: Array) -> Array:
        return edges.searchsorted(x, side="right").astype(np.int32)

    def cumsum(self, x: Array) -> Array:
        return x.cumsum()

    def add_(self, x: Array, y: Array) -> Array:
        x += y
        return x

    def sub_(self, x: Array, y: Array) -> Array:
        x -= y
        return x

    def scale_(self, x: Array, factor: float) -> Array:
        x *= factor
        return x

    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        return (a.T if transpose_a else a) @ (b.T if transpose_b else b)

    def transpose(self, a: Array) -> Array:
        return a.T

    def svd(self, a: Array) -> tuple[Array, Array, Array]:
        if not np.isfinite(a).all():
            # LAPACK does not converge, and NumPy would raise. A run skips a step of NaN on all ranks.
            a = np.full_like(a, np.nan)
            return a[:, : min(a.shape)], a.reshape(-1)[: min(a.shape)], a.T[:, : min(a.shape)]
        u, s, v = np.linalg.svd(a, full_matrices=False)
        return u, s, v.T

    def pack(self, codes: Array, bits: int) -> Array:
        if bits == 1:
            return np.packbits(codes.astype(np.uint8, copy=False), bitorder="little")
        return super().pack(codes, bits)

    def unpack(self, data: Array, bits: int, n: int) -> Array:
        if bits == 1:
            return np.unpackbits(data, count=n, bitorder="little").astype(np.int64)
        return super().unpack(data, bits, n)
