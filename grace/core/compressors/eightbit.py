"""8-bit floating-point formats: those of Dettmers, and FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from grace.core.methods.compressor import Compressor
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.values.registry import compressors
from grace.core.values.spec import Array, Field, Payload, Site, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# The number of mantissas of each binary format, and its largest finite number in steps of the smallest one.
_SMALL_FLOATS = {"1-3-4": (16, 1984), "e4m3": (8, 448 << 9), "e5m2": (4, 57344 << 16)}


@compressors.register("eightbit")
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

    When: a quarter of the bytes with little to tune; "dynamic" also for values of very different size. Use error
    feedback (GRACE, Table I). For fewer bytes take another method.

    Reference: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016. FP8: Micikevicius et al.,
    "FP8 formats for deep learning", arXiv:2209.05433, 2022; here halfway values are rounded up, not to even.
    """

    format: Literal["1-3-4", "dynamic", "e4m3", "e5m2"] = "dynamic"

    default_memory = "residual"
    linear_in = ("scale",)

    def contraction(self, spec: TensorSpec) -> float | None:
        # The widest relative gaps above the first entry: from 5.5e-7 to 3.25e-6 ("dynamic"), and from 1 to 2 steps.
        smallest, error = 5.5e-7, 2.7 / 3.8
        if self.format != "dynamic":
            smallest, error = 1 / _SMALL_FLOATS[self.format][1], 1 / 3
        return max(0.0, 1 - error**2 - spec.numel * (smallest / 2) ** 2)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("scale", spec.work_dtype, 1), Field("codes", "uint8", spec.numel)

    def _table(self, ops: ArrayOps, dtype: str) -> Array:
        return ops.constant(("eightbit", self.format, dtype), lambda: self._make_table(ops, dtype))

    def _make_table(self, ops: ArrayOps, dtype: str) -> Array:
        # Integers divided once, so that every framework computes the same bits.
        if self.format != "dynamic":
            mantissa, largest = _SMALL_FLOATS[self.format]
            normal = ops.arange(mantissa, dtype) + float(mantissa)
            units = [ops.arange(mantissa, dtype), *(normal * float(2**e) for e in range(128 // mantissa - 1))]
            return ops.concat(units) / ops.cast(largest, dtype)
        pieces = [ops.zeros(1, dtype)]
        for k in range(7):
            middle = (ops.arange(2**k, dtype) * 2.0 + 1.0) * 9.0 + float(2 ** (k + 1))
            pieces.append(middle / ops.cast(10 ** (7 - k) * 2 ** (k + 1), dtype))
        return ops.concat(pieces)

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        scale = ops.reshape(ops.max_abs(x), (1,))
        return {"scale": scale, "codes": table_encode(ops, x, scale, self._table(ops, at.spec.work_dtype))}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        codes, scales = ([payload[name] for payload in payloads] for name in ("codes", "scale"))
        return table_sum(at.ops, codes, scales, self._table(at.ops, at.spec.work_dtype))

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        table = self._table(at.ops, at.spec.work_dtype)
        return table_sum(at.ops, [payload["codes"]], [-payload["scale"]], table, onto=x)


@composite(one_graph=True)
def table_encode(ops: ArrayOps, x: Array, scale: Array, table: Array) -> Array:
    """Return the index (uint8) of the entry of a table of 128 nearest |x| / scale, the larger of two; + 128 if x < 0.

    The table ascends.
    """
    share = ops.abs(x) / ops.where(scale > 0, scale, 1.0)
    index = ops.search_sorted((table[:-1] + table[1:]) * 0.5, share)
    return ops.cast(index + ops.cast(x < 0, "int32") * 128, "uint8")


@table_encode.kernel(table_encode="x T, scale T, table T -> uint8[x]")
def _(ops: Native, x: Array, scale: Array, table: Array) -> Array | None:
    if ops.floating(x) is None:
        return None
    return ops.run("table_encode", [x, scale, table], outputs=["uint8"], lengths=[ops.length(x)])[0]


@composite(one_graph=True)
def table_sum(
    ops: ArrayOps, codes: Sequence[Array], scales: Sequence[Array], table: Array, onto: Array | None = None
) -> Array:
    """Return the sum of +-entry * scale over the results of `table_encode`."""
    for data, scale in zip(codes, scales, strict=True):
        code = ops.cast(data, "int32")
        magnitude = ops.gather(table, ops.bit_and(code, 127)) * scale
        onto = plus(ops, onto, ops.where(code > 127, -magnitude, magnitude))
    return onto


@table_sum.kernel(table_sum="[onto_ T], codes uint8..., scales T..., table T; ranks, n, has_onto -> T[n]")
def _(
    ops: Native, codes: Sequence[Array], scales: Sequence[Array], table: Array, onto: Array | None = None
) -> Array | None:
    n = ops.length(codes[0])
    return ops.total("table_sum", [*codes, *scales, table], [len(codes), n], n, ops.dtype(table), onto)
