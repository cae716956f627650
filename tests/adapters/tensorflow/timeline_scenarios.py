"""A scenario about the times of a step in TensorFlow, run by each rank."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import tensorflow as tf

import grace.tensorflow
from tests.adapters.tensorflow.model import wrap
from tests.adapters.tensorflow.usage_model import POWERSGD, TOPK, error_of, fit, gradients, net, samples


def timeline() -> dict[str, Any]:
    """Write timelines by GRACE_TIMELINE and by a call, three steps of `fit` each. Try a path that cannot be written."""
    with tempfile.TemporaryDirectory() as folder:
        model = net()
        with mock.patch.dict(os.environ, GRACE_TIMELINE=f"{folder}/told.json"):
            optimizer = wrap({**POWERSGD, "bucket_bytes": 256})
        model.compile(optimizer, "mse", steps_per_execution=3)
        fit(model, 3)
        results: dict[str, Any] = {"stats": optimizer.grace.stats()}
        optimizer.grace.start_timeline(f"{folder}/by hand.json")
        fit(model, 3, start=3)
        optimizer.grace.stop_timeline()
        fit(model, 3, start=6)
        for name in ("told", "by hand"):
            results[name] = _events(folder, name)

        plain = net()
        plain.compile(wrap(TOPK), "mse")
        fit(plain, 1)
        results["late"] = error_of(lambda: plain.optimizer.grace.start_timeline(f"{folder}/late.json"))
        with mock.patch.dict(os.environ, GRACE_TIMELINE=f"{folder}/tape.json"):
            _step_of_tape(net())
        results["tape"] = _events(folder, "tape")
        path = f"{folder}/nowhere/trace.json" if hvd.rank() == 1 else ""
        with mock.patch.dict(os.environ, GRACE_TIMELINE=path):
            results["refused"] = error_of(lambda: wrap(TOPK))
            results["refused tape"] = error_of(lambda: _step_of_tape(net()))
    return results


def _events(folder: str, name: str) -> Any:
    return json.loads(Path(f"{folder}/{name}.rank{hvd.rank()}.json").read_text())


def _step_of_tape(model: Any) -> None:
    exchange, (x, y) = grace.tensorflow.Exchange(TOPK), samples(1, hvd.rank())
    exchange.build(model.trainable_variables)
    exchange(gradients(model, tf.constant(x), tf.constant(y)))
