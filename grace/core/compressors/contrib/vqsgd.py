"""Vector-quantized SGD: vertices of a cross-polytope in place of the elements of a bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from grace.core.codecs.buckets import BucketQuantizer
from grace.core.codecs.levels import bucket_norms, rows_of
from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import beyond_int32
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Key, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# Shares of the norm are multiples of 1 / _UNIT, so that their sums are exact and all frameworks draw equal vertices.
_UNIT = 1 << 24
# A code of a sign and an index has at most 16 bits.
_MOST = 1 << 15
# The random stream of the vertices that make up for a small |x|_1. The others are drawn from stream 0.
_REST = 1


@compressors.register(
    "vqsgd",
    About(
        family="quantization",
        adam=False,
        tests=[{"bucket_size": 8, "samples": 3, "norm": "l2"}],
        errors=[{}, {"norm": "l2"}, {"bucket_size": 512}],
    ),
)
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

    Cost: one pass for the norms, and one that adds up the magnitudes of a bucket and searches it for each vertex; no
    sorting, no state.

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
        if not ops.length(norms):
            return {"norms": norms, "codes": ops.zeros(0, "uint8")}
        least = math.isqrt(width * _UNIT**2) if self.norm == "l2" else 0
        codes, mass = draw_vertices(ops, x, norms, width, self.samples, least, at.private_key)
        if self.norm == "l1":
            sums = ops.cast(norms, "float64") * (ops.cast(mass, "float64") * (1 / _UNIT))
            norms = ops.cast(sums, at.spec.work_dtype)
        return {"norms": norms, "codes": ops.pack(codes, self.bits)}

    def _scale(self, payload: Payload, at: Site) -> Array:
        reach = math.sqrt(self.bucket_size) if self.norm == "l2" else 1.0
        return payload["norms"] * at.ops.cast(reach / self.samples, at.spec.work_dtype)

    def _sum(self, payloads: Sequence[Payload], scales: list[Array], at: Site, onto: Array | None = None) -> Array:
        ops, n = at.ops, at.spec.numel
        codes = [ops.unpack(payload["codes"], self.bits, self._vertices(n)) for payload in payloads]
        return vertices_sum(ops, codes, scales, self.bucket_size, self.samples, n, onto, at.out)


@composite(one_graph=True)
def draw_vertices(
    ops: ArrayOps, x: Array, norms: Array, width: int, samples: int, least: int, key: Key
) -> tuple[Array, Array]:
    """Return the codes of `samples` vertices per bucket of x, and |x|_1 of each bucket in units of norm / 2^24 (int64).

    `norms` are those of the buckets. A vertex is a point from 0 to R, where the elements of the bucket lie in a row by
    their magnitudes. R is |x|_1, or `least` units if these are more; what is drawn beyond |x|_1 is any vertex. A code
    is the element's index within its bucket, plus `width` if its sign is negative.
    """
    rows, buckets = rows_of(ops, x, width), ops.length(norms)
    share = ops.abs(rows) / ops.reshape(ops.where(norms > 0, norms, 1.0), (-1, 1))
    ends = ops.cumsum(ops.reshape(ops.cast(ops.floor(share * float(_UNIT)), "int64"), (-1,)))
    totals = ops.reshape(ends, (buckets, width))[:, -1]
    starts = ops.concat([ops.zeros(1, "int64"), totals[:-1]])
    mass = totals - starts
    # Rounding can raise the sum of the shares above `least`.
    reach = ops.where(mass < least, least, mass)
    words = ops.reshape(ops.words(buckets * samples, key), (buckets, samples))
    points = ops.shift_right(ops.shift_right(words, 1) * ops.reshape(reach, (-1, 1)), 31)
    places = ops.cast(ops.search_sorted(ends, ops.reshape(points + ops.reshape(starts, (-1, 1)), (-1,))), "int64")
    first = _firsts(ops, buckets, samples, width)
    # An empty bucket has none.
    codes = ops.clip(places - first, 0, width - 1)
    signs = ops.gather(ops.reshape(rows, (-1,)), ops.cast(first + codes, "int32"))
    codes = ops.where(signs < 0, codes + width, codes)
    if least:
        others = ops.shift_right(ops.words(buckets * samples, key, _REST), 32 - width.bit_length())
        codes = ops.where(ops.reshape(points < ops.reshape(mass, (-1, 1)), (-1,)), codes, others)
    return codes, mass


@draw_vertices.kernel()
def _(
    ops: Native, x: Array, norms: Array, width: int, samples: int, least: int, key: Key
) -> tuple[Array, Array] | None:
    if ops.floating(x) is None:
        return None
    buckets = ops.length(norms)
    integers, lengths = [width, samples, least, *ops.key_integers(key)], [buckets * samples, buckets]
    codes, mass = ops.run("draw_vertices", [x, norms], integers, outputs=["int64", "int64"], lengths=lengths)
    return codes, mass


@composite(one_graph=True)
def vertices_sum(
    ops: ArrayOps,
    codes: Sequence[Array],
    scales: Sequence[Array],
    width: int,
    samples: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the sum over payloads of scale times how often each of n elements was drawn, with its sign.

    `codes` are those of `draw_vertices`. `onto` is an array that the sum starts from and consumes; without it the first
    payload starts the sum.
    """
    buckets, bits = ops.length(scales[0]), width.bit_length()
    first = _firsts(ops, buckets, samples, width)
    for drawn, scale in zip(codes, scales, strict=True):
        places = ops.cast(first + ops.bit_and(drawn, width - 1), "int32")
        signs = ops.cast(1 - 2 * ops.bit_and(ops.shift_right(drawn, bits - 1), 1), ops.dtype(scale))
        counts = ops.reshape(ops.segment_sum(signs, places, buckets * width), (buckets, width))
        onto = plus(ops, onto, ops.reshape(counts * ops.reshape(scale, (-1, 1)), (-1,))[:n])
    return onto


@vertices_sum.kernel()
def _(
    ops: Native,
    codes: Sequence[Array],
    scales: Sequence[Array],
    width: int,
    samples: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array | None:
    integers = [len(codes), width, samples, n]
    return ops.total("vertices_sum", [*codes, *scales], integers, n, ops.dtype(scales[0]), onto, out=out)


def _firsts(ops: ArrayOps, buckets: int, samples: int, width: int) -> Array:
    """Return for each vertex the index of its bucket's first element."""
    return (ops.arange(buckets * samples, "int64") // samples) * width
