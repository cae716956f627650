"""One test case for each array operation that has kernels.

A case takes the array operations and a `Given`, which draws the same numbers for kernels and reference implementation.
It yields the results that must be equal. `python -m tests.kernels` runs the same cases in another process.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from grace.core.codecs import bloom, estimated, levels, listed, rotation, signs, sums, tables
from grace.core.compressors import (
    adaptive,
    fp16,
    inceptionn,
    lpc,
    natural,
    powersgd,
    sketchedsgd,
    threelc,
    variance,
    wangni,
)
from grace.core.compressors import uniform as integers
from grace.core.compressors.contrib import adacomp, alq, fedqcs, kashin, szx, vqsgd
from grace.core.memories import dgc
from grace.core.memories import variance as squares
from grace.core.ops import get_ops, native
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.ops.numpy_ops import DTYPES
from grace.core.optim import moments as optimizers
from grace.core.spec import MAX_MAGNITUDE, Array, Key
from grace.core.wire import codings, huffman, indices, lanes, rans, runs, shuffle
from grace.testing.harness import LARGEST, SMALLEST, host
from tests.support import covering

# Sizes around the ends of a byte, of a register, of a task (1 << 16), and of a block within a task (1024, 4096).
SMALL = (0, 1, 7, 8, 9, 63, 64, 65, 1000)
LARGE = (4097, 65535, 65536, 65537, 200001)
# Outputs of 4 MiB and more bypass the cache; of 16 KiB in the build with sanitizers, which an ordinary run tests.
AROUND = {"float32": (1 << 20) + 5, "float64": (1 << 19) + 5}
KINDS = ("normal", "zeros", "equal", "sorted", "ties", "denormal", "huge", "huge and tiny", "negative")
BROKEN = ("nan", "infinite", "broken")


class Loose(NamedTuple):
    """A float64 sum whose order is not specified: equal up to the last bits of the sum of magnitudes, `scale`.

    A sum of n numbers in pieces of 65536 and eight lanes has at most 2^13 roundings per piece, which is 1e-12 of the
    sum of magnitudes. Pairwise sums are more exact.
    """

    value: Array
    scale: float


def values_of(kind: str, n: int, dtype: str, seed: int) -> np.ndarray[Any, Any]:
    """Return n numbers of a kind."""
    rng = np.random.default_rng([seed, n])
    normal, i = rng.standard_normal(n), np.arange(n)
    tiny, huge = SMALLEST[dtype], LARGEST[dtype]
    drawn = {
        "normal": lambda: normal,
        "zeros": lambda: np.where(i % 2, 0.0, -0.0),
        "equal": lambda: np.full(n, -0.5),
        "sorted": lambda: np.sort(normal),
        "ties": lambda: np.round(normal * 2) / 4,
        "denormal": lambda: np.round(normal * 5) * tiny,
        "huge": lambda: normal.clip(-1, 1) * huge,
        "huge and tiny": lambda: np.where(i % 5, 1e-30, huge * np.where(i % 2, 1, -1)),
        "negative": lambda: -(np.abs(normal) ** 3),
        "nan": lambda: np.where(i % 7 == 3, np.nan, normal),
        "infinite": lambda: np.where(i % 3 == 1, np.inf * np.where(i % 2, 1, -1), normal),
        "broken": lambda: np.where(i % 3 == 1, np.nan, np.where(i % 3 == 0, -np.inf, tiny)),
    }
    return drawn[kind]().astype(dtype)


@dataclass
class Given:
    """A source of arguments for one call. Equal fields give equal arguments, for any array operations."""

    ops: ArrayOps
    n: int
    dtype: str
    kind: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        self.drawn = 0
        self.reference = get_ops("numpy", native=False)

    @cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.n, zlib.crc32(self.kind.encode())])

    @property
    def is_small(self) -> bool:
        return self.n <= 1000

    def some(self, options: Sequence[Any]) -> Sequence[Any]:
        """Return all options for a small array, but one random option for a large array, to save time."""
        return options if self.n <= 65 else [options[int(self.rng.integers(len(options)))]]

    @property
    def ranks(self) -> int:
        return 1 + self.n % 3 if self.is_small else 2

    def lay(self, values: np.ndarray[Any, Any], offset: int = 3) -> Array:
        """Return an array of the framework that is not aligned to a register."""
        padded = np.concatenate([np.zeros(offset, values.dtype), values.reshape(-1)])
        data = self.ops.cast(padded.view(np.uint8), "uint8")
        return self.ops.from_bytes(data, self.reference.dtype(values))[offset:]

    def numbers(self, n: int | None = None) -> np.ndarray[Any, Any]:
        """Return new numbers of the kind, as a NumPy array."""
        self.drawn += 1
        return values_of(self.kind, self.n if n is None else n, self.dtype, 100 * self.seed + self.drawn)

    def x(self, n: int | None = None, offset: int = 3) -> Array:
        """Return a new array of numbers of the kind. The case may consume it."""
        return self.lay(self.numbers(n), offset)

    def scalar(self, value: Any) -> Array:
        """Return an array of one element of the dtype."""
        return self.lay(np.array([value]).astype(self.dtype), 1)

    def codes(self, bits: int, dtype: str = "int64", n: int | None = None) -> Array:
        return self.lay(self.rng.integers(0, 2**bits, self.n if n is None else n).astype(dtype))

    def bytes(self, n: int) -> Array:
        return self.lay(self.rng.integers(0, 256, n, np.uint8), 1)

    def packed(self, codes: np.ndarray[Any, Any], bits: int) -> Array:
        return self.lay(self.reference.pack(codes, bits), 1)

    def indices(self, count: int, ascending: bool = True) -> Array:
        """Return distinct indices below n."""
        drawn = self.rng.permutation(self.n)[:count]
        return self.lay((np.sort(drawn) if ascending else drawn).astype(np.int32))

    def key(self) -> Key:
        return Key(int(self.rng.integers(2**64, dtype=np.uint64)), int(self.rng.integers(1000)), self.drawn % 3)

    def size(self) -> float:
        """Return the sum of the magnitudes of the last drawn numbers, at least the smallest number."""
        last = values_of(self.kind, self.n, self.dtype, 100 * self.seed + self.drawn).astype(np.float64)
        return float(np.abs(last).sum()) or float(SMALLEST[self.dtype])


Case = Callable[[ArrayOps, Given], Iterator[Any]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register the case of the operation with the function's name."""
    CASES[function.__name__] = function
    return function


def results(name: str, given: Given) -> list[Any]:
    """Return the results of a case as NumPy arrays."""
    found: list[Any] = []
    for result in CASES[name](given.ops, given):
        if isinstance(result, Loose):
            found.append(Loose(host(given.ops, result.value), result.scale))
        else:
            found += [host(given.ops, x) for x in (result if isinstance(result, (tuple, list)) else [result])]
    return found


