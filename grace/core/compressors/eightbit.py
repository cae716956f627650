"""8-bit floating-point formats: those of Dettmers, and FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grace.core.codecs.tables import small_floats, small_floats_contraction, table_encode, table_sum
from grace.core.config.registry import About, compressors
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, TensorSpec


@compressors.register(
    "eightbit",
    About(
        family="quantization",
        adam=True,
        tests=[{"format": "1-3-4"}, {"format": "e5m2"}],
        errors=[{"format": name} for name in ("dynamic", "1-3-4", "e4m3", "e5m2")],
    ),
)
@dataclass(frozen=True)
class EightBit(Compressor):
    r"""8-bit floating point: sign and nearest entry of a table of 128, scaled by the largest magnitude.

    Formula: C(x)_i = s \, \mathrm{sign}(x_i) \, t_j, \; s = \max_k |x_k|, \; j = \mathrm{argmin}_j | |x_i| / s - t_j |

    Halfway between two entries the larger one is taken; the code 0 means 0.
    `format="dynamic"` encodes the power of ten in the number of leading zeros e, then a flag bit 1, and bisects (0.1,
    1) with the remaining k = 6 - e bits. e zeros and the number j mean `10^-e (0.1 + 0.9 (j + 1/2) / 2^k)`, the middle
    of the last interval. The entries reach from 0.993 down to 5.5e-7.
    `format="1-3-4"` is a small binary float with 3 bits of exponent and 4 bits of mantissa, with denormals, scaled so
    that its largest entry is 1. The relative error is at most about 3 % down to 1/124; below that, entries are 1/1984
    apart.
    `format="e4m3"` and `format="e5m2"` are FP8, with 4 or 5 bits of exponent. The largest magnitude becomes the largest
    finite number, 448 or 57,344; the codes of NaN and infinity are not used.
    Biased. Contraction with 1 - delta = r^2 + d (t_1 / 2)^2, where r is the largest relative error from t_1 on: delta =
    0.495 ("dynamic"), delta = 0.888 - 6e-8 d ("1-3-4"), delta = 0.888 - 5e-12 d ("e4m3"), delta = 0.888 - 2e-20 d
    ("e5m2"), and never below 0.

    Error: 0.00021 |x|^2 for normal x; 0.00018 |x|^2 with `format="1-3-4"`; 0.0007 |x|^2 with `format="e4m3"`; 0.0027
    |x|^2 with `format="e5m2"`.

    Cost: one pass for the maximum, one division and one binary search among 127 edges per element, and one table
    look-up per element to decode; no random numbers, no sorting.

    When: a quarter of the bytes with little to tune; "dynamic" also for values of very different size. For fewer bytes
    take another method. It has no memory, as in its paper. `memory="residual"` gives it the error feedback of GRACE's
    Table I, which changed no result in the study.

    Reference: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016. FP8: Micikevicius et al.,
    "FP8 formats for deep learning", arXiv:2209.05433, 2022; here halfway values are rounded up, not to even.
    """

    format: Literal["1-3-4", "dynamic", "e4m3", "e5m2"] = "dynamic"

    linear_in = ("scale",)
    nonfinite = "shown"

    def contraction(self, spec: TensorSpec) -> float | None:
        if self.format != "dynamic":
            return small_floats_contraction(self.format, spec.numel)
        # The widest relative gap above the first entry is that from 5.5e-7 to 3.25e-6.
        return max(0.0, 1 - (2.7 / 3.8) ** 2 - spec.numel * (5.5e-7 / 2) ** 2)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("scale", spec.work_dtype, 1), Field("codes", "uint8", spec.numel)

    def _table(self, ops: ArrayOps, dtype: str) -> Array:
        if self.format != "dynamic":
            return small_floats(ops, self.format, dtype)
        return ops.constant(("dynamic", dtype), lambda: _dynamic(ops, dtype))

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        scale = ops.flat_max_abs(x)
        return {
            "scale": scale,
            "codes": table_encode(ops, x, scale, self._table(ops, at.spec.work_dtype), _whole(at), at.out),
        }

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        codes, scales = ([payload[name] for payload in payloads] for name in ("codes", "scale"))
        return table_sum(at.ops, codes, scales, self._table(at.ops, at.spec.work_dtype), _whole(at), out=at.out)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        table = self._table(at.ops, at.spec.work_dtype)
        return table_sum(at.ops, [payload["codes"]], [-payload["scale"]], table, _whole(at), onto=x)


def _dynamic(ops: ArrayOps, dtype: str) -> Array:
    # Integers divided once, so that every framework computes the same bits.
    pieces = [ops.zeros(1, dtype)]
    for k in range(7):
        middle = (ops.arange(2**k, dtype) * 2.0 + 1.0) * 9.0 + float(2 ** (k + 1))
        pieces.append(middle / ops.cast(10 ** (7 - k) * 2 ** (k + 1), dtype))
    return ops.concat(pieces)


def _whole(at: Site) -> int:
    """Return the width of the only bucket."""
    return max(1, at.spec.numel)
