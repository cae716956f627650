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
    r"""1-bit SGD: one bit per element, decoded to the mean of its side; needs error feedback.

    Formula: C(x)_i = \begin{cases} \mu_1 & x_i \ge \tau \\ \mu_0 & x_i < \tau \end{cases}

    tau is `threshold`; mu_1 and mu_0 are the means of the elements on each side, sent along. The decoded gradient is
    the projection of x on two-valued gradients, so the error never exceeds |x|. With threshold 0, delta >= 1/d.

    Error: 0.36 |x|^2 for normal x.

    Cost: three passes for the two means, and bit packing; no random numbers, no sorting.

    When: as efsignsgd, but the memory needs no learning rate and the two sides may differ in size. Use error feedback.
    Not where a few elements of a tensor are large.

    Reference: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs", Interspeech 2014.
    """

    threshold: float = 0.0

    default_memory = "residual"
    linear_in = ("means",)

    def contraction(self, spec: TensorSpec) -> float | None:
        return 1.0 / max(1, spec.numel) if self.threshold == 0 else 0.0

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("means", spec.work_dtype, 2), Field("bits", "uint8", packed_size(spec.numel, 1))

    def compress(self, x: Array, at: Site) -> Payload:
        # The mean of an empty side is 0 and is never decoded.
        bits, means = at.ops.binarize_means(x, self.threshold)
        return {"means": means, "bits": bits}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        bits, means = ([payload[name] for payload in payloads] for name in ("bits", "means"))
        return at.ops.binary_sum(bits, means, at.spec.numel)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.binary_sum([payload["bits"]], [payload["means"]], at.spec.numel, onto=x, negate=True)
