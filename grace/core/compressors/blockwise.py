"""Blockwise quantization to the nearest number of a small format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from grace.core.codecs.buckets import BucketQuantizer
from grace.core.codecs.levels import bucket_norms, bucket_quantize, dequantize_sum
from grace.core.codecs.listed import bits_for, constant_levels, levels_sum, round_packed, sum_round
from grace.core.codecs.sums import FEEDBACK, Feedback
from grace.core.codecs.tables import small_floats, small_floats_contraction, table_encode, table_sum
from grace.core.config.registry import About, compressors
from grace.core.methods.fusions import compress_feedback
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, State, TensorSpec

# The largest integer of each format of integers.
_INTEGERS = {"int8": 127, "int4": 7}
_E2M1 = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# NormalFloat: quantiles of the normal distribution, 9 from 1/2 to q and 8 from 1 - q to 1/2, where q is the mean of
# 29/30 and 31/32, divided by the largest.
_NF4 = (
    *(-1.0, -0.6961928056, -0.5250729594, -0.3949174259, -0.2844413089, -0.1847734028, -0.0910499760),
    *(0.0, 0.0795803150, 0.1609301444, 0.2461122513, 0.3379151367, 0.4407097319, 0.5626168880, 0.7229566442, 1.0),
)
_LISTS = {
    "nf4": _NF4,
    "fp4": (*(-level / 6 for level in reversed(_E2M1)), 0.0, *(level / 6 for level in _E2M1)),
    "mxfp4": (*(-level for level in reversed(_E2M1)), 0.0, *_E2M1),
}
# FP8: the table of magnitudes of each format.
_TABLES = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2"}
# The exponent of the largest number of each MX format. The largest element of a block, in units of its scale, has it,
# too. Beyond the largest number it is cut to it.
_SHIFTS = {"mxfp4": 2, "mxfp8_e4m3": 8, "mxfp8_e5m2": 15}
# The smallest steps of a table in its unit 1.
_UNITS = {"e4m3": 1 << 9, "e5m2": 1 << 16}
_MANTISSA = 23


@compressors.register(
    "blockwise",
    About(
        family="quantization",
        adam=True,
        tests=[
            {"format": "fp4", "bucket_size": 0},
            {"format": "fp8_e5m2", "bucket_size": 100},
            {"format": "int4"},
            {"format": "int8", "bucket_size": 7},
            {"format": "mxfp4", "bucket_size": 32},
            {"format": "mxfp8_e4m3", "bucket_size": 32},
        ],
        errors=[
            *({"format": name} for name in ("int8", "int4", "nf4", "fp4", "fp8_e4m3", "fp8_e5m2")),
            *({"format": name, "bucket_size": 32} for name in ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2")),
        ],
        advised=[{"format": "int8"}, {}],
    ),
)
@dataclass(frozen=True)
class Blockwise(BucketQuantizer):
    r"""Blockwise quantization: the nearest number of a format of 4 or 8 bits, with a scale per block of elements.

    Formula: C(x)_i = m \, \mathrm{argmin}_{l \in L} |x_i / m - l|, \; m = \max_j |x_j|

    j runs over the element's block of `bucket_size` consecutive elements (0: one block for the tensor). `format`
    chooses the levels L. "int8" and "int4": the integers from -127 to 127, divided by 127, or from -7 to 7, divided by
    7. "nf4": NormalFloat, 16 quantiles of the normal distribution, 0, -1 and 1 among them. "fp4": the numbers with 2
    bits of exponent and 1 of mantissa (e2m1), which are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, divided by 6. "mxfp4": the same
    numbers, not divided, and as m the power of two with max_j |x_j| / m from 4 up to 8; elements above 6 m become 6 m.
    "fp8_e4m3" and "fp8_e5m2": FP8, divided by the largest numbers, 448 and 57,344. "mxfp8_e4m3" and "mxfp8_e5m2": the
    same, not divided, with max_j |x_j| / m from 256 up to 512, or from 2^15 up to 2^16; larger elements become the
    largest numbers. Codes of NaN and infinity are not sent. From the smallest normal number on, the relative error is
    at most 1/17 (e4m3) or 1/9 (e5m2); elements that are cut lose at most 1/8.
    Halfway values are rounded away from zero ("int8", "int4", FP8) or up. m takes a float of the working dtype, in MX
    formats 8 bits for its exponent: there m is at least 2^{-126}.
    Biased. Contraction: "nf4" and "fp4" with 1 - delta = max_g h_g^2 / (1 / (b - 1) + c_g^2) over the gaps g between
    levels, with half width h_g and centre c_g, for blocks of b elements; "fp8_e4m3" with delta = 0.888 - 5e-12 b and
    "fp8_e5m2" with delta = 0.888 - 2e-20 b; the others with delta = 0, because tiny blocks become 0.

    Error: 0.0084 |x|^2 for normal x; 3.6e-05 |x|^2 with `format="int8"`; 0.012 |x|^2 with `format="int4"`; 0.011 |x|^2
    with `format="fp4"`; 0.00063 |x|^2 with `format="fp8_e4m3"`; 0.0025 |x|^2 with `format="fp8_e5m2"`; 0.00087 |x|^2
    with `format="mxfp8_e4m3"` and `bucket_size=32`; 0.0029 |x|^2 with `format="mxfp8_e5m2"` and `bucket_size=32`.

    Cost: one pass for the largest magnitudes and one to round, which searches a list of 16 levels, or of 128 for FP8,
    for the formats other than integers; no random numbers, no sorting, no state but the residual.

    When: 4 bits per element with error feedback. "nf4" has the least error for gradients like normal ones, "mxfp4"
    sends the fewest bytes in small blocks. FP8 suits gradients whose parts differ in size, for which the one scale of
    `eightbit` is too large. Without a state, take `eden`, which is unbiased.

    Reference: Dettmers et al., "QLoRA: efficient finetuning of quantized LLMs", NeurIPS 2023 ("nf4"); Rouhani et al.,
    "Microscaling data formats for deep learning", arXiv:2310.10537, 2023 (MX formats, with blocks of 32);
    Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433, 2022.
    """

    format: Literal["int8", "int4", "nf4", "fp4", "mxfp4", "fp8_e4m3", "fp8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2"] = "nf4"
    bucket_size: int = 64

    default_memory = "residual"

    @property
    def linear_in(self) -> tuple[str, ...]:
        return () if self._shared_exponents else ("norms",)

    @property
    def _shared_exponents(self) -> bool:
        return self.format in _SHIFTS

    @property
    def levels(self) -> tuple[float, ...]:
        """Levels of the formats without a table in units of the scale, ascending."""
        most = _INTEGERS.get(self.format)
        return _LISTS[self.format] if most is None else tuple(level / most for level in range(-most, most + 1))

    @property
    def bits(self) -> int:
        """Bits per code: 4 or 8."""
        return 8 if self.format in _TABLES else bits_for(len(self.levels))

    def contraction(self, spec: TensorSpec) -> float | None:
        block = min(self.width(spec.numel), spec.numel)
        if self.format in ("fp8_e4m3", "fp8_e5m2"):
            return small_floats_contraction(_TABLES[self.format], block)
        # The scales of other formats end above the smallest numbers.
        if self.format not in ("nf4", "fp4"):
            return 0.0
        others = block - 1
        if others < 1:
            return 1.0
        gaps = (((high - low) / 2, (high + low) / 2) for low, high in pairwise(self.levels))
        return 1 - max(half**2 / (1 / others + centre**2) for half, centre in gaps)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        norms, codes = super().wire(spec)
        return (Field("norms", "uint8", norms.length), codes) if self._shared_exponents else (norms, codes)

    def compress(self, x: Array, at: Site) -> Payload:
        ops, width = at.ops, self.width(at.spec.numel)
        if self.format in _INTEGERS:
            codes, norms = bucket_quantize(ops, x, width, "max", _INTEGERS[self.format], self.bits, None, at.out)
            return {"norms": norms, "codes": codes}
        norms = bucket_norms(ops, x, width, "max")
        if self._shared_exponents:
            norms = _exponents(ops, norms, _SHIFTS[self.format])
        scales = self._scale({"norms": norms}, at)
        if self.format in _TABLES:
            codes = table_encode(ops, x, scales, self._table(at, saturating=True), width, at.out)
        else:
            codes = round_packed(ops, x, scales, self._list(at), width, None, at.out)
        return {"norms": norms, "codes": codes}

    def _scale(self, payload: Payload, at: Site) -> Array:
        norms = payload["norms"]
        return _powers(at.ops, norms, at.spec.work_dtype) if self._shared_exponents else norms

    def _sum(self, payloads: Sequence[Payload], scales: list[Array], at: Site, onto: Array | None = None) -> Array:
        n, width, codes = at.spec.numel, self.width(at.spec.numel), [payload["codes"] for payload in payloads]
        if self.format in _INTEGERS:
            return dequantize_sum(at.ops, codes, scales, width, _INTEGERS[self.format], self.bits, n, onto, at.out)
        if self.format in _TABLES:
            return table_sum(at.ops, codes, scales, self._table(at), width, onto, at.out)
        return levels_sum(at.ops, codes, scales, [self._list(at)] * len(codes), width, n, onto, at.out)

    def _table(self, at: Site, saturating: bool = False) -> Array:
        name = _TABLES[self.format]
        unit = _UNITS[name] if self._shared_exponents else None
        return small_floats(at.ops, name, at.spec.work_dtype, unit, saturating)

    def _list(self, at: Site) -> Array:
        return constant_levels(at.ops, self.levels, at.spec.work_dtype)


@compress_feedback.of(Blockwise, FEEDBACK)
def _(
    compressor: Blockwise, memory: Feedback, grad: Array, state: State, at: Site
) -> tuple[State, Payload, Array] | None:
    terms = memory.terms(grad, state, at)
    if terms is None or compressor.format not in ("nf4", "fp4"):
        return None
    width = compressor.width(at.spec.numel)
    left, codes, norms, finite = sum_round(at.ops, *terms, compressor._list(at), width, at.out)
    return {"residual": left}, {"norms": norms, "codes": codes}, finite


def _exponents(ops: ArrayOps, largest: Array, shift: int) -> Array:
    """Return the biased exponents (uint8) of the powers of two 2^shift below the largest magnitudes."""
    words = ops.from_bytes(ops.to_bytes(ops.cast(largest, "float32")), "int32")
    return ops.cast(ops.clip(ops.shift_right(words, _MANTISSA) - shift, 1, 254), "uint8")


def _powers(ops: ArrayOps, exponents: Array, dtype: str) -> Array:
    words = ops.shift_left(ops.cast(exponents, "int32"), _MANTISSA)
    return ops.cast(ops.from_bytes(ops.to_bytes(words), "float32"), dtype)
