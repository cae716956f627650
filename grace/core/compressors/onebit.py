"""1-bit SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.ops.base import packed_size
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Site, TensorSpec


@compressors.register("onebit")
@dataclass(frozen=True)
class OneBit(Compressor):
    """Send one bit per element, x_i >= threshold, and the mean of either side, to which the bits decode.

    The decoded gradient is the projection on two-valued gradients, so the error never exceeds |x|; with threshold 0,
    delta >= 1/d.
    Cost: three passes for the two means, and packing of bits; no random numbers, no sorting.
    When: as efsignsgd, but the memory need not know the learning rate, and the two sides may differ in size; it
    needs error feedback. Not where few elements of a tensor are large.
    Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
    DNNs", Interspeech 2014.
    """

    threshold: float = 0.0

    default_memory = "residual"
    linear_in = ("means",)

    def contraction(self, spec: TensorSpec) -> float | None:
        return 1.0 / max(1, spec.numel) if self.threshold == 0 else 0.0

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("means", spec.work_dtype, 2), Field("bits", "uint8", packed_size(spec.numel, 1))

    def compress(self, x: Array, at: Site) -> Payload:
        # The mean of an empty side is 0; it is never decoded.
        bits, means = at.ops.binarize_means(x, self.threshold)
        return {"means": means, "bits": bits}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        bits, means = ([payload[name] for payload in payloads] for name in ("bits", "means"))
        return at.ops.binary_sum(bits, means, at.spec.numel)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.binary_sum([payload["bits"]], [payload["means"]], at.spec.numel, onto=x, negate=True)
