"""A broadcast of the values of variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf


def broadcast(variables: Sequence[tf.Variable], root_rank: int, process_set: Any = hvd.global_process_set) -> None:
    """Give the variables the values that they have on the root. All ranks pass variables of the same shapes and dtypes.

    Horovod's own function names the collectives after variables, and keeps the graph that it traced first for these
    shapes. A process that starts later may have other names.
    """
    if not variables:
        return
    send = _sender(root_rank, process_set, process_set.process_set_id, tuple((v.shape, v.dtype) for v in variables))
    for variable, value in zip(variables, send(*map(tf.convert_to_tensor, variables)), strict=True):
        variable.assign(value)


# Every `fit` with the callback broadcasts. A graph holds no variables, and serves all models of these shapes.
@functools.lru_cache(maxsize=16)
def _sender(
    root_rank: int, process_set: Any, process_set_id: int, kinds: tuple[tuple[tf.TensorShape, tf.DType], ...]
) -> Callable[..., Sequence[tf.Tensor]]:
    """Return the graph that broadcasts values of these shapes and dtypes.

    A process set may get another identifier when Horovod starts anew, and the graph contains it.
    """

    def send(*values: tf.Tensor) -> list[tf.Tensor]:
        sent = []
        for number, value in enumerate(values):
            # Horovod does not support bfloat16. float32 holds its values exactly.
            wide = tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value
            name = f"grace.{process_set_id}.HorovodBroadcast.{number}"
            wide = hvd.broadcast(wide, root_rank, name=name, ignore_name_scope=True, process_set=process_set)
            sent.append(tf.cast(wide, value.dtype))
        return sent

    return tf.function(send, autograph=False).get_concrete_function(*(tf.TensorSpec(*kind) for kind in kinds))
