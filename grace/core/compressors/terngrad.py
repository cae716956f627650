"""TernGrad: ternary gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.errors import ConfigError
from grace.core.ops.base import packed_size
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Site, TensorSpec


@compressors.register("terngrad")
@dataclass(frozen=True)
class TernGrad(Compressor):
    """C(x_i) = s * sign(x_i) * b_i with s = max|x| and b_i ~ Bernoulli(|x_i| / s): 2 bits per element.

    Elements are first limited to `clip_factor` root mean squares (null: not at all), which are standard deviations
    where the mean is zero; a gradient far from zero mean would be clipped away by the latter. Unbiased without
    clipping, with variance s |x|_1 - |x|^2; clipping trades bias for a smaller s. Wen et al., "TernGrad: ternary
    gradients to reduce communication in distributed deep learning", NIPS 2017.
    """

    clip_factor: float | None = 2.5

    def __post_init__(self) -> None:
        if self.clip_factor is not None and not self.clip_factor > 0:
            raise ConfigError(
                f"terngrad: clip_factor counts root mean squares and must be positive, received {self.clip_factor!r}."
            )

    @property
    def unbiased(self) -> bool:
        return self.clip_factor is None

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("scale", spec.work_dtype, 1), Field("codes", "uint8", packed_size(spec.numel, 2))

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        if self.clip_factor is not None and at.spec.numel:
            bound = ops.norm(x) * (self.clip_factor / math.sqrt(at.spec.numel))
            x = ops.clip(x, -bound, bound)
        scale = ops.max(ops.abs(x))
        codes = ops.quantize(x, scale, 1, at.private_key)
        return {"scale": ops.reshape(scale, (1,)), "codes": ops.pack(codes + 1, 2)}

    def decompress(self, payload: Payload, at: Site) -> Array:
        codes = at.ops.unpack(payload["codes"], 2, at.spec.numel) - 1
        return at.ops.dequantize(codes, payload["scale"], 1, at.spec.work_dtype)
