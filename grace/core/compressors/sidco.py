"""SIDCo: a threshold from a fitted distribution, in stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from grace.core.codecs.estimated import EstimatedThreshold, above, reaching
from grace.core.compressors.topk import check_ratio
from grace.core.methods.capabilities import Thinning
from grace.core.ops.composites import ArrayOps
from grace.core.values.errors import ConfigError
from grace.core.values.registry import compressors
from grace.core.values.spec import Array, Site

_FIRST = 0.25  # share of the elements that a stage leaves to the next one


@compressors.register("sidco")
@dataclass(frozen=True)
class SIDCo(EstimatedThreshold, Thinning):
    r"""SIDCo: elements above a threshold that a fitted distribution gives, in several stages.

    Formula: C(x)_i = x_i \, 1_{|x_i| \ge \tau_M}, \quad \tau_m = \tau_{m-1} + \mu_m \ln(1 / \delta_m), \; \tau_0 = 0

    mu_m is the mean excess |x_i| - tau_{m-1} of the elements that reached tau_{m-1}; all deltas but the last are 0.25,
    and their product is compress_ratio. So each stage fits an exponential distribution to the tail that the one before
    left, which is exact for Laplace values. `distribution="pareto"` fits a generalized Pareto distribution by mean and
    variance. `stages` null means as many as the ratio allows (4 for 1 %); the paper moves the number of stages during
    the run. Its gamma fit is left out, because the quantile of that distribution has no closed form. About
    compress_ratio of the elements travel; the number depends on the data. If none reaches the threshold, the largest
    do.

    Error: 0.9 |x|^2 for normal x.

    Cost: one pass of sums per stage and one of comparisons; nothing is sorted, no random numbers.

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

    def shares(self) -> list[float]:
        """Return the share that each stage keeps of what the one before left; their product is compress_ratio."""
        most = 1 + math.floor(math.log(self.compress_ratio) / math.log(_FIRST))
        count = min(most, self.stages or most)
        return [_FIRST] * (count - 1) + [self.compress_ratio / _FIRST ** (count - 1)]

    def bound(self, x: Array, at: Site) -> Array:
        ops, tail, left = at.ops, x, 1.0
        found = ops.full(1, 0.0, "float64")[0]
        for share in self.shares():
            if left < _FIRST:
                tail, _ = reaching(ops, tail, found)
            found = found + self._step(ops, tail, found, share)
            left *= share
        return found

    def _step(self, ops: ArrayOps, x: Array, bound: Array, share: float) -> Array:
        """Return the excess over the bound that this share of the elements above it reaches."""
        pareto = self.distribution == "pareto"
        number, sums = above(ops, x, bound, 2 if pareto else 1)
        number = ops.where(number > 0, number, 1.0)
        excess = sums[0] / number - bound
        mean = ops.where(excess > 0, excess, 0.0)
        if not pareto:
            return mean * math.log(1 / share)
        square = mean * mean
        variance = sums[2] / number * sums[2] - 2 * bound * (excess + bound) + bound * bound - square
        # square / variance is 1 for exponential values and 3 for uniform ones, whose tail has an end.
        least = ops.where(square > 0, square / 3, 1.0)
        ratio = square / ops.where(variance > least, variance, least)
        shape, scale = (1 - ratio) / 2, mean * (ratio + 1) / 2
        exponential = ops.abs(shape) < 1e-6
        shape = ops.where(exponential, 1.0, shape)
        power = (ops.full(1, 1 / share, "float64")[0] ** shape - 1) / shape
        # Powers differ in the last bit between frameworks.
        return ops.cast(ops.cast(scale * ops.where(exponential, math.log(1 / share), power), "float32"), "float64")
