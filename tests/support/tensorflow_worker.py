"""One rank that runs the TensorFlow scenarios."""

from __future__ import annotations

import importlib
import sys

from tests.support import rank

_MODULES = [
    f"tests.adapters.tensorflow.{name}_scenarios"
    for name in (
        *("exchange", "half_sum", "checkpoint", "schedule", "timeline", "usage", "callback", "rare_usage", "refusal"),
        *("saving", "loss_scaling", "sparse", "tape", "replica", "waiting", "promise", "elastic"),
    )
]


def main() -> None:
    # Keras imports scikit-learn if it is there, and with it pandas: more than a second on every rank.
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    del sys.modules["sklearn"]
    from tests.adapters.tensorflow.model import PROCESS_SETS

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    world = rank.ranks()
    # Horovod needs the process sets at its start: even ranks, odd ranks, and a number that is not a power of two.
    members = [[0, 2], [1, 3], [0, 2, 3]] if world == 4 else []
    PROCESS_SETS[:] = map(hvd.ProcessSet, members)
    hvd.init(process_sets=PROCESS_SETS)
    # Graphs and models of one scenario must neither fill the memory of the next nor number its layers.
    rank.serve(hvd.rank(), [importlib.import_module(name) for name in _MODULES], after=keras.utils.clear_session)
    hvd.shutdown()


if __name__ == "__main__":
    main()
