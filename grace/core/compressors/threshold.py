"""Threshold-v sparsification."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.compressor import Sparsifier
from grace.core.errors import ConfigError
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Site, TensorSpec


@compressors.register("threshold")
@dataclass(frozen=True)
class Threshold(Sparsifier):
    """Keep every element with |x_i| > threshold, in the units of the gradient; the error is at most d * threshold^2.

    The payload's size depends on the data and may be zero. `capacity` bounds a burst: at most that share of the
    elements travels, the largest ones, and the rest stays in the residual.
    Cost: one comparing pass; a partial sort of what passed where `capacity` is set; no random numbers.
    When: the scale of the gradients is known and steady. Elsewhere it sends all or nothing: topk has fixed bytes, and
    hardthreshold finds its threshold by itself.
    Dutta et al., "On the discrepancy between the theoretical analysis and practical implementations of compressed
    communication", AAAI 2020.
    """

    threshold: float = 0.01
    capacity: float | None = None

    fixed_size = False

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ConfigError(f"threshold: expected a magnitude of at least 0, received {self.threshold!r}.")
        if self.capacity is not None and not 0 < self.capacity <= 1:
            raise ConfigError(f"threshold: capacity is a share of the elements in (0, 1], received {self.capacity!r}.")

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("values", spec.work_dtype, "kept"), Field("indices", "int32", "kept", below=spec.numel)

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        values, indices = ops.select(x, self.threshold, strict=True)
        if self.capacity is not None:
            most = max(1, int(self.capacity * at.spec.numel))
            values, best = ops.sparsify(values, ops.min_size(ops.length(values), most))
            indices = ops.gather(indices, best)
        return {"values": values, "indices": indices}
