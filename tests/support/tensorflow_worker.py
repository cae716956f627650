"""One rank of a multi-process test of TensorFlow: as `torch_worker.py`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from tests.adapters.tensorflow.model import PROCESS_SETS

_MODULES = [
    f"tests.adapters.tensorflow.{name}_scenarios"
    for name in (
        *("exchange", "half_sum", "checkpoint", "schedule", "timeline", "usage", "callback", "rare_usage", "refusal"),
        *("saving", "loss_scaling", "sparse", "tape"),
    )
]


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    world = int(os.environ.get("GRACE_TEST_RANKS", "1"))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    # Horovod wants process sets when it starts: even and odd ranks.
    PROCESS_SETS[:] = [hvd.ProcessSet(list(range(i, world, 2))) for i in range(2)] if world > 2 else []
    hvd.init(process_sets=PROCESS_SETS)
    modules = [importlib.import_module(name) for name in _MODULES]
    results = {}
    for name in names:
        started = time.monotonic()
        try:
            results[name] = next(getattr(module, name) for module in modules if hasattr(module, name))()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        # Graphs and models of one scenario must neither fill the memory of the next nor number its layers.
        keras.utils.clear_session()
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        (out / f"rank-{hvd.rank()}.json").write_text(json.dumps(results))
    hvd.shutdown()


if __name__ == "__main__":
    main()
