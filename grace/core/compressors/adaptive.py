"""Adaptive threshold SGD: two thresholds that follow the gradient, two means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.compressor import Compressor, beyond_int32
from grace.core.compressors.topk import check_ratio
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Site, TensorSpec


@compressors.register("adaptive")
@dataclass(frozen=True)
class Adaptive(Compressor):
    """C(x_i) = mean of the kept x of its sign, if x_i is among the top compress_ratio of its sign; else 0.

    Of the p positive elements the max(1, int(compress_ratio * p)) largest travel, of the negative ones as many in
    proportion: two ascending lists of int32 indices and one mean per list, 4 bytes per kept element. The thresholds
    are exact, by selection, where the paper takes a sample; among equal magnitudes the lower index is kept. The
    decoded gradient is the projection of x on its two lists, so the error never exceeds |x|, and delta >= 1/d.
    Cost: two selections (no full sort) and three passes; no random numbers.
    When: half the bytes of top-k at an equal ratio, if one magnitude per sign is enough; with a small ratio the kept
    magnitudes are alike.
    Dryden et al., "Communication quantization for data-parallel training of deep neural networks", MLHPC 2016.
    """

    compress_ratio: float = 0.01

    fixed_size = False
    selects = True
    default_memory = "residual"
    linear_in = ("means",)

    def __post_init__(self) -> None:
        check_ratio("adaptive", self.compress_ratio)

    def contraction(self, spec: TensorSpec) -> float | None:
        # Of one sign with p elements, k of them kept, S their sum and b the least of them: the rest is below b, so
        # |x|^2 <= S^2 + (p - k) b^2 with k b <= S, and S^2 / k of it is carried: a share of k / (k^2 + p - k) >= 1/p.
        return 1.0 / max(1, spec.numel)

    def unfit(self, spec: TensorSpec) -> str | None:
        return beyond_int32(spec)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (
            Field("means", spec.work_dtype, 2),
            Field("positive", "int32", "positives", below=spec.numel),
            Field("negative", "int32", "negatives", below=spec.numel),
        )

    def compress(self, x: Array, at: Site) -> Payload:
        means, positive, negative = at.ops.top_of_sides(x, self.compress_ratio)
        return {"means": means, "positive": positive, "negative": negative}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        parts = [part for payload in payloads for part in _parts(payload, payload["means"], at)]
        values, indices = zip(*parts, strict=True)
        return at.ops.sparse_sum(values, indices, at.spec.numel)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        values, indices = zip(*_parts(payload, -payload["means"], at), strict=True)
        return at.ops.sparse_sum(values, indices, at.spec.numel, onto=x)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.put_(at.ops.put_(x, payload["positive"], 0.0), payload["negative"], 0.0)


def _parts(payload: Payload, means: Array, at: Site) -> list[tuple[Array, Array]]:
    """Values and indices of either list."""
    return [
        (at.ops.full(at.ops.length(payload[name]), mean, at.spec.work_dtype), payload[name])
        for name, mean in (("positive", means[0]), ("negative", means[1]))
    ]
