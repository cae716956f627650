"""Dynamic communication thresholding: top-k's threshold, renewed from time to time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.codecs.estimated import EstimatedThreshold
from grace.core.compressors.hardthreshold import smallest_magnitude
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.capabilities import Learning
from grace.core.methods.compressor import keep_count
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import MAX_MAGNITUDE, Array, Payload, State, TensorSpec


@compressors.register(
    "dct",
    About(
        family="sparsification",
        adam=True,
        tests=[{"compress_ratio": 0.1, "refresh": 2}],
        digits=Setting(options={"compress_ratio": 0.01, "refresh": 10}),
    ),
)
@dataclass(frozen=True)
class DCT(EstimatedThreshold, Learning):
    r"""Dynamic communication thresholding: elements above the k-th magnitude of an earlier step.

    Formula: C(x)_i = x_i \, 1_{|x_i| \ge \tau}, \quad \tau = |x|_{(k)} \;\text{at the last renewal}

    `k = max(1, int(compress_ratio * d))`. Every `refresh` steps each rank sends its k largest elements, and tau becomes
    the mean over the ranks of the smallest magnitude that they sent. Until the next renewal all elements from tau on
    travel, so the number follows the data. If a schedule changes compress_ratio, tau is renewed at once. If no element
    reaches tau, the largest do. The paper's sparse activations, for model parallelism, are no part of it.

    Error: 0.91 |x|^2 for normal x; 0.56 |x|^2 with `compress_ratio=0.1`.

    Cost: one pass of comparisons; a selection as in topk at every renewal. State: tau.

    When: gradients whose sizes change slowly, late in a run. At its start the residual is still empty, so the first tau
    is too low: renew often there. If they shrink, few elements travel until the next renewal.

    Reference: Gupta et al., "Training recommender systems at scale: communication-efficient model and data
    parallelism", KDD 2021.
    """

    compress_ratio: float = 0.01
    refresh: int = 1000

    def __post_init__(self) -> None:
        check_ratio("dct", self.compress_ratio)
        if self.refresh < 1:
            raise ConfigError(f"dct: refresh (in steps) must be at least 1, received {self.refresh!r}.")

    @property
    def absolute(self) -> bool:
        return True

    def init(self, spec: TensorSpec, ops: ArrayOps, key_seed: int) -> State:
        # `ratio` is what the threshold was found for, `left` the steps until the next renewal.
        return {name: ops.zeros(1, "float64") for name in ("threshold", "ratio", "left")}

    def _renews(self, at: Site) -> Array:
        """Return whether this step finds a threshold, of shape (1,)."""
        wanted = at.ops.full(1, self.compress_ratio, "float64")
        return at.ops.bit_or(at.state["ratio"] != wanted, at.state["left"] <= 0)

    def bound(self, x: Array, at: Site) -> Array:
        ops, k = at.ops, keep_count(self.compress_ratio, at.spec.numel)
        found = ops.choose(
            self._renews(at)[0], lambda: ops.cast(ops.top_bound(x, k), "float64"), lambda: at.state["threshold"]
        )
        return found[0]

    def learn(self, payloads: Sequence[Payload], at: Site) -> State:
        ops, dtype, renews = at.ops, at.spec.work_dtype, self._renews(at)
        sizes = [ops.cast(smallest_magnitude(payload["values"], ops, dtype), "float64") for payload in payloads]
        every = ops.concat(sizes)
        # A rank whose gradient is zero does not count.
        counts = every <= MAX_MAGNITUDE[dtype]
        number, total = ops.sum(ops.cast(counts, "float64")), ops.sum(ops.where(counts, every, 0.0))
        found = ops.where(number > 0, total / ops.where(number > 0, number, 1.0), 0.0)
        left = ops.where(renews, self.refresh * ops.cast(found > 0, "float64"), at.state["left"])
        return {
            "threshold": ops.where(renews, found, at.state["threshold"]),
            "ratio": ops.full(1, self.compress_ratio, "float64"),
            "left": left - 1.0,
        }
