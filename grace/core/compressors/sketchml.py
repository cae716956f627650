"""SketchML: quantile buckets in a MinMaxSketch, and delta-coded keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from grace.core.codecs.sketch import decode_keys, encode_keys
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError, PayloadError
from grace.core.methods.capabilities import Selecting
from grace.core.methods.compressor import Compressor, keep_count
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.ops.random import hash_words
from grace.core.spec import Array, Field, Payload, TensorSpec


class _Places(NamedTuple):
    """Positions of the keys, in the order of the wire: index in the gradient, list, and bins, one row after another.

    A list holds the keys of one sign and one group of buckets, ascending.
    """

    indices: Array
    lists: Array
    bins: Array
    bin_count: int


@compressors.register(
    "sketchml",
    About(
        family="hybrid",
        adam=False,
        tests=[
            {"compress_ratio": 1.0, "quantiles": 256, "rows": 3, "columns": 0.7},
            {"compress_ratio": 0.2, "quantiles": 2, "groups": 2},
        ],
    ),
)
@dataclass(frozen=True)
class SketchML(Compressor, Selecting):
    r"""SketchML: the largest elements as quantile buckets in a sketch, with delta-coded indices.

    Formula: C(x)_i = \mathrm{sign}(x_i) \, \mathrm{mean}(b'), \quad b' \le b

    b is the quantile bucket of |x_i|, and b' the bucket that the MinMaxSketch returns for it. Of the k = max(1,
    int(compress_ratio * d)) largest magnitudes, those that are not zero are sent. (The ratio 1.0 sends every nonzero
    element, for sparse gradients as the paper assumes.) Each sign has `quantiles` buckets of equal count (at most k),
    by exact quantiles, and a bucket decodes to its mean. The buckets form `groups` of consecutive buckets; each group
    has a sketch with `rows` rows of ceil(columns * keys of the group) bins. Inserting bucket b at h_j(i) in every row j
    keeps the smallest bucket in each bin; a query takes the largest of its bins. So b' is in the group of b and never
    above b: magnitudes shrink where keys collide, and no sign flips.
    Keys travel as differences of 1 to 4 bytes with 2 bits for the width, sorted by sign, group and index, so that the
    order also gives sign and group. The payload has about 2.1 bytes per key at 1 % kept, rows * columns *
    ceil(log2(quantiles / groups)) bits per key for the sketch, and 2 * quantiles means of the working dtype per tensor.
    No contraction: the mean of a bucket can exceed its smaller elements by more than their size.

    Error: 0.91 |x|^2 for normal x; 0.034 |x|^2 with `compress_ratio=1.0`.

    Cost: a partial sort of d elements (not with compress_ratio = 1); on the kept ones two sorts, 2 * rows hashes and a
    dozen passes.

    When: the fewest bytes per kept element, on slow networks. For large sparse gradients: on small tensors the means
    cost too much. GRACE measures a high overhead.

    Reference: Jiang et al., "SketchML: accelerating distributed machine learning with data sketches", SIGMOD 2018. The
    paper approximates the quantiles by a sketch, which only saves time.
    """

    compress_ratio: float = 0.01
    quantiles: int = 64
    groups: int = 8
    rows: int = 2
    columns: float = 0.2

    default_memory = "residual"

    def __post_init__(self) -> None:
        check_ratio("sketchml", self.compress_ratio)
        if self.groups < 1 or not self.groups <= self.quantiles <= 65536 or self.quantiles % self.groups:
            raise ConfigError(
                "sketchml: quantiles must be a multiple of groups and at most 65536, and groups at least 1; "
                f"received quantiles={self.quantiles!r}, groups={self.groups!r}."
            )
        if self.rows < 1 or not self.columns > 0:
            raise ConfigError(
                "sketchml: rows must be at least 1, and columns a positive number of bins per key; "
                f"received {self.rows!r} and {self.columns!r}."
            )

    def unfit(self, spec: TensorSpec) -> str | None:
        if 2 * self.groups * spec.numel >= 2**32:
            return f"keys of {spec.numel} elements in 2 x {self.groups} lists do not fit into 32 bits"
        return None

    def _per_group(self, spec: TensorSpec) -> int:
        """Return the number of buckets in a group; a tensor has no more buckets than kept elements."""
        return max(1, min(self.quantiles, keep_count(self.compress_ratio, spec.numel)) // self.groups)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (
            Field("means", spec.work_dtype, 2 * self.groups * self._per_group(spec)),
            Field("count", "int32", 1),
            Field("widths", "uint8", "widths"),
            Field("keys", "uint8", "keys"),
            Field("sketch", "uint8", "sketch"),
        )

    def _bits(self, spec: TensorSpec) -> int:
        return max(1, (self._per_group(spec) - 1).bit_length())

    def compress(self, x: Array, at: Site) -> Payload:
        ops, n, each = at.ops, at.spec.numel, self._per_group(at.spec)
        top = ops.top_indices(x, keep_count(self.compress_ratio, n))
        values = ops.gather(x, top)
        means, codes = [], []
        for sign, mine in enumerate((values > 0, values < 0)):
            chosen = ops.nonzero(mine)
            buckets, mean = self._buckets(ops, ops.abs(ops.gather(values, chosen)), each)
            means.append(ops.cast(mean, at.spec.work_dtype))
            lists = buckets // each + sign * self.groups
            # One number that sorts by list, then index, and also carries the bucket.
            codes.append((lists * n + ops.cast(ops.gather(top, chosen), "int64")) * each + buckets % each)
        ordered = ops.sort(ops.concat(codes))
        keys = ordered // each
        places = self._places(keys, at)
        inserted = ops.concat([ordered % each] * self.rows)
        sketch = ops.scatter_min_(ops.full(places.bin_count, each - 1, "int64"), places.bins, inserted)
        widths, data = encode_keys(ops, keys)
        return {
            "means": ops.concat(means),
            "count": ops.cast(ops.full(1, ops.length(keys), "int64"), "int32"),
            "widths": widths,
            "keys": data,
            "sketch": ops.pack(sketch, self._bits(at.spec)),
        }

    def _buckets(self, ops: ArrayOps, magnitudes: Array, each: int) -> tuple[Array, Array]:
        """Return the bucket of every magnitude (int64), smallest first and of equal counts, and the means (float64)."""
        number = each * self.groups
        count = ops.length(magnitudes)
        # Equal magnitudes share a bucket. The appended 0 serves empty input, where the edge is never compared.
        ordered = ops.concat([ops.sort(magnitudes), ops.full(1, 0.0, ops.dtype(magnitudes))])
        starts = ops.cast(count, "int64") * (ops.arange(number - 1, "int64") + 1) // number
        edges = ops.gather(ordered, ops.cast(starts, "int32"))
        buckets = ops.search_sorted(edges, magnitudes)
        sums = ops.segment_sum(ops.cast(magnitudes, "float64"), buckets, number)
        counts = ops.segment_sum(ops.full(count, 1.0, "float64"), buckets, number)
        return ops.cast(buckets, "int64"), sums / ops.where(counts > 0, counts, 1.0)

    def _places(self, keys: Array, at: Site) -> _Places:
        ops, total = at.ops, 2 * self.groups
        lists, indices = keys // max(1, at.spec.numel), keys % max(1, at.spec.numel)
        which = ops.cast(lists, "int32")
        counts = ops.segment_sum(ops.full(ops.length(keys), 1.0, "float64"), which, total)
        columns = ops.cast(-ops.floor(counts * -self.columns), "int64")
        ends = ops.cumsum(columns)
        width, start = ops.gather(columns, which), ops.gather(ends - columns, which)
        words = hash_words(ops, indices, self.rows, at.key)
        bins = [start + ops.shift_right(word * width, 32) + ends[-1] * row for row, word in enumerate(words)]
        bin_count = ops.size(ends[-1]) * self.rows
        return _Places(ops.cast(indices, "int32"), which, ops.cast(ops.concat(bins), "int32"), bin_count)

    def _decode(self, payload: Payload, at: Site) -> tuple[Array, Array]:
        """Return the values and their indices."""
        ops, each = at.ops, self._per_group(at.spec)
        count = ops.size(payload["count"][0])
        error = PayloadError(
            "sketchml: expected keys, buckets and a sketch of the tensor, received others; the payload is damaged."
        )
        keys = decode_keys(ops, payload["widths"], payload["keys"], count)
        keys = ops.require(ops.max(keys) < 2 * self.groups * max(1, at.spec.numel), error, keys)
        places = self._places(keys, at)
        packed = ops.cast(packed_size(places.bin_count, self._bits(at.spec)), "int64")
        fits = packed == ops.cast(ops.length(payload["sketch"]), "int64")
        sketch = ops.require(fits, error, payload["sketch"])
        bins = ops.unpack(sketch, self._bits(at.spec), places.bin_count)
        found = ops.reshape(ops.gather(bins, places.bins), (self.rows, count))
        found = ops.require(ops.max(found) < each, error, found)
        bucket = places.lists * each + ops.cast(ops.max(found, axis=0), "int32")
        means = ops.gather(payload["means"], bucket)
        return ops.where(places.lists < self.groups, means, -means), places.indices

    def decompress(self, payload: Payload, at: Site) -> Array:
        return at.ops.desparsify(*self._decode(payload, at), at.spec.numel, at.out)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        values, indices = self._decode(payload, at)
        return at.ops.sparse_sum([-values], [indices], at.spec.numel, onto=x)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        count = at.ops.size(payload["count"][0])
        keys = decode_keys(at.ops, payload["widths"], payload["keys"], count)
        return at.ops.put_(x, at.ops.cast(keys % max(1, at.spec.numel), "int32"), 0.0)
