"""Half-precision communication: float16 and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grace.core.compressor import Compressor
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Site, TensorSpec


@dataclass(frozen=True)
class _Half(Compressor):
    """Cast to a 16-bit float before sending, back to the working dtype after the sum.

    The mean of the ranks, made in float32, is rounded to 16 bits once more; an error feedback knows only of the first
    rounding.
    """

    wire_dtype: ClassVar[str]

    summable = True
    carries_nonfinite = True

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("values", self.wire_dtype, spec.numel),)

    def compress(self, x: Array, at: Site) -> Payload:
        return {"values": at.ops.cast(x, self.wire_dtype)}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return at.ops.cast(payload["values"], at.spec.work_dtype)


@compressors.register("fp16")
@dataclass(frozen=True)
class FP16(_Half):
    """Round to float16: 10 bits of mantissa, |x| <= 65504; larger values become infinite, as a loss scaler expects.

    Cost: one rounding pass in either direction, and one for the sum, which the ranks make by themselves; no random
    numbers, no sorting, no state.
    When: half the bytes without tuning. Not for gradients beyond that range, nor much below 6e-8, which become zero:
    there take bf16.
    """

    wire_dtype: ClassVar[str] = "float16"


@compressors.register("bf16")
@dataclass(frozen=True)
class BF16(_Half):
    """Round to bfloat16: 7 bits of mantissa and the range of float32.

    Cost: as fp16.
    When: half the bytes whatever the size of the gradients; fp16 has 3 more bits where its range is enough.
    """

    wire_dtype: ClassVar[str] = "bfloat16"
