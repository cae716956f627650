"""Randomized distributed mean estimation: a centre, and random coordinates with their distance from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from grace.core.compressors.topk import advice_on_ratio, check_ratio
from grace.core.compressors.wangni import Wangni, sparse_entries
from grace.core.config.registry import About, Setting, compressors
from grace.core.methods.compressor import Compressor, beyond_int32
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, TensorSpec

# Random numbers are multiples of this, and so is a probability.
_STEP = 2.0**-24


@compressors.register(
    "dme",
    About(
        family="sparsification",
        adam=False,
        tests=[{"compress_ratio": 0.3, "probabilities": "optimal"}],
        errors=[{"probabilities": name} for name in ("uniform", "optimal")],
        digits=Setting(options={"compress_ratio": 0.1, "probabilities": "optimal"}),
    ),
)
@dataclass(frozen=True)
class DME(Compressor):
    r"""Randomized distributed mean estimation: random coordinates, and for all others the mean of the gradient.

    Formula: C(x)_i = \frac{x_i}{p_i} - \frac{1 - p_i}{p_i} \mu \;\text{with probability } p_i, \;\text{else}\; \mu

    mu is the mean of x. Coordinates are drawn independently, on each rank by itself. With `probabilities="uniform"` all
    p_i are p = `compress_ratio`. With "optimal" they minimize the variance with p d coordinates on average: p_i is
    proportional to |x_i - mu|, at most 1. That is the method `wangni` applied to x - mu. Unbiased, E|x - C(x)|^2 =
    sum_i (1 / p_i - 1) (x_i - mu)^2: for the same probabilities, `randomk` and `wangni` have x_i in place of x_i - mu.
    One float for mu, and per drawn coordinate a value of the working dtype and an int32 index; with "optimal" the bytes
    of `wangni`. "uniform" takes p as a multiple of 2^-24.

    Error: 9 |x|^2 for normal x; 5.4 |x|^2 with `probabilities="optimal"`.

    Cost: one pass for the mean and one random number per element; "optimal" 2 to 10 passes more, as in `wangni`.

    When: to study means of vectors that have a large mean of their own. The mean of gradients is near 0, so `wangni` is
    as exact, and with error feedback top-k is better.

    Reference: Konecny and Richtarik, "Randomized distributed mean estimation: accuracy vs. communication", Frontiers in
    Applied Mathematics and Statistics 2018.
    """

    compress_ratio: float = 0.1
    probabilities: Literal["uniform", "optimal"] = "uniform"

    unbiased = True

    def __post_init__(self) -> None:
        check_ratio("dme", self.compress_ratio)

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        return ("centre", "values") if self.probabilities == "uniform" else ("centre", *self._optimal.linear_in)

    @property
    def advice(self) -> str | None:
        return advice_on_ratio(self.compress_ratio)

    @property
    def _optimal(self) -> Wangni:
        return Wangni(self.compress_ratio)

    @property
    def _probability(self) -> float:
        return max(1, round(self.compress_ratio / _STEP)) * _STEP

    def unfit(self, spec: TensorSpec) -> str | None:
        return beyond_int32(spec)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        centre = Field("centre", spec.work_dtype, 1)
        if self.probabilities == "optimal":
            return centre, *self._optimal.wire(spec)
        values, indices = Field("values", spec.work_dtype, "kept"), Field("indices", "int32", "kept", below=spec.numel)
        return centre, values, indices

    def compress(self, x: Array, at: Site) -> Payload:
        ops, dtype, p = at.ops, at.spec.work_dtype, self._probability
        # Divided first, so that no sum overflows.
        centre = _sum(ops, x / ops.cast(max(1, at.spec.numel), dtype), at.spec.numel)
        if self.probabilities == "optimal":
            return {"centre": ops.reshape(centre, (1,)), **self._optimal.compress(x - centre, at)}
        # u < p, as a comparison that the kernel of `select` makes.
        bound = ops.full(1, 1 - p, "float32")
        _, indices = ops.select(1.0 - ops.uniform(at.spec.numel, at.private_key), bound, strict=True)
        values = (ops.gather(x, indices) - centre) / ops.cast(p, dtype)
        return {"centre": ops.reshape(centre, (1,)), "values": values, "indices": indices}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        ops, n = at.ops, at.spec.numel
        centre = payloads[0]["centre"]
        for payload in payloads[1:]:
            centre = centre + payload["centre"]
        if self.probabilities == "optimal":
            values, indices = sparse_entries(ops, payloads)
        else:
            values, indices = ([payload[name] for payload in payloads] for name in ("values", "indices"))
        return ops.sparse_sum(values, indices, n, onto=ops.full(n, centre[0], at.spec.work_dtype))


def _sum(ops: ArrayOps, x: Array, n: int) -> Array:
    """Return the sum of n elements, with the same bits in every framework."""
    if ops.dtype(x) != "float64":
        # Added in float64, and rounded once.
        return ops.sum(x)
    # Nothing is wider than float64, so the order matters: the halves are added until one element is left.
    while n > 1:
        half = (n + 1) // 2
        x = ops.concat([x[: n - half] + x[half:], x[n - half : half]])
        n = half
    return ops.sum(x)
