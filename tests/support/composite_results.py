"""Expected results of every composite, computed with plain NumPy, without the array operations.

A case makes calls for arrays of n elements: the name of the composite, its arguments and options, and the results.
Elements are multiples of 2^-10, so that sums in float64 are exact in any order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import grace.core.optim.moments  # noqa: F401 - registers its composites
from grace.core.codecs.bloom import BloomFilter
from grace.core.codecs.peeling import spread
from grace.core.memories.variance import square_sum
from grace.core.ops.numpy_ops import NumpyOps
from grace.core.spec import Key

KEY = Key(77, 5, 2)
SIZES = (0, 1, 7, 8, 9, 1000)
RANKS = 3


class Call(NamedTuple):
    """One call of a composite. `options` may contain arrays."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    expected: tuple[np.ndarray, ...]


CASES: dict[str, Callable[[int, str], tuple[Call, ...]]] = {}


def case(function: Callable[[int, str], Iterator[Call]]) -> Callable[[int, str], Iterator[Call]]:
    # Every backend gets copies of the arguments, so that all of them can have the same calls.
    CASES[function.__name__] = functools.cache(lambda n, dtype: tuple(function(n, dtype)))
    return function


def numbers(n: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Return numbers of different sizes, some of them equal, some zero."""
    rng = np.random.default_rng(1000 * seed + n)
    x = np.round(rng.standard_normal(n) * 2.0 ** rng.integers(-6, 4, n) * 1024) / 1024
    return x.astype(dtype)


def several(n: int, dtype: str) -> list[np.ndarray]:
    return [numbers(n, dtype, seed) for seed in range(RANKS)]


def uniform(n: int) -> np.ndarray:
    return NumpyOps().uniform(n, KEY)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    codes = codes.astype(np.int64)
    if bits > 8:
        return np.concatenate([(codes & 255).astype(np.uint8), packed(codes >> 8, bits - 8)])
    return np.packbits(((codes[:, None] >> np.arange(bits)) & 1).astype(np.uint8).ravel(), bitorder="little")


def sums(
    name: str,
    values: list[np.ndarray],
    args: Callable[[int], tuple[Any, ...]],
    onto: np.ndarray,
    **options: Any,
) -> Iterator[Call]:
    """Return calls for one rank and for all ranks, with and without `onto`. `args` makes arguments for n ranks."""
    for count in (1, len(values)):
        total = values[0].copy()
        for value in values[1:count]:
            total += value
        yield Call(name, args(count), options, (total,))
        total = onto.copy()
        for value in values[:count]:
            total += value
        yield Call(name, args(count), {**options, "onto": onto}, (total,))


# --- helpers ----------------------------------------------------------------------------------------------------


@case
def flat_product(n, dtype):
    # One column: a sum of products would depend on how it is rounded.
    a, b = numbers(n, dtype), numbers(3, dtype, 1)
    yield Call("flat_product", (a, b, 1), {}, (np.outer(a, b).ravel(),))


@case
def sub_product_(n, dtype):
    a, b, x = numbers(n, dtype), numbers(3, dtype, 1), numbers(3 * n, dtype, 2)
    product = np.outer(a, b).ravel()
    yield Call("sub_product_", (x, a, b, 1), {}, (x - product, product))


@case
def power_product(n, dtype):
    # One column whose length is exact, and whole numbers, whose products are.
    x, q = np.arange(2 * n).astype(dtype), np.array([[3], [4]], dtype)
    units = q / np.dtype(dtype).type(5)
    yield Call("power_product", (x, q * 0, (n, 2)), {}, (np.zeros(n, dtype), np.array(False)))
    x[1::2] = 0
    yield Call("power_product", (x, q, (n, 2)), {}, (x[::2] * units[0], np.array(True)))


@case
def sum_power_product(n, dtype):
    # As in power_product; where the sum is not finite, the product is not specified.
    x, y = np.arange(2 * n).astype(dtype), numbers(2 * n, dtype)
    q = np.array([[3], [4]], dtype)
    units, y[1::2] = q / np.dtype(dtype).type(5), -x[1::2]
    total = x + y
    yield Call("sum_power_product", (x, y, q, (n, 2)), {}, (total, total[::2] * units[0], np.array(True)))
    yield Call("sum_power_product", (x, y, q * 0, (n, 2)), {}, (total, np.zeros(n, dtype), np.array(False)))


@case
def project(n, dtype):
    if n == 0:
        return
    # An axis is its own basis.
    x, axis = numbers(3 * n, dtype), np.zeros(n, dtype)
    axis[n // 2] = 2
    yield Call("project", (x, axis, (n, 3)), {}, (axis / 2, x.reshape(n, 3)[n // 2]))


@case
def weighted_sum(n, dtype):
    x, y, _ = several(n, dtype)
    t = np.dtype(dtype).type
    for a, b in ((1, 1), (0.9, 1), (1, 0.3), (0.9, 1 - 0.9), (1, -1)):
        yield Call("weighted_sum", (x, a, y, b), {}, (x * t(a) + y * t(b),))


@case
def cast_half(n, dtype):
    x, _, _ = several(n, dtype)
    for half in (np.float16, ml_dtypes.bfloat16):
        yield Call("cast_half", (x, np.dtype(half).name), {}, (x.astype(half),))
        yield Call("cast_half", (x.astype(half), dtype), {}, (x.astype(half).astype(dtype),))


@case
def half_sum(n, dtype):
    for half in (np.float16, ml_dtypes.bfloat16):
        rows = np.stack([x.astype(half) for x in several(n, "float32")])
        for count, factor in ((1, 1.0), (2, 1.0), (2, 0.5), (RANKS, 1 / RANKS)):
            total = sum(row.astype(np.float32) * np.float32(factor) for row in rows[:count])
            yield Call("half_sum", (list(rows[:count]),), {"factor": factor}, (total.astype(half),))
    x = np.array([40000, 40000, -1, np.inf], np.float16)
    yield Call("half_sum", ([x, x],), {}, (np.array([np.inf, np.inf, -2, np.inf], np.float16),))
    yield Call("half_sum", ([x, x],), {"factor": 0.5}, (x,))


@case
def limited_sum(n, dtype):
    x, y, z = several(n, dtype)
    t = np.dtype(dtype).type
    for a, b, limit in ((0.9, 1 - 0.9, 1.0), (1, -1, 0.25), (0.5, 2, 1e3)):
        expected = np.clip(x * t(a) + y * z * t(b), -t(limit), t(limit))
        yield Call("limited_sum", (x, a, y, b, z, limit), {}, (expected,))
    if n:
        y = y.copy()
        y[n // 2] = np.nan
        yield Call("limited_sum", (x, 1, y, 1, z, 1.0), {}, (np.clip(x + y * z, t(-1), t(1)),))


@case
def masked_sum(n, dtype):
    x, y, z = several(n, dtype)
    kept = np.where(z > 0, y, 0).astype(dtype)
    for a, b in ((1, -0.01), (0.9, 1), (1, 0.5)):
        t = np.dtype(dtype).type
        yield Call("masked_sum", (x, a, y, b, z), {}, (x * t(a) + kept * t(b), kept))


@case
def momentum_sum(n, dtype):
    x, y, z = several(n, dtype)
    t = np.dtype(dtype).type
    for m in (0.9, 0.0):
        momentum = x * t(m) + y
        yield Call("momentum_sum", (x, m, y, z), {}, (momentum, z + momentum, np.array(True)))
    if n:
        z = z.copy()
        z[n // 2] = np.nan
        yield Call("momentum_sum", (x, 0.9, y, z), {}, (x * t(0.9) + y, z + (x * t(0.9) + y), np.array(False)))


@case
def sum_top(n, dtype):
    x, y, _ = several(n, dtype)
    t = np.dtype(dtype).type
    for k in {0, min(1, n), n // 3, n}:
        total = x * t(0.9) + y
        indices = np.sort(np.argsort(-np.abs(total), kind="stable")[:k]).astype(np.int32)
        yield Call("sum_top", (x, 0.9, y, 1, k), {}, (total, np.array(True), total[indices], indices))


@case
def sum_sample(n, dtype):
    x, y, _ = several(n, dtype)
    total = x * np.dtype(dtype).type(0.9) + y
    for k in {0, min(1, n), n // 3, n}:
        indices = NumpyOps().sample(n, k, KEY)
        left = total.copy()
        left[indices] = 0
        yield Call("sum_sample", (x, 0.9, y, 1, k, KEY), {}, (left, np.array(True), total[indices], indices))


@case
def sum_select(n, dtype):
    x, y, _ = several(n, dtype)
    for bound, strict in ((0.5, True), (0.0, False), (1e9, True)):
        total = x + y
        passed = np.abs(total) > bound if strict else np.abs(total) >= bound
        (indices,) = np.nonzero(passed)
        found = total[indices], indices.astype(np.int32)
        yield Call("sum_select", (x, 1, y, 1, bound, strict), {}, (total, np.array(True), *found))


@case
def finite_sum(n, dtype):
    x, y, _ = several(n, dtype)
    t = np.dtype(dtype).type
    for a, b in ((1, 1), (0.9, 1), (1, 0.3), (0.9, 1 - 0.9)):
        yield Call("finite_sum", (x, a, y, b), {}, (x * t(a) + y * t(b), np.array(True)))
    for at, bad in ((0, np.nan), (n // 2, np.inf), (n - 1, -np.inf)):
        if n:
            z = y.copy()
            z[at] = bad
            yield Call("finite_sum", (x, 1, z, 1), {}, (x + z, np.array(False)))
            yield Call("finite_sum", (z, 0.9, x, 1), {}, (z * t(0.9) + x, np.array(False)))


@case
def max_abs(n, dtype):
    x = numbers(n, dtype)
    most = np.array(max(abs(x), default=0), dtype)
    yield Call("max_abs", (x,), {}, (most,))
    yield Call("flat_max_abs", (x,), {}, (most.reshape(1),))


@case
def norm_max(n, dtype):
    x = numbers(n, dtype)
    norm = np.array(np.sqrt(np.sum(x.astype(np.float64) ** 2)), dtype)
    yield Call("norm_max", (x,), {}, (norm, np.array(max(abs(x), default=0), dtype)))


@case
def words(n, dtype):
    drawn = NumpyOps().uniform(n, KEY, 3)
    result = NumpyOps().words(n, KEY, 3)
    assert result.max(initial=0) < 2**32
    assert np.array_equal((result >> 8) * 2.0**-24, drawn)
    yield Call("words", (n, KEY, 3), {}, (result,))


@case
def sparse_sum(n, dtype):
    values, indices = [], []
    for rank, x in enumerate(several(n, dtype)):
        index = np.sort(np.random.default_rng(rank).permutation(n)[: n // 2 + n % 2]).astype(np.int32)
        values.append(x[: len(index)])
        indices.append(index)
    dense = [np.zeros(n, dtype) for _ in values]
    for total, value, index in zip(dense, values, indices, strict=True):
        total[index] = value
    yield from sums("sparse_sum", dense, lambda count: (values[:count], indices[:count], n), numbers(n, dtype, 9))
    yield Call("desparsify", (values[1], indices[1], n), {}, (dense[1],))


# --- bits -------------------------------------------------------------------------------------------------------


# Numbers of columns of matrices; they divide 1000, and some of them 8 and 9.
COLUMNS = (2, 4, 9, 25, 1000)


def columns_of(n: int) -> list[int]:
    return [columns for columns in COLUMNS if n and n % columns == 0]


def side_means(x: np.ndarray, threshold: float) -> list[float]:
    """Return the mean of the numbers below the threshold and that of the others."""
    high, low = (x.astype(np.float64)[side] for side in (x >= threshold, x < threshold))
    return [side.sum().astype(x.dtype).astype(np.float64) / max(1, len(side)) for side in (low, high)]


@case
def binarize(n, dtype):
    x = numbers(n, dtype)
    x[::3] = 0
    for threshold in (0, 0.25, -0.5):
        bits = packed(x >= threshold, 1)
        yield Call("binarize", (x, threshold, True), {}, (packed(x > threshold, 1),))
        yield Call("binarize", (x, threshold), {}, (bits,))
        yield Call("binarize_means", (x, threshold), {}, (bits, np.array(side_means(x, threshold)).astype(dtype)))
        for columns in columns_of(n):
            pairs = np.array([side_means(column, threshold) for column in x.reshape(-1, columns).T]).astype(dtype)
            yield Call("binarize_means", (x, threshold, columns), {}, (bits, pairs.T.reshape(-1)))
    mean = np.abs(x).sum(dtype=np.float64).astype(dtype) / np.array(max(1, n), dtype)
    yield Call("sign_mean", (x,), {}, (packed(x >= 0, 1), mean.reshape(1)))


@case
def sum_sign_mean(n, dtype):
    x, y, _ = several(n, dtype)
    total = x * np.dtype(dtype).type(0.9) + y
    mean = np.abs(total).sum(dtype=np.float64).astype(dtype) / np.array(max(1, n), dtype)
    told = (total, packed(total >= 0, 1), mean.reshape(1), np.array(True))
    yield Call("sum_sign_mean", (x, 0.9, y, 1), {}, told)


@case
def sum_columns(n, dtype):
    x, y, _ = several(n, dtype)
    # With this factor all sums are exact, in any order.
    total = x * np.dtype(dtype).type(0.5) + y
    for columns in (1, *columns_of(n)):
        pairs = np.array([side_means(column, 0.25) for column in total.reshape(-1, columns).T]).astype(dtype)
        told = (total, packed(total >= 0.25, 1), pairs.T.reshape(-1), np.array(True))
        yield Call("sum_columns", (x, 0.5, y, 1, 0.25, columns), {}, told)


@case
def binarize_finite(n, dtype):
    x = numbers(n, dtype)
    for strict, bits in ((False, packed(x >= 0, 1)), (True, packed(x > 0, 1))):
        yield Call("binarize_finite", (x, strict), {}, (bits, np.array(True)))
    if n:
        x = x.copy()
        x[n // 2] = np.inf
        yield Call("binarize_finite", (x,), {}, (packed(x >= 0, 1), np.array(False)))


@case
def binary_sum(n, dtype):
    xs = several(n, dtype)
    bits, levels = [packed(x >= 0, 1) for x in xs], [numbers(2, dtype, 5 + rank) for rank in range(RANKS)]
    values = [np.array([level[int(v >= 0)] for v in x], dtype) for x, level in zip(xs, levels, strict=True)]
    base = numbers(n, dtype, 9)
    yield from sums("binary_sum", values, lambda count: (bits[:count], levels[:count], n), base)
    for columns in columns_of(n):
        pairs = [numbers(2 * columns, dtype, 5 + rank) for rank in range(RANKS)]
        rows = [np.arange(n) % columns + np.where(x >= 0, columns, 0) for x in xs]
        found = [pair[row] for pair, row in zip(pairs, rows, strict=True)]

        def arguments(count, pairs=pairs):
            return bits[:count], pairs[:count], n

        yield from sums("binary_sum", found, arguments, base, columns=columns)
    scales = [level[:1] for level in levels]
    values = [np.where(x >= 0, scale, -scale) for x, scale in zip(xs, scales, strict=True)]
    yield from sums("sign_sum", values, lambda count: (bits[:count], scales[:count], n), base)
    third = np.dtype(dtype).type(1 / 3)
    yield Call("sign_sum", (bits[:2], scales[:2], n), {"factor": 1 / 3}, ((values[0] + values[1]) * third,))


@case
def majority(n, dtype):
    xs = several(n, dtype)
    bits = [packed(x >= 0, 1) for x in xs]
    for count in (1, 2, 3):
        votes = sum((2 * (x >= 0) - 1 for x in xs[:count]), np.zeros(n, int))
        yield Call("majority", (bits[:count], n, dtype), {}, (np.sign(votes).astype(dtype),))


# --- levels in buckets ------------------------------------------------------------------------------------------


def buckets(x: np.ndarray, width: int) -> list[np.ndarray]:
    return [x[start : start + width] for start in range(0, len(x), width)]


@case
def bucket_norms(n, dtype):
    x = numbers(n, dtype)
    for width in (1, 4, 100, max(1, n)):
        parts = buckets(x.astype(np.float64), width)
        yield Call("bucket_norms", (x, width, "l2"), {}, (np.array([np.sqrt((p * p).sum()) for p in parts], dtype),))
        yield Call("bucket_norms", (x, width, "max"), {}, (np.array([abs(p).max() for p in parts], dtype),))


def transformed(x: np.ndarray) -> np.ndarray:
    """Return the Hadamard transform by its definition: the sign of (i, j) is that of the common bits of i and j."""
    rows = x[None]
    while rows.shape[1] > 1:
        rows = np.concatenate([rows[:, 0::2] + rows[:, 1::2], rows[:, 0::2] - rows[:, 1::2]])
    return rows.ravel()


def signs(n: int, stream: int, rank: int) -> np.ndarray:
    words = NumpyOps().words(-(-n // 32), Key(KEY.seed, KEY.step, rank), stream)
    return 1 - 2 * ((words[:, None] >> np.arange(32)) & 1).ravel()[:n]


def rotated_parts(x: np.ndarray, block: int) -> list[np.ndarray]:
    """Return blocks, the last one with zeros up to a power of two from 8 on."""
    parts = buckets(x, block)
    if parts and len(parts[-1]) < block:
        width = 8
        while width < len(parts[-1]):
            width *= 2
        parts[-1] = np.concatenate([parts[-1], np.zeros(width - len(parts[-1]), x.dtype)])
    return parts


ROTATED_LEVELS = (-1.5, -0.5, 0.5, 1.5)


@case
def rotate(n, dtype):
    t, x = np.dtype(dtype).type, numbers(n, dtype)
    for block in (128, 4096):
        for back in (False, True):
            parts, first = [np.zeros(0, dtype)], 0
            for part in rotated_parts(x, block):
                width = len(part)
                one, two = (signs(first + width, s, KEY.rank)[first:].astype(dtype) for s in (1, 2))
                if back:
                    parts.append(transformed(transformed(part) * two / t(width)) * one)
                else:
                    parts.append(transformed(transformed(part * one) * two / t(width)))
                first += width
            yield Call("rotate", (x, block, KEY, back), {}, (np.concatenate(parts),))


@case
def rotated_encode(n, dtype):
    t = np.dtype(dtype).type
    x, levels = numbers(n, dtype), np.array(ROTATED_LEVELS, dtype)
    for block, fit, stochastic, salt, transforms in (
        (128, True, False, None, 2),
        (512, False, True, 9, 2),
        (4096, True, True, None, 2),
        (4096, True, False, None, 1),
        (128, False, True, 9, 1),
    ):
        rank = KEY.rank if salt is None else salt
        codes, scales, first = [np.zeros(0, np.int64)], [], 0
        for part in rotated_parts(x, block):
            width = len(part)
            here = slice(first, first + width)
            y = transformed(part * signs(first + width, 1, rank)[here].astype(dtype))
            if transforms == 2:
                y = transformed(y * signs(first + width, 2, rank)[here].astype(dtype) / t(width))
            norm = t(np.sqrt((part.astype(np.float64) ** 2).sum()))
            root, divisor = (t(1 / np.sqrt(width)), t(width)) if transforms == 2 else (t(1), t(1))
            reach = norm * root if fit else abs(y).max()
            share = 1 - uniform(first + width)[here].astype(dtype) if stochastic else np.full(width, 0.5, dtype)
            low, high = levels[:-1, None] * reach, levels[1:, None] * reach
            code = (y >= low + share * (high - low)).sum(axis=0)
            product = t((y * levels[code]).astype(np.float64).sum())
            fitted = (norm * (norm / product) if product > 0 else t(0)) / divisor
            scales.append(fitted if fit else reach / t(width))
            codes.append(code)
            first += width
        expected = (packed(np.concatenate(codes), 2), np.array(scales, dtype))
        yield Call("rotated_encode", (x, levels, block, fit, stochastic, KEY, salt, transforms), {}, expected)


def turned_back(x: np.ndarray, block: int, rank: int, transforms: int) -> np.ndarray:
    """Return D H D' H x, block by block, with the signs of a rank; or D H x, by one transform."""
    parts, first = [x[:0]], 0
    for part in rotated_parts(x, block):
        one, two = (signs(first + len(part), stream, rank)[first:].astype(x.dtype) for stream in (1, 2))
        turned = transformed(part)
        parts.append((transformed(turned * two) if transforms == 2 else turned) * one)
        first += len(part)
    return np.concatenate(parts)


class Rotated(NamedTuple):
    """Payloads of all ranks for n rotated elements: q and scale of each, and q packed with scales per block."""

    q: list[np.ndarray]
    scale: list[np.ndarray]
    codes: list[np.ndarray]
    scales: list[np.ndarray]


def sent_rotated(n: int, block: int, dtype: str) -> Rotated:
    rng, levels = np.random.default_rng(n), np.array(ROTATED_LEVELS, dtype)
    widths = [len(part) for part in rotated_parts(np.zeros(n), block)]
    codes = [rng.integers(0, 4, sum(widths)) for _ in range(RANKS)]
    scales = [np.round(rng.standard_normal(len(widths)) * 8).astype(dtype) / 8 for _ in range(RANKS)]
    of_elements = [np.repeat(scale, widths) for scale in scales]
    return Rotated([levels[code] for code in codes], of_elements, [packed(code, 2) for code in codes], scales)


@case
def rotated_sum(n, dtype):
    levels = np.array(ROTATED_LEVELS, dtype)
    for block, transforms in ((128, 2), (4096, 2), (128, 1)):
        sent = sent_rotated(n, block, dtype)
        salts = [np.array([r], np.int32) for r in range(RANKS)]
        values = [(turned_back(sent.q[r], block, r, transforms) * sent.scale[r])[:n] for r in range(RANKS)]

        def args(ranks, sent=sent, salts=salts, block=block):
            return sent.codes[:ranks], sent.scales[:ranks], salts[:ranks], levels, block, n, KEY

        yield from sums("rotated_sum", values, args, numbers(n, dtype), transforms=transforms)


@case
def shared_rotated_sum(n, dtype):
    levels = np.array(ROTATED_LEVELS, dtype)
    for block, transforms in ((128, 2), (4096, 2), (4096, 1)):
        sent = sent_rotated(n, block, dtype)
        for ranks in (1, RANKS):
            total = sent.q[0] * sent.scale[0]
            for r in range(1, ranks):
                total += sent.q[r] * sent.scale[r]
            total = turned_back(total, block, KEY.rank, transforms)[:n]
            args, how = (sent.codes[:ranks], sent.scales[:ranks], levels, block, n, KEY), {"transforms": transforms}
            yield Call("shared_rotated_sum", args, how, (total,))
            yield Call("shared_rotated_sum", args, {**how, "onto": numbers(n, dtype)}, (numbers(n, dtype) + total,))


def levels_of(x: np.ndarray, scales: np.ndarray, width: int, levels: int, key: Key | None) -> np.ndarray:
    """Return signed levels, bucket by bucket: by stochastic rounding or, without a key, the nearest."""
    u = np.full(len(x), 0.5, x.dtype) if key is None else uniform(len(x)).astype(x.dtype)
    codes = np.zeros(len(x), np.int64)
    for i, scale in enumerate(scales):
        part = slice(i * width, min(len(x), (i + 1) * width))
        if scale > 0:
            magnitude = np.minimum(np.floor(abs(x[part]) / scale * x.dtype.type(levels) + u[part]), levels)
            codes[part] = np.where(x[part] < 0, -magnitude, magnitude)
    return codes


@case
def to_integers(n, dtype):
    x = numbers(n, dtype)
    scale = np.array([abs(x).max(initial=0)], dtype)
    for most, integer in ((127, "int8"), (300, "int16"), (2**23 - 1, "int32")):
        for key in (KEY, None):
            expected = levels_of(x, scale, max(1, n), most, key).astype(integer)
            yield Call("to_integers", (x, scale, most, key, integer), {}, (expected,))


@case
def from_integers(n, dtype):
    t, rng = np.dtype(dtype).type, np.random.default_rng(n)
    for most, integer in ((127, "int8"), (300, "int16"), (2**23 - 1, "int32")):
        codes = rng.integers(-most, most + 1, n).astype(integer)
        expected = codes.astype(dtype) * (t(0.75) / t(most))
        scale, onto = np.array([0.75], dtype), numbers(n, dtype)
        yield Call("from_integers", (codes, scale, most), {}, (expected,))
        yield Call("from_integers", (codes, scale, most), {"onto": onto}, (onto + expected,))


@case
def pack_lanes(n, dtype):
    for count, bits, integer in ((1, 32, "int32"), (2, 16, "int16"), (3, 10, "int16"), (6, 5, "int8")):
        codes, word = drawn_words(n, count, bits)
        yield Call("pack_lanes", (codes.astype(integer), n, count), {}, (word,))


@case
def unpack_lanes(n, dtype):
    for count, bits, integer in ((1, 32, "int32"), (2, 16, "int16"), (3, 10, "int16"), (6, 5, "int8")):
        codes, word = drawn_words(n, count, bits)
        yield Call("unpack_lanes", (word, n, count), {}, (codes.astype(integer),))


def drawn_words(n: int, lanes: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return integers of a lane of some bits, and their words."""
    most = 2 ** (bits - 1) - 1
    codes = np.random.default_rng(n).integers(-most, most + 1, n)
    count = -(-n // lanes)
    rows = np.concatenate([codes, np.zeros(lanes * count - n, np.int64)]).reshape(lanes, count)
    return codes, (rows * 2 ** (bits * np.arange(lanes)[:, None])).sum(axis=0).astype(np.int32)


@case
def best_levels(n, dtype):
    unit, x = 1 << 19, abs(numbers(n, "float64"))
    sizes = np.sort(np.floor(x / max(x.max(initial=0), 1) * unit))
    for s in (2, 3, 7) if n else ():
        levels = [0.0]
        for j in range(1, s):
            levels.append((int(sizes[int((1 - (1 - j / s) ** 5) * n)]) + (unit >> s - j)) // 2)
        levels.append(unit)
        for _ in range(6):
            for j in (*range(1, s, 2), *range(2, s, 2)):
                low, high = levels[j - 1], levels[j + 1]
                inside = sizes[(sizes > low) & (sizes <= high)]
                if len(inside):
                    above = int((inside - low).sum() // (high - low))
                    levels[j] = inside[max(len(inside) - above - 1, 0)]
        yield Call("best_levels", (sizes, s, False), {}, (np.array(levels, float),))
        trials = []
        for multiplier in np.arange(8, 61) / 64:
            table = np.floor([0.0, *(unit * multiplier ** (s - j) for j in range(1, s + 1))])
            gap = np.searchsorted(table[1:-1], sizes)
            trials.append((((table[gap + 1] - sizes) * (sizes - table[gap])).sum(), table))
        yield Call("best_levels", (sizes, s, True), {}, (min(trials, key=lambda trial: trial[0])[1],))


@case
def centroids(n, dtype):
    unit, x = 1 << 19, abs(numbers(n, "float64"))
    sizes = np.sort(np.floor(x / max(x.max(initial=0), 1) * unit))
    calls = ((1, 0, False), (5, 2, False), (16, 0, True)) if n > 9 else ((4, 0, True),)
    # Sizes are float64 whatever the gradients are, so one dtype of theirs is enough.
    for count, power, ends in calls if n in (1, 9, 1000) and dtype == "float32" else ():
        weights = np.floor((sizes / unit) ** power * 2**20)
        if ends:
            shares = np.arange(count) / (count - 1)
            steps = np.floor(unit * shares)
        else:
            shares = (np.arange(count) + 0.5) / count
            steps = sizes[0] + (sizes[-1] - sizes[0]) * shares
        found = (sizes[np.minimum(n - 1, np.floor(n * shares)).astype(int)] + steps) // 2
        for _ in range(20):
            if ends:
                found[[0, -1]] = 0, unit
            part = np.searchsorted((found[:-1] + found[1:]) // 2, sizes)
            inside = [(weights[part == j].sum(), (weights * sizes)[part == j].sum()) for j in range(count)]
            found = np.array(
                [total // weight if weight else c for (weight, total), c in zip(inside, found, strict=True)]
            )
        if ends:
            found[[0, -1]] = 0, unit
        yield Call("centroids", (sizes, count, power, ends), {}, (found,))


@case
def sum_round(n, dtype):
    x, y, _ = several(n, dtype)
    total, levels = x * np.dtype(dtype).type(0.9) + y, np.array(ROTATED_LEVELS, dtype)
    for width in (4, 100):
        norms = np.array([abs(p).max() for p in buckets(total, width)], dtype)
        mine = np.repeat(norms, width)[:n]
        low, high = levels[:-1, None] * mine, levels[1:, None] * mine
        codes = (total >= low + np.dtype(dtype).type(0.5) * (high - low)).sum(axis=0)
        left = total - levels[codes] * mine
        yield Call("sum_round", (x, 0.9, y, 1, levels, width), {}, (left, packed(codes, 2), norms, np.array(True)))


@case
def round_packed(n, dtype):
    x, levels = numbers(n, dtype), np.array(ROTATED_LEVELS, dtype)
    for width, key in ((4, KEY), (100, None), (max(1, n), KEY)):
        share = np.full(n, 0.5, dtype) if key is None else 1 - uniform(n).astype(dtype)
        scales = np.array([abs(p).max() for p in buckets(x, width)], dtype)
        mine = np.repeat(scales, width)[:n]
        low, high = levels[:-1, None] * mine, levels[1:, None] * mine
        codes = (x >= low + share * (high - low)).sum(axis=0)
        yield Call("round_packed", (x, scales, levels, width, key), {}, (packed(codes, 2),))


@case
def levels_sum(n, dtype):
    rng, levels = np.random.default_rng(n), np.array(ROTATED_LEVELS, dtype)
    for width in (4, 100, max(1, n)):
        codes = [rng.integers(0, 4, n) for _ in range(RANKS)]
        scales = [abs(numbers(-(-n // width), dtype, rank)) for rank in range(RANKS)]
        tables = [levels * (rank + 1) for rank in range(RANKS)]
        values = [tables[r][codes[r]] * np.repeat(scales[r], width)[:n] for r in range(RANKS)]
        data = [packed(code, 2) for code in codes]

        def args(ranks, data=data, scales=scales, tables=tables, width=width):
            return data[:ranks], scales[:ranks], tables[:ranks], width, n

        yield from sums("levels_sum", values, args, numbers(n, dtype, 9))


@case
def quantize_packed(n, dtype):
    x = numbers(n, dtype)
    for width, levels, bits in ((4, 127, 8), (100, 1, 2), (max(1, n), 300, 10)):
        scales = np.array([abs(p).max() for p in buckets(x, width)], dtype)
        for limit in (None, np.array(0.75, dtype), np.array([0.75], dtype)):
            clipped = x if limit is None else np.clip(x, -0.75, 0.75).astype(dtype)
            options = {} if limit is None else {"limit": limit}
            for key in (KEY, None):
                expected = packed(levels + levels_of(clipped, scales, width, levels, key), bits)
                yield Call("quantize_packed", (x, scales, width, levels, bits, key), options, (expected,))


@case
def bucket_quantize(n, dtype):
    x = numbers(n, dtype)
    for width, levels, bits in ((4, 127, 8), (100, 1, 2), (max(1, n), 300, 10)):
        scales = np.array([abs(p).max() for p in buckets(x, width)], dtype)
        for key in (KEY, None):
            codes = packed(levels + levels_of(x, scales, width, levels, key), bits)
            yield Call("bucket_quantize", (x, width, "max", levels, bits, key), {}, (codes, scales))
    norms = np.array([np.sqrt((p.astype(np.float64) ** 2).sum()) for p in buckets(x, 4)], dtype)
    codes = packed(1 + levels_of(x, norms, 4, 1, None), 2)
    yield Call("bucket_quantize", (x, 4, "l2", 1, 2, None), {}, (codes, norms))


@case
def floor_packed(n, dtype):
    x, u = numbers(n, dtype), uniform(n).astype(dtype)
    for width, delta in ((2, 0.75), (8, 0.0625), (12, 2.0**-9), (4, 0.0)):
        half = 2 ** (width - 1)
        steps = np.clip(x, -half * delta, (half - 1) * delta).astype(dtype) / np.array(delta or 1, dtype)
        whole = np.floor(steps)
        codes = half + np.minimum(whole + np.where(steps - whole > u, 1, 0), half - 1)
        yield Call("floor_packed", (x, np.array([delta], dtype), width, KEY), {}, (packed(codes, width),))


@case
def dequantize_sum(n, dtype):
    t = np.dtype(dtype).type
    for width, levels, bits in ((4, 127, 8), (100, 1, 2), (max(1, n), 300, 10)):
        codes, scales, values = [], [], []
        for rank in range(RANKS):
            signed = np.random.default_rng(rank).integers(-levels, levels + 1, n)
            scale = abs(numbers(-(-n // width), dtype, rank))
            codes.append(packed(signed + levels, bits))
            scales.append(scale)
            values.append(signed.astype(dtype) * np.repeat(scale / t(levels), width)[:n])

        def args(count, codes=codes, scales=scales, rest=(width, levels, bits, n)):
            return codes[:count], scales[:count], *rest

        yield from sums("dequantize_sum", values, args, numbers(n, dtype, 9))


# --- powers of two ----------------------------------------------------------------------------------------------

_BIAS, _TOP, _MANTISSA = {"float32": 127, "float64": 1023}, {"float32": 254, "float64": 2046}, {"float32": 23}


def natural_codes(x: np.ndarray, clipped: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes without signs, the signs, and the base."""
    dtype, u = x.dtype.name, uniform(len(x)).astype(np.float64)
    fraction, exponent = np.frexp(abs(x).astype(np.float64))
    field = np.where(x == 0, 0, exponent - 1 + _BIAS[dtype])
    above = np.where(x == 0, 0.0, 2 * fraction - 1)
    noise = np.floor(u * 2**23) * 2.0**-23 if dtype == "float32" else u + 2.0**-25
    codes = np.minimum(field + (above >= 1 - noise), _TOP[dtype])
    base = max(0, int(codes.max(initial=0)) - 127) if clipped else 0
    if clipped:
        share = abs(x) / x.dtype.type(2.0 ** (base + 1 - _BIAS[dtype]))
        codes = np.where(field > base, codes - base, uniform(len(x)).astype(dtype) + share >= 1)
    return codes, np.signbit(x), np.array([base], np.int32)


@case
def natural(n, dtype):
    bits = {"float32": 9, "float64": 12}[dtype]
    for clipped, width in ((False, bits), (True, 8)):
        made, bases, values = [], [], []
        for x in several(n, dtype):
            codes, negative, base = natural_codes(x * x.dtype.type(2.0**60), clipped)
            made.append(packed(codes + (negative.astype(int) << width - 1), width))
            bases.append(base)
            size = np.where(codes > 0, 2.0 ** (codes + base[0] - _BIAS[dtype]), 0.0)
            values.append(np.where(negative, -size, size).astype(dtype))
            shifted = x * x.dtype.type(2.0**60)
            most = np.array([abs(shifted).max(initial=0)], dtype)
            yield Call("natural_encode", (shifted, KEY, clipped), {}, (made[-1], base, most))
        for negate in (False, True):
            signed = [-v for v in values] if negate else values

            def args(count, made=made, bases=bases, clipped=clipped):
                return made[:count], bases[:count], n, dtype, clipped

            yield from sums("natural_sum", signed, args, numbers(n, dtype, 9), negate=negate)
        third = np.dtype(dtype).type(1 / 3)
        total = (values[0] + values[1]) * third
        yield Call("natural_sum", (made[:2], bases[:2], n, dtype, clipped), {"factor": 1 / 3}, (total,))


@case
def squares(n, dtype):
    x, onto = numbers(n, dtype), abs(numbers(n, dtype, 1))
    for largest in (2.0**20, 0.5):
        bounded = np.clip(x, -largest, largest)
        expected = np.minimum(bounded * bounded + onto, 2 * largest * largest).astype(dtype)
        yield Call(square_sum.name, (x, onto, largest), {}, (expected,))


def power_words_of(x: np.ndarray, clear: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the largest nearest power of two of the clear elements, the words of those near it, and their values."""
    fraction, exponent = np.frexp(abs(x.astype(np.float64)))
    powers = np.where((x != 0) & clear, exponent - 1 + (fraction >= 0.75), -(10**6)).astype(int)
    top = powers.max(initial=-(10**6))
    words, values = [], np.zeros(len(x), x.dtype)
    for i in np.flatnonzero((powers >= top - 7) & (powers > -(10**6))).tolist():
        word = ((top - powers[i]) << 28) + i
        words.append(word - 2**31 if x[i] < 0 else word)
        values[i] = np.copysign(2.0 ** powers[i], x[i])
    return np.array([2.0**top if words else 0], x.dtype), np.array(words, np.int32), values


@case
def powers_in_words(n, dtype):
    words, scales, values = [], [], []
    for rank, x in enumerate(several(n, dtype)):
        noise = abs(numbers(n, dtype, 5 + rank))
        for alpha in (0.0, 1.5):
            clear = x.astype(np.float64) ** 2 > alpha * noise.astype(np.float64)
            yield Call("power_words", (x, noise, alpha), {}, power_words_of(x, clear)[:2])
        scale, word, value = power_words_of(x, np.full(n, True))
        yield Call("power_words", (x, None, 1.5), {}, (scale, word))
        scales.append(scale)
        words.append(word)
        values.append(value)
        for factor in (1.0, 0.75):
            faded = np.where(value == 0, x * x.dtype.type(factor), x.dtype.type(0))
            yield Call("power_fade_", (x.copy(), word, factor), {}, (faded,))
    yield from sums("power_sum", values, lambda count: (words[:count], scales[:count], n), numbers(n, dtype, 9))


# --- tables, ternary digits, numbers of several widths ------------------------------------------------------------


@case
def table(n, dtype):
    entries = (np.arange(128) / 127.0).astype(dtype) ** 2
    edges = [(low + high) * entries.dtype.type(0.5) for low, high in pairwise(entries)]
    for width in (max(1, n), 7):
        codes, scales, values = [], [], []
        for x in several(n, dtype):
            mine = np.array([abs(p).max(initial=0) for p in buckets(x, width)] or [0], dtype)
            spread = np.repeat(mine, width)[:n]
            share = abs(x) / np.where(spread > 0, spread, 1).astype(dtype)
            index = sum((share >= edge for edge in edges), np.zeros(n, int))
            codes.append((index + 128 * (x < 0)).astype(np.uint8))
            scales.append(mine)
            values.append(np.where(x < 0, -1, 1).astype(dtype) * (entries[index] * spread))
            yield Call("table_encode", (x, mine, entries, width), {}, (codes[-1],))

        def args(ranks, codes=codes, scales=scales, width=width):
            return codes[:ranks], scales[:ranks], entries, width

        yield from sums("table_sum", values, args, numbers(n, dtype, 9))


def runs(digits: list[int]) -> list[int]:
    """Return five digits per byte, with 2 to 14 zero bytes as one byte."""
    digits = digits + [1] * (-len(digits) % 5)
    values = [int("".join(map(str, digits[i : i + 5])), 3) for i in range(0, len(digits), 5)]
    coded = []
    for value, group in groupby(values):
        count = len(list(group))
        while value == 121 and count > 1:
            coded.append(243 + min(count, 14) - 2)
            count -= min(count, 14)
        coded += [value] * count
    return coded


@case
def ternary(n, dtype):
    for bound in (0.01, 0.5, 100.0):
        codes, scales, values = [], [], []
        for x in several(n, dtype):
            half = np.array([bound], dtype)
            digits = [1 + int(v >= half[0]) - int(v <= -half[0]) for v in x]
            codes.append(np.array(runs(digits), np.uint8))
            scales.append(2 * half)
            values.append((np.array(digits, dtype) - 1) * (2 * half))
            yield Call("ternary_encode", (x, 2 * half), {}, (codes[-1],))

        def args(count, codes=codes, scales=scales):
            return codes[:count], scales[:count], n

        yield from sums("ternary_sum", values, args, numbers(n, dtype, 9))


@case
def precision(n, dtype):
    for bound, m, h in ((2.0**-4, 2, 0), (2.0**-9, 5, 3)):
        payloads, values = [], []
        for x in several(n, dtype):
            scale = np.array([0.75], dtype)
            y = x / scale
            size = abs(y)
            tags = np.where(size < bound, 0, np.where(size < 2.0**-m, 1, np.where(size < 2.0**-h, 2, 3)))
            words = np.trunc(y[tags == 2] * 2.0 ** (h + 15)).astype(np.int16)
            small = np.trunc(y[tags == 1] * 2.0 ** (m + 7)).astype(np.int8)
            payloads.append((y[tags == 3], words, small, packed(tags, 2)))
            decoded = np.where(tags == 3, y, 0)
            decoded[tags == 2], decoded[tags == 1] = words * 2.0 ** -(h + 15), small * 2.0 ** -(m + 7)
            values.append(decoded.astype(dtype))
            yield Call("precision_encode", (x, scale, bound, m, h), {}, payloads[-1])
        for factor in (1, -0.75):
            scale = np.array([factor], dtype)

            def args(count, payloads=payloads, scale=scale, rest=(m, h, n)):
                return payloads[:count], [scale] * count, *rest

            yield from sums("precision_sum", [v * scale for v in values], args, numbers(n, dtype, 9))


def leading_bits(y: np.ndarray, bound: float, block: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Return the payload of float32 numbers without the scale, by a plain reading of SZx, and what it decodes to."""
    middles, lengths, codes, values = [], [], [], [np.zeros(0, np.float32)]
    planes: list[list[int]] = [[], [], [], []]
    for start in range(0, len(y), block):
        part = y[start : start + block]
        part = np.concatenate([part, np.full(block - len(part), part[-1])])
        # A sum with 0 takes the sign from a zero.
        middle = (part.max() + part.min()) * np.float32(0.5) + np.float32(0)
        rest = np.where(abs(part - middle) < 2.0**-60, np.float32(0), part - middle)
        radius, kept = float(abs(rest).max()), 0
        if radius > bound - 2.0**-22:
            kept = min(32, max(9, math.frexp(radius)[1] - math.frexp(bound)[1] + 10))
        words, size, before = rest.view(np.uint32).astype(np.int64) >> (32 - kept), -(-kept // 8), b""
        for word in words if kept else ():
            sent = int(word).to_bytes(size, "big")
            equal = next((i for i in range(min(3, size)) if before[i : i + 1] != sent[i : i + 1]), min(3, size))
            codes.append(equal)
            for place, byte in enumerate(reversed(sent[equal:])):
                planes[place].append(byte)
            before = sent
        middles.append(middle)
        lengths.append(kept)
        values.append((words << (32 - kept)).astype(np.uint32).view(np.float32) + middle)
    fields = np.array(middles, np.float32), np.array(lengths, np.uint8), packed(np.array(codes), 2)
    data = np.array([byte for plane in planes for byte in plane], np.uint8)
    return (*fields, data), np.concatenate(values)[: len(y)]


@case
def leading(n, dtype):
    for bound, block in ((2.0**-5, 8), (0.3, 4), (2.0**-18, 12)):
        payloads, scales, values = [], [], []
        for x in several(n, dtype):
            scale = np.array([abs(x).max(initial=0)], dtype)
            payload, decoded = leading_bits((x / np.where(scale > 0, scale, 1)).astype(np.float32), bound, block)
            payloads.append(payload)
            scales.append(scale)
            values.append(decoded.astype(dtype) * scale)
            yield Call("leading_encode", (x, scale, bound, block), {}, payload)

        def args(count, payloads=payloads, scales=scales, block=block):
            return payloads[:count], scales[:count], block, n

        yield from sums("leading_sum", values, args, numbers(n, dtype, 9))


# --- selections and sketches --------------------------------------------------------------------------------------


@case
def select(n, dtype):
    x = numbers(n, dtype)
    for k in sorted({1, n // 3, n} & set(range(1, n + 1))):
        yield Call("top_bound", (x, k), {}, (np.sort(abs(x))[n - k : n - k + 1],))
    edge = float(abs(x[n // 2])) if n else 0.5
    for bound in (0.0, edge):
        for strict, nonzero in ((True, False), (False, False), (False, True)):
            passed = [
                i for i, v in enumerate(abs(x)) if (v > bound if strict else v >= bound) and not (nonzero and v == 0)
            ]
            indices = np.array(passed, np.int32)
            for given in (bound, np.array([bound], dtype)):
                yield Call("select", (x, given, strict), {"nonzero": nonzero}, (x[indices], indices))


@case
def moments(n, dtype):
    x = numbers(n, dtype)
    for bound in (0.0, float(abs(x[n // 2])) if n else 0.5, 100.0):
        kept = x[abs(x) >= bound].astype(np.float64)
        sums = [abs(kept).sum(), kept[kept > 0].sum(), np.sqrt((kept**2).sum())]
        for powers, known in enumerate((0, 1, 3)):
            found = np.array([*sums[:known], 0, 0, 0][:3], dtype)
            yield Call("moments", (x, np.array([bound], dtype), powers), {}, (np.array([len(kept)]), found))


@case
def top_of_sides(n, dtype):
    x = numbers(n, dtype)
    for ratio in (0.01, 0.3, 1.0):
        lists, means = [], []
        for side in (np.flatnonzero(x > 0), np.flatnonzero(x < 0)):
            k = min(len(side), max(1, int(ratio * len(side))))
            best = np.sort(side[np.argsort(-abs(x[side]), kind="stable")[:k]])
            lists.append(best.astype(np.int32))
            means.append(x[best].astype(np.float64).sum() / max(1, k))
        yield Call("top_of_sides", (x, ratio), {}, (np.array(means, dtype), *lists))


@case
def bins(n, dtype):
    x, more = numbers(n, dtype), numbers(n, dtype, 1)
    for width in (1, 7, 500):
        maxima = np.array([abs(x[i : i + width]).max() for i in range(0, n, width)], dtype)
        reached = [i for i in range(n) if abs(x[i] + more[i]) >= maxima[i // width]]
        lists = ([i for i in reached if x[i] > 0], [i for i in reached if x[i] < 0])
        expected = tuple(np.array(indices, np.int32) for indices in lists)
        yield Call("select_in_bins", (x, more, maxima, width), {}, expected)


def odds_of(x: np.ndarray, k: int, budget: float | None) -> np.ndarray:
    """Return the largest magnitude and lambda, from the sorted magnitudes: the first set of certain elements that fits.

    The largest magnitude must be a power of two, for exact sums.
    """
    largest = float(abs(x).max(initial=0))
    ordered = np.sort(abs(x.astype(np.float64)))[::-1] / (largest or 1)
    for certain in range(len(x)):
        rest = ordered[certain:]
        if budget is None:
            above, below = float(k - certain), rest.sum()
        else:
            above, below = rest.sum(), (ordered**2).sum() * budget + (rest**2).sum()
        if below and rest[0] * (above / below) < 1:
            return np.array([largest, above / below])
    return np.array([largest, 0.0])


@case
def drawn(n, dtype):
    for x in (np.append(numbers(max(0, n - 1), dtype), np.full(min(n, 1), -64, dtype)), np.zeros(n, dtype)):
        for k, budget in ((max(1, n // 10), None), (max(1, n // 3), None), (1, 0.5), (1, 4.0)):
            odds = odds_of(x, k, budget)
            if n > 1:
                yield Call("keep_odds", (x, k, budget), {}, (odds,))
            p = abs(x.astype(np.float64)) / (odds[0] or 1.0) * odds[1]
            certain = np.flatnonzero(p >= 1).astype(np.int32)
            left = np.flatnonzero((p < 1) & (2 * np.floor(uniform(n) * 2.0**24) + 1 < p * 2**25))
            signed = np.array([-1 - i if x[i] < 0 else i for i in left], np.int32)
            yield Call("draw_kept", (x, odds, KEY), {}, (x[certain], certain, signed))
            scale, sign = np.array([0.3], dtype), np.where(x[left] < 0, -1, 1).astype(dtype)
            yield Call("drawn_entries", (signed, scale), {}, (sign * scale, left.astype(np.int32)))


def hash_functions(count: int) -> list[tuple[int, int]]:
    """Return a and b of each function, whose word for an item is the upper half of a * item + b modulo 2^64."""
    parts = (uniform(6 * count).astype(np.float64) * 2**24).astype(int).reshape(count, 2, 3).tolist()
    a, b = ([(p << 40) ^ (q << 16) ^ (r >> 8) for p, q, r in (pair[i] for pair in parts)] for i in (0, 1))
    return list(zip(a, b, strict=True))


@case
def vertices(n, dtype):
    rng = np.random.default_rng(n)
    for width, samples, least in ((4, 3, 0), (8, 5, 40 << 20), (16, 1, 0)):
        x, t = numbers(n, dtype), np.dtype(dtype).type
        # Powers of two, so that shares are exact.
        norms = np.array([2.0 ** np.ceil(np.log2(max(abs(part).max(), 1e-3) * 4)) for part in buckets(x, width)], dtype)
        codes, masses = [], []
        words, others = (NumpyOps().words(len(norms) * samples, KEY, stream).tolist() for stream in (0, 1))
        for j, part in enumerate(buckets(x, width)):
            shares = [int(abs(float(value)) / float(norms[j]) * 2**24) for value in part]
            masses.append(sum(shares))
            for i in range(j * samples, (j + 1) * samples):
                point = (words[i] >> 1) * max(masses[-1], least) >> 31
                place = next((k for k in range(len(part)) if sum(shares[: k + 1]) > point), width - 1)
                negative = place < len(part) and part[place] < 0
                drawn = others[i] >> (32 - width.bit_length())
                codes.append(drawn if least and point >= masses[-1] else place + width * int(negative))
        expected = np.array(codes, np.int64), np.array(masses, np.int64)
        yield Call("draw_vertices", (x, norms, width, samples, least, KEY), {}, expected)
        lists = [rng.integers(0, 2 * width, len(codes)) for _ in range(RANKS)]
        scales = [numbers(len(norms), dtype, seed) / t(8) for seed in range(RANKS)]
        values = []
        for drawn, scale in zip(lists, scales, strict=True):
            counts = np.zeros(len(norms) * width, dtype)
            for i, code in enumerate(drawn.tolist()):
                counts[i // samples * width + code % width] += -1 if code >= width else 1
            values.append((counts.reshape(-1, width) * scale.reshape(-1, 1)).reshape(-1)[:n])

        def args(ranks, lists=lists, scales=scales, width=width, samples=samples):
            return lists[:ranks], scales[:ranks], width, samples, n

        yield from sums("vertices_sum", values, args, numbers(n, dtype))


@case
def bloom_filter(n, dtype):
    for form in (BloomFilter(17, 2), BloomFilter(5 * n + 1, 3)):
        set_bits = np.random.default_rng(n).random(form.bits) < 0.6
        functions = hash_functions(form.hashes)
        places = [[((a * i + b) % 2**64 >> 32) * form.bits >> 32 for a, b in functions] for i in range(n)]
        found = [i for i in range(n) if all(set_bits[place] for place in places[i])]
        data = np.packbits(set_bits, bitorder="little")
        yield Call("filter_positions", (form, data, n, KEY), {}, (np.array(found, np.int32),))


@case
def largest_of_blocks(n, dtype):
    x = numbers(n, dtype)
    for block, ratio in ((128, 0.1), (256, 0.5)):
        kept = [np.zeros(0, dtype)]
        for part in rotated_parts(x, block):
            least = np.sort(abs(part))[-max(1, int(ratio * len(part)))]
            kept.append(np.where(abs(part) >= least, part, 0).astype(dtype))
        yield Call("largest_of_blocks", (x, block, ratio), {}, (np.concatenate(kept)[:n],))


@case
def frame(n, dtype):
    t, x = np.dtype(dtype).type, numbers(n, dtype)
    for block, redundancy in ((128, 2), (512, 4)):
        width, found, elements = block // redundancy, [np.zeros(0, dtype)], [np.zeros(0, dtype)]
        for j, part in enumerate(buckets(x, width)):
            one, two = (signs((j + 1) * block, s, KEY.rank)[j * block :].astype(dtype) for s in (1, 2))
            rest = np.concatenate([part, np.zeros(width - len(part), dtype)])
            bound = t(np.sqrt((rest.astype(np.float64) ** 2).sum())) * t(1 / np.sqrt(block))
            total = np.zeros(block, dtype)
            for _ in range(4):
                filled = np.concatenate([rest, np.zeros(block - width, dtype)])
                cut = np.clip(transformed(transformed(filled * one) * two / t(block)), -bound, bound)
                total, bound = total + cut, bound / 2
                rest = rest - (transformed(transformed(cut) * two / t(block)) * one)[:width]
            filled = np.concatenate([rest, np.zeros(block - width, dtype)])
            found.append(total + transformed(transformed(filled * one) * two / t(block)))
            elements.append((transformed(transformed(found[-1]) * two / t(block)) * one)[:width])
        coefficients = np.concatenate(found)
        yield Call("spread_in_frame", (x, block, redundancy, KEY), {}, (coefficients,))
        yield Call("project_from_frame", (coefficients, block, redundancy, KEY), {}, (np.concatenate(elements),))


@case
def sketch(n, dtype):
    x, rows, columns = numbers(n, dtype), 3, 16 * (n // 50 + 1)
    functions = [[((a * (i // 16) + b) % 2**64) >> 32 for i in range(n)] for a, b in hash_functions(2 * rows)]
    bins = [[(word * columns >> 32) ^ (i % 16) for i, word in enumerate(words)] for words in functions[:rows]]
    signs = [[-1 if word >> (16 + i % 16) & 1 else 1 for i, word in enumerate(words)] for words in functions[rows:]]
    made = np.zeros((rows, columns))
    for j in range(rows):
        for i in range(n):
            made[j, bins[j][i]] += signs[j][i] * float(x[i])
    made = made.astype(dtype)
    found = [[signs[j][i] * made[j, bins[j][i]] for j in range(rows)] for i in range(n)]
    median = np.array([sorted(values)[rows // 2] for values in found], dtype)
    yield Call("count_sketch", (x, rows, columns, KEY), {}, (made.ravel(),))
    yield Call("sketch_estimate", (made.ravel(), n, rows, columns, KEY), {}, (median,))


def peeled(sketch: np.ndarray, places: list[list[int]], signs: list[list[int]]) -> dict[int, float]:
    """Return values taken out of buckets one by one, and the median of the buckets of every element left."""
    buckets, left, found, size = sketch.astype(np.float64).tolist(), set(range(len(places[0]))), {}, len(sketch) // 4
    while True:
        held: dict[int, list[tuple[int, int]]] = {}
        for row in range(4):
            for i in left:
                held.setdefault(row * size + places[row][i], []).append((row, i))
        alone = next((bucket for bucket, mine in held.items() if len(mine) == 1), None)
        if alone is None:
            break
        ((row, i),) = held[alone]
        found[i] = signs[row][i] * buckets[alone]
        for row in range(4):
            buckets[row * size + places[row][i]] -= signs[row][i] * found[i]
        left.remove(i)
    for i in left:
        rows = sorted(signs[row][i] * buckets[row * size + places[row][i]] for row in range(4))
        found[i] = (rows[1] + rows[2]) / 2
    return found


@case
def sparse_sketch(n, dtype):
    functions, counters = 3, 16 * (n // 40 + 1)
    factor, length = spread(n)
    blocks = length // 16
    words = NumpyOps().words((8 + functions) * blocks, KEY).astype(int).tolist()
    words = [words[j * blocks : (j + 1) * blocks] for j in range(8 + functions)]
    x = numbers(n, dtype)
    indices = np.arange(0, n, 7, dtype=np.int32)
    order = [i * factor % length for i in range(length)]
    for columns in (16 * (n // 100 + 1), 16 * (n // 500 + 1)):
        lengths = [columns] * 4 + [counters] * (4 + functions)
        places = [[(w[i // 16] * m >> 32) ^ (i % 16) for i in order] for w, m in zip(words, lengths, strict=True)]
        signs = [[-1 if words[4 + row][i // 16] >> (i % 16) & 1 else 1 for i in order] for row in range(4)]
        sketch, there = np.zeros((4, columns)), np.zeros((functions, counters), np.int8)
        for i in indices:
            for row in range(4):
                sketch[row, places[row][i]] += signs[row][i] * float(x[i])
            for j in range(functions):
                there[j, places[8 + j][i]] |= x[i] != 0
        sketch, options = sketch.astype(dtype).ravel(), (n, columns, functions, counters, KEY)
        yield Call("sketch_sparse", (x[indices], indices, *options), {}, (sketch, there.ravel()))
        passing = [i for i in range(length) if all(there[j, places[8 + j][i]] for j in range(functions))]
        found = peeled(sketch, [[p[i] for i in passing] for p in places[:4]], [[s[i] for i in passing] for s in signs])
        dense = np.zeros(length)
        for i, value in found.items():
            dense[passing[i]] = value
        yield Call("peel", (sketch, there.ravel(), *options), {}, (dense[:n].astype(dtype),))


@case
def gaps(n: int, dtype: str) -> Iterator[Call]:
    for step, low in ((1, 0), (2, 0), (3, 1), (7, 2), (40, 3)):
        indices = np.arange(0, n, step, np.int32) + np.int32(n % 2 and step == 1)
        apart = np.diff(indices, prepend=-1) - 1
        rest = apart >> low
        yield Call("gap_facts", (indices, low), {}, (np.array([apart.max(initial=0), rest.sum()]),))
        k, unary = len(indices), (len(indices) + int(rest.sum()) + 7) // 8
        padded = np.concatenate([apart, np.zeros(-k % 8, np.int64)])
        planes = [np.packbits(padded >> j & 1, bitorder="little") for j in range(low)]
        marks = np.zeros(8 * unary, np.uint8)
        marks[np.cumsum(rest + 1) - 1] = 1
        coded = np.concatenate([*planes, np.packbits(marks, bitorder="little")]).astype(np.uint8)
        yield Call("encode_gaps", (indices, low, unary, 10), {}, (coded,))
        yield Call("decode_gaps", (coded, low, unary, k, 10), {}, (indices,))


# --- codings --------------------------------------------------------------------------------------------------------


def best_lengths(counts: dict[int, int]) -> dict[int, int]:
    """Return the lengths of Huffman's words by merging the two rarest sets again and again."""
    sets = [(count, symbol, {symbol: 0}) for symbol, count in counts.items()]
    while len(sets) > 1:
        sets.sort(key=lambda one: one[:2])
        (a, i, one), (b, _, two) = sets[:2]
        sets[:2] = [(a + b, i, {symbol: length + 1 for symbol, length in (one | two).items()})]
    return sets[0][2] if len(counts) > 1 else dict.fromkeys(counts, 1)


@case
def huffman(n: int, dtype: str) -> Iterator[Call]:
    # Powers of two: only one set of lengths is the best.
    for counts in ({5: 1, 3: 1, 0: 2, 7: 4, 200: 8}, {9: max(1, n)}, {1: 8, 2: 4, 3: 2, 4: 1, 5: 1}):
        data = np.repeat(list(counts), list(counts.values())).astype(np.uint8)
        lengths = best_lengths(counts)
        word, bits = 0, []
        words: dict[int, str] = {}
        for length, symbol in sorted((length, symbol) for symbol, length in lengths.items()):
            word <<= length - (len(bits[-1]) if bits else length)
            words[symbol] = f"{word:0{length}b}"
            bits.append(words[symbol])
            word += 1
        stream = np.array([int(bit) for symbol in data.tolist() for bit in words[symbol]], np.int64)
        table = packed(np.array([lengths.get(symbol, 0) for symbol in range(256)]), 4)
        coded = np.concatenate([table, packed(stream, 1)])
        yield Call("huffman_encode", (data, 8), {}, (coded,))
        yield Call("huffman_decode", (coded, 8, len(data)), {}, (data,))


@case
def rans(n: int, dtype: str) -> Iterator[Call]:
    counts = {0: 5, 3: 2, 4: 1}
    data = np.repeat(list(counts), list(counts.values())).astype(np.int64)
    frequencies = {symbol: 1 + count * (2**15 - 3) // 8 for symbol, count in counts.items()}
    frequencies[0] += 2**15 - sum(frequencies.values())
    starts = {0: 0, 3: frequencies[0], 4: frequencies[0] + frequencies[3]}
    states, words = [2**16] * 4, []
    for i in reversed(range(8)):
        symbol, x = int(data[i]), states[i % 4]
        if x >= frequencies[symbol] << 17:
            words.append(x & 0xFFFF)
            x >>= 16
        quotient, rest = divmod(x, frequencies[symbol])
        states[i % 4] = (quotient << 15) + rest + starts[symbol]
    numbers16 = [x & 0xFFFF for x in states] + [x >> 16 for x in states] + words[::-1]
    head = [packed(np.isin(np.arange(8), list(counts)), 1), packed(np.array(list(frequencies.values())) - 1, 16)]
    coded = np.concatenate([*head, packed(np.array(numbers16), 16)]).astype(np.uint8)
    plain = packed(data, 3)
    yield Call("rans_encode", (plain, 3), {}, (coded,))
    yield Call("rans_decode", (coded, 3, len(plain)), {}, (plain,))


@case
def runs_of_a_byte(n: int, dtype: str) -> Iterator[Call]:
    for data in (np.arange(n) % 7 // 5 + 3, np.full(max(1, n), 9), np.array([1, 2, 1, 1])):
        data = data.astype(np.uint8)
        if not len(data):
            continue
        most = int(np.bincount(data).argmax())
        out = [most]
        for byte, group in groupby(data.tolist()):
            length = len(list(group))
            if byte != most:
                out += [byte ^ most] * length
            else:
                out += [part for i in range(0, length, 255) for part in (0, min(255, length - i))]
        coded = np.array(out, np.uint8)
        yield Call("run_length_encode", (data,), {}, (coded,))
        yield Call("run_length_decode", (coded, len(data)), {}, (data,))


@case
def bit_planes(n: int, dtype: str) -> Iterator[Call]:
    for bits, data in ((8, np.arange(n) % 5), (2, np.arange(n) % 256), (8, np.full(n, 9))):
        data = data.astype(np.uint8)
        symbols = np.packbits(
            np.unpackbits(data, bitorder="little").reshape(-1, bits), axis=1, bitorder="little"
        ).ravel()
        most = int(np.bincount(symbols, minlength=1).argmax())
        half = 1 << (bits - 1)
        apart = (symbols.astype(np.int64) - most + half) % (2 * half) - half
        folded = np.where(apart < 0, -2 * apart - 1, 2 * apart)
        padded = np.concatenate([folded, np.zeros(-len(folded) % 128, np.int64)])
        planes = np.concatenate([np.packbits(padded >> j & 1, bitorder="little") for j in range(bits)])
        blocks = planes.reshape(-1, 16)
        there = blocks.any(axis=1)
        coded = np.concatenate([[most], np.packbits(there, bitorder="little"), blocks[there].ravel()]).astype(np.uint8)
        yield Call("bitshuffle_encode", (data, bits), {}, (coded,))
        yield Call("bitshuffle_decode", (coded, bits, n), {}, (data,))
