"""Deliberately wrong array operations: see `tests.mutants`."""

from __future__ import annotations

import numpy as np

from grace.core.ops.numpy_ops import NumpyOps
from tests.mutants.methods import OPS as OPS
from tests.mutants.methods import breaks


@breaks("test_concatenation_is_a_copy")
class ConcatenatesByReference(NumpyOps):
    def concat(self, arrays):
        return arrays[0] if len(arrays) == 1 else super().concat(arrays)


@breaks("test_sums_are_rounded_once")
class SumsInFloat32(NumpyOps):
    def sum(self, x, axis=None):
        return np.asarray(np.cumsum(x, dtype=x.dtype)[-1] if axis is None else np.sum(x, axis=axis))


@breaks("test_wrapping_sums_wrap_and_keep_every_bit")
class SumsInFloat64(NumpyOps):
    def wrapping_sum(self, x, axis=None):
        with np.errstate(invalid="ignore"):
            return self.sum(x, axis)


@breaks("test_finite_sees_every_bad_element_and_no_other")
class LooksAtTheSumOnly(NumpyOps):
    def finite(self, x):
        with np.errstate(all="ignore"):
            return np.isfinite(np.sum(x))


@breaks("test_top_indices_prefer_the_lower_index")
@breaks("test_top_indices_equal_a_stable_sort")
class PrefersTheHigherIndex(NumpyOps):
    def top_indices(self, x, k):
        return np.sort(x.size - 1 - np.argsort(-np.abs(x[::-1]), kind="stable")[:k]).astype(np.int32)


@breaks("test_orthogonalize")
class OrthogonalizesOnce(NumpyOps):
    def compute(self, composite, args, options):
        if composite.name != "orthogonalize":
            return super().compute(composite, args, options)
        (a,) = args
        columns = []
        for j in range(a.shape[1]):
            column = a[:, j]
            for other in columns:
                column = column - other * np.sum(other * a[:, j])
            columns.append(column / np.linalg.norm(column))
        return np.stack(columns, axis=1)


@breaks("test_orthogonalize_makes_dependent_columns_zero")
class InventsDirections(NumpyOps):
    def compute(self, composite, args, options):
        if composite.name != "orthogonalize":
            return super().compute(composite, args, options)
        return np.linalg.qr(*args)[0]


@breaks("test_packed_format")
class PacksBigEndFirst(NumpyOps):
    def pack(self, codes, bits):
        return np.packbits(np.packbits(np.unpackbits(super().pack(codes, bits)), bitorder="little"))[::-1].copy()


@breaks("test_packing_is_tight_and_reversible")
class PacksLoosely(NumpyOps):
    def pack(self, codes, bits):
        data = super().pack(codes, bits)
        return np.concatenate([data, np.zeros(1, np.uint8)])


@breaks("test_quantize_rounds_up_with_the_right_chance")
class RoundsToNearest(NumpyOps):
    def quantize(self, x, scale, levels, key):
        return np.round(x / np.where(scale > 0, scale, np.inf) * levels).astype(np.int64)


@breaks("test_bytes_round_trip")
class SwapsBytes(NumpyOps):
    def to_bytes(self, x):
        return super().to_bytes(x.byteswap())


@breaks("test_cast_truncates_and_rounds_to_nearest_even")
class RoundsInsteadOfTruncating(NumpyOps):
    def cast(self, x, dtype):
        return super().cast(np.round(x) if dtype == "int32" else x, dtype)


@breaks("test_sparsify_and_desparsify")
class LosesSigns(NumpyOps):
    def sparsify(self, x, k):
        return super().sparsify(np.abs(x), k)


@breaks("test_selection")
class FindsInt64Indices(NumpyOps):
    def nonzero(self, condition):
        return np.flatnonzero(condition)


@breaks("test_reductions_of_nothing")
class MaxOfNothingFails(NumpyOps):
    def max(self, x, axis=None):
        return np.asarray(np.max(x, axis=axis, initial=-np.inf)).astype(x.dtype)


@breaks("test_creation")
class ArangeOfFloats(NumpyOps):
    def arange(self, n, dtype):
        return np.arange(n) * 1.0


@breaks("test_cast_to_its_own_dtype_is_no_copy")
class CopiesOnCast(NumpyOps):
    def cast(self, x, dtype):
        return super().cast(np.array(x), dtype)


