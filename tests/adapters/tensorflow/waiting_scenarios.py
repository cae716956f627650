"""Scenarios in which some ranks wait for others, run by each rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import tensorflow as tf

from grace.tensorflow import BroadcastGlobalVariablesCallback, Exchange, MetricAverageCallback, waiting
from tests.adapters.tensorflow.model import wrap
from tests.adapters.tensorflow.usage_model import error_of, net
from tests.support.cases import EVERYTHING

SHORT = {"compressor": "topk", "compress_ratio": 0.5, "timeout": 2, **EVERYTHING}
# The time limit of a rank for which no other comes.
LONE = 1


def meet() -> None:
    hvd.allreduce(tf.zeros([]), name="meet")


def waits(folder: str) -> dict[str, Any]:
    """Wrap, use callbacks, change and step on one rank only, and then on the others as well."""
    first, ended = hvd.rank() == 0, Path(folder) / "ended"
    limited = mock.patch.object(Exchange, "timeout", LONE)
    lone = {**SHORT, "timeout": LONE}
    results = {"wrap": "" if first else error_of(lambda: wrap(lone))}
    meet()
    if first:
        # The other rank's message is still there.
        wrap(lone)
    meet()
    model = net()
    model.compile(wrap(SHORT), "mse")
    broadcast, average = BroadcastGlobalVariablesCallback(), MetricAverageCallback()
    for callback in (broadcast, average):
        callback.set_model(model)
    calls = {"broadcast": broadcast.on_train_begin, "metrics": lambda: average.on_epoch_end(0, {"loss": 1.0})}
    for purpose, call in calls.items():
        with limited:
            results[purpose] = error_of(call) if first else ""
        meet()
        if not first:
            waiting.gather(hvd.global_process_set, purpose, "this scenario")(None)
        meet()
    exchange, variable = Exchange(SHORT), tf.Variable(tf.zeros([40, 40]), name="w")
    exchange.build([variable])
    gradient = tf.fill([40, 40], 1.0 + hvd.rank())
    exchange([gradient])
    with limited:
        results["change"] = error_of(lambda: exchange.change(compress_ratio=0.1)) if first else ""
    meet()
    if not first:
        waiting.gather(hvd.global_process_set, "change", "this scenario")(None)
    meet()
    began = time.monotonic()
    with mock.patch.object(waiting, "end_process", lambda error: ended.write_text(str(error))):
        while not first and not ended.exists() and time.monotonic() < began + 60:
            time.sleep(0.1)
        merged = exchange([gradient])[0]
    results["step"] = ended.read_text()
    results["merged"] = float(tf.reduce_max(merged))
    results["under way"] = exchange._step._watch.under_way()
    return results
