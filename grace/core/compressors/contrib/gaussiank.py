"""Gaussian-k: a threshold from a fitted normal distribution."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from grace.core.codecs.estimated import EstimatedThreshold, above, deviation
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import keep_count
from grace.core.methods.site import Site
from grace.core.spec import Array


@compressors.register(
    "gaussiank",
    About(
        family="sparsification",
        adam=False,
        tests=[{"compress_ratio": 0.3, "adjustments": 0}],
        digits=Setting(options={"compress_ratio": 0.01}),
    ),
)
@dataclass(frozen=True)
class GaussianK(EstimatedThreshold):
    r"""Gaussian-k: elements above the percent point of a fitted normal distribution, corrected by their number.

    Formula: C(x)_i = x_i \, 1_{|x_i| \ge \tau}, \quad \tau = |\mu| + \sigma \Phi^{-1}(1 - \delta / 2)

    mu and sigma are mean and standard deviation of x, delta is compress_ratio. While fewer than 2/3 k or more than 4/3
    k elements reach tau, for k = max(1, int(compress_ratio * d)), tau is halved or multiplied by 1.5, at most
    `adjustments` times. Between a tau that too many reach and one that too few reach, the middle is next; with the
    factors alone, as published, it can swing to and fro. The number sent depends on the data. If none reaches tau, the
    largest do.

    Error: 0.91 |x|^2 for normal x.

    Cost: a pass each for mean and deviation, one per adjustment, one of comparisons; nothing is sorted.

    When: values close to normal, as residuals of large layers often are. Heavy tails need adjustments; sidco fits the
    tail.

    Reference: Shi et al., "Understanding top-k sparsification in distributed deep learning", 2019.
    """

    compress_ratio: float = 0.01
    adjustments: int = 4

    def __post_init__(self) -> None:
        check_ratio("gaussiank", self.compress_ratio)
        if self.adjustments < 0:
            raise ConfigError(f"gaussiank: adjustments must be at least 0, received {self.adjustments!r}.")

    def bound(self, x: Array, at: Site) -> Array:
        ops, k = at.ops, keep_count(self.compress_ratio, at.spec.numel)
        mean, sigma = deviation(ops, x)
        first = ops.abs(mean) + sigma * NormalDist().inv_cdf(1 - self.compress_ratio / 2)

        zero = ops.full(1, 0.0, "float64")[0]

        def tried(bound: Array, low: Array, high: Array, tries: Array) -> Array:
            return ops.stack([bound, above(ops, x, bound)[0], low, high, tries], axis=0)

        def again(s: Array) -> Array:
            return ops.bit_and(ops.bit_or(s[1] < 2 * k / 3, s[1] > 4 * k / 3), s[4] < self.adjustments)

        def adjusted(s: Array) -> Array:
            few = s[1] < k
            low, high = ops.where(few, s[2], s[0]), ops.where(few, s[0], s[3])
            between = ops.bit_and(low > 0, high > 0)
            scaled = s[0] * (1.5 - ops.cast(few, "float64"))
            return tried(ops.where(between, (low + high) / 2, scaled), low, high, s[4] + 1)

        return ops.while_loop(again, adjusted, tried(first, zero, zero, zero))[0]
