"""Helpers for TensorFlow's gradients: dense tensors, rows of an embedding (IndexedSlices), or None."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from grace.core.errors import MismatchError
from grace.core.spec import TensorSpec

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


@contextmanager
def before_graphs() -> Iterator[None]:
    """Leave the graphs that are being traced: what runs within is eager, and its variables belong to no graph.

    A `tf.function` that makes a variable in its first trace is traced twice, unless the variable says not to be lifted.
    """

    def make(creator: Any, **options: Any) -> tf.Variable:
        return creator(**{**options, "experimental_enable_variable_lifting": False})

    with tf.init_scope(), tf.variable_creator_scope(make):
        yield


def inside(variable: Any) -> tf.Variable:
    """Return the TensorFlow variable inside a Keras variable, or the variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def device_of(variable: Any) -> str:
    """Return the device type of a variable and its gradients, in lower case: "cpu", "gpu" or another."""
    return str(tf.DeviceSpec.from_string(inside(variable).device or "").device_type or "cpu").lower()


def common_kinds(ranks: Sequence[Mapping[str, str | None]]) -> dict[str, str | None]:
    """Return the kind of each gradient, None if no rank has one. Raises MismatchError if the ranks differ."""
    common: dict[str, str | None] = {}
    for name in ranks[0]:
        kinds = sorted({kind for kind in (kinds[name] for kinds in ranks) if kind is not None})
        if len(kinds) > 1:
            raise MismatchError(
                f"the gradient of '{name}' is {kinds[0]} on some ranks and {kinds[1]} on others; "
                "compute it the same way on all ranks, or pass sparse_as_dense=True."
            )
        common[name] = kinds[0] if kinds else None
    return common


def kind_of(gradient: Gradient | None, rows: bool) -> str | None:
    """Return the form of a gradient: "dense", "rows of DTYPE" (of the indices) where `rows` are allowed, or None."""
    if gradient is None:
        return None
    return f"rows of {gradient.indices.dtype.name}" if rows and isinstance(gradient, tf.IndexedSlices) else "dense"


def as_kind(gradient: Gradient | None, kind: str, spec: TensorSpec) -> Gradient:
    """Return a gradient in this form, with the shape and dtype of `spec`; None stands for zeros."""
    if gradient is not None:
        gradient = tf.cast(gradient, spec.dtype)
    if kind == "dense":
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(spec.shape))
        dense = tf.zeros(spec.shape, spec.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        return tf.ensure_shape(dense, spec.shape)
    if gradient is None:
        values, indices = tf.zeros([0, *spec.shape[1:]], spec.dtype), tf.zeros([0], tf.int32)
    elif isinstance(gradient, tf.IndexedSlices):
        values, indices = gradient.values, gradient.indices
    else:
        values, indices = gradient, tf.range(spec.shape[0])
    return tf.IndexedSlices(values, tf.cast(indices, kind.removeprefix("rows of ")), tf.constant(spec.shape))


def signature_of(spec: TensorSpec, kind: str | None) -> tf.TypeSpec:
    """Return the type of a gradient in this form in a graph, for any number of rows."""
    if kind in (None, "dense"):
        return tf.TensorSpec(spec.shape, spec.dtype)
    return tf.IndexedSlicesSpec(spec.shape, spec.dtype, kind.removeprefix("rows of "), tf.int32, [None])


def nbytes(gradient: Gradient) -> tf.Tensor:
    """Return the size of a gradient in bytes, or that of its rows and their indices."""
    parts = (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else (gradient,)
    return sum(tf.size(x, tf.int64) * x.dtype.size for x in parts)


def names_of(variables: Sequence[Any], saved: tuple[str, ...]) -> tuple[str, ...]:
    """Return unique names: the paths of Keras variables, the names of TensorFlow variables. Duplicates get a number.

    `saved` names take precedence, because Keras shortens the paths when it loads a Sequential model, and rules and
    random numbers depend on the names.
    """
    names: list[str] = []
    for variable in variables:
        name = plain = getattr(variable, "path", None) or variable.name.partition(":")[0]
        number = 1
        while name in names:
            number += 1
            name = f"{plain}.{number}"
        names.append(name)
    if len(saved) == len(names) and all(old.endswith(new) for old, new in zip(saved, names, strict=True)):
        return saved
    return tuple(names)


def is_embedding(name: str) -> bool:
    """Return whether the variable belongs to a Keras Embedding layer. Its gradient holds only the rows looked up."""
    return name.rpartition("/")[2] == "embeddings"
