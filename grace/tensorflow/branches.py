"""Branches of a graph, which must return a tensor, and what runs in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def always(make: Callable[[], object]) -> Callable[[], tf.Tensor]:
    """Return a branch that calls a function."""

    def branch() -> tf.Tensor:
        make()
        return tf.constant(True)

    return branch


def never() -> tf.Tensor:
    """Return the tensor of a branch in which nothing happens."""
    return tf.constant(False)


def in_python(function: Callable[..., Any], inputs: Sequence[Any], dtype: tf.DType, shape: list[int]) -> tf.Tensor:
    """Return the result of a function of NumPy arrays, which runs whenever the graph runs."""
    result = tf.numpy_function(function, list(inputs), dtype)
    result.set_shape(shape)
    return result
