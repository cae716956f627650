"""One rank that runs the TensorFlow scenarios."""

from __future__ import annotations

import gc
import importlib

from tests.support import keras_alone, rank

keras_alone.load()
# All forks of this process share what is imported here; horovodrun is one of them.
import horovod.runner.launch  # noqa: E402, F401
import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from tests.adapters.tensorflow.model import PROCESS_SETS  # noqa: E402

_MODULES = [
    importlib.import_module(f"tests.adapters.tensorflow.{name}_scenarios")
    for name in (
        *("exchange", "half_sum", "checkpoint", "schedule", "timeline", "usage", "callback", "rare_usage", "refusal"),
        *("saving", "loss_scaling", "sparse", "tape", "replica", "waiting", "promise", "elastic", "optim"),
        *("outer", "auto"),
    )
]


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    # Tracing makes objects by the hundred thousand, which the garbage collector would visit again and again.
    gc.set_threshold(100_000, 50, 100)
    world = rank.ranks()
    # Horovod needs the process sets at its start: even ranks, odd ranks, and a number that is not a power of two. Of
    # three ranks, two.
    members = {3: [[0, 1]], 4: [[0, 2], [1, 3], [0, 2, 3]]}.get(world, [])
    PROCESS_SETS[:] = map(hvd.ProcessSet, members)
    hvd.init(process_sets=PROCESS_SETS)
    rank.let_gloo_give_way()
    # Graphs and models of one scenario must neither fill the memory of the next nor number its layers.
    rank.serve(hvd.rank(), _MODULES, after=keras.utils.clear_session)
    hvd.shutdown()


if __name__ == "__main__":
    main()
