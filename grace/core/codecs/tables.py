"""Tables of 128 magnitudes, and the codings of elements by the nearest of them, with a scale per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grace.core.codecs.levels import rows_of
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# The number of mantissas of each binary format, and its largest finite number in steps of the smallest one.
SMALL_FLOATS = {"1-3-4": (16, 1984), "e4m3": (8, 448 << 9), "e5m2": (4, 57344 << 16)}
# More than any share of a scale, so that no element is nearer to a code for NaN or infinity than to the largest number.
_BEYOND = 2.0**100


def small_floats(ops: ArrayOps, name: str, dtype: str, unit: int | None = None, saturating: bool = False) -> Array:
    """Return the magnitudes of an 8-bit format in units of its largest number, or of `unit` of its smallest steps.

    The codes of NaN and infinity continue the exponents; `saturating` puts them out of the reach of every element.
    """

    def make() -> Array:
        # Integers divided once, so that every framework computes the same bits.
        mantissa, largest = SMALL_FLOATS[name]
        normal = ops.arange(mantissa, dtype) + float(mantissa)
        steps = [ops.arange(mantissa, dtype), *(normal * float(2**e) for e in range(128 // mantissa - 1))]
        shares = ops.concat(steps) / ops.cast(unit or largest, dtype)
        return ops.where(ops.concat(steps) > float(largest), _BEYOND, shares) if saturating else shares

    return ops.constant(("small floats", name, dtype, unit, saturating), make)


def small_floats_contraction(name: str, n: int) -> float:
    """Return delta of rounding n elements to the numbers of a format, the largest element to its largest number."""
    # The widest relative gap above the first entry is that from 1 to 2 steps.
    return max(0.0, 1 - (1 / 3) ** 2 - n * (1 / SMALL_FLOATS[name][1] / 2) ** 2)


@composite(one_graph=True)
def table_encode(ops: ArrayOps, x: Array, scales: Array, table: Array, width: int, out: Array | None = None) -> Array:
    """Return the index (uint8) of the entry of a table of 128 nearest |x| / scale, the larger of two; + 128 if x < 0.

    The table ascends. Every bucket of `width` elements has a scale.
    """
    rows = rows_of(ops, ops.abs(x), width)
    scales = ops.reshape(scales, (-1, 1))
    share = ops.reshape(rows / ops.where(scales > 0, scales, 1.0), (-1,))[: ops.length(x)]
    index = ops.search_sorted((table[:-1] + table[1:]) * 0.5, share)
    return ops.cast(index + ops.cast(x < 0, "int32") * 128, "uint8")


@table_encode.kernel()
def _(ops: Native, x: Array, scales: Array, table: Array, width: int, out: Array | None = None) -> Array | None:
    if ops.floating(x) is None:
        return None
    inputs, lengths = [x, scales, table], [ops.length(x)]
    return ops.run("table_encode", inputs, [width], outputs=["uint8"], lengths=lengths, out=out)[0]


@composite(one_graph=True)
def table_sum(
    ops: ArrayOps,
    codes: Sequence[Array],
    scales: Sequence[Array],
    table: Array,
    width: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the sum of +-entry * scale over the results of `table_encode`, added in the order of the ranks.

    `onto` is an array that the sum starts from and consumes; without it the first payload starts the sum.
    """
    for data, scale in zip(codes, scales, strict=True):
        code = ops.cast(data, "int32")
        rows = rows_of(ops, ops.gather(table, ops.bit_and(code, 127)), width) * ops.reshape(scale, (-1, 1))
        magnitude = ops.reshape(rows, (-1,))[: ops.length(data)]
        onto = plus(ops, onto, ops.where(code > 127, -magnitude, magnitude))
    return onto


@table_sum.kernel()
def _(
    ops: Native,
    codes: Sequence[Array],
    scales: Sequence[Array],
    table: Array,
    width: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array | None:
    n = ops.length(codes[0])
    return ops.total("table_sum", [*codes, *scales, table], [len(codes), width, n], n, ops.dtype(table), onto, out=out)
