"""SDAGC: a threshold in standard deviations."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.codecs.estimated import EstimatedThreshold, deviation
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.site import Site
from grace.core.spec import Array


@compressors.register(
    "sdagc", About(family="sparsification", adam=False, tests=[{"alpha": 0.5}], digits=Setting(options={"alpha": 2.5}))
)
@dataclass(frozen=True)
class SDAGC(EstimatedThreshold):
    r"""SDAGC: every element of at least a number of standard deviations.

    Formula: C(x)_i = x_i \, 1_{|x_i| \ge \alpha \sigma}

    sigma is the standard deviation of the elements of x, so alpha sets the share that travels, whatever their size: of
    normal values 0.27 % with the default 3, 1.2 % with 2.5. At most d / alpha^2 elements are that far from their mean.
    The memory `dgc` adds the momentum correction and the clipping of the paper. If no element reaches the threshold,
    the largest do.

    Error: 0.97 |x|^2 for normal x.

    Cost: a pass each for mean and deviation and one of comparisons; nothing is sorted.

    When: a share that may follow the tail of each tensor. For a given share take sidco or topk.

    Reference: Chen et al., "Standard deviation based adaptive gradient compression for distributed deep learning",
    CCGRID 2020.
    """

    alpha: float = 3.0

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ConfigError(f"sdagc: alpha (in standard deviations) must be positive, received {self.alpha!r}.")

    def bound(self, x: Array, at: Site) -> Array:
        return deviation(at.ops, x)[1] * self.alpha
