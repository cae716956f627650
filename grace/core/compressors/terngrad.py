"""TernGrad: ternary gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grace.core.codecs.levels import dequantize_sum, quantize_packed
from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.methods.capabilities import Negotiating
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Proposal, Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.spec import MAX_MAGNITUDE, Array, Field, Payload, TensorSpec

# The largest sum of ones that a signed byte holds.
_MOST_RANKS = 127


@compressors.register(
    "terngrad",
    About(
        family="quantization",
        adam=True,
        tests=[
            {"clip_factor": None},
            {"clip_factor": 0.5},
            {"shared_scale": True},
            {"clip_factor": None, "shared_scale": True},
        ],
    ),
)
@dataclass(frozen=True)
class TernGrad(Compressor, Negotiating):
    r"""TernGrad: stochastic rounding to -1, 0 and 1 times the largest magnitude; 2 bits per element.

    Formula: C(x)_i = s \, \mathrm{sign}(x_i) \, b_i, \; s = \max_j |x_j|, \; b_i \sim \mathrm{Bernoulli}(|x_i| / s)

    Elements are first clipped to `clip_factor` root mean squares (null: no clipping). The root mean square equals the
    standard deviation if the mean is zero; clipping a gradient of large mean by its standard deviation would clip it
    away. Unbiased without clipping, with variance s |x|_1 - |x|^2; clipping trades bias for a smaller s.
    With `shared_scale` all ranks use the largest s of any rank (scaler sharing): the ranks negotiate one float first,
    and an allreduce adds the codes b_i sign(x_i): 1 byte per element for any number of ranks up to 127. The variance is
    that of the larger s. Four codes share an int32, because not every library of collectives adds 8-bit integers.

    Error: 1 |x|^2 for normal x; 2.5 |x|^2 with `clip_factor=null`.

    Cost: one pass for norm and maximum, and one to round; one random number per element; no sorting, no state.

    When: 2 bits without memory or error feedback; a smaller learning rate may help. It travels by `allgather`, so the
    bytes grow with the ranks. `shared_scale` sends 4 times the bytes, but an allreduce adds them; use it with many
    ranks whose gradients are alike in size.

    Reference: Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NIPS
    2017.
    """

    clip_factor: float | None = 2.5
    shared_scale: bool = False

    def __post_init__(self) -> None:
        if self.clip_factor is not None and not self.clip_factor > 0:
            raise ConfigError(
                f"terngrad: clip_factor (in root mean squares) must be positive or null, received {self.clip_factor!r}."
            )

    @property
    def unbiased(self) -> bool:
        return self.clip_factor is None

    @property
    def summable(self) -> bool:
        return self.shared_scale

    @property
    def nonfinite(self) -> Literal["lost", "shown"]:
        return "lost" if self.shared_scale else "shown"

    @property
    def linear_in(self) -> tuple[str, ...]:
        return () if self.shared_scale else ("scale",)

    def check_ranks(self, size: int) -> None:
        if self.shared_scale and size > _MOST_RANKS:
            raise IncompatibleError(
                f"terngrad: shared_scale adds codes of -1, 0 and 1 in one byte, which holds at most {_MOST_RANKS} "
                f"of them, received {size} ranks; set shared_scale to false."
            )

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        if self.shared_scale:
            return (Field("words", "int32", -(-spec.numel // 4)),)
        return Field("scale", spec.work_dtype, 1), Field("codes", "uint8", packed_size(spec.numel, 2), bits=2)

    def proposed(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("scale", spec.work_dtype, 1),) if self.shared_scale else ()

    def propose(self, x: Array, at: Site) -> Proposal:
        return Proposal(self._scale(x, at)[0], "max")

    def _scale(self, x: Array, at: Site) -> tuple[Array, Array | None]:
        """Return the largest magnitude after clipping, of shape (1,), and the clipping limit (None: not clipped).

        An element that counts as infinite shows in the largest magnitude: clipping does not hide it.
        """
        ops = at.ops
        if self.clip_factor is None or not at.spec.numel:
            return ops.flat_max_abs(x), None
        norm, largest = ops.norm_max(x)
        limit = norm * (self.clip_factor / math.sqrt(at.spec.numel))
        clips = ops.bit_and(limit < largest, largest <= MAX_MAGNITUDE[at.spec.work_dtype])
        return ops.reshape(ops.where(clips, limit, largest), (1,)), limit

    def compress(self, x: Array, at: Site) -> Payload:
        ops, width = at.ops, max(1, at.spec.numel)
        scale, limit = self._scale(x, at)
        if self.shared_scale:
            x = x if limit is None else ops.clip(x, -limit, limit)
            return {"words": _to_words(ops, ops.quantize(x, at.negotiated, 1, at.private_key))}
        return {"scale": scale, "codes": quantize_packed(ops, x, scale, width, 1, 2, at.private_key, limit, at.out)}

    def decompress(self, payload: Payload, at: Site) -> Array:
        if not self.shared_scale:
            return self.merge([payload], at)
        codes = _from_words(at.ops, payload["words"], at.spec.numel)
        return at.ops.dequantize(codes, at.negotiated, 1, at.spec.work_dtype)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        if self.shared_scale:
            return super().merge(payloads, at)
        codes, scales = ([payload[name] for payload in payloads] for name in ("codes", "scale"))
        return self._sum(codes, scales, at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        if self.shared_scale:
            return super().residual_(x, payload, at)
        return self._sum([payload["codes"]], [-payload["scale"]], at, onto=x)

    def _sum(self, codes: list[Array], scales: list[Array], at: Site, onto: Array | None = None) -> Array:
        n = at.spec.numel
        return dequantize_sum(at.ops, codes, scales, max(1, n), 1, 2, n, onto, at.out)


def _to_words(ops: ArrayOps, codes: Array) -> Array:
    """Pack four codes as c_0 + 2^8 c_1 + 2^16 c_2 + 2^24 c_3, so that sums of words are words of sums."""
    n = ops.length(codes)
    groups = -(-n // 4)
    rows = ops.reshape(ops.concat([codes, ops.zeros(4 * groups - n, "int64")]), (groups, 4))
    return ops.cast(rows[:, 0] + rows[:, 1] * 2**8 + rows[:, 2] * 2**16 + rows[:, 3] * 2**24, "int32")


def _from_words(ops: ArrayOps, words: Array, n: int) -> Array:
    # With 128 added, none of the four sums is negative, so none borrows from the next.
    biased = ops.cast(words, "int64") + 0x80808080
    codes = [ops.bit_and(ops.shift_right(biased, 8 * j), 255) - 128 for j in range(4)]
    return ops.reshape(ops.stack(codes, axis=1), (-1,))[:n]
