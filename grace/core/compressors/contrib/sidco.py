"""SIDCo: a threshold from a fitted distribution, in stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grace.core.codecs.estimated import EstimatedThreshold, above, reaching
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import keep_count
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array

_FIRST = 0.25  # least share of the elements that a stage leaves to the next one
_NEAR, _MOST = 0.2, 12  # the paper's tolerance of the number sent, and the most stages if the option sets none
_FLAT = 1e-4  # least magnitude of a shape; smaller ones count as an exponential distribution


@compressors.register(
    "sidco",
    About(
        family="sparsification",
        adam=False,
        tests=[{"compress_ratio": 0.1, "distribution": "pareto"}, {"stages": 1}],
        digits=Setting(options={"compress_ratio": 0.01}),
    ),
)
@dataclass(frozen=True)
class SIDCo(EstimatedThreshold):
    r"""SIDCo: elements above a threshold that a fitted distribution gives, in several stages.

    Formula: C(x)_i = x_i \, 1_{|x_i| \ge \tau_M}, \quad \tau_m = \tau_{m-1} + \mu_m \ln(1 / \delta_m), \; \tau_0 = 0

    mu_m is the mean excess |x_i| - tau_{m-1} of the n_m elements that reach tau_{m-1}. delta_m is k / n_m for
    `k = max(1, int(compress_ratio * d))`, but at least 0.25 unless the stage is the last that `stages` allows. So each
    stage fits an exponential distribution to the tail that the one before left, which is exact for Laplace values.
    `distribution="pareto"` fits a generalized Pareto distribution by mean and variance. Stages follow until the number
    of elements is within 20 % of k: at most `stages`, or 12 if it is null. If fewer than k elements reach tau_m, the
    next threshold lies between two tried ones, where the logarithm of the number is interpolated. The paper changes the
    number of stages every five steps, by the numbers sent, and takes compress_ratio for granted in each stage; here
    every step counts, so nothing is kept between steps. The gamma fit is left out, because the quantile of that
    distribution has no closed form. If fewer than k elements are not zero, these travel. Ties may keep the number far
    from k.

    Error: 0.9 |x|^2 for normal x.

    Cost: one pass of sums and two of comparisons, and a pass of sums per stage over what the first one leaves; nothing
    is sorted, no random numbers.

    When: large tensors whose values have a smooth distribution, where top-k spends its time on the selection. Not where
    the size must be exact.

    Reference: Abdelmoniem et al., "An efficient statistical-based gradient compression technique for distributed
    training systems", MLSys 2021.
    """

    compress_ratio: float = 0.01
    distribution: Literal["exponential", "pareto"] = "exponential"
    stages: int | None = None

    def __post_init__(self) -> None:
        check_ratio("sidco", self.compress_ratio)
        if self.stages is not None and self.stages < 1:
            raise ConfigError(f"sidco: stages must be at least 1, or null, received {self.stages!r}.")

    def bound(self, x: Array, at: Site) -> Array:
        ops, k, most = at.ops, keep_count(self.compress_ratio, at.spec.numel), self.stages or _MOST
        zero = ops.full(1, 0.0, "float64")[0]

        def found(bound: Array, low: Array, high: Array, stage: Array) -> Array:
            """Return a bound, the number that reaches it, the bound of the next stage, the bracket, and the stage.

            The bracket is a lower bound and its number, at least k, and an upper one, 0 if not known, and its number.
            """
            least = _FIRST * ops.cast(stage + 1 < most, "float64")
            number, further = self._fit(ops, tail, bound, k, least)
            return ops.concat([ops.stack([bound, number, further], axis=0), low, high, ops.reshape(stage, (1,))])

        def far(s: Array) -> Array:
            outside = ops.bit_or(s[1] < (1 - _NEAR) * k, s[1] > (1 + _NEAR) * k)
            return ops.bit_and(outside, s[7] < most)

        def narrowed(s: Array) -> Array:
            few = s[1] < k
            low, high = ops.where(few, s[3:5], s[:2]), ops.where(few, s[:2], s[5:7])
            fall = _logarithm(low[1] / ops.where(high[1] > 0, high[1], 0.5))
            way = _rounded(ops, _logarithm(low[1] / k) / ops.where(high[0] > 0, fall, 1.0))
            between = low[0] + (high[0] - low[0]) * ops.clip(way, 0.1, 0.9)
            return found(ops.where(high[0] > 0, between, s[2]), low, high, s[7] + 1)

        _, first = self._fit(ops, x, zero, k, _FIRST if most > 1 else 0.0)
        values, _ = reaching(ops, x, first)
        # Later stages need the elements above the lower bound only.
        tail = ops.choose(ops.count(values) >= k, lambda: values, lambda: reaching(ops, x, zero)[0])
        low, unknown = ops.stack([zero, zero + ops.count(tail)], axis=0), ops.zeros(2, "float64")
        return ops.choose(
            ops.count(tail) < k,
            lambda: zero,
            lambda: ops.while_loop(far, narrowed, found(first, low, unknown, zero + 1))[0],
        )

    def _fit(self, ops: ArrayOps, x: Array, bound: Array, k: int, least: Array | float) -> tuple[Array, Array]:
        """Return how many elements reach the bound, and the bound that k, or this share of them, would reach."""
        pareto = self.distribution == "pareto"
        count, sums = above(ops, x, bound, 2 if pareto else 1)
        number = ops.where(count > 0, count, 1.0)
        share = ops.where(k / number > least, k / number, least)
        excess = sums[0] / number - bound
        mean = ops.where(excess > 0, excess, 0.0)
        if not pareto:
            return count, bound + _rounded(ops, mean * _logarithm(1 / share))
        square = mean * mean
        variance = sums[2] / number * sums[2] - 2 * bound * (excess + bound) + bound * bound - square
        # square / variance is 1 for exponential values and 3 for uniform ones, whose tail has an end.
        least_variance = ops.where(square > 0, square / 3, 1.0)
        ratio = square / ops.where(variance > least_variance, variance, least_variance)
        shape, scale = (1 - ratio) / 2, mean * (ratio + 1) / 2
        flat = ops.abs(shape) < _FLAT
        power = (share ** -ops.where(flat, 1.0, shape) - 1) / ops.where(flat, 1.0, shape)
        return count, bound + _rounded(ops, scale * ops.where(flat, _logarithm(1 / share), power))


def _logarithm(x: Array) -> Array:
    """Return the natural logarithm by powers, with a relative error below 1e-6 up to x = 1e10."""
    return (x**_FLAT - x**-_FLAT) / (2 * _FLAT)


def _rounded(ops: ArrayOps, x: Array) -> Array:
    """Return x with fewer digits: powers differ in the last bit between frameworks."""
    return ops.cast(ops.cast(x, "float32"), "float64")
