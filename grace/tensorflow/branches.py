"""Branches of a graph, which must return a tensor."""

from __future__ import annotations

from collections.abc import Callable

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
