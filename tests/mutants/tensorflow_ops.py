"""Deliberately wrong array operations of TensorFlow, by errors that only TensorFlow's graphs reveal."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from grace.backends.tensorflow_ops import TensorflowOps


class RoundsNumbersToFloat32(TensorflowOps):
    def cast(self, x, dtype):
        return tf.cast(x, dtype)


class MaxOfNothingIsInfinite(TensorflowOps):
    def max(self, x, axis=None):
        return tf.reduce_max(x, axis=axis)


class SumsInFloat32(TensorflowOps):
    def norm(self, x, axis=None):
        return tf.norm(x, axis=axis)


class FindsInt64Indices(TensorflowOps):
    def nonzero(self, condition):
        return tf.reshape(tf.where(condition), [-1])


class LeavesIndicesByMagnitude(TensorflowOps):
    def top_indices(self, x, k):
        return tf.math.top_k(tf.abs(x), k).indices


class SwapsBytes(TensorflowOps):
    def to_bytes(self, x):
        data = super().to_bytes(x)
        return data if x.dtype == tf.uint8 else tf.reverse(data, [0])


class AddsTwice(TensorflowOps):
    def scatter_add_(self, x, indices, values):
        return tf.tensor_scatter_nd_add(super().scatter_add_(x, indices, values), indices[:, None], values)


class StopsTooEarly(TensorflowOps):
    def while_loop(self, condition, body, x):
        return tf.while_loop(condition, lambda v: (body(v),), (x,), maximum_iterations=1)[0]


class ChecksOnlyNan(TensorflowOps):
    def finite(self, x):
        return tf.logical_not(tf.reduce_any(tf.math.is_nan(x)))


class RequiresNothing(TensorflowOps):
    def require(self, condition, error, then=None):
        tf.debugging.Assert(tf.constant(True), [str(error)])
        return then


class RoundsToNearest(TensorflowOps):
    def quantize(self, x, scale, levels, key):
        safe = np.where(scale > 0, scale, np.inf)
        return tf.cast(tf.round(x / safe * levels), tf.int64)


OPS = {
    "test_numbers_keep_the_precision_of_their_dtype": RoundsNumbersToFloat32,
    "test_reductions_of_nothing": MaxOfNothingIsInfinite,
    "test_sums_are_rounded_once": SumsInFloat32,
    "test_selection": FindsInt64Indices,
    "test_top_indices_equal_a_stable_sort": LeavesIndicesByMagnitude,
    "test_bytes_round_trip": SwapsBytes,
    "test_sparsify_and_desparsify": AddsTwice,
    "test_control": StopsTooEarly,
    "test_finite_sees_every_bad_element_and_no_other": ChecksOnlyNan,
    "test_a_requirement_that_fails_raises_its_error": RequiresNothing,
    "test_quantize_rounds_up_with_the_right_chance": RoundsToNearest,
}
