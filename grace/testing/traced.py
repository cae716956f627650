"""Compressors, memories and array operations that run in TensorFlow graphs, as in a traced training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Memory
from grace.core.methods.site import Site
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Key

P = TypeVar("P", Compressor, Memory)

# Some of a compressor's methods belong to capabilities, which only some have.
_COMPRESSOR = (
    "propose",
    "compress",
    "decompress",
    "merge",
    "learn",
    "residual_",
    "erase_",
    "fade_",
)
_MEMORY = ("compensate", "update", "finish")
# These tell Python something about an array and compute nothing.
_ABOUT_ARRAYS = ("dtype", "length", "size", "min_size", "require")


class Traced:
    """Mixin for a contract: run it in TensorFlow graphs, on fewer tensors, because tracing takes time.

    Example:

    class TestMineTraced(grace.testing.Traced, grace.testing.CompressorContract):
        @pytest.fixture
        def compressor(self):
            return grace.testing.traced(my_package.Mine())
    """

    frameworks: ClassVar[tuple[str, ...]] = ("numpy", "tensorflow")
    shapes: ClassVar[tuple[tuple[int, ...], ...]] = ((), (24, 40), (0,))
    few_shapes: ClassVar[tuple[tuple[int, ...], ...]] = shapes
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64", "float16")

    @pytest.fixture
    def ops(self) -> ArrayOps:
        """Return the array operations under test."""
        pytest.importorskip("tensorflow")
        return get_ops("tensorflow")


def traced(component: P) -> P:
    """Return a copy of a compressor or memory whose array methods run as graphs on TensorFlow's arrays.

    Arrays, states and the step number are inputs of a graph. The tensor's spec, seed, rank and size are constants in
    it. Payload fields of run-time length have an unknown length in it. On arrays of other frameworks the methods are
    unchanged.
    """
    result = copy.copy(component)
    for name in _COMPRESSOR if isinstance(component, Compressor) else _MEMORY:
        if hasattr(component, name):
            # Set it on the instance, because the registry identifies a component by its class.
            object.__setattr__(result, name, TracedMethod(component, name))
    return result


def traced_ops() -> ArrayOps:
    """Return TensorFlow's array operations; each of them, and each composite of the table, runs in its own graph."""
    ops, plain = (type(get_ops("tensorflow"))() for _ in range(2))
    for name in dir(ArrayOps):
        if not name.startswith("_") and name not in _ABOUT_ARRAYS and callable(getattr(ops, name)):
            setattr(ops, name, _Graphs(getattr(ops, name)))
    # A whole composite is one graph, its kernels included.
    ops.runs_kernels = False
    ops.compute = _Graphs(lambda composite, args, options: composite(plain, *args, **options))
    return ops


def _opened(arg: Any) -> Any:
    import tensorflow as tf

    if isinstance(arg, Site):
        return arg._replace(key=_opened(arg.key))
    if isinstance(arg, Key):
        return arg._replace(step=tf.constant(arg.step, tf.int64))
    return tf.constant(arg) if isinstance(arg, np.ndarray) else arg


class _Graphs:
    """A function that runs as a graph, with one graph per combination of static arguments, shapes and dtypes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # The number of traces of each graph.
        self.traces: dict[Any, int] = {}
        self._graphs: dict[Any, Callable[..., Any]] = {}
        self._results: dict[Any, Any] = {}

    def __call__(self, *args: Any, open_ended: tuple[Array, ...] = (), **options: Any) -> Any:
        import tensorflow as tf

        if not tf.executing_eagerly():
            return self.function(*args, **options)
        opened = [_opened(arg) for arg in args], {name: _opened(option) for name, option in options.items()}
        flat = tf.nest.flatten(opened)
        unknown = {id(array) for array in open_ended}
        forms = [
            tf.TensorSpec([None] if id(v) in unknown else v.shape, v.dtype) if tf.is_tensor(v) else v for v in flat
        ]
        structure = tf.nest.map_structure(lambda _: 0, opened)
        signature = (repr(structure), *forms)
        if signature not in self._graphs:
            self.traces[signature] = 0
            self._graphs[signature] = self._graph(signature, structure, forms)
        values = self._graphs[signature](*(v for v in flat if tf.is_tensor(v)))
        return _filled(*self._results[signature], values)

    def _graph(self, signature: Any, structure: Any, forms: list[Any]) -> Callable[..., list[Array]]:
        import tensorflow as tf

        def body(*values: Array) -> list[Array]:
            self.traces[signature] += 1
            args, options = _filled(structure, forms, values)
            results = self.function(*args, **options)
            flat = tf.nest.flatten(results)
            static = [tf.TensorSpec(v.shape, v.dtype) if tf.is_tensor(v) else v for v in flat]
            self._results[signature] = tf.nest.map_structure(lambda _: 0, results), static
            return [v for v in flat if tf.is_tensor(v)]

        specs = [form for form in forms if isinstance(form, tf.TensorSpec)]
        return tf.function(body, input_signature=specs, autograph=False)


def _filled(structure: Any, forms: list[Any], values: Any) -> Any:
    """Return the structure with the static values of `forms`, and with arrays in place of TensorSpecs."""
    import tensorflow as tf

    arrays: Iterator[Array] = iter(values)
    leaves = [next(arrays) if isinstance(form, tf.TensorSpec) else form for form in forms]
    return tf.nest.pack_sequence_as(structure, leaves)


class TracedMethod:
    """A method of a compressor or memory that runs as a graph on TensorFlow's arrays."""

    def __init__(self, component: Compressor | Memory, name: str) -> None:
        self._part = component
        self._graphs = _Graphs(getattr(component, name))

    @property
    def traces(self) -> dict[Any, int]:
        """The number of traces of each graph."""
        return self._graphs.traces

    def __call__(self, *args: Any) -> Any:
        site = args[-1]
        if not site.ops.traced:
            return self._graphs.function(*args)
        compressor = next((a for a in args if isinstance(a, Compressor)), self._part)
        open_ended: list[Array] = []
        if isinstance(compressor, Compressor):
            fields = compressor.wire(site.spec)
            names = [f.name for f in fields if isinstance(f.length, str)]
            for arg in args:
                for payload in arg if isinstance(arg, list) else [arg]:
                    if isinstance(payload, dict) and set(payload) == {f.name for f in fields}:
                        open_ended += [payload[name] for name in names]
        return self._graphs(*args, open_ended=tuple(open_ended))
