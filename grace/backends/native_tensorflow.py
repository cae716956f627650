"""Kernels for TensorFlow tensors, eager and traced: the operation GraceKernel, loaded from a library.

The operation exists for the CPU only. It is opaque to TensorFlow, so the graph optimizer cannot change its results.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from grace.backends.tensorflow_ops import TensorflowOps
from grace.core.errors import PayloadError
from grace.core.observe.log import logger
from grace.core.ops.native import REBUILD, Native, describe_fault
from grace.core.spec import Array

# The first words of the operation's messages.
_ERRORS = {"PayloadError": PayloadError, "TypeError": TypeError, "ValueError": ValueError}


# What tensorflow_ops.cpp records in the library.
_RECORD = re.compile(rb"grace: built for TensorFlow ([0-9A-Za-z.+-]+)\0")


@cache
def library() -> str | None:
    """Return the path of the operation's library; None if it was not built."""
    spec = importlib.util.find_spec("grace._tensorflow_ops")
    return None if spec is None else spec.origin


@cache
def operation() -> Any:
    """Return the function that makes a GraceKernel. Raises an OpError if TensorFlow cannot load the library."""
    return tf.load_op_library(library()).grace_kernel


def built_for(path: str) -> str | None:
    """Return the version of TensorFlow that a library was built for; None if the file does not record one."""
    found = _RECORD.search(Path(path).read_bytes())
    return None if found is None else found[1].decode()


@cache
def fault() -> str | None:
    """Return why the installed TensorFlow cannot use the library, and log a warning; None if it can."""
    path = library()
    if path is None:
        return "not built"
    built, detail = built_for(path), ""
    # A library for another version may load and still misread TensorFlow's objects, so loading it is not tried.
    if built in (None, tf.__version__):
        try:
            operation()
        except tf.errors.OpError as error:
            detail = f" TensorFlow says: {error.message}"
        else:
            return None
    reason = f"built for TensorFlow {built or 'of an unknown version'}"
    reason += " and cannot be loaded" if detail else f", but {tf.__version__} is installed"
    logger().warning("the kernels for TensorFlow are not used: they were %s. %s%s", reason, REBUILD, detail)
    return reason


def describe() -> str:
    """Return the text of `grace doctor` on the kernels for TensorFlow: which are in use, or why none are.

    Raises ConfigError for an invalid environment variable.
    """
    return describe_fault(fault(), "CPU only")


class NativeTensorflowOps(Native, TensorflowOps):
    """Kernels on TensorFlow tensors in main memory; they use TensorFlow's number of intra-op threads."""

    @classmethod
    def fault(cls, device: str) -> str | None:
        # The operation exists for the CPU only: TensorFlow would copy a gradient elsewhere back and forth.
        return fault() if device.startswith("cpu") else f"not built for {device}"

    def run(
        self,
        kernel: str,
        inputs: Sequence[Array],
        integers: Sequence[Any] = (),
        numbers: Sequence[Any] = (),
        *,
        outputs: Sequence[str],
        lengths: Sequence[Any] = (),
        consumes: bool = False,
        out: Array | tuple[Array, ...] | None = None,
    ) -> list[Array]:
        # Shapes help only in graphs; eager TensorFlow would cache an operation for each of them.
        eager = tf.executing_eagerly()
        static = [] if eager else [n if isinstance(n, int) else -1 for n in lengths]
        vectors = _vector(integers, tf.int64), _vector(numbers, tf.float64)
        try:
            with tf.control_dependencies(_readers(inputs[:1]) if consumes and not eager else []):
                results = operation()(
                    list(inputs),
                    *vectors,
                    Tout=[tf.uint8 if dtype == "bool" else tf.as_dtype(dtype) for dtype in outputs],
                    kernel=kernel,
                    name=kernel,
                    lengths=static,
                    consumes=consumes,
                )
        except tf.errors.InvalidArgumentError as error:
            raise _of_core(error) from None
        results = list(results)
        if outputs[-1] == "bool":
            results[-1] = results[-1][0] > 0
        return results


def _readers(arrays: Sequence[Array]) -> list[Any]:
    """Return the operations of the graph that read the arrays so far.

    An operation that consumes an array waits for them and runs last: while one of them still holds the array, a copy
    would be made.
    """
    graph = tf.compat.v1.get_default_graph()
    return [reader for x in arrays if getattr(x, "graph", None) is graph for reader in x.consumers()]


def _vector(values: Sequence[Any], dtype: Any) -> Any:
    """Return Python numbers and 0-d tensors as one tensor."""
    if any(isinstance(value, tf.Tensor) for value in values):
        return tf.stack([tf.cast(value, dtype) for value in values])
    return tf.constant(values, dtype, shape=[len(values)])


def _of_core(error: Exception) -> Exception:
    """Return the Python or core error that the operation's message names; any other TensorFlow error unchanged."""
    for name, cls in _ERRORS.items():
        _, found, text = str(error).partition(f"{name}: ")
        if found:
            return cls(text.partition(" [Op:")[0])
    return error
