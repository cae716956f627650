"""A broadcast of the values of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf


def broadcast(variables: Sequence[tf.Variable], root_rank: int, process_set: Any = hvd.global_process_set) -> None:
    """Give the variables the values that they have on the root. All ranks pass variables of the same shapes and dtypes.

    Horovod's own function names the collectives after variables, and keeps the graph that it traced first for these
    shapes. A process that starts later may have other names.
    """

    @tf.function(autograph=False)
    def send() -> None:
        for number, variable in enumerate(variables):
            # Horovod does not support bfloat16. float32 holds its values exactly.
            value = tf.cast(variable, tf.float32) if variable.dtype == tf.bfloat16 else variable.read_value()
            name = f"grace.{process_set.process_set_id}.HorovodBroadcast.{number}"
            value = hvd.broadcast(value, root_rank, name=name, ignore_name_scope=True, process_set=process_set)
            variable.assign(tf.cast(value, variable.dtype))

    send()
