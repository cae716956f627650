"""Random elements among the largest: rTop-k."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.codecs.sums import FEEDBACK, Feedback, sum_top
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Sparsifier, keep_count
from grace.core.methods.fusions import compress_sum
from grace.core.methods.site import Site
from grace.core.spec import Array, Field, Payload, State, TensorSpec


@compressors.register(
    "rtopk",
    About(
        family="sparsification",
        adam=False,
        tests=[{"compress_ratio": 0.3, "spread": 2.5}],
        digits=Setting(options={"compress_ratio": 0.01}),
    ),
)
@dataclass(frozen=True)
class RTopK(Sparsifier):
    r"""Random top-k (rTop-k): k elements drawn at random among the r of largest magnitude.

    Formula: C(x)_i = x_i \, 1_{i \in K}, \quad K \subset R \;\text{random}, \; |K| = k, \; R: \text{the $r$ largest}

    `k = max(1, int(compress_ratio * d))`, and r is `spread` times k, at most d. Each rank draws its own k of its r.
    With `spread=1` it is topk, with spread at least 1 / compress_ratio randomk with its own indices on every rank. The
    payload is that of topk. E|x - C(x)|^2 = |x|^2 - (k/r) |x_R|^2 <= (1 - k/d) |x|^2.

    Error: 0.93 |x|^2 for normal x; 0.91 |x|^2 with `spread=1.0`.

    Cost: the selection of r elements as in topk, r random indices, and a sort of k.

    When: sparse gradients with noise, where the largest elements of a batch are not reliably those of the mean. The
    residual ages by a factor of spread against topk.

    Reference: Barnes et al., "rTop-k: a statistical estimation approach to distributed SGD", IEEE Journal on Selected
    Areas in Information Theory 2020.
    """

    compress_ratio: float = 0.01
    spread: float = 2.0

    def __post_init__(self) -> None:
        check_ratio("rtopk", self.compress_ratio)
        if not self.spread >= 1:
            raise ConfigError(f"rtopk: spread (r / k) must be at least 1, received {self.spread!r}.")

    def contraction(self, spec: TensorSpec) -> float | None:
        return keep_count(self.compress_ratio, spec.numel) / max(1, spec.numel)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        k = keep_count(self.compress_ratio, spec.numel)
        return Field("values", spec.work_dtype, k), Field("indices", "int32", k, below=spec.numel)

    def compress(self, x: Array, at: Site) -> Payload:
        return self.chosen(*at.ops.sparsify(x, self.largest(at)), at)

    def largest(self, at: Site) -> int:
        """Return r."""
        return min(at.spec.numel, int(self.spread * keep_count(self.compress_ratio, at.spec.numel)))

    def chosen(self, values: Array, indices: Array, at: Site) -> Payload:
        """Return the payload of k of the r largest."""
        ops, r, k = at.ops, self.largest(at), keep_count(self.compress_ratio, at.spec.numel)
        chosen = ops.cast(ops.sort(ops.sample(r, k, at.private_key)), "int32")
        return {"values": ops.gather(values, chosen), "indices": ops.gather(indices, chosen)}


@compress_sum.of(RTopK, FEEDBACK)
def _(compressor: RTopK, memory: Feedback, grad: Array, state: State, at: Site) -> tuple[Array, Payload, Array] | None:
    terms = memory.terms(grad, state, at)
    if terms is None:
        return None
    x, finite, values, indices = sum_top(at.ops, *terms, compressor.largest(at), at.out)
    return x, compressor.chosen(values, indices, at), finite
