"""A scenario about sums of 16-bit floats in TensorFlow, run by each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace.core.ops import get_ops
from grace.core.transport.collectives import sum_halves
from grace.tensorflow.transport import HorovodTransport
from grace.testing.harness import run_program
from tests.adapters.tensorflow.model import PROCESS_SETS
from tests.support import half_precision


def half_sums() -> dict[str, Any]:
    """Compute sums and means over all ranks, and over those of a process set, each in its own graph."""

    def reductions(process_set: Any) -> dict[str, Any]:
        transport = HorovodTransport(process_set, f"halves.{process_set.process_set_id}")

        def reduce(x: np.ndarray, op: Any, name: str) -> Callable[[], np.ndarray]:
            @tf.function(autograph=False)
            def reduced(x: tf.Tensor) -> tf.Tensor:
                factor = 1 / transport.size if op == "mean" else 1.0
                program = sum_halves(get_ops("tensorflow"), x, transport.rank, transport.size, factor)
                return run_program(program, transport, name)

            result = reduced(tf.constant(x))
            return lambda: result.numpy()

        return half_precision.reductions(reduce, process_set.ranks, hvd.rank())

    sets = [hvd.global_process_set, *(process_set for process_set in PROCESS_SETS if process_set.included())]
    return {str(process_set.ranks): reductions(process_set) for process_set in sets}
