"""Codings of levels in buckets of `width` consecutive elements, and the sum over all ranks' levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array, Key

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# The longest buckets of the kernels that round a bucket right after its norm.
LONGEST_IN_CACHE = 512


@composite(one_graph=True)
def bucket_norms(ops: ArrayOps, x: Array, width: int, kind: Literal["l2", "max"]) -> Array:
    """Return the Euclidean norm or largest magnitude of every bucket; zeros fill the last one."""
    rows = rows_of(ops, x, width)
    return ops.norm(rows, axis=1) if kind == "l2" else ops.max(ops.abs(rows), axis=1)


@bucket_norms.kernel()
def _(ops: Native, x: Array, width: int, kind: Literal["l2", "max"]) -> Array | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    buckets = -(-ops.length(x) // width)
    return ops.run("bucket_norms", [x], [width, int(kind == "max")], outputs=[dtype], lengths=[buckets])[0]


@composite(one_graph=True)
def quantize_packed(
    ops: ArrayOps,
    x: Array,
    scales: Array,
    width: int,
    levels: int,
    bits: int,
    key: Key | None,
    limit: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return levels + l, packed, with l from `quantize` of x and the scale of its bucket.

    Without a key, x is rounded to the nearest level. With `limit`, of one element, x is first clipped to [-limit,
    limit].
    """
    n = ops.length(x)
    if limit is not None:
        limit = ops.reshape(limit, ())
        x = ops.clip(x, -limit, limit)
    codes = ops.quantize(rows_of(ops, x, width), ops.reshape(scales, (-1, 1)), levels, key)
    return ops.pack(ops.reshape(codes, (-1,))[:n] + levels, bits)


@quantize_packed.kernel()
def _(
    ops: Native,
    x: Array,
    scales: Array,
    width: int,
    levels: int,
    bits: int,
    key: Key | None,
    limit: Array | None = None,
    out: Array | None = None,
) -> Array | None:
    if ops.floating(x) is None:
        return None
    inputs = [x, scales] if limit is None else [x, scales, limit]
    integers, size = [width, levels, bits, *ops.noise_integers(key)], packed_size(ops.length(x), bits)
    return ops.run("quantize_packed", inputs, integers, outputs=["uint8"], lengths=[size], out=out)[0]


@composite()
def bucket_quantize(
    ops: ArrayOps,
    x: Array,
    width: int,
    kind: Literal["l2", "max"],
    levels: int,
    bits: int,
    key: Key | None,
    out: Array | None = None,
) -> tuple[Array, Array]:
    """Return the results of `quantize_packed`, by the norms of the buckets, and of `bucket_norms`."""
    norms = bucket_norms(ops, x, width, kind)
    return quantize_packed(ops, x, norms, width, levels, bits, key, out=out), norms


@bucket_quantize.kernel()
def _(
    ops: Native,
    x: Array,
    width: int,
    kind: Literal["l2", "max"],
    levels: int,
    bits: int,
    key: Key | None,
    out: Array | None = None,
) -> tuple[Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None or width > LONGEST_IN_CACHE or bits > 8:
        return None
    n = ops.length(x)
    codes, norms = ops.run(
        "bucket_quantize",
        [x],
        [width, int(kind == "max"), levels, bits, *ops.noise_integers(key)],
        outputs=["uint8", dtype],
        lengths=[packed_size(n, bits), -(-n // width)],
        out=out,
    )
    return codes, norms


@composite(one_graph=True)
def dequantize_sum(
    ops: ArrayOps,
    codes: Sequence[Array],
    scales: Sequence[Array],
    width: int,
    levels: int,
    bits: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the sum of l scale / levels over the results of `quantize_packed`, added in the order of the ranks.

    `onto` is an array that the sum starts from and consumes; without it the first payload starts the sum.
    """
    for data, scale in zip(codes, scales, strict=True):
        rows = rows_of(ops, ops.unpack(data, bits, n) - levels, width)
        values = ops.dequantize(rows, ops.reshape(scale, (-1, 1)), levels, ops.dtype(scale))
        onto = plus(ops, onto, ops.reshape(values, (-1,))[:n])
    return onto


@dequantize_sum.kernel()
def _(
    ops: Native,
    codes: Sequence[Array],
    scales: Sequence[Array],
    width: int,
    levels: int,
    bits: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array | None:
    integers = [len(codes), width, levels, bits, n]
    return ops.total("dequantize_sum", [*codes, *scales], integers, n, ops.dtype(scales[0]), onto, out=out)


def rows_of(ops: ArrayOps, x: Array, width: int) -> Array:
    """Return x as a matrix of buckets, padded with zeros."""
    n = ops.length(x)
    rows = -(-n // width)
    missing = rows * width - n
    if isinstance(missing, int) and missing == 0:
        return ops.reshape(x, (rows, width))
    return ops.reshape(ops.concat([x, ops.zeros(missing, ops.dtype(x))]), (rows, width))
