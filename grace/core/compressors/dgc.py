"""Deep Gradient Compression: top-k with an estimated threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Sparsifier, keep_count
from grace.core.methods.site import Site
from grace.core.spec import Array, Field, Payload, TensorSpec


@compressors.register(
    "dgc",
    About(
        family="sparsification",
        adam=False,
        tests=[{"compress_ratio": 0.1, "min_samples": 16, "sample_ratio": 0.05}, {"compress_ratio": 1.0}],
        # The memory of dgc contains the momentum, so the optimizer must have none.
        digits=Setting(momentum=0.0, options={"compress_ratio": 0.01, "momentum": 0.9}),
    ),
)
@dataclass(frozen=True)
class DGC(Sparsifier):
    r"""Deep Gradient Compression: top-k with a threshold estimated from a sample; its memory corrects the momentum.

    Formula: C(x)_i = x_i \, 1_{|x_i| \ge \tau}, \quad \tau \approx \text{the $k$-th largest of}\; |x_1|, \dots, |x_d|

    `k = max(1, int(compress_ratio * d))`. tau is the magnitude that a share of compress_ratio of a random sample of
    max(min_samples, sample_ratio * d) elements reaches. Elements at or above tau travel if they number from k/overshoot
    to overshoot * k. If more pass, only the k largest of them travel; if fewer pass, the k largest of the whole tensor.
    (In that case the original lowers the threshold step by step.) Zeros never travel. Set the optimizer's momentum to
    0, because the memory `dgc` holds the momentum.

    Error: 0.91 |x|^2 for normal x; 0.55 |x|^2 with `compress_ratio=0.1`.

    Cost: a random sample, a selection on it and two passes; another selection, as in top-k, when the estimate was off.

    When: ratios of 1 % and below on large tensors. There top-k spends its time on the selection.

    Reference: Lin et al., "Deep gradient compression", ICLR 2018.
    """

    compress_ratio: float = 0.01
    sample_ratio: float = 0.01
    min_samples: int = 1024
    overshoot: float = 1.3

    default_memory = "dgc"

    def __post_init__(self) -> None:
        check_ratio("dgc", self.compress_ratio)
        if not 0 < self.sample_ratio <= 1:
            raise ConfigError(
                f"dgc: sample_ratio must be a share of the elements in (0, 1], received {self.sample_ratio!r}."
            )
        if self.min_samples < 1 or self.overshoot < 1:
            raise ConfigError(
                "dgc: min_samples and overshoot must be at least 1, "
                f"received {self.min_samples!r} and {self.overshoot!r}."
            )

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("values", spec.work_dtype, "kept"), Field("indices", "int32", "kept", below=spec.numel)

    def compress(self, x: Array, at: Site) -> Payload:
        ops, n = at.ops, at.spec.numel
        if n == 0:
            return {"values": x, "indices": ops.zeros(0, "int32")}
        k = keep_count(self.compress_ratio, n)
        count = min(n, max(self.min_samples, math.ceil(self.sample_ratio * n)))
        drawn = x if count == n else ops.gather(x, ops.sample(n, count, at.private_key))
        bound = ops.top_bound(drawn, keep_count(self.compress_ratio, count))
        passed = ops.select(x, bound, strict=False, nonzero=True)
        number = ops.count(passed[1])
        values, indices = ops.choose(
            ops.bit_or(number * self.overshoot < k, number > self.overshoot * k),
            lambda: self._largest(x, passed, number, k, at),
            lambda: list(passed),
        )
        return {"values": values, "indices": indices}

    def _largest(self, x: Array, passed: tuple[Array, Array], number: Array, k: int, at: Site) -> list[Array]:
        """Return the k largest nonzero elements: among those that passed, or among all if fewer than k passed."""
        ops = at.ops
        values, among = ops.choose(number < k, lambda: list(ops.select(x, 0, strict=True)), lambda: list(passed))
        values, best = ops.sparsify(values, ops.min_size(ops.length(among), k))
        return [values, ops.gather(among, best)]
