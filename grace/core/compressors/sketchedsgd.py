"""Sketched-SGD: the largest elements of the summed gradient, found in a Count-Sketch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.capabilities import Negotiating
from grace.core.methods.compressor import Sparsifier, keep_count
from grace.core.methods.site import Proposal, Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.random import hash_words
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Key, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# A Count-Sketch hashes blocks of this many consecutive elements; its columns are a multiple of it.
SKETCH_BLOCK = 16


@compressors.register(
    "sketchedsgd",
    About(
        family="sparsification",
        adam=False,
        tests=[
            {"compress_ratio": 0.1, "rows": 3, "columns_per_k": 0.5},
            {"rows": 1, "columns_per_k": 20.0, "candidates": 1},
        ],
        # As for dgc. Sketches find large coordinates later than exact magnitudes would.
        digits=Setting(lr=0.1, momentum=0.0, options={"memory": "dgc", "momentum": 0.9}),
    ),
)
@dataclass(frozen=True)
class SketchedSGD(Sparsifier, Negotiating):
    r"""Sketched-SGD: the k largest elements of the summed gradient, found in a Count-Sketch that allreduce adds.

    Formula: C(x)_i = x_i \, 1_{i \in K}, \; K = \mathrm{top}_k |e|, \; e_i = \mathrm{median}_j \, s_j(i) S[j, h_j(i)]

    Each rank adds x to a table: S[j, h_j(i)] += s_j(i) x_i, with random buckets h_j and signs s_j. The table has `rows`
    rows and columns_per_k * k columns, rounded up to a multiple of 16. Sketches are linear, so an allreduce adds them,
    and all ranks find the same heavy hitters, even those that are large on no single rank. A second allreduce adds the
    exact values of the `candidates` * k elements with the largest estimates; `k = max(1, int(compress_ratio * d))`. The
    paper keeps the best k of these candidates. Here all of them are applied, and a wrong guess costs only its place.
    The hashes are redrawn in every step, so that no coordinate stays hidden behind the same collision. Blocks of 16
    elements are hashed together, for speed; this is not in the paper. Two elements of one block never collide, others
    as often as with separate hashes (`count_sketch` gives the reasons).
    A row errs by more than c |x| / sqrt(columns) with probability at most p = 1/c^2, and the median only if more than
    half of the rows do: 1.2 % for c = 3 and 5 rows. Nothing else is lost: |x - C(x)| <= |x|. A rank sends rows *
    columns + candidates * k values (5 * 2 k + 4 k by default: 14 % of the dense gradient), whatever the number of
    ranks. Of k elements of 8 standard deviations in the sum of normal gradients, 62 % are among the candidates by
    default, and 29 % with `candidates=1`.

    Error: 0.95 |x|^2 for normal x; 0.99 |x|^2 with `candidates=1`.

    Cost: in both rounds two hashes per row and 16 elements; a segment sum and a gather per row; a sort of `rows`
    numbers per element, and a partial sort. This is several times the cost of topk. Without kernels the buffers take 2
    rows + 2 arrays of the gradient's size.

    When: many ranks, because allreduce adds the sketches. So the bytes hardly grow with the ranks. On up to 8 ranks
    topk sends less. It works with the memory dgc as in the paper (momentum correction and masking; then set the
    optimizer's momentum to 0).

    Reference: Ivkin et al., "Communication-efficient distributed SGD with sketching", NeurIPS 2019.
    """

    compress_ratio: float = 0.01
    rows: int = 5
    columns_per_k: float = 2.0
    candidates: int = 4

    summable = True

    def __post_init__(self) -> None:
        check_ratio("sketchedsgd", self.compress_ratio)
        if self.rows < 1 or self.rows % 2 == 0:
            raise ConfigError(f"sketchedsgd: rows must be odd, so that there is a median; received {self.rows!r}.")
        if not self.columns_per_k > 0:
            raise ConfigError(f"sketchedsgd: columns_per_k must be positive, received {self.columns_per_k!r}.")

        if self.candidates < 1:
            raise ConfigError(
                f"sketchedsgd: candidates (per element to keep) must be at least 1, received {self.candidates!r}."
            )

    def _sent(self, spec: TensorSpec) -> int:
        """Return the number of elements that are exchanged."""
        return min(spec.numel, self.candidates * keep_count(self.compress_ratio, spec.numel))

    def _columns(self, spec: TensorSpec) -> int:
        wanted = self.columns_per_k * keep_count(self.compress_ratio, spec.numel)
        return SKETCH_BLOCK * math.ceil(wanted / SKETCH_BLOCK)

    def unfit(self, spec: TensorSpec) -> str | None:
        sent = self.rows * self._columns(spec) + self._sent(spec)
        if sent >= spec.numel:
            return f"a sketch of {self.rows} x {self._columns(spec)} and its values are no smaller than the tensor"
        return super().unfit(spec)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        k = self._sent(spec)
        return Field("values", spec.work_dtype, k), Field("indices", "int32", k, wire=False)

    def proposed(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("sketch", spec.work_dtype, self.rows * self._columns(spec)),)

    def propose(self, x: Array, at: Site) -> Proposal:
        return Proposal(count_sketch(at.ops, x, self.rows, self._columns(at.spec), at.key), "sum")

    def estimate(self, at: Site) -> Array:
        """Return the estimate of every element of the sum, from the negotiated sketch."""
        return sketch_estimate(at.ops, at.negotiated, at.spec.numel, self.rows, self._columns(at.spec), at.key)

    def compress(self, x: Array, at: Site) -> Payload:
        indices = at.ops.top_indices(self.estimate(at), self._sent(at.spec))
        return {"values": at.ops.gather(x, indices), "indices": indices}


@composite(one_graph=True)
def count_sketch(ops: ArrayOps, x: Array, rows: int, columns: int, key: Key) -> Array:
    """Return rows of `columns` buckets, one after another: S[j, h_j(i)] += s_j(i) x_i, with hashes from the key.

    Element 16 b + l is lane l of block b. Blocks are hashed, not elements. This is for speed and not in the paper:
    a block is one place in memory, while 16 elements with separate hashes have 16. A word of `hash_words` for b
    gives a column c_j(b), uniform in [0, columns) (up to 2^-32), and h_j(i) = c_j(b) xor l: the 16 elements take
    the 16 columns around c_j(b), each its own. s_j(i) is bit 16 + l of another word, negative where it is set.
    Elements of one block never collide. Elements of two blocks collide if c_j(b') = c_j(b) xor l xor l', which has
    probability 1 / columns because the words of two blocks are independent. The signs of any two elements are
    independent, too, and signs are independent of columns. Therefore a row's error has mean 0 and variance (|x|^2 -
    |block of i|^2) / columns, no more than with hashes of the elements; only the errors of neighbors are
    correlated.
    A bucket is added in float64 and rounded once. Raises ValueError unless columns is a multiple of 16.
    """
    found = hashes(ops, ops.length(x), rows, columns, key)
    return ops.concat([ops.segment_sum(ops.where(odd, -x, x), bucket, columns) for bucket, odd in found])


@count_sketch.kernel()
def _(ops: Native, x: Array, rows: int, columns: int, key: Key) -> Array | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    integers, lengths = [rows, columns, *ops.key_integers(key)], [rows * columns]
    return ops.run("count_sketch", [x], integers, outputs=[dtype], lengths=lengths)[0]


@composite(one_graph=True)
def sketch_estimate(ops: ArrayOps, sketch: Array, n: int, rows: int, columns: int, key: Key) -> Array:
    """Return median_j s_j(i) S[j, h_j(i)] for n elements, from an odd number of rows.

    The result is finite: a median that overflowed or is NaN counts as large (1e38, in float64 1e307).
    """
    found = []
    for j, (bucket, odd) in enumerate(hashes(ops, n, rows, columns, key)):
        values = ops.gather(sketch[j * columns : (j + 1) * columns], bucket)
        found.append(ops.where(odd, -values, values))
    median = ops.sort(ops.stack(found, axis=1))[:, rows // 2]
    # The order of 0 and -0 differs between sorts.
    median = ops.where(median == 0, 0.0, median)
    most = 1e38 if ops.dtype(sketch) == "float32" else 1e307
    return ops.where(ops.abs(median) < most, median, most)


@sketch_estimate.kernel()
def _(ops: Native, sketch: Array, n: int, rows: int, columns: int, key: Key) -> Array | None:
    dtype = ops.floating(sketch)
    if dtype is None:
        return None
    integers = [n, rows, columns, *ops.key_integers(key)]
    return ops.run("sketch_estimate", [sketch], integers, outputs=[dtype], lengths=[n])[0]


def hashes(ops: ArrayOps, n: int, rows: int, columns: int, key: Key) -> Iterator[tuple[Array, Array]]:
    """Yield for each row the bucket of every element, and whether its sign is negative."""
    if columns % SKETCH_BLOCK != 0:
        raise ValueError(f"sketch: expected a multiple of {SKETCH_BLOCK} columns, received {columns}.")
    element = ops.arange(n, "int64")
    lane, block = ops.bit_and(element, SKETCH_BLOCK - 1), ops.shift_right(element, SKETCH_BLOCK.bit_length() - 1)
    words = hash_words(ops, block, 2 * rows, key)
    for column, signs in zip(words[:rows], words[rows:], strict=True):
        bucket = ops.bit_xor(ops.shift_right(column * columns, 32), lane)
        sign = ops.bit_and(ops.shift_right(signs, SKETCH_BLOCK + lane), 1)
        yield ops.cast(bucket, "int32"), sign == 1
