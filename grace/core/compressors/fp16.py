"""Half-precision communication: float16 and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from grace.core.config.registry import About, compressors
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@dataclass(frozen=True)
class _Half(Compressor):
    """Cast to a 16-bit float before sending and back to the working dtype after the sum.

    The ranks average in float32 and round the mean to 16 bits once more. Error feedback sees only the first rounding.
    """

    wire_dtype: ClassVar[str]

    summable = True
    nonfinite = "carried"
    joins = True
    of_any_length = True

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("values", self.wire_dtype, spec.numel),)

    def compress(self, x: Array, at: Site) -> Payload:
        return {"values": cast_half(at.ops, x, self.wire_dtype, at.out)}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return cast_half(at.ops, payload["values"], at.spec.work_dtype, at.out)


@composite()
def cast_half(ops: ArrayOps, x: Array, dtype: str, out: Array | None = None) -> Array:
    """Return x in another dtype, as `cast` does; kernels may write it to `out`."""
    return ops.cast(x, dtype)


@cast_half.kernel()
def _(ops: Native, x: Array, dtype: str, out: Array | None = None) -> Array | None:
    return ops.cast_half(x, dtype, out)


@compressors.register("fp16", About(family="other", adam=True))
@dataclass(frozen=True)
class FP16(_Half):
    r"""Half precision as float16: half the bytes, 10 bits of mantissa, values up to 65504.

    Formula: C(x) = \mathrm{float16}(x)

    Larger values become infinite, as a loss scaler expects.

    Error: 4.3e-08 |x|^2 for normal x.

    Cost: one rounding pass in each direction and one for the sum, which the ranks compute themselves; no random
    numbers, no sorting, no state.

    When: half the bytes without tuning. Not for gradients above that range, or far below 6e-8, which become zero: use
    bf16 there.
    """

    wire_dtype: ClassVar[str] = "float16"


@compressors.register("bf16", About(family="other", adam=True))
@dataclass(frozen=True)
class BF16(_Half):
    r"""Half precision as bfloat16: half the bytes, 7 bits of mantissa, the range of float32.

    Formula: C(x) = \mathrm{bfloat16}(x)

    Error: 2.8e-06 |x|^2 for normal x.

    Cost: as fp16.

    When: half the bytes whatever the scale of the gradients. fp16 has 3 more bits of mantissa where its range is
    enough.
    """

    wire_dtype: ClassVar[str] = "bfloat16"
