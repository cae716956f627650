"""No compression."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import About, compressors
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.spec import Array, Field, Payload, TensorSpec


@compressors.register("none", About(family="other", adam=True))
@dataclass(frozen=True)
class NoCompression(Compressor):
    """No compression: the gradient as it is.

    Formula: C(x) = x

    A bfloat16 gradient travels as float32, because not every library of collectives can add bfloat16.

    Error: 0 |x|^2 for normal x.

    Cost: one copy into the buffer of its bucket.

    When: the network is fast enough, or you need a baseline.
    """

    summable = True
    unbiased = True
    nonfinite = "carried"
    joins = True
    of_any_length = True

    def contraction(self, spec: TensorSpec) -> float | None:
        return 1.0

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        dtype = "float32" if spec.dtype == "bfloat16" else spec.dtype
        return (Field("values", dtype, spec.numel),)

    def compress(self, x: Array, at: Site) -> Payload:
        return {"values": at.ops.cast(x, self.wire(at.spec)[0].dtype)}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return at.ops.cast(payload["values"], at.spec.work_dtype)
