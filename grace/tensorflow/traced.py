"""One graph of the step for every pattern of dense and sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from grace.tensorflow.gradients import Gradient, flat


class Traced:
    """A step as a graph, traced once for every pattern of dense and sparse gradients, for any number of rows.

    `body(gradients, absent, loss_scale)` is the function to trace. `shapes` are the shapes of the variables.
    """

    def __init__(self, body: Callable[..., list[Gradient]], shapes: Sequence[tuple[int, ...]]) -> None:
        self._body, self._shapes = body, shapes
        self._functions: dict[Any, Any] = {}

    def __call__(
        self, gradients: Sequence[Gradient], absent: frozenset[int], loss_scale: tf.Tensor | None
    ) -> list[Gradient]:
        sparse = tuple(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        key = sparse, absent, loss_scale is None
        if key not in self._functions:
            self._functions[key] = self._make(sparse, absent, loss_scale, gradients)
        scale = [] if loss_scale is None else [loss_scale]
        return self._nested(self._functions[key](*flat(gradients), *scale), sparse)

    def _make(
        self,
        sparse: tuple[bool, ...],
        absent: frozenset[int],
        loss_scale: tf.Tensor | None,
        gradients: Sequence[Gradient],
    ) -> Any:
        signature: list[tf.TensorSpec] = []
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                rows = [None, *gradient.values.shape[1:]]
                signature += [tf.TensorSpec(rows, gradient.dtype), tf.TensorSpec([None], gradient.indices.dtype)]
            else:
                signature.append(tf.TensorSpec(gradient.shape, gradient.dtype))
        if loss_scale is not None:
            signature.append(tf.TensorSpec([], loss_scale.dtype))

        def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
            scale = None if loss_scale is None else tensors[-1]
            return flat(self._body(self._nested(tensors, sparse), absent, scale))

        return tf.function(step, input_signature=signature, autograph=False)

    def _nested(self, tensors: Sequence[tf.Tensor], sparse: tuple[bool, ...]) -> list[Gradient]:
        each = iter(tensors)
        return [
            tf.IndexedSlices(next(each), next(each), tf.constant(shape)) if rows else next(each)
            for rows, shape in zip(sparse, self._shapes, strict=True)
        ]
