"""Hard-threshold sparsification: one absolute threshold for all layers and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.compressor import Sparsifier
from grace.core.compressors.topk import check_ratio
from grace.core.errors import ConfigError
from grace.core.ops.composites import ArrayOps
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Site, State, TensorSpec


@compressors.register("hardthreshold")
@dataclass(frozen=True)
class HardThreshold(Sparsifier):
    r"""Hard-threshold sparsifier: every element at or above one magnitude, equal for all layers and steps.

    Formula: C(x)_i = x_i \, 1_{|x_i| \ge \lambda}

    lambda is `threshold`, in units of the gradient. This is an absolute compressor: |x - C(x)|^2 <= d lambda^2 for
    every x, so with error feedback the error never builds up. Of all ways to spend one volume over a whole run it has
    the smallest total error (Lemma 3); top-k is the best only for a single step. The volume varies from step to step
    and may be zero. The payload has 8 bytes per kept element.
    With `threshold` null, the first step uses `1 / (2 sqrt(k))` with k = compress_ratio * elements of the whole model,
    a first guess that does not know the scale of the gradients. During the first `tune_steps` steps the threshold
    follows the share that all ranks and layers send, compared with compress_ratio; then it stays. If a schedule starts
    this method later, or changes compress_ratio, the count of these steps starts there.

    Cost: one pass of comparisons; nothing is sorted.

    When: gradients differ much in size between layers, steps or ranks, and the budget counts for the whole run. Not
    where every step must be equally short.

    Reference: Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021.
    """

    threshold: float | None = None
    compress_ratio: float = 0.001
    tune_steps: int = 300

    fixed_size = False

    def __post_init__(self) -> None:
        check_ratio("hardthreshold", self.compress_ratio)
        if self.threshold is not None and not self.threshold > 0:
            raise ConfigError(
                f"hardthreshold: threshold must be positive, or null to derive it; received {self.threshold!r}."
            )
        if self.tune_steps < 0:
            raise ConfigError(f"hardthreshold: tune_steps must be at least 0, received {self.tune_steps!r}.")

    @property
    def _tunes(self) -> bool:
        return self.threshold is None and self.tune_steps > 0

    def first(self, spec: TensorSpec) -> float:
        """Return the threshold of the first step."""
        if self.threshold is not None:
            return self.threshold
        return 1.0 / (2.0 * math.sqrt(max(1.0, self.compress_ratio * (spec.model_numel or spec.numel))))

    def init(self, spec: TensorSpec, ops: ArrayOps, key_seed: int) -> State:
        if not self._tunes:
            return {}
        # Also the ratio that the threshold was tuned for, and in how many steps.
        numbers = {"threshold": self.first(spec), "ratio": self.compress_ratio, "steps": 0}
        return {name: ops.full(1, number, "float64") for name, number in numbers.items()}

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("values", spec.work_dtype, "kept"), Field("indices", "int32", "kept", below=spec.numel)

    def compress(self, x: Array, at: Site) -> Payload:
        ops, dtype = at.ops, at.spec.work_dtype
        bound = at.state["threshold"] if self._tunes else ops.full(1, self.first(at.spec), dtype)
        values, indices = ops.select(x, ops.cast(bound, dtype), strict=False)
        return {"values": values, "indices": indices}

    def tally(self, payloads: Sequence[Payload], at: Site) -> tuple[Array, Array] | None:
        """Return the number of elements sent and the number of all elements, over all ranks."""
        if not self._tunes:
            return None
        kept = sum(at.ops.count(payload["indices"]) for payload in payloads)
        return at.ops.cast(kept, "float64"), at.ops.cast(float(at.spec.numel * len(payloads)), "float64")

    def retune(self, state: State, first: Array, second: Array, at: Site) -> State:
        ops = at.ops
        wanted, target = ops.full(1, self.compress_ratio, "float64"), second * self.compress_ratio
        step = ops.where(state["ratio"] == wanted, state["steps"], 0.0)
        # Steps of log(threshold) decrease as 1/t (Robbins and Monro). With error feedback, what is held back now comes
        # back later, and steps of constant size would oscillate forever. The limits serve steps that send nothing or
        # everything.
        ratio = ops.clip((first + 1.0) / (target + 1.0), 0.1, 10.0)
        tuned = state["threshold"] * ratio ** (0.5 / (1.0 + step * (10.0 / self.tune_steps)))
        # Powers differ in the last bit between frameworks.
        tuned = ops.cast(ops.cast(tuned, "float32"), "float64")
        threshold = ops.where(step < self.tune_steps, tuned, state["threshold"])
        return {"threshold": threshold, "ratio": wanted, "steps": step + 1.0}
