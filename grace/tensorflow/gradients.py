"""Gradients as TensorFlow gives them: dense, as rows of an embedding, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from grace.core.errors import MismatchError
from grace.core.spec import TensorSpec

Gradient = tf.Tensor | tf.IndexedSlices


def inside(variable: Any) -> tf.Variable:
    """The variable of TensorFlow inside one of Keras, or itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def device_of(variable: Any) -> str:
    """Where a variable lies, and its gradients with it: "cpu", "gpu" or another kind of device, in small letters."""
    return str(tf.DeviceSpec.from_string(inside(variable).device or "").device_type or "cpu").lower()


def common_kinds(ranks: Sequence[Mapping[str, str | None]]) -> dict[str, str | None]:
    """The kinds of gradients that ranks have; None where no rank has one. Raises MismatchError if they differ."""
    common: dict[str, str | None] = {}
    for name in ranks[0]:
        kinds = sorted({kinds[name] for kinds in ranks} - {None})
        if len(kinds) > 1:
            raise MismatchError(
                f"the gradient of '{name}' is {kinds[0]} on some ranks and {kinds[1]} on others; "
                "compute it in the same way on all of them, or pass sparse_as_dense=True."
            )
        common[name] = kinds[0] if kinds else None
    return common


def nothing(spec: TensorSpec, kind: str | None) -> Gradient:
    """The gradient of a rank that has none, of the kind that the others have."""
    if kind == "dense":
        return tf.zeros(spec.shape, spec.dtype)
    indices = tf.zeros([0], str(kind).removeprefix("rows of "))
    return tf.IndexedSlices(tf.zeros([0, *spec.shape[1:]], spec.dtype), indices, tf.constant(spec.shape))


def as_rows(gradient: Gradient, kind: str) -> tf.IndexedSlices:
    """A gradient as rows under indices of the dtype that the kind names."""
    dtype = tf.as_dtype(kind.removeprefix("rows of "))
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values, tf.cast(gradient.indices, dtype), gradient.dense_shape)
    return tf.IndexedSlices(gradient, tf.range(gradient.shape[0], dtype=dtype), tf.constant(tuple(gradient.shape)))


def nbytes(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Bytes of the rows and their indices."""
    return sum(tf.size(x, tf.int64) * x.dtype.size for x in (gradient.values, gradient.indices))


def flat(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    return [
        tensor
        for gradient in gradients
        for tensor in ([gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient])
    ]


def names_of(variables: Sequence[Any], saved: tuple[str, ...]) -> tuple[str, ...]:
    """The paths of Keras' variables, the names of TensorFlow's; numbered where two are alike.

    Names with which the variables were `saved` win: in a Sequential model that it loads, Keras shortens the paths, on
    which rules and random numbers depend.
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
    """Whether Keras' Embedding layer has made the variable: its gradient comes as the rows that were looked up."""
    return name.rpartition("/")[2] == "embeddings"
