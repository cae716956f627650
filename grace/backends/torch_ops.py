"""Array operations on PyTorch tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import torch

from grace.core.ops.base import unknown
from grace.core.ops.composites import ArrayOps
from grace.core.spec import ITEMSIZE, MAX_MAGNITUDE, Array

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.bool: "bool"}


class TorchOps(ArrayOps):
    """PyTorch tensors on one device."""

    name: ClassVar[str] = "torch"
    kernels: ClassVar[str | None] = "grace.backends.native_torch:NativeTorchOps"

    def zeros(self, n: int, dtype: str) -> Array:
        return torch.zeros(n, dtype=DTYPES[dtype], device=self.device)

    def empty(self, n: int, dtype: str) -> Array:
        return torch.empty(n, dtype=DTYPES[dtype], device=self.device)

    def full(self, n: int, value: Array, dtype: str) -> Array:
        return torch.full((n,), value, dtype=DTYPES[dtype], device=self.device)

    def numbers(self, values: Sequence[Array], dtype: str) -> Array:
        # On a GPU, a tensor of a list would make the host wait.
        if self.device == "cpu" and all(isinstance(value, (int, float)) for value in values):
            return torch.tensor(values, dtype=DTYPES[dtype])
        return super().numbers(values, dtype)

    def arange(self, n: int, dtype: str) -> Array:
        return torch.arange(n, dtype=DTYPES[dtype], device=self.device)

    def cast(self, x: Array, dtype: str) -> Array:
        if isinstance(x, torch.Tensor):
            # The most frequent call, for which `to` takes as long as a small kernel.
            known = x.dtype is DTYPES[dtype] and x.is_cpu and self.device == "cpu"
            return x if known else x.to(self.device, DTYPES[dtype])
        if isinstance(x, (int, float)):
            # Unlike a copy from the host, this waits for no device.
            return torch.full((), x, dtype=DTYPES[dtype], device=self.device)
        return torch.as_tensor(x, dtype=DTYPES[dtype], device=self.device)

    def copy(self, x: Array) -> Array:
        return x.clone()

    def dtype(self, x: Array) -> str:
        try:
            return _NAMES[x.dtype]
        except (AttributeError, KeyError):
            raise TypeError(unknown("a PyTorch tensor", DTYPES, x)) from None

    def to_bytes(self, x: Array) -> Array:
        if x.dim() == 1 and x.is_contiguous() and x.stride(0) == 1:
            return x.view(torch.uint8)
        # An expanded scalar or an empty array counts as contiguous with a stride of 0, which `view` refuses.
        return x.reshape(-1).contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)

    def from_bytes(self, data: Array, dtype: str) -> Array:
        return data if dtype == "uint8" else data.view(DTYPES[dtype])

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        # A view takes longer than the question whether it is needed.
        return x if x.shape == shape else x.reshape(shape)

    def concat(self, arrays: Sequence[Array]) -> Array:
        return torch.cat([a if a.dim() == 1 else a.reshape(-1) for a in arrays])

    def split(self, x: Array, lengths: Sequence[int]) -> list[Array]:
        return list(x.split_with_sizes(lengths)) if len(lengths) > 1 else [x]

    def lay_out(self, arrays: Sequence[Array]) -> Array:
        first = arrays[0]
        if len(arrays) > 1 and first.is_contiguous() and _end_to_end(arrays):
            return first.as_strided((sum(a.numel() for a in arrays),), (1,), first.storage_offset())
        return super().lay_out(arrays)

    def is_same(self, x: Array, y: Array) -> bool:
        return bool(x.nbytes == y.nbytes and x.data_ptr() == y.data_ptr())

    def place(self, out: Array, start: int, x: Array, factor: float) -> None:
        target = out if x.numel() == out.numel() else out[start : start + x.numel()]
        if factor == 1:
            target.copy_(x)
        else:
            torch.mul(x, _operand(factor, x), out=target)

    def place_all(self, outs: Sequence[Array], x: Array) -> None:
        # One call for all of them: a small tensor takes less time than the call.
        torch._foreach_copy_(outs, torch._utils._unflatten_dense_tensors(x, outs))

    def stack(self, arrays: Sequence[Array], axis: int) -> Array:
        return torch.stack(tuple(arrays), dim=axis)

    def length(self, x: Array) -> int:
        return int(x.numel())

    def count(self, x: Array) -> float:
        return float(x.numel())

    def size(self, x: Array) -> int:
        return int(x)

    def sizes(self, x: Array, n: int) -> list[int]:
        return x.tolist()  # type: ignore[no-any-return]

    def min_size(self, a: int, b: int) -> int:
        return min(a, b)

    def abs(self, x: Array) -> Array:
        return x.abs()

    def floor(self, x: Array) -> Array:
        return x.floor()

    def sqrt(self, x: Array) -> Array:
        # PyTorch's own of float32 is not always rounded correctly.
        return x.double().sqrt().to(x.dtype)

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        if isinstance(condition, bool):
            condition = self.constant(("condition", condition), lambda: self.full(1, condition, "uint8").bool()[0])
        if isinstance(b, (int, float)) and isinstance(a, torch.Tensor):
            b = _operand(b, a)
        elif isinstance(a, (int, float)) and isinstance(b, torch.Tensor):
            a = _operand(a, b)
        return torch.where(condition, a, b)

    def clip(self, x: Array, low: Array, high: Array) -> Array:
        return x.clamp(low, high)

    def sum(self, x: Array, axis: int | None = None) -> Array:
        return torch.sum(x, dim=axis, dtype=torch.float64).to(x.dtype)

    def wrapping_sum(self, x: Array, axis: int | None = None) -> Array:
        return torch.sum(x, dim=axis)

    def max(self, x: Array, axis: int | None = None) -> Array:
        if x.numel() == 0:
            shape = () if axis is None else tuple(s for i, s in enumerate(x.shape) if i != axis)
            return torch.zeros(shape, dtype=x.dtype, device=x.device)
        return x.max() if axis is None else x.amax(dim=axis)

    def min(self, x: Array) -> Array:
        return x.min() if x.numel() else torch.zeros((), dtype=x.dtype, device=x.device)

    def norm(self, x: Array, axis: int | None = None) -> Array:
        return torch.linalg.vector_norm(x, dim=axis, dtype=torch.float64).to(x.dtype)

    def finite(self, x: Array) -> Array:
        if x.numel() == 0:
            return torch.ones((), dtype=torch.bool, device=x.device)
        # NaN is the maximum and the minimum of a tensor that holds it, and every comparison with it is false.
        low, high = torch.aminmax(x)
        limit = MAX_MAGNITUDE[self.dtype(x)]
        return (low >= -limit) & (high <= limit)

    def any(self, condition: Array) -> Array:
        return condition.any()

    def conditions(self, x: Array, n: int) -> list[Array]:
        return x.tolist() if x.is_cpu else super().conditions(x, n)

    def nonzero(self, condition: Array) -> Array:
        return torch.nonzero(condition).reshape(-1).to(torch.int32)

    def top_indices(self, x: Array, k: int) -> Array:
        n = x.numel()
        if k >= n:
            return self.arange(n, "int32")
        if k == 0:
            return self.zeros(0, "int32")
        magnitude = x.abs()
        # topk breaks ties as it likes; only the k-th magnitude is taken from it.
        bound = torch.topk(magnitude, k, sorted=False).values.min()
        above = torch.nonzero(magnitude > bound).reshape(-1)
        ties = torch.nonzero(magnitude == bound).reshape(-1)[: k - above.numel()]
        return torch.cat([above, ties]).sort().values.to(torch.int32)

    def gather(self, x: Array, indices: Array) -> Array:
        return x.index_select(0, indices)

    def put_(self, x: Array, indices: Array, value: float) -> Array:
        return x.index_fill_(0, indices.long(), value)

    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        return x.index_add_(0, indices, values)

    def scatter_min_(self, x: Array, indices: Array, values: Array) -> Array:
        return x.scatter_reduce_(0, indices.long(), values, "amin")

    def segment_sum(self, values: Array, segments: Array, n: int) -> Array:
        return self.zeros(n, "float64").index_add_(0, segments, values.double()).to(values.dtype)

    def sort(self, x: Array) -> Array:
        return torch.sort(x).values

    def search_sorted(self, edges: Array, x: Array) -> Array:
        return torch.searchsorted(edges, x.contiguous(), right=True, out_int32=True)

    def cumsum(self, x: Array) -> Array:
        return torch.cumsum(x, 0)

    def add_(self, x: Array, y: Array) -> Array:
        return x.add_(y)

    def sub_(self, x: Array, y: Array) -> Array:
        return x.sub_(y)

    def scaled(self, x: Array, factor: float) -> Array:
        return x * _operand(factor, x)

    def scale_(self, x: Array, factor: float) -> Array:
        return x.mul_(_operand(factor, x))

    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        return (a.t() if transpose_a else a) @ (b.t() if transpose_b else b)

    def transpose(self, a: Array) -> Array:
        return a.t()

    def svd(self, a: Array) -> tuple[Array, Array, Array]:
        if not torch.isfinite(a).all():
            # LAPACK does not converge, and PyTorch would raise. A run skips a step of NaN on all ranks.
            a = torch.full_like(a, torch.nan)
            return a[:, : min(a.shape)], a.reshape(-1)[: min(a.shape)], a.t()[:, : min(a.shape)]
        u, s, v = torch.linalg.svd(a, full_matrices=False)
        return u, s, v.t()


def _operand(number: float, x: torch.Tensor) -> float | torch.Tensor:
    """Return a number as a 0-d tensor of x's dtype where that gives the same result: PyTorch takes it sooner."""
    return _number(number, x.dtype) if x.is_cpu and x.dtype in (torch.float32, torch.float64) else number


@lru_cache
def _number(number: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), number, dtype=dtype)


def _end_to_end(arrays: Sequence[torch.Tensor]) -> bool:
    """Return whether each array begins, in one storage, where the one before ends."""
    # The offsets first: those of arrays that lie apart differ at the first pair.
    for a, b in itertools.pairwise(arrays):
        if b.storage_offset() != a.storage_offset() + a.numel() or not b.is_contiguous():
            return False
    return len({a.untyped_storage().data_ptr() for a in arrays}) == 1
