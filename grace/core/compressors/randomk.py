"""Random-k sparsification with indices shared by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grace.core.codecs.sums import FEEDBACK, Feedback, sum_sample
from grace.core.compressors.topk import advice_on_ratio, check_ratio
from grace.core.config.registry import About, Need, Setting, compressors
from grace.core.methods.compressor import Sparsifier, keep_count
from grace.core.methods.fusions import compress_feedback
from grace.core.methods.site import Site
from grace.core.spec import Array, Field, Payload, State, TensorSpec


@compressors.register(
    "randomk",
    About(
        family="sparsification",
        adam=False,
        tests=[
            {"mode": "block", "compress_ratio": 0.3},
            {"mode": "block", "compress_ratio": 0.6, "scaled": True},
            {"scaled": True},
            {"compress_ratio": 0.3},
            {"compress_ratio": 0.3, "scaled": True},
            {"compress_ratio": 1.0},
        ],
        advised=[{"compress_ratio": 0.3}, {}],
        # A coordinate is sent every 1 / compress_ratio steps on average. Such a delay needs less momentum.
        digits=Setting(lr=0.15, momentum=0.5, options={"compress_ratio": 0.1, "memory": "residual"}),
        needs={
            "memory": Need(
                "residual",
                "expected 'none' or 'residual', received neither, and neither is good everywhere. In the study, error "
                "feedback diverged or fell behind with SGD and momentum, and with Adam it helped on two tasks of three "
                "(docs/communicators_and_memories.md). With SGD write memory = 'none', or 'residual' and lower the "
                "momentum; with Adam try both.",
            )
        },
    ),
)
@dataclass(frozen=True)
class RandomK(Sparsifier):
    r"""Random-k sparsifier: k coordinates drawn at random, equal on all ranks.

    Formula: C(x)_i = c \, x_i \, 1_{i \in K}, \quad c = d / k \;\text{if scaled, else}\; 1

    K holds `k = max(1, int(compress_ratio * d))` coordinates, drawn uniformly without replacement. They follow from
    seed, tensor and step, so only the k values travel, by allreduce. So this is also the method of random masks with k
    ones. With `mode="block"` (block-random-k) K is one run of k consecutive coordinates from a random one on. If it
    reaches the end, it continues at the beginning, so that all coordinates are drawn equally often. `scaled=False` is a
    contraction with delta = k/d in expectation. Error feedback suits some models and makes others diverge, so the
    memory must be named: "residual", as in the paper, or "none". `scaled=True` is unbiased with E|x -
    C(x)|^2 = (d/k - 1) |x|^2; use it without error feedback.

    Error: 0.9 |x|^2 for normal x; 9 |x|^2 with `scaled=true`.

    Cost: O(k): k random indices by a keyed permutation (with blocks one), and one gather; no pass over x, no sorting.

    When: many ranks, or little time to select. Allreduce adds the values. Not at topk's ratios: a coordinate waits d/k
    steps on average, so it needs a larger ratio, and less momentum in the optimizer. At 1 % training stalled or
    diverged at the learning rate of dense training. Blocks read memory in order; neighbours travel together.

    Reference: Stich et al., "Sparsified SGD with memory", NeurIPS 2018; blocks: Vogels et al., "PowerSGD", NeurIPS 2019
    (Random Block).
    """

    compress_ratio: float = 0.1
    scaled: bool = False
    mode: Literal["elements", "block"] = "elements"

    summable = True

    def __post_init__(self) -> None:
        check_ratio("randomk", self.compress_ratio)

    @property
    def advice(self) -> str | None:
        return advice_on_ratio(self.compress_ratio)

    @property
    def unbiased(self) -> bool:
        return self.scaled

    @property
    def selects(self) -> bool:
        return not self.scaled

    @property
    def default_memory(self) -> str:
        return "none" if self.scaled else "residual"

    def contraction(self, spec: TensorSpec) -> float | None:
        return None if self.scaled else keep_count(self.compress_ratio, spec.numel) / max(1, spec.numel)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        k = keep_count(self.compress_ratio, spec.numel)
        return Field("values", spec.work_dtype, k), Field("indices", "int32", k, wire=False)

    def compress(self, x: Array, at: Site) -> Payload:
        n, k = at.spec.numel, keep_count(self.compress_ratio, at.spec.numel)
        indices = self._indices(n, k, at)
        values = at.ops.gather(x, indices)
        return {"values": values * (n / k) if self.scaled and k else values, "indices": indices}

    def _indices(self, n: int, k: int, at: Site) -> Array:
        ops = at.ops
        if self.mode == "elements" or not k:
            return ops.sample(n, k, at.key)
        place = ops.arange(k, "int64") + ops.cast(ops.sample(n, 1, at.key), "int64")
        return ops.cast(ops.where(place < n, place, place - n), "int32")

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        if self.scaled:
            return at.ops.sparse_sum([-payload["values"]], [payload["indices"]], at.spec.numel, onto=x)
        return self.erase_(x, payload, at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        values = payloads[0]["values"]
        for payload in payloads[1:]:
            values = at.ops.weighted_sum(values, 1, payload["values"], 1)
        return at.ops.desparsify(values, payloads[0]["indices"], at.spec.numel, at.out)


@compress_feedback.of(RandomK, FEEDBACK)
def _(
    compressor: RandomK, memory: Feedback, grad: Array, state: State, at: Site
) -> tuple[State, Payload, Array] | None:
    terms = memory.terms(grad, state, at)
    if terms is None or compressor.scaled or compressor.mode != "elements":
        return None
    k = keep_count(compressor.compress_ratio, at.spec.numel)
    left, finite, values, indices = sum_sample(at.ops, *terms, k, at.key, at.out)
    return {"residual": left}, {"values": values, "indices": indices}, finite