@breaks("test_a_copy_has_memory_of_its_own")
class CopiesByReference(NumpyOps):
    def copy(self, x):
        return x


@breaks("test_shape_operations")
class StacksAlongTheFirstAxis(NumpyOps):
    def stack(self, arrays, axis):
        return np.stack(arrays, axis=0)


@breaks("test_arithmetic")
class ClipsOneSide(NumpyOps):
    def clip(self, x, low, high):
        return np.minimum(x, high)


@breaks("test_bit_operations")
class ShiftsWithoutSign(NumpyOps):
    def shift_right(self, a, bits):
        return (a.view(np.uint64) >> np.uint64(bits)).view(np.int64)


@breaks("test_conditions_are_arrays_or_bools")
class NegatesBits(NumpyOps):
    def bit_not(self, a):
        return ~a


@breaks("test_scaling_rounds_once_and_keeps_the_dtype")
class ScalesInPlace(NumpyOps):
    def scaled(self, x, factor):
        return self.scale_(x, factor)


@breaks("test_shape_operations")
class SplitsEvenly(NumpyOps):
    def split(self, x, lengths):
        return np.array_split(x, len(lengths))


@breaks("test_consuming_arithmetic")
class SubtractsTheWrongWay(NumpyOps):
    def sub_(self, x, y):
        return y - x


@breaks("test_linear_algebra")
class ForgetsToTranspose(NumpyOps):
    def transpose(self, a):
        return a.reshape(a.shape[::-1])


@breaks("test_numbers_keep_the_precision_of_their_dtype")
class ComputesNumbersInFloat32(NumpyOps):
    def where(self, condition, a, b):
        return super().where(condition, np.float32(a) if isinstance(a, float) else a, b)


@breaks("test_a_requirement_that_fails_raises_its_error")
class RequiresNothing(NumpyOps):
    def require(self, condition, error, then=None):
        return then


@breaks("test_control")
class LoopsOnce(NumpyOps):
    def while_loop(self, condition, body, x):
        return body(x) if condition(x) else x


@breaks("test_order")
class SortsByMagnitude(NumpyOps):
    def sort(self, x):
        return x[np.argsort(np.abs(x), kind="stable")] if x.ndim == 1 else super().sort(x)


@breaks("test_indices_may_repeat_in_segments_and_minima")
class AddsRepeatedOnce(NumpyOps):
    def segment_sum(self, values, segments, n):
        return super().scatter_add_(np.zeros(n, values.dtype), segments, values)


@breaks("test_singular_values")
class TransposesV(NumpyOps):
    def svd(self, a):
        return np.linalg.svd(a, full_matrices=False)


@breaks("test_weighted_sum_rounds_either_product_and_changes_nothing")
class WeighsInPlace(NumpyOps):
    def weighted_sum(self, x, a, y, b):
        return self.add_(self.scale_(x, a), y * np.float32(b))


@breaks("test_weighted_sum_rounds_either_product_and_changes_nothing")
class RoundsOnce(NumpyOps):
    def weighted_sum(self, x, a, y, b):
        return (a * x.astype(np.float64) + b * y.astype(np.float64)).astype(x.dtype)


@breaks("test_sums_over_ranks_add_in_their_order")
class AddsTheLastRankFirst(NumpyOps):
    def compute(self, composite, args, options):
        if composite.name == "binary_sum":
            bits, levels, *rest = args
            args = (bits[::-1], levels[::-1], *rest)
        return super().compute(composite, args, options)


@breaks("test_every_column_of_a_matrix_has_means_of_its_own")
class MeansOfRows(NumpyOps):
    def compute(self, composite, args, options):
        if composite.name == "binarize_means":
            x, threshold, columns = args
            args = (np.ascontiguousarray(x.reshape(columns, -1).T).reshape(-1), threshold, columns)
        return super().compute(composite, args, options)


@breaks("test_select_knows_which_side_the_bound_is_on")
class SelectsTheBoundAlways(NumpyOps):
    def select(self, x, bound, strict, nonzero=False):
        return super().select(x, bound, False, nonzero)


@breaks("test_corrupt_payloads_are_refused")
class ScattersAnywhere(NumpyOps):
    def sparse_sum(self, values, indices, n, onto=None, out=None):
        total = np.zeros(n, values[0].dtype) if onto is None else onto
        for value, index in zip(values, indices, strict=True):
            total = self.scatter_add_(total, index, value)
        return total
