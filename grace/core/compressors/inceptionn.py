"""INCEPTIONN: numbers of as many bits as an error bound asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grace.core.compressor import Compressor
from grace.core.errors import ConfigError
from grace.core.ops.base import packed_size
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Site, TensorSpec

_FIELDS = ("full", "words", "bytes", "tags")


@compressors.register("inceptionn")
@dataclass(frozen=True)
class Inceptionn(Compressor):
    """C(x_i) in 0, 8, 16 or 32 bits by the exponent of |x_i|, and a tag of 2 bits; |x_i - C(x_i)| <= error_bound.

    Nothing is sent of |x_i| < error_bound; up to 2^-m go 8 bits, up to 2^-h 16 bits; from there on the number as it is
    (32 bits; 64 for float64 gradients, which have the same short forms). With b = ceil(-log2 error_bound), m =
    max(ceil(b/2), b-7) is halfway between the bound and 1, and h = max(0, b-15) is 0 for bounds from 2^-15 on. Short
    forms are whole numbers, truncated towards zero, of steps 2^-(m+7) and 2^-(h+15): a sign, zeros, the leading 1,
    whose place is the exponent, and the bits below it. Both steps are at most 2^-b; for a smaller bound numbers just
    below 1 go in full, since 16 bits cannot hold it.
    Biased towards zero; the error never exceeds |x| (delta = 0). Three fields of run-time length.
    Cost: comparisons, three compactions and three scatters; no random numbers, no sorting, no state.
    When: gradients of known scale, most of them small; 2 bits remain of those below the bound. Rescale or choose
    error_bound by the gradients: all below it are lost. Without error feedback (GRACE, Table I).
    Li et al., "A network-centric hardware/algorithm co-design to accelerate distributed training of deep neural
    networks", MICRO 2018.
    """

    error_bound: float = 2**-10

    fixed_size = False
    harmed_by_feedback = "its error is bounded in every element by itself, and GRACE trains it without"

    def __post_init__(self) -> None:
        if not 2**-64 <= self.error_bound < 1:
            raise ConfigError(f"inceptionn: error_bound must lie in [2^-64, 1), received {self.error_bound!r}.")

    def contraction(self, spec: TensorSpec) -> float | None:
        return 0.0

    @property
    def _ends(self) -> tuple[int, int]:
        """m and h: short forms of 8 bits end below 2^-m, those of 16 bits below 2^-h."""
        bits = math.ceil(-math.log2(self.error_bound))
        return max(-(-bits // 2), bits - 7), max(0, bits - 15)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (
            Field("full", spec.work_dtype, "fulls"),
            Field("words", "int16", "words"),
            Field("bytes", "int8", "bytes"),
            Field("tags", "uint8", packed_size(spec.numel, 2)),
        )

    def compress(self, x: Array, at: Site) -> Payload:
        return dict(zip(_FIELDS, at.ops.precision_encode(x, self.error_bound, *self._ends), strict=True))

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return self._sum(payloads, at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self._sum([payload], at, onto=x, negate=True)

    def _sum(self, payloads: Sequence[Payload], at: Site, **options: Any) -> Array:
        arrays = [tuple(payload[name] for name in _FIELDS) for payload in payloads]
        return at.ops.precision_sum(arrays, *self._ends, at.spec.numel, at.spec.work_dtype, **options)
