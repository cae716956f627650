"""Codings of one bit per element, and the sums over all ranks' bits.

A sum takes lists over the ranks and adds in their order. `onto` is an array that the sum starts from and consumes;
without it the first payload starts the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@composite(one_graph=True)
def binarize(ops: ArrayOps, x: Array, threshold: float, strict: Array | bool = False) -> Array:
    """Return one packed bit per element: x >= threshold, or x > threshold if the 0-d condition `strict` holds."""
    if isinstance(strict, bool):
        above = x > threshold if strict else x >= threshold
    else:
        above = ops.bit_or(x > threshold, ops.bit_and(x >= threshold, ~strict))
    return ops.pack(ops.cast(above, "uint8"), 1)


@binarize.kernel()
def _(ops: Native, x: Array, threshold: float, strict: Array | bool = False) -> Array | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    size, least = packed_size(ops.length(x), 1), _least(ops, threshold, strict, dtype)
    return ops.run("binarize", [x], (), [least], outputs=["uint8"], lengths=[size])[0]


def _least(ops: Native, threshold: float, strict: Array | bool, dtype: str) -> Any:
    """Return the least number with bit 1: the kernel compares by >= only."""
    if strict is False:
        return threshold
    above = ops.next_above(threshold, dtype)
    if strict is True:
        return above
    first, second = (ops.full(1, number, "float64")[0] for number in (above, threshold))
    return ops.where(strict, first, second)


@composite(one_graph=True)
def binarize_finite(ops: ArrayOps, x: Array, strict: Array | bool = False) -> tuple[Array, Array]:
    """Return the packed bits of x >= 0, or x > 0, and whether x is finite. See `binarize`."""
    return binarize(ops, x, 0, strict), ops.finite(x)


@binarize_finite.kernel()
def _(ops: Native, x: Array, strict: Array | bool = False) -> tuple[Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    lengths = [packed_size(ops.length(x), 1), 1]
    least = _least(ops, 0.0, strict, dtype)
    bits, good = ops.run("binarize_finite", [x], (), [least], outputs=["uint8", "bool"], lengths=lengths)
    return bits, good


@composite(one_graph=True)
def binarize_means(ops: ArrayOps, x: Array, threshold: float, columns: int = 1) -> tuple[Array, Array]:
    """Return the bits of `binarize` and the means of the elements with bit 0 and bit 1, in x's dtype.

    x is a matrix with that many columns, each with means of its own: first all of bit 0, then all of bit 1. The
    mean of no elements is 0.
    """
    count, high, low = _sides(ops, x, threshold, columns)
    rest, dtype = ops.cast(ops.length(x) // columns, "float64") - count, ops.dtype(x)
    sums = (ops.cast(ops.cast(side, dtype), "float64") for side in (low, high))
    means = [s / ops.where(m > 0, m, 1.0) for s, m in zip(sums, (rest, count), strict=True)]
    return binarize(ops, x, threshold), ops.reshape(ops.cast(ops.stack(means, axis=0), dtype), (-1,))


@binarize_means.kernel()
def _(ops: Native, x: Array, threshold: float, columns: int = 1) -> tuple[Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    kernel, integer = ("binarize_means", 0) if columns == 1 else ("binarize_columns", columns)
    outputs, lengths = ["uint8", dtype], [packed_size(ops.length(x), 1), 2 * columns]
    bits, means = ops.run(kernel, [x], [integer], [threshold], outputs=outputs, lengths=lengths)
    return bits, means


@composite(one_graph=True)
def sign_mean(ops: ArrayOps, x: Array) -> tuple[Array, Array]:
    """Return the packed bits of x >= 0 and the mean magnitude (x's dtype, (1,)); 0 for an empty array."""
    _, high, low = _sides(ops, x, 0)
    n, dtype = ops.cast(ops.length(x), "float64"), ops.dtype(x)
    mean = ops.cast(high - low, dtype) / ops.cast(ops.where(n > 0, n, 1.0), dtype)
    return binarize(ops, x, 0), ops.reshape(mean, (1,))


@sign_mean.kernel()
def _(ops: Native, x: Array) -> tuple[Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    outputs, lengths = ["uint8", dtype], [packed_size(ops.length(x), 1), 1]
    bits, mean = ops.run("binarize_means", [x], [1], [0.0], outputs=outputs, lengths=lengths)
    return bits, mean


@composite(one_graph=True)
def sum_sign_mean(
    ops: ArrayOps, x: Array, a: float, y: Array, b: float, out: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Return a x + b y, what `sign_mean` returns of it, and whether it is finite."""
    total, finite = ops.finite_sum(x, a, y, b, out)
    return total, *sign_mean(ops, total), finite


@sum_sign_mean.kernel()
def _(
    ops: Native, x: Array, a: float, y: Array, b: float, out: Array | None = None
) -> tuple[Array, Array, Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None or ops.floating(y) != dtype:
        return None
    n = ops.length(x)
    outputs, lengths = [dtype, "uint8", dtype, "bool"], [n, packed_size(n, 1), 1, 1]
    total, bits, mean, good = ops.run("sum_sign_mean", [x, y], (), [a, b], outputs=outputs, lengths=lengths, out=out)
    return total, bits, mean, good


@composite(one_graph=True)
def sum_columns(
    ops: ArrayOps,
    x: Array,
    a: float,
    y: Array,
    b: float,
    threshold: float,
    columns: int = 1,
    out: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Return a x + b y, what `binarize_means` returns of it, and whether it is finite."""
    total, finite = ops.finite_sum(x, a, y, b, out)
    return total, *binarize_means(ops, total, threshold, columns), finite


@sum_columns.kernel()
def _(
    ops: Native,
    x: Array,
    a: float,
    y: Array,
    b: float,
    threshold: float,
    columns: int = 1,
    out: Array | None = None,
) -> tuple[Array, Array, Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None or ops.floating(y) != dtype:
        return None
    n = ops.length(x)
    outputs, lengths = [dtype, "uint8", dtype, "bool"], [n, packed_size(n, 1), 2 * columns, 1]
    total, bits, means, good = ops.run(
        "sum_columns", [x, y], [columns], [threshold, a, b], outputs=outputs, lengths=lengths, out=out
    )
    return total, bits, means, good


def _sides(ops: ArrayOps, x: Array, threshold: float, columns: int = 1) -> tuple[Array, Array, Array]:
    """Return in float64 the number of elements with bit 1, their sum, and the sum of the others.

    They are 0-d for one column, else arrays over the columns.
    """
    high, wide = x >= threshold, ops.cast(x, "float64")
    sides = ops.cast(high, "float64"), ops.where(high, wide, 0.0), ops.where(high, 0.0, wide)
    count, above, below = (
        ops.sum(side) if columns == 1 else ops.sum(ops.reshape(side, (-1, columns)), axis=0) for side in sides
    )
    return count, above, below


@composite(one_graph=True)
def binary_sum(
    ops: ArrayOps,
    bits: Sequence[Array],
    levels: Sequence[Array],
    n: int,
    onto: Array | None = None,
    negate: bool = False,
    columns: int = 1,
    out: Array | None = None,
) -> Array:
    """Return the sum over ranks of the levels that the bits stand for.

    Each rank has n bits, of a matrix with that many columns, and the levels of its columns: first all of bit 0,
    then all of bit 1. `negate` subtracts instead of adding.
    """
    for data, level in zip(bits, levels, strict=True):
        signed = ops.reshape(-level if negate else level, (2, columns))
        above = ops.reshape(ops.unpack(data, 1, n) > 0, (-1, columns))
        onto = plus(ops, onto, ops.reshape(ops.where(above, signed[1], signed[0]), (-1,)))
    return onto


@binary_sum.kernel()
def _(
    ops: Native,
    bits: Sequence[Array],
    levels: Sequence[Array],
    n: int,
    onto: Array | None = None,
    negate: bool = False,
    columns: int = 1,
    out: Array | None = None,
) -> Array | None:
    kernel, kind, numbers = ("binary_sum", 0, [1.0]) if columns == 1 else ("column_sum", columns, [])
    integers = [len(bits), n, kind, int(negate)]
    return ops.total(kernel, [*bits, *levels], integers, n, ops.dtype(levels[0]), onto, numbers, out=out)


@composite(one_graph=True)
def sign_sum(
    ops: ArrayOps,
    bits: Sequence[Array],
    scales: Sequence[Array],
    n: int,
    onto: Array | None = None,
    negate: bool = False,
    factor: float = 1.0,
    out: Array | None = None,
) -> Array:
    """Return the result of `binary_sum` for levels of minus and plus a rank's scale, times a factor."""
    total = binary_sum(ops, bits, [ops.concat([-scale, scale]) for scale in scales], n, onto, negate, out=out)
    return total if factor == 1 else ops.scale_(total, factor)


@sign_sum.kernel()
def _(
    ops: Native,
    bits: Sequence[Array],
    scales: Sequence[Array],
    n: int,
    onto: Array | None = None,
    negate: bool = False,
    factor: float = 1.0,
    out: Array | None = None,
) -> Array | None:
    integers = [len(bits), n, 1, int(negate)]
    return ops.total("binary_sum", [*bits, *scales], integers, n, ops.dtype(scales[0]), onto, [factor], out=out)


@composite(one_graph=True)
def majority(ops: ArrayOps, bits: Sequence[Array], n: int, dtype: str, out: Array | None = None) -> Array:
    """Return 1 where more than half of the ranks set the bit, -1 where fewer did, 0 on a tie."""
    votes = ops.unpack(bits[0], 1, n)
    for data in bits[1:]:
        votes = votes + ops.unpack(data, 1, n)
    return ops.clip(ops.cast(2 * votes - len(bits), dtype), -1, 1)


@majority.kernel()
def _(ops: Native, bits: Sequence[Array], n: int, dtype: str, out: Array | None = None) -> Array | None:
    integers = [n, int(dtype == "float64")]
    return ops.run("majority", bits, integers, outputs=[dtype], lengths=[n], out=out)[0]
