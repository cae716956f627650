"""Quantization of buckets of consecutive elements to the levels of a list, and the sum over all ranks' levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grace.core.codecs.levels import LONGEST_IN_CACHE, bucket_norms, rows_of
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array, Key

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@composite(one_graph=True)
def round_packed(
    ops: ArrayOps, x: Array, scales: Array, levels: Array, width: int, key: Key | None, out: Array | None = None
) -> Array:
    """Return the packed indices of the levels that x is rounded to. Levels count times the scale of their bucket.

    With a key, x is rounded to one of its two neighbours with mean x; without one, to the nearest level, the upper of
    two. Beyond the outermost levels, x is rounded to them. There are 2, 4, 8 or 16 levels, ascending. Of equal levels,
    the last is taken.
    """
    n = ops.length(x)
    share: Array = 0.5
    if key is not None:
        share = 1.0 - rows_of(ops, ops.cast(ops.uniform(n, key), ops.dtype(x)), width)
    codes = indices_of_levels(ops, rows_of(ops, x, width), levels, ops.reshape(scales, (-1, 1)), share)
    return ops.pack(ops.reshape(codes, (-1,))[:n], bits_for(ops.length(levels)))


@round_packed.kernel()
def _(
    ops: Native, x: Array, scales: Array, levels: Array, width: int, key: Key | None, out: Array | None = None
) -> Array | None:
    if ops.floating(x) is None:
        return None
    size = packed_size(ops.length(x), bits_for(ops.length(levels)))
    inputs, integers = [x, scales, levels], [width, *ops.noise_integers(key)]
    return ops.run("round_packed", inputs, integers, outputs=["uint8"], lengths=[size], out=out)[0]


@composite()
def sum_round(
    ops: ArrayOps, x: Array, a: float, y: Array, b: float, levels: Array, width: int, out: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Round a x + b y to the nearest levels, times the largest magnitude of each bucket.

    Return what is left of it, the result of `round_packed`, these magnitudes, and whether all of it is finite.
    """
    total, finite = ops.finite_sum(x, a, y, b, out)
    norms = bucket_norms(ops, total, width, "max")
    codes = round_packed(ops, total, norms, levels, width, None)
    return levels_sum(ops, [codes], [-norms], [levels], width, ops.length(x), total), codes, norms, finite


@sum_round.kernel()
def _(
    ops: Native, x: Array, a: float, y: Array, b: float, levels: Array, width: int, out: Array | None = None
) -> tuple[Array, Array, Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None or ops.floating(y) != dtype or width > LONGEST_IN_CACHE:
        return None
    n = ops.length(x)
    left, codes, norms, finite = ops.run(
        "sum_round",
        [x, y, levels],
        [width],
        [a, b],
        outputs=[dtype, "uint8", dtype, "bool"],
        lengths=[n, packed_size(n, bits_for(ops.length(levels))), -(-n // width), 1],
        out=out,
    )
    return left, codes, norms, finite


@composite(one_graph=True)
def levels_sum(
    ops: ArrayOps,
    codes: Sequence[Array],
    scales: Sequence[Array],
    levels: Sequence[Array],
    width: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the sum of level times scale over the results of `round_packed`, added in the order of the ranks.

    All ranks have equally many levels. `onto` is an array that the sum starts from and consumes; without it the first
    payload starts the sum.
    """
    bits = bits_for(ops.length(levels[0]))
    for data, scale, own in zip(codes, scales, levels, strict=True):
        values = ops.gather(own, ops.cast(ops.unpack(data, bits, n), "int32"))
        rows = rows_of(ops, values, width) * ops.reshape(scale, (-1, 1))
        onto = plus(ops, onto, ops.reshape(rows, (-1,))[:n])
    return onto


@levels_sum.kernel()
def _(
    ops: Native,
    codes: Sequence[Array],
    scales: Sequence[Array],
    levels: Sequence[Array],
    width: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array | None:
    integers = [len(codes), width, n]
    return ops.total("levels_sum", [*codes, *scales, *levels], integers, n, ops.dtype(levels[0]), onto, out=out)


def indices_of_levels(ops: ArrayOps, x: Array, levels: Array, scale: Array, share: Array) -> Array:
    """Return the number (int64) of thresholds that x reaches; one is at that share of a gap between scaled levels.

    A threshold is at most the upper level, so that thresholds ascend in spite of rounding.
    """
    codes: Array = 0
    low = levels[0] * scale
    for j in range(1, ops.length(levels)):
        high = levels[j] * scale
        threshold = low + share * (high - low)
        codes = codes + ops.cast(x >= ops.where(threshold < high, threshold, high), "int64")
        low = high
    return codes


def bits_for(levels: int) -> int:
    """Return the bits of an index of one of so many levels."""
    return (levels - 1).bit_length()


def constant_levels(ops: ArrayOps, levels: tuple[float, ...], dtype: str) -> Array:
    """Return the levels as a constant, with the last one repeated up to a power of two."""
    missing = (1 << bits_for(len(levels))) - len(levels)
    return ops.constant((levels, dtype), lambda: ops.numbers([*levels, *levels[-1:] * missing], dtype))
