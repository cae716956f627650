"""Low-precision quantizer of LPC-SVRG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from grace.core.codecs.levels import dequantize_sum
from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Key, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# The largest power of two of float32.
LARGEST = 2.0**127


@compressors.register(
    "lpc", About(family="quantization", adam=True, tests=[{"width": 2}, {"width": 12, "delta": 0.001}])
)
@dataclass(frozen=True)
class LPC(Compressor):
    r"""Low-precision quantizer of LPC-SVRG: stochastic rounding to evenly spaced levels of w bits.

    Formula: C(x)_i = \delta \lfloor x_i / \delta + u_i \rfloor, \quad u_i \sim U[0, 1)

    There are w = `width` bits per element, for the levels -2^(w-1) delta to (2^(w-1) - 1) delta; x is clipped to this
    range first. With `delta` null, every rank uses max|x| / (2^(w-1) - 1) and sends it along (one float of the working
    dtype). Then nothing is clipped, C is unbiased, and its variance is at most d delta^2 / 4. With a fixed `delta`, C
    is unbiased only inside the range. The error can exceed |x|, so C is no contraction.

    Error: 0.0002 |x|^2 for normal x; 0.066 |x|^2 with `width=4`.

    Cost: one pass for the maximum (delta null) and one random number per element; no sorting, no state.

    When: a plain uniform quantizer without bias is enough. Values far below the maximum are mostly noise; there take
    qsgd with its buckets, or natural. With the memory `svrg` it is the method of LPC-SVRG. Use no error feedback.

    Reference: Yu, Wu and Huang, "Exploring fast and communication-efficient algorithms in large-scale distributed
    networks", AISTATS 2019.
    """

    width: int = 8
    delta: float | None = None

    harmed_by_feedback = "its rounding errors average out, and error feedback adds them to the variance"

    def __post_init__(self) -> None:
        if not 2 <= self.width <= 16:
            raise ConfigError(f"lpc: width must be a number of bits from 2 to 16, received {self.width!r}.")
        if self.delta is not None and not self.delta > 0:
            raise ConfigError(
                f"lpc: delta (the distance of two levels) must be positive or null, received {self.delta!r}."
            )
        # Decoding multiplies delta by this number of levels.
        if self.delta is not None and not self.delta * self._half <= LARGEST:
            raise ConfigError(
                f"lpc: expected levels that float32 can hold, received delta={self.delta!r} and {self._half} levels "
                "below 0; set a smaller delta or width, or null."
            )

    @property
    def absolute(self) -> bool:
        return self.delta is not None

    @property
    def unbiased(self) -> bool:
        return self.delta is None

    @property
    def joins(self) -> bool:
        return self.delta is not None

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        return ("delta",) if self.delta is None else ()

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        codes = Field("codes", "uint8", packed_size(spec.numel, self.width), bits=self.width)
        return (Field("delta", spec.work_dtype, 1), codes) if self.delta is None else (codes,)

    @property
    def _half(self) -> int:
        """The number of levels below 0."""
        return int(2 ** (self.width - 1))

    def compress(self, x: Array, at: Site) -> Payload:
        ops, dtype = at.ops, at.spec.work_dtype
        if self.delta is None:
            # A constant, because TensorFlow multiplies by the reciprocal of a number.
            most = ops.constant(("lpc", self._half, dtype), lambda: ops.cast(self._half - 1, dtype))
            delta = ops.flat_max_abs(x) / most
            return {"delta": delta, "codes": floor_packed(ops, x, delta, self.width, at.private_key, at.out)}
        return {"codes": floor_packed(ops, x, ops.full(1, self.delta, dtype), self.width, at.private_key, at.out)}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return self._sum(payloads, at, 1.0)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self._sum([payload], at, -1.0, onto=x)

    def _sum(self, payloads: Sequence[Payload], at: Site, sign: float, onto: Array | None = None) -> Array:
        ops, n, dtype = at.ops, at.spec.numel, at.spec.work_dtype
        # A power of two times delta; `dequantize_sum` divides by it, and both are exact.
        most = sign * self._half
        fixed = None if self.delta is None else ops.full(1, self.delta, dtype)
        scales = [ops.scaled(payload["delta"] if fixed is None else fixed, most) for payload in payloads]
        codes = [payload["codes"] for payload in payloads]
        return dequantize_sum(ops, codes, scales, max(1, n), self._half, self.width, n, onto, out=at.out)


@composite(one_graph=True)
def floor_packed(ops: ArrayOps, x: Array, delta: Array, width: int, key: Key, out: Array | None = None) -> Array:
    """Return 2^(width - 1) + floor(x / delta + u), packed; delta has shape (1,), and x is first clipped to the range.

    Where delta is 0, x counts as 0.
    """
    half = 2 ** (width - 1)
    # Clip before the division, which could overflow otherwise.
    x = ops.clip(x, delta * float(-half), delta * float(half - 1))
    steps = x / ops.where(delta > 0, delta, 1.0)
    level = ops.floor(steps)
    up = ops.cast(ops.uniform(ops.length(x), key), ops.dtype(x)) < steps - level
    codes = ops.clip(ops.cast(level, "int64") + ops.cast(up, "int64"), -half, half - 1)
    return ops.pack(codes + half, width)


@floor_packed.kernel()
def _(ops: Native, x: Array, delta: Array, width: int, key: Key, out: Array | None = None) -> Array | None:
    if ops.floating(x) is None:
        return None
    integers, size = [width, *ops.key_integers(key)], packed_size(ops.length(x), width)
    return ops.run("floor_packed", [x, delta], integers, outputs=["uint8"], lengths=[size], out=out)[0]
