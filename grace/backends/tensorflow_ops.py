"""Array operations on TensorFlow tensors, eager and traced.

Tensors cannot be changed, so consuming operations return new ones. Lengths are ints if the shape is static, and 0-d
tensors if it is known only when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import tensorflow as tf

from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import Composite
from grace.core.spec import ITEMSIZE, MAX_MAGNITUDE, Array, Key

_DTYPES: dict[str, Any] = {name: tf.dtypes.as_dtype(name) for name in ITEMSIZE}


R = TypeVar("R")
_HOLE = object()


def _as_graph(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method a graph of its own, once per signature, like a composite with `one_graph`."""

    @wraps(method)
    def call(self: TensorflowOps, *args: Any, **options: Any) -> Any:
        return self._in_graph(method, args, options)

    return call


class TensorflowOps(ArrayOps):
    """TensorFlow tensors; the runtime places them on devices."""

    name: ClassVar[str] = "tensorflow"
    eager: ClassVar[bool] = False
    traced: ClassVar[bool] = True
    dynamic_shapes: ClassVar[bool] = True
    kernels: ClassVar[str | None] = "grace.backends.native_tensorflow:NativeTensorflowOps"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._graphs: dict[Any, Callable[..., Any]] = {}

    def compute(self, composite: Composite[..., R], args: tuple[Any, ...], options: dict[str, Any]) -> R:
        if composite.one_graph:
            return cast(R, self._in_graph(composite.body, args, options))
        return super().compute(composite, args, options)

    def _in_graph(self, body: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return body(self, *args, **options), computed by a graph that is traced once per signature.

        Hundreds of small operations are slow in eager mode, and slow to trace again for every tensor and rank. An array
        of run-time length would make a graph per length, and an error in a graph becomes a TensorFlow error.
        """
        given = [_tensors(a) for a in args], {name: _tensors(a) for name, a in options.items()}
        signature = (body, _form(given))
        if signature not in self._graphs:
            # The graph must not keep the arrays that it was traced with.
            static = tf.nest.map_structure(lambda leaf: _HOLE if isinstance(leaf, tf.Tensor) else leaf, given)

            def traced(values: list[Any]) -> Any:
                rest = iter(values)
                args, options = tf.nest.map_structure(lambda leaf: next(rest) if leaf is _HOLE else leaf, static)
                return body(self, *args, **options)

            self._graphs[signature] = tf.function(traced, autograph=False)
        return self._graphs[signature]([leaf for leaf in tf.nest.flatten(given) if isinstance(leaf, tf.Tensor)])

    def zeros(self, n: int, dtype: str) -> Array:
        return tf.zeros([n], _DTYPES[dtype])

    def full(self, n: int, value: Array, dtype: str) -> Array:
        return tf.fill([n], self.cast(value, dtype))

    def numbers(self, values: Sequence[Array], dtype: str) -> Array:
        # One node in place of one per number. Constant floats would be changed by the graph optimizer.
        if dtype in ("int32", "int64") and all(isinstance(value, int) for value in values):
            return tf.constant(values, _DTYPES[dtype])
        return super().numbers(values, dtype)

    def arange(self, n: int, dtype: str) -> Array:
        return tf.cast(tf.range(n), _DTYPES[dtype])

    def cast(self, x: Array, dtype: str) -> Array:
        if isinstance(x, tf.Tensor):
            return tf.cast(x, _DTYPES[dtype])
        # TensorFlow would round a Python number to float32 on the way to float64.
        return _opaque(tf.cast(np.asarray(x), _DTYPES[dtype]))

    def copy(self, x: Array) -> Array:
        return tf.identity(x)

    def dtype(self, x: Array) -> str:
        return str(x.dtype.name)

    def to_bytes(self, x: Array) -> Array:
        return _flat(tf.bitcast(_flat(x), tf.uint8))

    def from_bytes(self, data: Array, dtype: str) -> Array:
        width = ITEMSIZE[dtype]
        return tf.bitcast(tf.reshape(data, [-1, width]) if width > 1 else data, _DTYPES[dtype])

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return tf.reshape(x, shape)

    def concat(self, arrays: Sequence[Array]) -> Array:
        return tf.concat([_flat(a) for a in arrays], axis=0)

    def stack(self, arrays: Sequence[Array], axis: int) -> Array:
        return tf.stack(arrays, axis=axis)

    def length(self, x: Array) -> Any:
        static = x.shape.num_elements()
        return tf.size(x) if static is None else static

    def count(self, x: Array) -> Array:
        return self.cast(self.length(x), "float64")

    def size(self, x: Array) -> Any:
        return x

    def min_size(self, a: Any, b: Any) -> Any:
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else tf.minimum(a, b)

    def abs(self, x: Array) -> Array:
        return tf.abs(x)

    def floor(self, x: Array) -> Array:
        return tf.floor(x)

    def sqrt(self, x: Array) -> Array:
        return tf.sqrt(x)

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        dtype = next(self.dtype(v) for v in (a, b) if isinstance(v, tf.Tensor))
        return tf.where(condition, self.cast(a, dtype), self.cast(b, dtype))

    def clip(self, x: Array, low: Array, high: Array) -> Array:
        return tf.clip_by_value(x, self.cast(low, self.dtype(x)), self.cast(high, self.dtype(x)))

    def bit_and(self, a: Array, b: Array) -> Array:
        if isinstance(a, int) and isinstance(b, int):
            return a & b
        return tf.logical_and(a, b) if _logical(a, b) else tf.bitwise.bitwise_and(*_same(a, b))

    def bit_or(self, a: Array, b: Array) -> Array:
        return tf.logical_or(a, b) if _logical(a, b) else tf.bitwise.bitwise_or(*_same(a, b))

    def bit_xor(self, a: Array, b: Array) -> Array:
        if isinstance(a, int) and isinstance(b, int):
            return a ^ b
        return tf.bitwise.bitwise_xor(*_same(a, b))

    def shift_left(self, a: Array, bits: int) -> Array:
        return tf.bitwise.left_shift(*_same(a, bits))

    def shift_right(self, a: Array, bits: int | Array) -> Array:
        return a >> bits if isinstance(a, int) else tf.bitwise.right_shift(*_same(a, bits))

    def sum(self, x: Array, axis: int | None = None) -> Array:
        return tf.cast(tf.reduce_sum(tf.cast(x, tf.float64), axis=axis), x.dtype)

    def wrapping_sum(self, x: Array, axis: int | None = None) -> Array:
        return tf.reduce_sum(x, axis=axis)

    def max(self, x: Array, axis: int | None = None) -> Array:
        if x.shape.num_elements() == 0:
            return tf.zeros([] if axis is None else [s for i, s in enumerate(x.shape) if i != axis], x.dtype)
        return tf.reduce_max(x, axis=axis)

    def min(self, x: Array) -> Array:
        return tf.zeros([], x.dtype) if x.shape.num_elements() == 0 else tf.reduce_min(x)

    def norm(self, x: Array, axis: int | None = None) -> Array:
        return tf.cast(tf.sqrt(tf.reduce_sum(tf.square(tf.cast(x, tf.float64)), axis=axis)), x.dtype)

    def finite(self, x: Array) -> Array:
        # A comparison with NaN is false.
        return tf.reduce_all(tf.abs(x) <= MAX_MAGNITUDE[self.dtype(x)])

    def any(self, condition: Array) -> Array:
        return tf.reduce_any(condition)

    def nonzero(self, condition: Array) -> Array:
        return tf.cast(tf.reshape(tf.where(condition), [-1]), tf.int32)

    def top_indices(self, x: Array, k: int) -> Array:
        # top_k promises that among equal elements the lower index comes first.
        return tf.sort(tf.math.top_k(tf.abs(x), self.min_size(k, self.length(x)), sorted=True).indices)

    def gather(self, x: Array, indices: Array) -> Array:
        return tf.gather(x, indices)

    def put_(self, x: Array, indices: Array, value: float) -> Array:
        values = tf.fill(tf.shape(indices), self.cast(value, self.dtype(x)))
        return tf.tensor_scatter_nd_update(x, indices[:, tf.newaxis], values)

    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_add(x, indices[:, tf.newaxis], values)

    def scatter_min_(self, x: Array, indices: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_min(x, indices[:, tf.newaxis], values)

    def segment_sum(self, values: Array, segments: Array, n: int) -> Array:
        sums = tf.math.unsorted_segment_sum(tf.cast(values, tf.float64), segments, n)
        return tf.cast(sums, values.dtype)

    def sort(self, x: Array) -> Array:
        return tf.sort(x)

    def search_sorted(self, edges: Array, x: Array) -> Array:
        return tf.searchsorted(edges, x, side="right")

    def cumsum(self, x: Array) -> Array:
        return tf.cumsum(x)

    def add_(self, x: Array, y: Array) -> Array:
        return _opaque(x + y)

    def sub_(self, x: Array, y: Array) -> Array:
        return _opaque(x - y)

    def scale_(self, x: Array, factor: float) -> Array:
        return _opaque(x * factor)

    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)

    def transpose(self, a: Array) -> Array:
        return tf.transpose(a)

    def svd(self, a: Array) -> tuple[Array, Array, Array]:
        s, u, v = tf.linalg.svd(a)
        return u, s, v

    def constant(self, name: Hashable, make: Callable[[], Array]) -> Array:
        # A tensor of one graph cannot be used in another.
        return make()

    def choose(self, condition: Array, a: Callable[[], Array], b: Callable[[], Array]) -> Array:
        # In a graph, tf.cond takes no Python bool.
        return super().choose(condition, a, b) if isinstance(condition, bool) else tf.cond(condition, a, b)

    def computed(self, function: Callable[..., float], *numbers: Array, dtype: str = "int32") -> Array:
        if not any(isinstance(x, tf.Tensor) for x in numbers):
            return super().computed(function, *numbers, dtype=dtype)

        def call(*given: Any) -> Any:
            return np.dtype(dtype).type(function(*(x.item() for x in given)))

        found = tf.numpy_function(call, numbers, _DTYPES[dtype])
        found.set_shape([])
        return found

    def while_loop(self, condition: Callable[[Array], Array], body: Callable[[Array], Array], x: Array) -> Array:
        return tf.while_loop(condition, lambda v: (body(v),), (x,))[0]

    def require(self, condition: Array, error: Exception, then: Array = None) -> Array:
        if tf.executing_eagerly():
            return super().require(condition, error, then)
        check = tf.debugging.Assert(condition, [f"{type(error).__name__}: {error}"])
        if not isinstance(then, tf.Tensor):
            return then
        with tf.control_dependencies([check]):
            return tf.identity(then)

    def weighted_sum(self, x: Array, a: float, y: Array, b: float) -> Array:
        return _opaque(super().weighted_sum(x, a, y, b))

    @_as_graph
    def quantize(self, x: Array, scale: Array, levels: Any, key: Key | None) -> Array:
        return super().quantize(x, scale, self.cast(levels, self.dtype(x)), key)

    @_as_graph
    def dequantize(self, codes: Array, scale: Array, levels: Any, dtype: str) -> Array:
        return super().dequantize(codes, scale, self.cast(levels, dtype), dtype)

    words = _as_graph(ArrayOps.words)
    uniform = _as_graph(ArrayOps.uniform)
    sample = _as_graph(ArrayOps.sample)
    pack = _as_graph(ArrayOps.pack)
    unpack = _as_graph(ArrayOps.unpack)


def _opaque(x: Array) -> Array:
    """Return x in a form that the graph optimizer does not look into.

    The optimizer would turn a division by a constant into a multiplication by its rounded reciprocal, multiply
    constants with each other first, and add three arrays in another order; traced bits would then differ from eager
    ones. It leaves placeholders alone.
    """
    return x if tf.executing_eagerly() else tf.raw_ops.PlaceholderWithDefault(input=x, shape=x.shape)


def _flat(x: Array) -> Array:
    return x if x.shape.rank == 1 else tf.reshape(x, [-1])


def _tensors(value: Any) -> Any:
    """Return a key as tensors, its seed as the int64 of the same bits; return a tensor unchanged."""
    if not isinstance(value, Key) or isinstance(value.seed, tf.Tensor):
        return value
    seed = np.asarray(value.seed, np.uint64).astype(np.int64)
    return Key(tf.constant(seed), tf.cast(value.step, tf.int64), tf.constant(value.rank, tf.int64))


def _form(value: Any) -> Any:
    """Return what a graph depends on: shape and dtype of tensors, the value of the rest; lists and keys by item."""
    if isinstance(value, tf.Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return tuple((name, _form(value[name])) for name in sorted(value))
    return (type(value), *map(_form, value)) if isinstance(value, (list, tuple)) else value


def _logical(a: Any, b: Any) -> bool:
    return all(isinstance(v, bool) or v.dtype == tf.bool for v in (a, b))


def _same(a: Any, b: Any) -> tuple[Any, Any]:
    """Return both as tensors of the dtype of the one that is a tensor."""
    dtype = next(v.dtype for v in (a, b) if isinstance(v, tf.Tensor))
    return tf.cast(a, dtype), tf.cast(b, dtype)
