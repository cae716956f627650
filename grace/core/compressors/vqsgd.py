"""Vector-quantized SGD: vertices of a cross-polytope in place of the elements of a bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grace.core.methods.buckets import BucketQuantizer
from grace.core.methods.compressor import beyond_int32
from grace.core.methods.levels import bucket_norms, rows_of
from grace.core.ops.base import packed_size
from grace.core.ops.composites import plus
from grace.core.values.errors import ConfigError
from grace.core.values.registry import compressors
from grace.core.values.spec import Array, Field, Payload, Site, TensorSpec

# Shares of the norm are multiples of 1 / _UNIT, so that their sums are exact and all frameworks draw equal vertices.
_UNIT = 1 << 24
# A code of a sign and an index has at most 16 bits.
_MOST = 1 << 15
# The random stream of the vertices that make up for a small |x|_1. The others are drawn from stream 0.
_REST = 1


@compressors.register("vqsgd")
@dataclass(frozen=True)
class VQSGD(BucketQuantizer):
    r"""Vector-quantized SGD (vqSGD): a few random vertices of a cross-polytope per bucket, and one norm.

    Formula: C(x) = \frac{1}{s} \sum_{j=1}^{s} R \, \mathrm{sign}(x_{i_j}) e_{i_j}, \; P(i_j = i) = |x_i| / R, \; R =
    \|x\|_1

    A bucket of d = `bucket_size` elements is a mean of the vertices +-R e_i of a cross-polytope. s = `samples` of them
    are drawn, independently, and their signs and indices sent. `norm="l1"`: R = |x|_1, and the variance is (|x|_1^2 -
    |x|^2) / s. `norm="l2"`, as in the paper: R = sqrt(d) |x|, the least that is enough for all x of this norm. The part
    of R beyond |x|_1 goes to all 2 d vertices alike, and these cancel in the mean. The variance is then (d - 1) |x|^2 /
    s, which is never less. Unbiased. d is a power of two. A vertex takes 1 + log2(d) bits, and each bucket one float of
    the working dtype.

    Error: 2.5 |x|^2 for normal x; 3.9 |x|^2 with `norm="l2"`.

    Cost: one pass for the norms, some ten small passes, a cumulative sum, and a search for each vertex; no sorting, no
    state. There is no kernel for all of it.

    When: less than a bit per element without a memory, by few samples of large buckets, where the variance does no
    harm: many ranks, or large batches. At 2 bits and more `eden` has a small part of the variance.

    Reference: Gandikota et al., "vqSGD: vector quantized stochastic gradient descent", AISTATS 2021 (the scheme of the
    cross-polytope, repeated).
    """

    bucket_size: int = 64
    samples: int = 16
    norm: Literal["l1", "l2"] = "l1"

    unbiased = True

    def __post_init__(self) -> None:
        if not 2 <= self.bucket_size <= _MOST or self.bucket_size & (self.bucket_size - 1):
            raise ConfigError(
                f"vqsgd: bucket_size must be a power of two from 2 to {_MOST}, received {self.bucket_size!r}."
            )
        if self.samples < 1:
            raise ConfigError(f"vqsgd: samples must be a number of vertices of at least 1, received {self.samples!r}.")

    @property
    def bits(self) -> int:
        """Bits per vertex: 1 + log2(d)."""
        return self.bucket_size.bit_length()

    def unfit(self, spec: TensorSpec) -> str | None:
        return beyond_int32(spec)

    def _vertices(self, n: int) -> int:
        return -(-n // self.bucket_size) * self.samples

    @property
    def of_any_length(self) -> bool:
        # Its sizes are computed in Python.
        return False

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        norms, codes = super().wire(spec)
        return norms, codes._replace(length=packed_size(self._vertices(spec.numel), self.bits))

    def compress(self, x: Array, at: Site) -> Payload:
        ops, width = at.ops, self.bucket_size
        norms = bucket_norms(ops, x, width, "l2")
        buckets = ops.length(norms)
        if not buckets:
            return {"norms": norms, "codes": ops.zeros(0, "uint8")}
        rows = rows_of(ops, x, width)
        share = ops.abs(rows) / ops.reshape(ops.where(norms > 0, norms, 1.0), (-1, 1))
        ends = ops.cumsum(ops.reshape(ops.cast(ops.floor(share * float(_UNIT)), "int64"), (-1,)))
        totals = ops.reshape(ends, (buckets, width))[:, -1]
        starts = ops.concat([ops.zeros(1, "int64"), totals[:-1]])
        mass = totals - starts
        reach = mass if self.norm == "l1" else self._least(mass, at)
        # A point on the way from 0 to R. Where it lies within |x|_1, it belongs to an element.
        words = ops.reshape(ops.words(self._vertices(at.spec.numel), at.private_key), (buckets, self.samples))
        points = ops.shift_right(ops.shift_right(words, 1) * ops.reshape(reach, (-1, 1)), 31)
        places = ops.cast(ops.search_sorted(ends, ops.reshape(points + ops.reshape(starts, (-1, 1)), (-1,))), "int64")
        # An empty bucket has none.
        first = self._firsts(buckets, at)
        codes = ops.clip(places - first, 0, width - 1)
        signs = ops.gather(ops.reshape(rows, (-1,)), ops.cast(first + codes, "int32"))
        codes = ops.where(signs < 0, codes + width, codes)
        if self.norm == "l2":
            others = ops.shift_right(ops.words(self._vertices(at.spec.numel), at.private_key, _REST), 32 - self.bits)
            codes = ops.where(ops.reshape(points < ops.reshape(mass, (-1, 1)), (-1,)), codes, others)
        else:
            sums = ops.cast(norms, "float64") * (ops.cast(mass, "float64") * (1 / _UNIT))
            norms = ops.cast(sums, at.spec.work_dtype)
        return {"norms": norms, "codes": ops.pack(codes, self.bits)}

    def _least(self, mass: Array, at: Site) -> Array:
        # Rounding can raise the sum of the shares above sqrt(d).
        least = math.isqrt(self.bucket_size * _UNIT**2)
        return at.ops.where(mass < least, least, mass)

    def _firsts(self, buckets: int, at: Site) -> Array:
        """Return for each vertex the index of its bucket's first element."""
        count = at.ops.arange(buckets * self.samples, "int64")
        return (count // self.samples) * self.bucket_size

    def _scale(self, payload: Payload, at: Site) -> Array:
        reach = math.sqrt(self.bucket_size) if self.norm == "l2" else 1.0
        return payload["norms"] * at.ops.cast(reach / self.samples, at.spec.work_dtype)

    def _sum(self, payloads: Sequence[Payload], scales: list[Array], at: Site, onto: Array | None = None) -> Array:
        ops, width, buckets = at.ops, self.bucket_size, at.ops.length(scales[0])
        first = self._firsts(buckets, at)
        for payload, scale in zip(payloads, scales, strict=True):
            codes = ops.unpack(payload["codes"], self.bits, buckets * self.samples)
            places = ops.cast(first + ops.bit_and(codes, width - 1), "int32")
            signs = ops.cast(1 - 2 * ops.shift_right(codes, self.bits - 1), at.spec.work_dtype)
            counts = ops.reshape(ops.segment_sum(signs, places, buckets * width), (buckets, width))
            values = counts * ops.reshape(scale, (-1, 1))
            onto = plus(ops, onto, ops.reshape(values, (-1,))[: at.spec.numel])
        return onto
