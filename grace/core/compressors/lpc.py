"""The low-precision quantizer of LPC-SVRG."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.errors import ConfigError
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Site, TensorSpec


@compressors.register("lpc")
@dataclass(frozen=True)
class LPC(Compressor):
    """C(x_i) = delta (l + 1) with probability x_i / delta - l, else delta l; l = floor(x_i / delta), clipped to w bits.

    Levels are -2^(w-1) delta .. (2^(w-1) - 1) delta, with w = `width` bits per element; what lies outside becomes the
    nearest of them. With `delta` null every rank takes max|x| / (2^(w-1) - 1) and sends it along (one float of the
    working dtype): then nothing is clipped, C is unbiased, and its variance is at most d delta^2 / 4. With a fixed
    `delta` it is unbiased inside the range only. Its error can exceed |x|, so there is no contraction.
    Cost: one pass for the maximum (delta null), one random number per element; no sorting, no state.
    When: a plain uniform quantizer without bias. Values far below the maximum are mostly noise; there qsgd with its
    buckets, or natural, is better. The memory `svrg` makes of it LPC-SVRG's method. Error feedback does it no good.
    Yu, Wu and Huang, "Exploring fast and communication-efficient algorithms in large-scale distributed networks",
    AISTATS 2019.
    """

    width: int = 8
    delta: float | None = None

    harmed_by_feedback = "its rounding errors cancel by themselves, and fed back they add to its variance"

    def __post_init__(self) -> None:
        if not 2 <= self.width <= 16:
            raise ConfigError(f"lpc: width is a number of bits in 2..16, received {self.width!r}.")
        if self.delta is not None and not self.delta > 0:
            raise ConfigError(f"lpc: delta is the distance of two levels, positive or null; received {self.delta!r}.")

    @property
    def unbiased(self) -> bool:
        return self.delta is None

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        codes = Field("codes", "uint8", packed_size(spec.numel, self.width))
        return (Field("delta", spec.work_dtype, 1), codes) if self.delta is None else (codes,)

    def compress(self, x: Array, at: Site) -> Payload:
        ops, dtype = at.ops, at.spec.work_dtype
        half = 2 ** (self.width - 1)
        payload = {}
        if self.delta is None:
            delta = ops.max(ops.abs(x)) / ops.cast(half - 1, dtype)
            payload["delta"] = ops.reshape(delta, (1,))
        else:
            delta = self._fixed(ops, dtype)
        # Clipped before the division, which otherwise could overflow.
        x = ops.clip(x, delta * float(-half), delta * float(half - 1))
        steps = x / ops.where(delta > 0, delta, 1.0)
        level = ops.floor(steps)
        up = ops.cast(ops.uniform(at.spec.numel, at.private_key), dtype) < steps - level
        codes = ops.clip(ops.cast(level, "int64") + ops.cast(up, "int64"), -half, half - 1)
        return {**payload, "codes": ops.pack(codes + half, self.width)}

    def _fixed(self, ops: ArrayOps, dtype: str) -> Array:
        # Not by `cast`: PyTorch makes a float32 of a Python number first.
        return ops.full(1, self.delta, dtype)[0]

    def decompress(self, payload: Payload, at: Site) -> Array:
        ops, dtype = at.ops, at.spec.work_dtype
        codes = ops.unpack(payload["codes"], self.width, at.spec.numel) - 2 ** (self.width - 1)
        delta = payload["delta"] if self.delta is None else self._fixed(ops, dtype)
        return ops.cast(codes, dtype) * delta
