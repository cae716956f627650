"""M22: the largest elements, rounded to levels that are best where elements are large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from grace.core.codecs.centroids import both_signs, fit
from grace.core.codecs.listed import levels_sum, round_packed
from grace.core.codecs.quantized import QuantizedSparsifier
from grace.core.compressors.topk import TopK, check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor, Sparsifier
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.spec import Array, Field, Payload, TensorSpec

_MOST_POWER = 8


@compressors.register(
    "m22",
    About(
        family="hybrid",
        adam=False,
        tests=[{"compress_ratio": 0.3, "bits": 1, "power": 8}],
        errors=[*({"bits": bits} for bits in (1, 2, 4)), {"compress_ratio": 0.1}],
        digits=Setting(options={"compress_ratio": 0.01}),
    ),
)
@dataclass(frozen=True)
class M22(QuantizedSparsifier):
    r"""M22: top-k, its values rounded to the levels with the least error weighted by a power of their magnitude.

    Formula: C(x) = Q(S(x)), \; \min_{q} \sum_{i \in S} |x_i|^M \, (|x_i| - q_i)^2

    S keeps the k = max(1, int(compress_ratio * d)) largest magnitudes. The q_i are 2^(bits - 1) magnitudes for both
    signs, fitted by each rank in every step to the kept values, or to 4,096 random ones of them; a value becomes the
    nearest. `power` is M, from 0 to 8: 0 is the squared error, which k-means minimizes; the larger M, the more levels
    go to large magnitudes. In the paper, a generalized normal or Weibull distribution is fitted to the kept values
    first, and the levels to that; here to the values themselves, whatever their distribution. A code takes `bits` bits,
    1 to 4, an index an int32, and the levels 2^(bits - 1) floats of the working dtype. With a memory of residuals, what
    rounding loses arrives later.

    Error: 0.92 |x|^2 for normal x; 0.56 |x|^2 with `compress_ratio=0.1`.

    Cost: the selection of `topk`; on the kept values, a sort of the sample, some 250 small operations to fit the
    levels, and a search among at most 16 levels.

    When: little more than half of the bytes of `topk`, nearly with its error; index_coding lessens the rest. A power
    above 0 keeps the largest values, which move the weights most, at the cost of the others.

    Reference: Liu et al., "M22: a communication-efficient algorithm for federated learning inspired by
    rate-distortion", IEEE Transactions on Communications 72, 2024.
    """

    compress_ratio: float = 0.01
    bits: int = 4
    power: int = 2

    def __post_init__(self) -> None:
        check_ratio("m22", self.compress_ratio)
        if not 1 <= self.bits <= 4:
            raise ConfigError(f"m22: bits must be a number from 1 to 4, received {self.bits!r}.")
        if not 0 <= self.power <= _MOST_POWER:
            raise ConfigError(f"m22: power must be a number from 0 to {_MOST_POWER}, received {self.power!r}.")

    @cached_property
    def pair(self) -> tuple[Sparsifier, Compressor]:
        return TopK(self.compress_ratio), _WeightedLevels(self.bits, self.power)


@dataclass(frozen=True)
class _WeightedLevels(Compressor):
    """Rounding to the nearest of 2^bits levels, fitted with the weights |x|^power."""

    bits: int
    power: int

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (
            Field("magnitudes", spec.work_dtype, 1 << (self.bits - 1)),
            Field("codes", "uint8", packed_size(spec.numel, self.bits)),
        )

    def compress(self, x: Array, at: Site) -> Payload:
        ops, sizes, zero = at.ops, at.ops.abs(x), at.ops.zeros(1, at.spec.work_dtype)[0]
        count, width = 1 << (self.bits - 1), max(1, at.spec.numel)
        magnitudes = fit(ops, sizes, zero, ops.max(sizes), count, at.private_key, self.power, ends=False)
        one = ops.full(1, 1.0, at.spec.work_dtype)
        return {
            "magnitudes": magnitudes,
            "codes": round_packed(ops, x, one, both_signs(ops, magnitudes), width, None, at.out),
        }

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        ops, n = at.ops, at.spec.numel
        scales = [ops.full(1, 1.0, at.spec.work_dtype)] * len(payloads)
        levels = [both_signs(ops, payload["magnitudes"]) for payload in payloads]
        return levels_sum(ops, [payload["codes"] for payload in payloads], scales, levels, max(1, n), n, out=at.out)