def free(ops: ArrayOps, g: Given, value: Array) -> Any:
    """Return a sum of the last drawn numbers. In float32 it must be exact; in float64 the order may change it."""
    # For one element, PyTorch uses the magnitude as the norm. The square would underflow below 2^-537.
    return Loose(value, g.size() + 1e-140) if g.dtype == "float64" else value


# --- arithmetic ----------------------------------------------------------------------------------------------------


@case
def weighted_sum(ops, g):
    for a, b in g.some([(1.0, 1.0), (0.9, 0.1), (1, -0.3), (0.3, 1), (-1e-3, 0.0)]):
        yield ops.weighted_sum(g.x(), a, g.x(), b)


@case
def max_abs(ops, g):
    yield ops.max_abs(g.x())


@case
def flat_max_abs(ops, g):
    yield ops.flat_max_abs(g.x())


@case
def norm_max(ops, g):
    norm, most = ops.norm_max(g.x())
    yield free(ops, g, norm)
    yield most


@case
def norm(ops, g):
    yield free(ops, g, ops.norm(g.x()))
    if g.is_small and g.n:
        yield free(ops, g, ops.norm(ops.reshape(g.x(), (1, g.n)), axis=1))


@case
def finite(ops, g):
    yield ops.cast(ops.finite(g.x()), "uint8")
    for at in g.some([0, g.n // 2, g.n - 1]) if g.n else ():
        for value in (np.nan, np.inf, -np.inf, MAX_MAGNITUDE[g.dtype], -1.01 * MAX_MAGNITUDE[g.dtype]):
            values = g.numbers()
            values[at] = value
            yield ops.cast(ops.finite(g.lay(values)), "uint8")


@case
def cast_half(ops, g):
    return _halves(g, functools.partial(fp16.cast_half, ops))


@case
def cast(ops, g):
    return _halves(g, ops.cast)


def _halves(g, cast):
    for half in ("float16", "bfloat16"):
        x = g.x()
        yield cast(x, half)
        # Halfway between two numbers, and slightly more or less.
        word = g.rng.integers(0, 2**32, g.n, np.uint32)
        tie = ((word & 0xFFFFE000) | g.rng.choice([0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], g.n)).astype(
            np.uint32
        )
        with np.errstate(invalid="ignore"):
            yield cast(g.lay(np.nan_to_num(tie.view(np.float32)).astype(g.dtype)), half)
        # Every pattern of 16 bits. NumPy warns about some NaNs when it converts them.
        pattern = np.arange(65536, dtype=np.uint16) if g.n == 65536 else g.rng.integers(0, 2**16, g.n, np.uint16)
        largest = 0x7C00 if half == "float16" else 0x7F80
        is_nan = (pattern & 0x7FFF) > largest
        pattern = np.where(is_nan & (g.dtype == "float64"), largest, pattern).astype(np.uint16)
        yield cast(g.lay(pattern.view(DTYPES[half])), g.dtype)


@case
def finite_sum(ops, g):
    for a, b in g.some([(1.0, 1.0), (0.9, 0.1), (1, -0.3), (0.3, 1)]):
        total, finite = ops.finite_sum(g.x(), a, g.x(), b)
        yield total
        yield ops.cast(finite, "uint8")
    for at in g.some([0, g.n // 2, g.n - 1]) if g.n else ():
        for value in (np.nan, np.inf, -np.inf, MAX_MAGNITUDE[g.dtype], -1.01 * MAX_MAGNITUDE[g.dtype]):
            values = g.numbers()
            values[at] = value
            yield ops.cast(ops.finite_sum(g.lay(values), 1, g.x(), 0.5)[1], "uint8")


@case
def momentum_sum(ops, g):
    for m in g.some([0.9, 0.0, 0.3]):
        momentum, total, finite = dgc.momentum_sum(ops, g.x(), m, g.x(), g.x())
        yield momentum
        yield total
        yield ops.cast(finite, "uint8")
    for at in g.some([0, g.n // 2, g.n - 1]) if g.n else ():
        for value in (np.nan, np.inf, -1.01 * MAX_MAGNITUDE[g.dtype]):
            values = g.numbers()
            values[at] = value
            for u, v in ((values, g.numbers()), (g.numbers(), values)):
                yield ops.cast(dgc.momentum_sum(ops, g.lay(u), 1.0, g.x(), g.lay(v))[2], "uint8")


@case
def limited_sum(ops, g):
    for a, b in g.some([(0.9, 1 - 0.9), (0.0, 1.0), (1, -0.3)]):
        for limit in (1.0, 1e-3):
            yield optimizers.limited_sum(ops, g.x(), a, g.x(), b, ops.clip(g.x(), -1, 1), limit)


@case
def masked_sum(ops, g):
    for a, b in g.some([(1, -0.01), (0.9, 1.0), (1.0, 0.0)]):
        yield from optimizers.masked_sum(ops, g.x(), a, g.x(), b, g.x())


@case
def sum_top(ops, g):
    for k in (0, 1, g.n // 100, g.n // 3, g.n):
        for a, b in g.some([(1.0, 1.0), (0.9, 1.0), (1.0, 0.3)]):
            for x in (g.x(), g.lay(np.round(g.numbers()))):
                total, finite, *found = sums.sum_top(ops, x, a, g.x(), b, k)
                yield total
                yield ops.cast(finite, "uint8")
                yield from found
    if g.n:
        values = g.numbers()
        values[g.n // 2] = np.nan
        yield ops.cast(sums.sum_top(ops, g.x(), 1.0, g.lay(values), 1.0, g.n // 100)[1], "uint8")


@case
def sum_select(ops, g):
    for bound, strict in g.some([(0.0, True), (0.5, True), (1.0, False), (0.0, False), (1e30, True)]):
        for a, b in g.some([(1.0, 1.0), (0.9, 1.0)]):
            total, finite, *found = sums.sum_select(ops, g.x(), a, g.x(), b, bound, strict)
            yield total
            yield ops.cast(finite, "uint8")
            yield from found
    if g.n:
        values = g.numbers()
        values[-1] = np.inf
        yield ops.cast(sums.sum_select(ops, g.x(), 1.0, g.lay(values), 1.0, 0.5, True)[1], "uint8")


@case
def half_sum(ops, g):
    for half in ("float16", "bfloat16"):
        for rows, factor in g.some([(1, 1.0), (2, 1.0), (2, 0.5), (3, 1 / 3), (5, 1.0)]):
            # Every finite pattern of 16 bits. The sums may be infinite.
            pattern = g.rng.integers(0, 2**16, rows * g.n, np.uint16)
            infinite = 0x7C00 if half == "float16" else 0x7F80
            pattern &= np.where(pattern & infinite == infinite, 0xBFFF, 0xFFFF).astype(np.uint16)
            yield ops.half_sum([g.lay(row) for row in pattern.view(DTYPES[half]).reshape(rows, -1)], factor)


# --- random --------------------------------------------------------------------------------------------------------


@case
def words(ops, g):
    yield ops.words(g.n, g.key())
    yield ops.words(g.n, Key(2**64 - 1, 2**31 - 1, 2**20), 7)


@case
def uniform(ops, g):
    yield ops.uniform(g.n, g.key(), 3)


@case
def sample(ops, g):
    for k in g.some(sorted({0, g.n // 100, g.n // 2, g.n})):
        yield ops.sample(g.n, k, g.key())


# --- the helpers of the GRACE paper --------------------------------------------------------------------------------


@case
def quantize(ops, g):
    x = g.x()
    yield ops.quantize(x, ops.max_abs(x), 127, g.key())


@case
def dequantize(ops, g):
    yield ops.dequantize(ops.cast(g.codes(8), "int64") - 127, g.scalar(0.3), 127, g.dtype)


@case
def sparsify(ops, g):
    for k in g.some(sorted({0, 1, g.n // 100, g.n // 3, g.n - 1, g.n, g.n + 5} - {-1})):
        yield ops.sparsify(g.x(), k)


@case
def moments(ops, g):
    for bound in g.some([0.0, 0.5, 3.0]):
        for powers in range(3):
            number, sums = estimated.moments(ops, g.x(), g.scalar(bound), powers)
            yield number
            yield free(ops, g, sums)


@case
def top_bound(ops, g):
    for k in g.some(sorted({1, g.n // 100, g.n // 3, g.n} - {0})):
        if k <= g.n:
            yield ops.top_bound(g.x(), k)


@case
def top_indices(ops, g):
    for k in g.some([1, g.n // 10]):
        yield ops.top_indices(g.x(), k)


@case
def desparsify(ops, g):
    indices = g.indices(g.n // 3)
    yield ops.desparsify(g.x(g.n // 3), indices, g.n)


@case
def sparse_sum(ops, g):
    for ascending in (True, False):
        for onto in (False, True):
            counts = [g.n // (2 + 3 * r) for r in range(g.ranks)]
            indices = [g.indices(count, ascending) for count in counts]
            yield ops.sparse_sum([g.x(count) for count in counts], indices, g.n, g.x() if onto else None)


@case
def gather(ops, g):
    yield ops.gather(g.x(), g.indices(g.n // 2, ascending=False))


@case
def put_(ops, g):
    yield ops.put_(g.x(), g.indices(g.n // 2, ascending=False), 0.1)


@case
def scatter_add_(ops, g):
    yield ops.scatter_add_(g.x(), g.indices(g.n // 2, ascending=False), g.x(g.n // 2))


@case
def matmul(ops, g):
    """Thin matrices in all three positions: sums of up to 200,001 products, in any order."""
    if g.kind.startswith("huge"):
        return  # Overflows depend on the order.
    for columns, r in g.some([(1, 1), (3, 2), (33, 4), (700, 7), (1, 16), (513, 3)]):
        rows = -(-g.n // columns)
        wide = ops.reshape(g.x(rows * columns), (rows, columns))
        right, left = (ops.reshape(g.x(side * r), (side, r)) for side in (columns, rows))
        # A float32 sum loses less than 1e-6 of the sum of magnitudes, in any order.
        loss = 2.5e5 if g.dtype == "float32" else 1.0
        for a, b, flags in ((wide, right, (False, False)), (wide, left, (True, False)), (left, right, (False, True))):
            sizes = ops.matmul(ops.abs(a), ops.abs(b), *flags)
            yield Loose(ops.matmul(a, b, *flags), loss * float(host(ops, ops.max_abs(ops.reshape(sizes, (-1,))))))


@case
def flat_product(ops, g):
    if g.kind.startswith("huge"):
        return  # As in matmul.
    for rows, columns, r in g.some([(1, 1, 1), (33, 7, 4), (7, 33, 2), (1, 700, 16), (513, 3, 1)]):
        a, b = (g.x(side * r) for side in (rows, columns))
        loss = 2.5e5 if g.dtype == "float32" else 1.0
        most = ops.max_abs(ops.flat_product(ops.abs(a), ops.abs(b), r))
        yield Loose(ops.flat_product(a, b, r), loss * float(host(ops, most)))


@case
def sub_product_(ops, g):
    if g.kind.startswith("huge"):
        return  # As in matmul.
    shapes = [(1, 1, 1), (33, 7, 4), (7, 33, 2), (1, 700, 16), (513, 3, 1)]
    for rows, columns, r in [(257, 4099, 3)] if g.n >= AROUND[g.dtype] else g.some(shapes):
        a, b = (g.x(side * r) for side in (rows, columns))
        loss = 2.5e5 if g.dtype == "float32" else 1.0
        most = float(host(ops, ops.max_abs(ops.flat_product(ops.abs(a), ops.abs(b), r))))
        for each in ops.sub_product_(g.x(rows * columns), a, b, r):
            yield Loose(each, loss * max(most, float(host(ops, ops.max_abs(each)))))


@case
def power_product(ops, g):
    if g.kind.startswith("huge"):
        return  # As in matmul.
    for rows, columns, r in g.some([(1, 1, 1), (33, 7, 4), (7, 33, 2), (1, 700, 16), (513, 3, 1)]):
        x, q = g.x(rows * columns), ops.reshape(g.x(columns * r), (columns, r))
        product, whole = powersgd.power_product(ops, x, q, (rows, columns))
        loss = 2.5e5 if g.dtype == "float32" else 1.0
        # Denormals have few bits.
        least = 1e6 * float(np.finfo(g.dtype).tiny)
        yield Loose(product, loss * columns * float(host(ops, ops.max_abs(x))) + least)
        # The squares of denormal float64 underflow, so lengths are zero. PyTorch does not square a single element.
        if (g.kind, g.dtype) != ("denormal", "float64"):
            yield ops.cast(whole, "uint8")


@case
def sum_power_product(ops, g):
    if g.kind.startswith("huge"):
        return  # As in matmul.
    for rows, columns, r in g.some([(1, 1, 1), (33, 7, 4), (7, 33, 2), (1, 700, 16), (513, 3, 1)]):
        x, y, q = g.x(rows * columns), g.x(rows * columns), ops.reshape(g.x(columns * r), (columns, r))
        total, product, good = powersgd.sum_power_product(ops, x, y, q, (rows, columns))
        yield total
        # As in power_product.
        loss, least = 2.5e5 if g.dtype == "float32" else 1.0, 1e6 * float(np.finfo(g.dtype).tiny)
        yield Loose(product, loss * columns * float(host(ops, ops.max_abs(total))) + least)
        if (g.kind, g.dtype) != ("denormal", "float64"):
            yield ops.cast(good, "uint8")


@case
def project(ops, g):
    if g.kind.startswith("huge"):
        return  # As in matmul.
    for rows, columns, r in g.some([(4, 3, 1), (33, 7, 4), (77, 33, 2), (513, 3, 1)]):
        x, p = g.x(rows * columns), g.x(rows * r)
        basis, product = powersgd.project(ops, x, p, (rows, columns))
        # As in orthogonalize.
        yield Loose(basis, 1e3) if g.dtype == "float64" else basis
        loss, least = 2.5e5 if g.dtype == "float32" else 1e3, 1e6 * float(np.finfo(g.dtype).tiny)
        yield Loose(product, loss * rows * float(host(ops, ops.max_abs(x))) + least)


@case
def orthogonalize(ops, g):
    for rank in (1, 4):
        if g.n >= 4 * rank:
            rows = g.n // rank
            basis = powersgd.orthogonalize(ops, ops.reshape(g.x(rows * rank), (rows, rank)))
            # A column is independent if more than 1e-6 of its length remains. This amplifies rounding noise.
            yield Loose(basis, 1e3) if g.dtype == "float64" else basis


@case
def pack(ops, g):
    for bits in range(1, 17) if g.is_small else g.some(range(1, 17)):
        yield ops.pack(g.codes(bits), bits)
        if bits <= 8:
            yield ops.pack(g.codes(bits, "uint8"), bits)
        yield ops.pack(g.codes(min(bits, 14), "int32"), bits)


@case
def unpack(ops, g):
    for bits in range(1, 17) if g.is_small else g.some(range(1, 17)):
        yield ops.unpack(g.bytes(packed_size(g.n, bits)), bits, g.n)


# --- signs ---------------------------------------------------------------------------------------------------------


@case
def binarize(ops, g):
    for threshold in g.some([0.0, 0.1, -0.5, 1e30]):
        yield signs.binarize(ops, g.x(), threshold)
        yield signs.binarize(ops, g.x(), threshold, True)


def matrices(g: Given) -> Sequence[tuple[int, int]]:
    """Return (rows, columns) of matrices of up to n elements, narrow ones and ones that are divided across."""
    widths = [2, 3, 8, 13, 16, 65] if g.is_small else [3, 64, 1000, 4100]
    return [(g.n // columns, columns) for columns in g.some(widths) if columns <= g.n]


@case
def binarize_means(ops, g):
    for threshold in g.some([0.0, 0.25, -0.5]):
        bits, means = signs.binarize_means(ops, g.x(), threshold)
        yield bits
        yield free(ops, g, means)
    for rows, columns in matrices(g):
        bits, means = signs.binarize_means(ops, g.x(rows * columns), 0.25, columns)
        yield bits
        yield free(ops, g, means)


@case
def sign_mean(ops, g):
    bits, mean = signs.sign_mean(ops, g.x())
    yield bits
    yield free(ops, g, mean)


@case
def binarize_finite(ops, g):
    for strict in (False, True):
        bits, finite = signs.binarize_finite(ops, g.x(), strict)
        yield bits
        yield ops.cast(finite, "uint8")
    for at in g.some([0, g.n // 2, g.n - 1]) if g.n else ():
        for value in (np.nan, np.inf, -np.inf, MAX_MAGNITUDE[g.dtype], -1.01 * MAX_MAGNITUDE[g.dtype]):
            values = g.numbers()
            values[at] = value
            yield ops.cast(signs.binarize_finite(ops, g.lay(values), True)[1], "uint8")


@case
def binary_sum(ops, g):
    size = packed_size(g.n, 1)
    for onto in (False, True):
        bits = [g.bytes(size) for _ in range(g.ranks)]
        levels = [g.x(2, offset=1) for _ in range(g.ranks)]
        yield signs.binary_sum(ops, bits, levels, g.n, g.x() if onto else None, negate=onto)
        for rows, columns in matrices(g):
            n, some = rows * columns, [data[: packed_size(rows * columns, 1)] for data in bits]
            levels = [g.x(2 * columns, offset=1) for _ in range(g.ranks)]
            yield signs.binary_sum(ops, some, levels, n, g.x(n) if onto else None, onto, columns)


@case
def sign_sum(ops, g):
    size = packed_size(g.n, 1)
    for onto in (False, True):
        bits = [g.bytes(size) for _ in range(g.ranks)]
        scales = [g.x(1, offset=1) for _ in range(g.ranks)]
        yield signs.sign_sum(ops, bits, scales, g.n, g.x() if onto else None, negate=onto)
        yield signs.sign_sum(ops, bits, scales, g.n, g.x() if onto else None, factor=1 / 3)


@case
def sum_sign_mean(ops, g):
    for a, b in g.some([(1.0, 1.0), (0.9, 1.0), (1.0, 0.3)]):
        total, bits, mean, finite = signs.sum_sign_mean(ops, g.x(), a, g.x(), b)
        yield total
        yield bits
        yield free(ops, g, mean)
        yield ops.cast(finite, "uint8")
    if g.n:
        values = g.numbers()
        values[g.n // 2] = np.nan
        yield ops.cast(signs.sum_sign_mean(ops, g.x(), 1.0, g.lay(values), 1.0)[3], "uint8")


@case
def sum_columns(ops, g):
    for a, b in g.some([(1.0, 1.0), (0.9, 1.0), (1.0, 0.3)]):
        for threshold in g.some([0.0, 0.25]):
            for rows, columns in ((g.n, 1), *matrices(g)):
                n = rows * columns
                total, bits, means, finite = signs.sum_columns(ops, g.x(n), a, g.x(n), b, threshold, columns)
                yield total
                yield bits
                yield free(ops, g, means)
                yield ops.cast(finite, "uint8")
    if g.n:
        values = g.numbers()
        values[g.n // 2] = np.nan
        for columns in (1, g.n):
            yield ops.cast(signs.sum_columns(ops, g.x(), 1.0, g.lay(values), 1.0, 0.0, columns)[3], "uint8")


@case
def sum_sample(ops, g):
    for k in (0, 1, g.n // 10, g.n // 3, g.n):
        for a, b in g.some([(1.0, 1.0), (0.9, 1.0), (1.0, 0.3)]):
            left, finite, *found = sums.sum_sample(ops, g.x(), a, g.x(), b, min(k, g.n), Key(77, 5, 1))
            yield left
            yield ops.cast(finite, "uint8")
            yield from found
    if g.n:
        values = g.numbers()
        values[g.n // 2] = -np.inf
        for k in (0, g.n):
            yield ops.cast(sums.sum_sample(ops, g.x(), 1.0, g.lay(values), 1.0, k, Key(77, 5, 1))[1], "uint8")


@case
def majority(ops, g):
    for ranks in g.some([1, 2, 3, 8]):
        yield signs.majority(ops, [g.bytes(packed_size(g.n, 1)) for _ in range(ranks)], g.n, g.dtype)


# --- levels in buckets ---------------------------------------------------------------------------------------------


def widths(g: Given) -> Sequence[int]:
    return g.some([5, 512, max(1, g.n), max(1, g.n // 2), 1, 2**40]) if g.is_small else [512, g.n, 5][g.n % 3 :][:1]


@case
def bucket_norms(ops, g):
    for width in widths(g):
        width = min(width, max(1, g.n))
        yield levels.bucket_norms(ops, g.x(), width, "max")
        yield free(ops, g, levels.bucket_norms(ops, g.x(), width, "l2"))


@case
def quantize_packed(ops, g):
    pairs = [(1, 2), (7, 4), (15, 5), (127, 8), (300, 10), (32767, 16)]
    for width in widths(g):
        width = min(width, max(1, g.n))
        for level, bits in g.some(pairs):
            for limit in g.some([None, 0.5]):
                x = g.numbers()
                scales = levels.bucket_norms(g.reference, x, width, "max") if g.n else x
                edge = None if limit is None else g.scalar(limit)
                yield levels.quantize_packed(ops, g.lay(x), g.lay(scales), width, level, bits, g.key(), edge)
                yield levels.quantize_packed(ops, g.lay(x), g.lay(scales), width, level, bits, None, edge)


@case
def bucket_quantize(ops, g):
    for width in widths(g):
        width = min(width, max(1, g.n))
        for level, bits in g.some([(1, 2), (7, 4), (15, 5), (127, 8), (300, 10)]):
            yield from levels.bucket_quantize(ops, g.x(), width, "max", level, bits, None)
            codes, norms = levels.bucket_quantize(ops, g.x(), width, "l2", level, bits, g.key())
            yield free(ops, g, norms)
            if g.dtype == "float32":
                yield codes
            yield from levels.bucket_quantize(ops, g.x(), width, "max", level, bits, g.key())


@case
def floor_packed(ops, g):
    for width in g.some([2, 3, 8, 9, 16]):
        x = g.numbers()
        largest = np.abs(x).max(initial=0) / g.reference.cast(2 ** (width - 1) - 1, g.dtype)
        # All levels, and a range that clips some elements.
        for delta in (largest, largest * g.reference.cast(0.25, g.dtype)):
            yield lpc.floor_packed(ops, g.lay(x), g.scalar(delta), width, g.key())


@case
def dequantize_sum(ops, g):
    pairs = [(1, 2), (7, 4), (15, 5), (127, 8), (300, 10), (32767, 16), (32768, 16)]
    for width in widths(g):
        width = min(width, max(1, g.n))
        for level, bits in g.some(pairs):
            for onto in (False, True):
                most = min(2 * level, 2**bits - 1)
                codes = [g.packed(g.rng.integers(0, most + 1, g.n), bits) for _ in range(g.ranks)]
                scales = [g.x(-(-g.n // width)) for _ in range(g.ranks)]
                yield levels.dequantize_sum(ops, codes, scales, width, level, bits, g.n, g.x() if onto else None)


@case
def best_levels(ops, g):
    if g.n:
        share = np.abs(g.numbers()) / np.float64(LARGEST[g.dtype])
        with np.errstate(invalid="ignore", over="ignore"):
            spread = np.abs(g.numbers()).astype(np.float64)
            spread = spread / (spread.max() or 1.0)
        for drawn in (spread, share, g.rng.random(g.n) ** 8):
            sizes = np.sort(np.floor(np.nan_to_num(drawn[:4096]).clip(0, 1) * alq._UNIT))
            for s, exponential in g.some([(2, False), (3, True), (4, False), (7, False), (7, True)]):
                yield alq.best_levels(ops, g.lay(sizes), s, exponential)


# The dtypes of integers, and the largest magnitudes that they are used for.
INTEGERS = [("int8", 1), ("int8", 127), ("int16", 300), ("int16", 32767), ("int32", 40000), ("int32", 2**23 - 1)]


@case
def to_integers(ops, g):
    x = g.numbers()
    scale = np.abs(x).max(initial=0).astype(g.dtype)
    for dtype, most in g.some(INTEGERS):
        for key in (g.key(), None):
            yield integers.to_integers(ops, g.lay(x), g.lay(scale, 1), most, key, dtype)


@case
def from_integers(ops, g):
    for dtype, most in g.some(INTEGERS):
        codes = signed(g, most, dtype)
        for onto in (None, g.x()):
            yield integers.from_integers(ops, codes, g.scalar(0.3), most, onto)


@case
def pack_lanes(ops, g):
    for count in g.some(LANES):
        bits = 32 // count
        for dtype in ("int8", "int16", "int32"):
            most = 2 ** (min(bits, int(dtype[3:])) - 1) - 1
            yield lanes.pack_lanes(ops, signed(g, most, dtype), g.n, count)


@case
def unpack_lanes(ops, g):
    for count in g.some(LANES):
        # Any words, too: a sum of damaged ones is decoded alike everywhere.
        yield lanes.unpack_lanes(ops, signed(g, 2**31 - 1, "int32", lanes.words(g.n, count)), g.n, count)


LANES = [1, 2, 3, 4, 5, 6, 8, 10, 16]


def signed(g: Given, most: int, dtype: str, n: int | None = None) -> Array:
    """Return integers from -most to most."""
    return g.lay(g.rng.integers(-most, most + 1, g.n if n is None else n).astype(dtype), 1)


def level_lists(g: Given) -> Sequence[np.ndarray[Any, Any]]:
    halves = [0.1 + np.sort(g.rng.random(2 ** (bits - 1))) for bits in g.some([1, 2, 3, 4])]
    return [np.concatenate([-half[::-1], half]).astype(g.dtype) for half in halves]


@case
def round_packed(ops, g):
    for width in widths(g):
        width = min(width, max(1, g.n))
        for chosen in level_lists(g):
            x = g.numbers()
            scales = levels.bucket_norms(g.reference, x, width, "max") if g.n else x
            for key in (g.key(), None):
                yield listed.round_packed(ops, g.lay(x), g.lay(scales), g.lay(chosen), width, key)


@case
def sum_round(ops, g):
    for width in widths(g):
        width = min(width, max(1, g.n))
        for chosen in level_lists(g):
            for a, b in g.some([(1.0, 1.0), (0.9, 1.0), (1.0, 0.3)]):
                *made, finite = listed.sum_round(ops, g.x(), a, g.x(), b, g.lay(chosen), width)
                yield from made
                yield ops.cast(finite, "uint8")
            if g.n:
                values = g.numbers()
                values[g.n // 2] = np.nan
                yield ops.cast(listed.sum_round(ops, g.x(), 1.0, g.lay(values), 1.0, g.lay(chosen), width)[3], "uint8")


@case
def levels_sum(ops, g):
    for width in widths(g):
        width = min(width, max(1, g.n))
        for chosen in level_lists(g):
            for onto in (False, True):
                codes = [g.bytes(packed_size(g.n, (len(chosen) - 1).bit_length())) for _ in range(g.ranks)]
                scales = [g.x(-(-g.n // width)) for _ in range(g.ranks)]
                begin = g.x() if onto else None
                tables = [g.lay(chosen * (rank + 1)) for rank in range(g.ranks)]
                yield listed.levels_sum(ops, codes, scales, tables, width, g.n, begin)


@case
def rotate(ops, g):
    for block in g.some([128, 256, 4096]):
        for back in (False, True):
            yield rotation.rotate(ops, g.x(), block, g.key(), back)


# Elements of a block and coefficients per element.
FRAMES = [(128, 2), (256, 16), (4096, 2)]


def frames(g):
    """Return frames for a vector; a large one in a frame of 16 times its size takes as long as all other cases."""
    return g.some(FRAMES if g.is_small or covering.ALL else FRAMES[::2])


@case
def spread_in_frame(ops, g):
    for block, redundancy in frames(g):
        yield free(ops, g, kashin.spread_in_frame(ops, g.x(), block, redundancy, g.key()))


@case
def project_from_frame(ops, g):
    for block, redundancy in frames(g):
        yield kashin.project_from_frame(ops, g.x(g.n // block * block), block, redundancy, g.key())


@case
def largest_of_blocks(ops, g):
    for block in g.some([128, 4096]):
        for ratio in g.some((0.01, 0.3, 1.0)):
            yield fedqcs.largest_of_blocks(ops, g.x(), block, ratio)


@case
def recover_sparse(ops, g):
    for block, reduction, rounds in g.some([(128, 1, 3), (256, 5, 1), (4096, 3, 5)]):
        count = sum(fedqcs.measurements(width, reduction) for width in rotation.rotated_widths(g.n, block))
        z = g.lay(g.rng.standard_normal(count).astype(g.dtype))
        found = fedqcs.recover_sparse(ops, z, g.n, block, reduction, rounds, 0.1, 0.04, g.key())
        # Sums of float64 are in another order, and every round begins with those of the last one.
        yield Loose(found, 1e4) if g.dtype == "float64" else found


@case
def rotated_encode(ops, g):
    for block in g.some([128, 256, 4096]):
        for chosen in level_lists(g):
            for fit, stochastic in ((True, False), (False, True)):
                key = g.key()
                for salt in (None, int(g.rng.integers(2**32))):
                    for transforms in (1, 2):
                        given = g.lay(chosen), block, fit, stochastic, key, salt, transforms
                        codes, scales = rotation.rotated_encode(ops, g.x(), *given)
                        yield codes
                        yield free(ops, g, scales) if fit else scales


@case
def rotated_sum(ops, g):
    for block in g.some([128, 256, 4096]):
        widths = rotation.rotated_widths(g.n, block)
        for chosen in level_lists(g):
            bits = (len(chosen) - 1).bit_length()
            for onto, transforms in itertools.product((False, True), (1, 2)):
                codes = [g.bytes(packed_size(sum(widths), bits)) for _ in range(g.ranks)]
                scales = [g.lay(g.rng.standard_normal(len(widths)).astype(g.dtype)) for _ in range(g.ranks)]
                salts = [g.lay(g.rng.integers(-(2**31), 2**31, 1).astype(np.int32), 1) for _ in range(g.ranks)]
                rest = g.lay(chosen), block, g.n, g.key(), g.x() if onto else None, transforms
                yield rotation.rotated_sum(ops, codes, scales, salts, *rest)


@case
def shared_rotated_sum(ops, g):
    for block in g.some([128, 256, 4096]):
        widths = rotation.rotated_widths(g.n, block)
        for chosen in level_lists(g):
            bits = (len(chosen) - 1).bit_length()
            for onto, transforms in itertools.product((False, True), (1, 2)):
                codes = [g.bytes(packed_size(sum(widths), bits)) for _ in range(g.ranks)]
                scales = [g.lay(g.rng.standard_normal(len(widths)).astype(g.dtype)) for _ in range(g.ranks)]
                rest = g.lay(chosen), block, g.n, g.key(), g.x() if onto else None, transforms
                yield rotation.shared_rotated_sum(ops, codes, scales, *rest)


# --- powers of two, tables, digits, widths -------------------------------------------------------------------------


@case
def natural_encode(ops, g):
    for clipped in (False, True):
        yield natural.natural_encode(ops, g.x(), g.key(), clipped)


@case
def natural_sum(ops, g):
    for clipped in (False, True):
        for onto, negate in ((False, False), (True, True), (True, False)):
            made = [natural.natural_encode(g.reference, g.numbers(), g.key(), clipped) for _ in range(g.ranks)]
            codes, bases = [g.lay(code, 1) for code, _, _ in made], [g.lay(base) for _, base, _ in made]
            yield natural.natural_sum(ops, codes, bases, g.n, g.dtype, clipped, g.x() if onto else None, negate)
            yield natural.natural_sum(ops, codes, bases, g.n, g.dtype, clipped, factor=1 / 3)


@case
def square_sum(ops, g):
    # Sums that reach the limit, too.
    for largest in g.some([squares.LARGEST[g.dtype], 0.5]):
        yield squares.square_sum(ops, g.x(), ops.abs(g.x()), largest)


@case
def power_words(ops, g):
    for alpha in g.some([None, 1.5, 0.0, 1e-3]):
        noise = None if alpha is None else ops.abs(g.x())
        yield variance.power_words(ops, g.x(), noise, alpha or 0.0)


def words_of_powers(g: Given, ascending: bool, count: int) -> Array:
    """Return words of distinct indices, any powers and both signs."""
    drawn = g.rng.permutation(g.n)[:count]
    places = np.sort(drawn) if ascending else drawn
    return g.lay((g.rng.integers(-8, 8, count) * 2**variance.INDEX_BITS + places).astype(np.int32), 1)


@case
def power_sum(ops, g):
    for ascending in (True, False):
        for onto in (False, True):
            payloads = [words_of_powers(g, ascending, g.n // (2 + 3 * r)) for r in range(g.ranks)]
            scales = [g.scalar(2.0 ** (3 - r)) for r in range(g.ranks)]
            yield variance.power_sum(ops, payloads, scales, g.n, g.x() if onto else None)


@case
def power_fade_(ops, g):
    for ascending in (True, False):
        for factor in (1.0, 0.999):
            yield variance.power_fade_(ops, g.x(), words_of_powers(g, ascending, g.n // 3), factor)


def table(g: Given) -> Array:
    steps = np.arange(128) / 127.0
    return g.lay((steps * steps).astype(g.dtype))


@case
def table_encode(ops, g):
    x = g.numbers()
    # No number may be larger than its scale, because the quotient must not overflow.
    for scale in [np.abs(x).max(initial=0), 0.0] if np.abs(x).max(initial=0) < 1e3 else [np.abs(x).max()]:
        yield tables.table_encode(ops, g.lay(x), g.scalar(scale), table(g), max(1, g.n))
    for width in widths(g):
        width = min(width, max(1, g.n))
        scales = levels.bucket_norms(g.reference, x, width, "max") if g.n else x
        yield tables.table_encode(ops, g.lay(x), g.lay(scales), table(g), width)


@case
def table_sum(ops, g):
    for width in widths(g):
        width = min(width, max(1, g.n))
        for onto in (False, True):
            codes = [g.bytes(g.n) for _ in range(g.ranks)]
            scales = [g.x(-(-g.n // width)) for _ in range(g.ranks)]
            yield tables.table_sum(ops, codes, scales, table(g), width, g.x() if onto else None)


@case
def ternary_encode(ops, g):
    for half in g.some([0.8, 0.0, 3.5, 1e35]):
        yield threelc.ternary_encode(ops, g.x(), g.scalar(half))


@case
def ternary_sum(ops, g):
    for onto in (False, True):
        made = []
        for half in (0.1, 1.5, 3.5)[: g.ranks]:
            made.append(g.lay(threelc.ternary_encode(g.reference, g.numbers(), np.array([half], g.dtype)), 1))
        scales = [g.x(1) for _ in made]
        yield threelc.ternary_sum(ops, made, scales, g.n, g.x() if onto else None)


@case
def precision_encode(ops, g):
    for bound, m, h in g.some([(2.0**-10, 5, 0), (0.7, 1, 0), (1e-6, 13, 5)]):
        for scale in (1, 0.3, 0):
            yield inceptionn.precision_encode(ops, g.x(), g.scalar(scale), bound, m, h)


@case
def precision_sum(ops, g):
    for bound, m, h in g.some([(2.0**-10, 5, 0), (0.7, 1, 0), (1e-6, 13, 5)]):
        for onto, scale in ((False, 1), (False, 0.3), (True, -0.3)):
            one = np.ones(1, g.dtype)
            made = [inceptionn.precision_encode(g.reference, g.numbers(), one, bound, m, h) for _ in range(g.ranks)]
            payloads = [tuple(g.lay(part, 1) for part in one) for one in made]
            scales = [g.scalar(scale) for _ in made]
            yield inceptionn.precision_sum(ops, payloads, scales, m, h, g.n, g.x() if onto else None)


# The bound of an error, and the elements of a block.
BLOCKS = [(2.0**-5, 128), (0.3, 4), (2.0**-20, 12), (0.01, 3000)]


@case
def leading_encode(ops, g):
    for bound, block in g.some(BLOCKS):
        for x in (g.numbers(), np.sort(g.numbers())):
            scale = np.abs(x).max(initial=0)
            for divisor in (scale, scale * 2):
                yield szx.leading_encode(ops, g.lay(x), g.scalar(divisor), bound, block)


def any_bits(g: Given, block: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Return a payload of random lengths and codes, which no gradient has, and of as many bytes as they ask for."""
    kept = g.rng.choice([0, 1, 9, 16, 20, 32, 255], -(-g.n // block)).astype(np.uint8)
    codes = g.rng.integers(0, 4, (np.count_nonzero(kept), block))
    width = -(-np.minimum(kept[kept > 0], 32).astype(int) // 8)
    count = int((width[:, None] - codes).clip(0).sum())
    middles = g.rng.standard_normal(len(kept)).astype(np.float32)
    # Without the highest bits there are neither NaN nor infinite elements.
    return middles, kept, g.reference.pack(codes.ravel(), 2), g.rng.integers(0, 64, count).astype(np.uint8)


@case
def leading_sum(ops, g):
    for bound, block in g.some(BLOCKS):
        for onto, scale in ((False, 1), (True, -0.3)):
            one = np.ones(1, g.dtype)
            share = [x / (np.abs(x).max(initial=0) or 1) for x in (g.numbers() for _ in range(g.ranks))]
            made = [szx.leading_encode(g.reference, x, one, bound, block) for x in share] + [any_bits(g, block)]
            payloads = [tuple(g.lay(part, 1) for part in one) for one in made]
            scales = [g.scalar(scale) for _ in made]
            yield szx.leading_sum(ops, payloads, scales, block, g.n, g.x() if onto else None)


# --- selections and sketches ---------------------------------------------------------------------------------------


@case
def select(ops, g):
    for bound in g.some([0.5, 0.0, 2.0, 1e36]):
        for strict, nonzero in ((True, False), (False, False), (False, True)):
            yield ops.select(g.x(), bound, strict, nonzero)
            yield ops.select(g.x(), ops.reshape(g.scalar(bound), ()), strict, nonzero)


@case
def top_of_sides(ops, g):
    for ratio in g.some([0.01, 0.3, 1.0]):
        means, positive, negative = adaptive.top_of_sides(ops, g.x(), ratio)
        yield free(ops, g, means)
        yield positive, negative


@case
def select_in_bins(ops, g):
    for width in g.some([1, 7, 500]):
        x, more = g.numbers(), g.numbers()
        with np.errstate(all="ignore"):
            maxima = levels.bucket_norms(g.reference, x, width, "max")
            yield adacomp.select_in_bins(ops, g.lay(x), g.lay(more), g.lay(maxima, 1), width)


# How many elements to keep, as a divisor of n, or the variance budget.
KEPT = [(100, None), (7, None), (1, None), (1, 0.5), (1, 3.0)]


@case
def keep_odds(ops, g):
    for share, budget in g.some(KEPT):
        odds = wangni.keep_odds(ops, g.x(), g.n // share, budget)
        yield odds[:1]
        yield Loose(odds[1:], float(host(ops, odds)[1]))


@case
def draw_kept(ops, g):
    for share, budget in g.some(KEPT):
        x = g.numbers()
        odds = wangni.keep_odds(g.reference, x, g.n // share, budget)
        yield wangni.draw_kept(ops, g.lay(x), g.lay(odds, 1), g.key())


@case
def drawn_entries(ops, g):
    signed = g.rng.integers(-(2**31), 2**31, g.n).astype(np.int32)
    yield wangni.drawn_entries(ops, g.lay(signed, 1), g.x(1))


# Elements and vertices of a bucket.
BUCKETS = [(2, 1), (64, 16), (1024, 1500)]


@case
def draw_vertices(ops, g):
    for width, samples in g.some(BUCKETS):
        for least in (0, int(2**24 * width**0.5)):
            x = g.numbers()
            norms = levels.bucket_norms(g.reference, x, width, "l2")
            yield vqsgd.draw_vertices(ops, g.lay(x), g.lay(norms, 1), width, samples, least, g.key())


@case
def vertices_sum(ops, g):
    for width, samples in g.some(BUCKETS):
        buckets = -(-g.n // width)
        for onto in (False, True):
            codes = [g.codes(width.bit_length(), n=buckets * samples) for _ in range(g.ranks)]
            scales = [g.x(buckets) for _ in range(g.ranks)]
            yield vqsgd.vertices_sum(ops, codes, scales, width, samples, g.n, g.x() if onto else None)


# Rows and columns. For 9 rows, medians use the generic code.
SKETCHES = [(1, 16), (3, 112), (5, 1008), (7, 64), (9, 32)]


@case
def count_sketch(ops, g):
    for rows, columns in g.some(SKETCHES):
        yield sketchedsgd.count_sketch(ops, g.x(), rows, columns, g.key())


@case
def sketch_estimate(ops, g):
    for rows, columns in g.some(SKETCHES):
        yield sketchedsgd.sketch_estimate(ops, g.x(rows * columns), g.n, rows, columns, g.key())


# Bits and hash functions. Without any, a filter is a bitmap.
FILTERS = [(1, 1), (13, 3), (1000, 2), (1_000_003, 10)]


@case
def filter_positions(ops, g):
    for form in (bloom.BloomFilter(*form) for form in g.some(FILTERS)):
        for data in (g.bytes(form.nbytes), g.lay(np.full(form.nbytes, 255, np.uint8), 1)):
            yield bloom.filter_positions(ops, form, data, g.n, g.key())


def _indices(g: Given) -> tuple[Array, int]:
    """Return ascending indices, the last of g.n elements among them, and their number."""
    count = int(g.rng.integers(g.n // 2 + 1))
    drawn = np.append(np.flatnonzero(g.rng.permutation(max(0, g.n - 1)) < count), [g.n - 1][: g.n]).astype(np.int32)
    return g.lay(drawn, offset=4), len(drawn)


@case
def gap_facts(ops, g):
    for low in g.some([0, 1, 5, 16]):
        yield indices.gap_facts(ops, _indices(g)[0], low)


def _coded(ops: ArrayOps, g: Given, low: int) -> tuple[Array, int, Array, int]:
    chosen, k = _indices(g)
    quotients = int(indices.gap_facts(ops, chosen, low)[1])
    # With one bit per plane of every gap, nothing remains for the unary part.
    unary = (k + quotients + 7) // 8 if quotients or g.seed % 2 else 0
    return indices.encode_gaps(ops, chosen, low, unary, 18), unary, chosen, k


@case
def encode_gaps(ops, g):
    for low in g.some([0, 1, 5, 16, 18]):
        yield _coded(ops, g, low)[0]


@case
def decode_gaps(ops, g):
    for low in g.some([0, 1, 5, 16, 18]):
        data, unary, chosen, k = _coded(ops, g, low)
        yield indices.decode_gaps(ops, data, low, unary, k, 18), chosen


def _symbols(g: Given, bits: int) -> np.ndarray[Any, Any]:
    """Return the bytes of symbols of which few are frequent. The reference decoders need much memory for many."""
    drawn = g.rng.geometric([0.02, 0.5, 0.97][g.seed % 3], min(g.n, 70001))
    return np.asarray(g.reference.pack(np.minimum(drawn, (1 << bits) - 1), bits))


def _decoded(ops: ArrayOps, g: Given, codec: codings.Codec, widths: Sequence[int]) -> Iterator[Array]:
    for bits in g.some(widths):
        data = _symbols(g, bits)
        if len(data):
            yield codec.decode(ops, g.lay(np.asarray(codec.encode(g.reference, data, bits)), 1), bits, len(data))


@case
def huffman_encode(ops, g):
    for bits in g.some([8, 3, 5, 7]):
        yield huffman.huffman_encode(ops, g.lay(_symbols(g, bits), 1), bits)


@case
def huffman_decode(ops, g):
    yield from _decoded(ops, g, codings.CODECS["huffman"], [8, 3, 5, 7])


@case
def rans_encode(ops, g):
    for bits in g.some([8, 3, 6]):
        yield rans.rans_encode(ops, g.lay(_symbols(g, bits), 1), bits)


@case
def rans_decode(ops, g):
    yield from _decoded(ops, g, codings.CODECS["rans"], [8, 3, 6])


@case
def run_length_encode(ops, g):
    yield runs.run_length_encode(ops, g.lay(_symbols(g, 8), 1))


@case
def run_length_decode(ops, g):
    yield from _decoded(ops, g, codings.CODECS["run_length"], [8])


@case
def bitshuffle_encode(ops, g):
    for bits in g.some([8, 1, 2, 5]):
        yield shuffle.bitshuffle_encode(ops, g.lay(_symbols(g, bits), 1), bits)


@case
def bitshuffle_decode(ops, g):
    yield from _decoded(ops, g, codings.CODECS["bitshuffle"], [8, 1, 2, 5])


# Every pair of a size, a kind of numbers and a dtype.
_SMALL = covering.pairwise({"n": SMALL, "kind": KINDS, "dtype": native.FLOATS})


def plans(dtype: str) -> Iterator[tuple[int, str, int]]:
    """Return size, kind and seed of the calls of every case."""
    for row in _SMALL:
        if row["dtype"] == dtype:
            yield row["n"], row["kind"], KINDS.index(row["kind"])
    # The sources are templates of the dtype. Without --all, a large size therefore meets normal numbers of float32, or
    # another kind of float64.
    for seed, n in enumerate(LARGE):
        if covering.ALL or (seed % 2 and dtype == "float32"):
            yield n, "normal", seed
        if covering.ALL or (not seed % 2 and dtype == "float64"):
            yield n, KINDS[1 + seed % (len(KINDS) - 1)], seed
    if covering.ALL:
        yield AROUND[dtype], "normal", 0


def sizes(dtype: str) -> Iterator[tuple[int, str, int]]:
    """Return one or two of `plans` per size, for kernels that are already tested with other instructions."""
    for seed, n in enumerate(SMALL + LARGE):
        yield n, "normal", seed
        if n in SMALL:
            yield n, KINDS[1 + seed % (len(KINDS) - 1)], seed
    if covering.ALL:
        yield AROUND[dtype], "normal", 0


_FEW_KINDS = ("zeros", "huge", "denormal", "normal")
_FEW = covering.rows({"n": (0, 1, 9, 65), "kind": _FEW_KINDS, "dtype": native.FLOATS})


def few(dtype: str) -> Iterator[tuple[int, str, int]]:
    """Return a few of `plans`, for a framework that uses the same kernels."""
    for row in _FEW:
        if row["dtype"] == dtype:
            yield row["n"], row["kind"], _FEW_KINDS.index(row["kind"])
    if covering.ALL or dtype == "float32":
        yield 65537, "normal", 0


# --- comparing -----------------------------------------------------------------------------------------------------


def plain(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bits of x, with all NaNs equal."""
    if x.dtype.kind == "f" or x.dtype == DTYPES["bfloat16"]:
        return np.where(np.isnan(x), np.array(np.nan, x.dtype), x)
    return x


def difference(got: Any, wanted: Any) -> str | None:
    """Return the difference between a kernel's result and the reference result, or None if they agree."""
    if isinstance(wanted, Loose):
        bound = 4e-12 * wanted.scale
        close = np.abs(got.value - wanted.value) <= bound + np.abs(wanted.value) * np.finfo(wanted.value.dtype).eps
        if got.value.shape == wanted.value.shape and (close | (got.value == wanted.value)).all():
            return None
        return f"expected {wanted.value} within {bound}, received {got.value}"
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return f"expected {wanted.dtype}{list(wanted.shape)}, received {got.dtype}{list(got.shape)}"
    a, b = plain(got), plain(wanted)
    if a.tobytes() == b.tobytes():
        return None
    a, b = (np.ascontiguousarray(v).reshape(-1) for v in (a, b))
    differs = np.flatnonzero(a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}"))
    at = int(differs[0])
    return f"{differs.size} of {a.size} elements, the first at {at}: expected {b[at]!r}, received {a[at]!r}"
