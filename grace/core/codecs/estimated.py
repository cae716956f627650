"""Shared parts of sparsifiers that estimate a threshold in place of sorting."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.methods.compressor import Sparsifier
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@dataclass(frozen=True)
class EstimatedThreshold(Sparsifier):
    """Base of sparsifiers that send what reaches an estimated threshold; they define `bound`.

    If no element reaches it, the largest ones travel, so that a residual never waits for good. Zeros never travel.
    """

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("values", spec.work_dtype, "kept"), Field("indices", "int32", "kept", below=spec.numel)

    @abstractmethod
    def bound(self, x: Array, at: Site) -> Array:
        """Return the threshold for at least one element, as a 0-d float64 array."""

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        if at.spec.numel == 0:
            return {"values": x, "indices": ops.zeros(0, "int32")}
        values, indices = reaching(ops, x, self.bound(x, at))
        values, indices = ops.choose(
            ops.count(indices) == 0,
            lambda: list(reaching(ops, x, ops.max_abs(x))),
            lambda: [values, indices],
        )
        return {"values": values, "indices": indices}


def reaching(ops: ArrayOps, x: Array, bound: Array) -> tuple[Array, Array]:
    """Return values and ascending indices where |x| >= bound, without zeros; the bound is a 0-d array."""
    edge = ops.reshape(ops.cast(bound, ops.dtype(x)), (1,))
    return ops.select(x, edge, strict=False, nonzero=True)


def above(ops: ArrayOps, x: Array, bound: Array, powers: int = 0) -> tuple[Array, Array]:
    """Return `moments` as float64 arrays, 0-d and of shape (3,); the bound is a number or a 0-d array."""
    dtype = ops.dtype(x)
    number, sums = moments(ops, x, ops.full(1, ops.cast(bound, dtype), dtype), powers)
    return ops.cast(number, "float64")[0], ops.cast(sums, "float64")


@composite()
def moments(ops: ArrayOps, x: Array, bound: Array, powers: int) -> tuple[Array, Array]:
    """Return the number of elements with |x| >= bound (int64, (1,)), and three sums over them, in x's dtype.

    The sums are that of the magnitudes if `powers` is at least 1, and that of the positive ones and the Euclidean norm
    if it is 2; others are 0. The bound has one element of x's dtype.
    """
    dtype = ops.dtype(x)
    passed = ops.abs(x) >= bound
    number = ops.reshape(ops.sum(ops.cast(passed, "int64")), (1,))
    if powers == 0:
        return number, ops.zeros(3, dtype)
    kept = ops.where(passed, x, 0.0)
    zero = ops.zeros(1, dtype)[0]
    rest = [ops.sum(ops.where(x > 0, kept, 0.0)), ops.norm(kept)] if powers > 1 else [zero, zero]
    return number, ops.stack([ops.sum(ops.abs(kept)), *rest], axis=0)


@moments.kernel()
def _(ops: Native, x: Array, bound: Array, powers: int) -> tuple[Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    number, sums = ops.run("moments", [x, bound], [powers], outputs=["int64", dtype], lengths=[1, 3])
    return number, sums


def mean_above(ops: ArrayOps, x: Array, bound: Array) -> Array:
    """Return the mean of the magnitudes >= bound, 0 if there are none, as a 0-d float64 array."""
    number, sums = above(ops, x, bound, 1)
    return sums[0] / ops.where(number > 0, number, 1.0)


def deviation(ops: ArrayOps, x: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation of at least one element, as 0-d float64 arrays."""
    number, sums = above(ops, x, 0.0, 2)
    mean, size = (2 * sums[1] - sums[0]) / number, sums[2] / number**0.5
    # In this form no square overflows.
    share = ops.abs(mean) / ops.where(size > 0, size, 1.0)
    return mean, size * ops.clip(1 - share * share, 0.0, 1.0) ** 0.5


def unsearched(ops: ArrayOps, n: int, high: Array | float = 0.0) -> Array:
    """Return the beginning of a search among n elements: no lower bound, and an upper one, 0 if it is not known.

    The float64 array holds a lower bound that at least k elements reach, their number, an upper bound that fewer reach,
    and the number of trials.
    """
    values = (0.0, float(n), high, 0.0)
    return ops.stack([ops.cast(value, "float64") for value in values], axis=0)


def tried(ops: ArrayOps, x: Array, k: int, search: Array, bound: Array) -> Array:
    """Return the search after one more bound, which becomes the lower one if k elements of x reach it."""
    number, _ = above(ops, x, bound)
    low, high = ops.stack([bound, number], axis=0), bound
    enough = number >= k
    return ops.concat(
        [ops.where(enough, low, search[:2]), ops.stack([ops.where(enough, search[2], high), search[3] + 1], axis=0)]
    )
