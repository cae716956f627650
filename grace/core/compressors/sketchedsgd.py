"""Sketched-SGD: heavy hitters of the sum of all gradients, found in a Count-Sketch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace.core.compressor import Sparsifier, keep_count
from grace.core.compressors.topk import check_ratio
from grace.core.errors import ConfigError
from grace.core.ops.composites import SKETCH_BLOCK
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Proposal, Site, TensorSpec


@compressors.register("sketchedsgd")
@dataclass(frozen=True)
class SketchedSGD(Sparsifier):
    """C(x) = x at the k largest |estimate| of sum_i x_i from the sum of Count-Sketches: one set for all ranks.

    S[j, h_j(i)] += s_j(i) x_i in a table of `rows` times columns = columns_per_k * k, rounded up to a multiple of 16,
    with random buckets h_j and signs s_j; est_i = median_j s_j(i) S[j, h_j(i)]. Sketches are linear, so an allreduce
    adds them, and all ranks find the same heavy hitters, also those that no rank sees alone. Then the exact values
    there are added by a second allreduce; k = max(1, int(compress_ratio * d)). The paper asks for the values of P k
    candidates and keeps the best k; here every value that was exchanged is applied, and a wrong guess costs a place
    only. Hashes are drawn anew in every step, so that a coordinate is not hidden by the same collision for ever.
    Blocks of 16 elements are hashed, for speed and not in the paper: two elements of one block never collide, others
    as often as with hashes of their own (`ArrayOps.count_sketch` has the reasons).
    A row errs by more than c |x| / sqrt(columns) with probability at most p = 1/c^2, the median with at most that of
    more than half of the rows: 1.2 % for c = 3 and 5 rows. Nothing is lost beside that: |x - C(x)| <= |x|. Sends
    rows * columns + k values (5 * 2 k + k with the defaults: 11 % of dense) whatever the number of ranks.

    Cost: in both rounds two hashes per row and 16 elements; a segment sum and a gather per row; a sort of `rows`
    numbers per element, and a partial sort: several times topk. Without kernels buffers of 2 rows + 2 arrays of the
    gradient's size.
    When: many ranks, where gathering topk's entries grows with their number. With few, topk sends less. Works with
    the memory dgc as in the paper (momentum correction, masking; the optimizer then without momentum). Ivkin et al.,
    "Communication-efficient distributed SGD with sketching", NeurIPS 2019.
    """

    compress_ratio: float = 0.01
    rows: int = 5
    columns_per_k: float = 2.0

    summable = True

    def __post_init__(self) -> None:
        check_ratio("sketchedsgd", self.compress_ratio)
        if self.rows < 1 or self.rows % 2 == 0:
            raise ConfigError(f"sketchedsgd: rows must be odd, so that one is the median; received {self.rows!r}.")
        if not self.columns_per_k > 0:
            raise ConfigError(f"sketchedsgd: columns_per_k must be positive, received {self.columns_per_k!r}.")

    def _columns(self, spec: TensorSpec) -> int:
        wanted = self.columns_per_k * keep_count(self.compress_ratio, spec.numel)
        return SKETCH_BLOCK * math.ceil(wanted / SKETCH_BLOCK)

    def unfit(self, spec: TensorSpec) -> str | None:
        sent = self.rows * self._columns(spec) + keep_count(self.compress_ratio, spec.numel)
        if sent >= spec.numel:
            return f"a sketch of {self.rows} x {self._columns(spec)} and the values are no smaller than the tensor"
        return super().unfit(spec)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        k = keep_count(self.compress_ratio, spec.numel)
        return Field("values", spec.work_dtype, k), Field("indices", "int32", k, wire=False)

    def agreement(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("sketch", spec.work_dtype, self.rows * self._columns(spec)),)

    def agree(self, x: Array, at: Site) -> Proposal | None:
        return Proposal(at.ops.count_sketch(x, self.rows, self._columns(at.spec), at.key), "sum")

    def estimate(self, at: Site) -> Array:
        """What the agreed sketch says of every element of the sum."""
        return at.ops.sketch_estimate(at.agreed, at.spec.numel, self.rows, self._columns(at.spec), at.key)

    def compress(self, x: Array, at: Site) -> Payload:
        indices = at.ops.top_indices(self.estimate(at), keep_count(self.compress_ratio, at.spec.numel))
        return {"values": at.ops.gather(x, indices), "indices": indices}
