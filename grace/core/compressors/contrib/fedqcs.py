"""FedQCS: few coarse measurements of the largest elements, from which message passing finds them again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.codecs.levels import bucket_norms, rows_of
from grace.core.codecs.listed import constant_levels, levels_sum, round_packed
from grace.core.codecs.rotation import (
    LONGEST,
    MOST_BITS,
    NORMAL_ERRORS,
    SHORTEST,
    first_of_blocks,
    normal_levels,
    padded,
    parts_of,
    rotate,
    rotated,
    rotated_back,
    rotated_widths,
)
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor, keep_count
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Key, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

_MOST_ROUNDS = 100
# exp(-t) is the value of a fraction at t / 2^8, squared as often; beyond the limit it does not matter.
_SQUARINGS, _MOST_EXPONENT = 8, 60.0
# Steps of Newton's method for a square root of a number from 1 to 10^6 or so.
_NEWTON = 16
# Limits of what a round may conclude: the share of large elements, and how much of its input a denoiser keeps.
_LEAST_SHARE, _MOST_SHARE = 1e-4, 0.9999
_LEAST_KEPT, _MOST_KEPT = 1e-4, 0.95
# The least variance of a large element, in units of the variance of all.
_LEAST_VARIANCE = 1e-6


@compressors.register(
    "fedqcs",
    About(
        family="hybrid",
        adam=True,
        tests=[{"compress_ratio": 0.3, "bits": 1, "reduction": 2, "block_size": 128, "rounds": 3}],
        errors=[{}, {"compress_ratio": 0.1, "reduction": 2}, {"bits": 1, "reduction": 1}],
    ),
)
@dataclass(frozen=True)
class FedQCS(Compressor):
    r"""FedQCS: few coarse measurements of the largest elements of a block; receivers find the elements again.

    Formula: C(x) = g \, \hat{x}(Q(A x_S / \sigma)), \; \hat{x}(z) \approx E[x | z], \; g = \langle x, \hat{x} \rangle /
    \|\hat{x}\|^2

    x_S has the S = max(1, int(compress_ratio N)) largest magnitudes of a block of N = `block_size` elements, and zeros
    elsewhere. A has the first m = max(1, N // reduction) rows of a random rotation (random signs and a Hadamard
    transform, twice). It is the same on all ranks and changes in each step. The measurements A x_S are nearly normal,
    and Q rounds them to the best 2^b levels for normal numbers (Lloyd, Max), with b = `bits`, from 1 to 4. By
    Bussgang's theorem, Q(y) / (1 - D) is y and noise of variance D / (1 - D) that does not depend on it, with the error
    D of the levels.
    Approximate message passing finds the mean of x_S given the codes, in `rounds` rounds. A round estimates a sparse x
    from a noisy copy of it, element by element, and makes a better copy from what the estimate does not explain of the
    measurements. An element is zero or normal (a Bernoulli-Gaussian prior). A round takes the share of large elements
    and their variance from the round before (expectation maximization). The sender does the same, and sends the factor
    g with the least error, so the error never exceeds |x|^2. A block sends one float of the working dtype. The last
    block is filled with zeros to a power of two.

    Error: 0.72 |x|^2 for normal x; 0.57 |x|^2 with `compress_ratio=0.1`, `reduction=2`.

    Cost: decoding takes about two rotations and thirty operations per element in each of the `rounds`. Every payload is
    decoded when it is made, for the residual, and by each receiver.

    When: a few per cent of the elements in 1 bit per element of the tensor or less, on slow links. `topk` with codings
    sends them exactly for twice the bytes.

    Reference: Oh et al., "Communication-efficient federated learning via quantized compressed sensing", IEEE Trans.
    Wireless Commun. 2023; Vila and Schniter, "Expectation-maximization Gaussian-mixture approximate message passing",
    IEEE Trans. Signal Process. 2013; Rangan et al., "Vector approximate message passing", IEEE Trans. Inf. Theory 2019
    (for rows of a rotation, in place of independent normal numbers). The prior has one Gaussian. Payloads are decoded
    one by one. The paper also decodes their mean at once, but that is not the mean of what each rank takes for sent, so
    residuals would be wrong.
    """

    compress_ratio: float = 0.05
    reduction: int = 3
    bits: int = 3
    block_size: int = 4096
    rounds: int = 10

    default_memory = "residual"
    linear_in = ("scales",)

    def __post_init__(self) -> None:
        check_ratio("fedqcs", self.compress_ratio)
        if not 1 <= self.bits <= MOST_BITS:
            raise ConfigError(f"fedqcs: bits must be a number from 1 to {MOST_BITS}, received {self.bits!r}.")
        if not SHORTEST <= self.block_size <= LONGEST or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"fedqcs: block_size must be a power of two from {SHORTEST} to {LONGEST}, received {self.block_size!r}."
            )
        if not 1 <= self.reduction <= SHORTEST:
            raise ConfigError(
                f"fedqcs: reduction must be a number of elements per measurement from 1 to {SHORTEST}, received "
                f"{self.reduction!r}."
            )
        if not 1 <= self.rounds <= _MOST_ROUNDS:
            raise ConfigError(f"fedqcs: rounds must be a number from 1 to {_MOST_ROUNDS}, received {self.rounds!r}.")

    def contraction(self, spec: TensorSpec) -> float | None:
        return 0.0

    def _measured(self, n: int) -> list[int]:
        """Return the number of measurements of each block."""
        return [measurements(width, self.reduction) for width in rotated_widths(n, self.block_size)]

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        measured = self._measured(spec.numel)
        codes = packed_size(sum(measured), self.bits)
        return Field("scales", spec.work_dtype, len(measured)), Field("codes", "uint8", codes, bits=self.bits)

    def compress(self, x: Array, at: Site) -> Payload:
        ops, dtype, measured = at.ops, at.spec.work_dtype, self._measured(at.spec.numel)
        if not measured:
            return {"scales": ops.zeros(0, dtype), "codes": ops.zeros(0, "uint8")}
        largest = ops.max_abs(x)
        # Below 1, so that no square overflows.
        x = x / ops.where(largest > 0, largest, 1.0)
        sparse = largest_of_blocks(ops, x, self.block_size, self.compress_ratio)
        y = first_of_blocks(ops, rotate(ops, sparse, self.block_size, at.key), self.block_size, measured)
        width = measured[0]
        # The last block may have fewer measurements than the others.
        roots = [1 / math.sqrt(m) for m in (width, measured[-1])]
        factors = ops.concat([ops.full(len(measured) - 1, roots[0], dtype), ops.full(1, roots[1], dtype)])
        deviations = bucket_norms(ops, y, width, "l2") * factors
        codes = round_packed(ops, y, deviations, self._levels(at), width, None, at.out)
        return {"scales": self._fit(x, self._found(codes, at), at) * largest, "codes": codes}

    def _fit(self, x: Array, found: Array, at: Site) -> Array:
        """Return the factor with the least error for every block."""
        ops = at.ops
        a, b = (rows_of(ops, ops.cast(values, "float64"), self.block_size) for values in (x, found))
        squares = ops.sum(b * b, axis=1)
        factors = ops.sum(a * b, axis=1) / ops.where(squares > 0, squares, 1.0)
        return ops.cast(factors, at.spec.work_dtype)

    def _found(self, codes: Array, at: Site) -> Array:
        """Return the elements that the codes of their measurements stand for, in units of their deviation."""
        ops, measured, noise = at.ops, self._measured(at.spec.numel), NORMAL_ERRORS[self.bits]
        width, count = measured[0], sum(measured)
        ones = ops.full(len(measured), 1 / (1 - noise), at.spec.work_dtype)
        z = levels_sum(ops, [codes], [ones], [self._levels(at)], width, count)
        return recover_sparse(
            ops,
            z,
            at.spec.numel,
            self.block_size,
            self.reduction,
            self.rounds,
            self.compress_ratio,
            noise / (1 - noise),
            at.key,
        )

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        ops, n, total = at.ops, at.spec.numel, None
        for payload in payloads:
            if n == 0:
                return ops.zeros(0, at.spec.work_dtype)
            rows = rows_of(ops, self._found(payload["codes"], at), self.block_size)
            total = plus(ops, total, ops.reshape(rows * ops.reshape(payload["scales"], (-1, 1)), (-1,))[:n])
        return total

    def _levels(self, at: Site) -> Array:
        return constant_levels(at.ops, normal_levels(self.bits), at.spec.work_dtype)


def measurements(width: int, reduction: int) -> int:
    """Return the number of measurements of a block."""
    return max(1, width // reduction)


@composite(one_graph=True)
def largest_of_blocks(ops: ArrayOps, x: Array, block: int, ratio: float) -> Array:
    """Return x with zeros in place of all but the largest magnitudes of every block; of equal ones it keeps all.

    A block keeps max(1, int(ratio * d)) of the d elements that it is rotated as.
    """
    widths = rotated_widths(ops.length(x), block)
    if not widths:
        return x
    rows = rows_of(ops, x, block)
    ordered = ops.sort(ops.abs(rows))
    kept = [keep_count(ratio, width) for width in (widths[0], widths[-1])]
    least = ops.concat([ordered[:-1, block - kept[0]], ordered[-1:, block - kept[1]]])
    sparse = ops.where(ops.abs(rows) >= ops.reshape(least, (-1, 1)), rows, 0.0)
    return ops.reshape(sparse, (-1,))[: ops.length(x)]


@largest_of_blocks.kernel()
def _(ops: Native, x: Array, block: int, ratio: float) -> Array | None:
    dtype, n = ops.floating(x), ops.length(x)
    if dtype is None or not n:
        return None
    kept = [keep_count(ratio, width) for width in (block, rotated_widths(n, block)[-1])]
    return ops.run("largest_of_blocks", [x], [block, *kept], outputs=[dtype], lengths=[n])[0]


@composite(one_graph=True)
def recover_sparse(
    ops: ArrayOps,
    z: Array,
    n: int,
    block: int,
    reduction: int,
    rounds: int,
    share: float,
    noise: float,
    key: Key,
) -> Array:
    """Return n elements from noisy measurements of them: estimates of sparse blocks by approximate message passing.

    z has the first measurements(d) elements of every rotated block of d elements, with noise of this variance. `share`
    of the elements are expected to be large in the first round.
    """
    found, done = [ops.zeros(0, ops.dtype(z))], 0
    for first, rows, width in parts_of(n, block):
        m = measurements(width, reduction)
        part = ops.reshape(z[done : done + rows * m], (rows, m))
        found.append(_recovered(ops, part, first, rows, m, width, rounds, share, noise, key))
        done += rows * m
    return ops.concat(found)[:n]


@recover_sparse.kernel()
def _(
    ops: Native,
    z: Array,
    n: int,
    block: int,
    reduction: int,
    rounds: int,
    share: float,
    noise: float,
    key: Key,
) -> Array | None:
    dtype = ops.floating(z)
    if dtype is None:
        return None
    integers = [n, block, reduction, rounds, *ops.key_integers(key)]
    return ops.run("recover_sparse", [z], integers, [share, noise], outputs=[dtype], lengths=[n])[0]


def _recovered(
    ops: ArrayOps,
    z: Array,
    first: int,
    rows: int,
    m: int,
    width: int,
    rounds: int,
    share: float,
    noise: float,
    key: Key,
) -> Array:
    """Return the estimates of blocks of `width` elements, whose m measurements are the rows of z."""
    dtype, per = ops.dtype(z), width / m

    def sums(values: Array) -> Array:
        """Return the sums of the rows, added in float64."""
        return ops.reshape(ops.cast(ops.sum(ops.cast(values, "float64"), axis=1), dtype), (rows, 1))

    def back(values: Array) -> Array:
        """Return `per` times the transpose of A, applied to measurements."""
        filled = padded(ops, ops.reshape(values, (-1,)), rows, m, width)
        return ops.reshape(rotated_back(ops, filled, first, width, key), (rows, width)) * per

    def forth(values: Array) -> Array:
        """Return A, applied to elements."""
        return ops.reshape(rotated(ops, ops.reshape(values, (-1,)), first, width, key), (rows, width))[:, :m]

    energy = sums(z * z) / m
    variance = ops.where(energy - noise > energy * 1e-3, energy - noise, energy * 1e-3)
    large = ops.reshape(ops.full(rows, share, dtype), (rows, 1))
    size, error = variance / share, variance * (per - 1) + noise * per
    copy = back(z)
    for more in reversed(range(rounds)):
        both = size + error
        kept = size / both
        power = copy * copy * (size / (both * error) * 0.5)
        odds = (1.0 - large) / large * _root(ops, both / error) * _decayed(ops, power)
        chance = 1.0 / (odds + 1.0)
        mean = copy * kept
        estimate = chance * mean
        if not more:
            break
        second = chance * (mean * mean + kept * error)
        spread = sums(second - estimate * estimate) / width
        trust = ops.clip(spread / error, _LEAST_KEPT, _MOST_KEPT)
        chances = sums(chance)
        large = ops.clip(chances / width, _LEAST_SHARE, _MOST_SHARE)
        size = sums(second) / chances
        size = ops.where(size > _LEAST_VARIANCE, size, _LEAST_VARIANCE)
        # Without the part of the copy that the estimate only repeats.
        fresh = (estimate - copy * trust) / (1.0 - trust)
        error = error * trust / (1.0 - trust)
        gain = error / (error + noise) / per
        copy = fresh + back(z - forth(fresh))
        error = error * (1.0 - gain) / gain
    return ops.reshape(estimate, (-1,))


def _decayed(ops: ArrayOps, t: Array) -> Array:
    """Return exp(-t) for t from 0 on, in the same operations everywhere: frameworks round theirs differently."""
    h = ops.where(t < _MOST_EXPONENT, t, _MOST_EXPONENT) * 2.0**-_SQUARINGS
    square = h * h * (1 / 12)
    result = (1.0 - h * 0.5 + square) / (1.0 + h * 0.5 + square)
    for _ in range(_SQUARINGS):
        result = result * result
    return result


def _root(ops: ArrayOps, x: Array) -> Array:
    """Return the square root of numbers from 1 on, by Newton's method: there are few of them, one per block."""
    root = (x + 1.0) * 0.5
    for _ in range(_NEWTON):
        root = (root + x / root) * 0.5
    return root
