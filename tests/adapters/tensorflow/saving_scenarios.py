"""Scenarios about saved models, run by each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.tensorflow import BroadcastGlobalVariablesCallback
from tests.adapters.tensorflow.loss_scaling_scenarios import mixed_float16, scaled, states
from tests.adapters.tensorflow.model import digest, sgd, wrap
from tests.adapters.tensorflow.usage_model import POWERSGD, TOPK, applying, by_hand, error_of, fit, net, samples
from tests.support.launch import ROOT

METHODS = {
    "topk": TOPK,
    "powersgd": POWERSGD,
    # Rules and random numbers depend on the names of variables.
    "by name": {"compressor": "none", "rules": [{"match": "net/hidden/kernel", "compressor": "qsgd"}]},
}


@keras.saving.register_keras_serializable("tests")
class Own(keras.optimizers.SGD):
    """An optimizer that the user has defined."""

    def __init__(self, factor: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.factor = factor

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.factor, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


class Unregistered(Own):
    """An optimizer that Keras knows only from `custom_objects`."""


def _compiled(optimizer: Any, **options: Any) -> keras.Model:
    model = net()
    # Run eagerly, because tracing Keras' own step takes longer than everything else here.
    model.compile(optimizer, "mse", **{"run_eagerly": True, **options})
    return model


def saved_models(labels: list[str]) -> dict[str, Any]:
    """Run three steps, save a file per rank, run two more in the loaded model, and compare with five steps at once."""
    cases = {label: wrap(config) for label, config in METHODS.items()}
    cases |= {
        "adam": wrap(TOPK, keras.optimizers.Adam(0.01)),
        "unregistered": wrap(TOPK, Unregistered(2.0, learning_rate=0.05)),
        "accumulating": wrap(TOPK, backward_passes_per_step=3),
        "mixed precision": wrap(TOPK),
        "scaled inside": wrap(TOPK, scaled(sgd())),
    }
    results = {}
    for label in labels:
        optimizer = cases[label]
        # Keras scales the loss of a loaded model only if the policy of its creation is set.
        with mixed_float16() if label == "mixed precision" else nullcontext(), tempfile.TemporaryDirectory() as folder:
            model = _compiled(optimizer, run_eagerly=label != "topk")
            # Save in the middle of an accumulation, if there is one.
            fit(model, 4)
            model.save(f"{folder}/model.keras")
            loaded = keras.models.load_model(f"{folder}/model.keras", custom_objects={"Unregistered": Unregistered})
        pairs = zip(model.optimizer.variables, loaded.optimizer.variables, strict=True)
        equal = all(digest([a]) == digest([b]) for a, b in pairs)
        for m in (model, loaded):
            fit(m, 3, start=4)
        results[label] = {
            "state": equal,
            "weights": [digest(model.weights), digest(loaded.weights)],
            "types": [type(model.optimizer).__name__, type(loaded.optimizer).__name__],
        }
    return results


def checkpoints() -> dict[str, Any]:
    """Restore a tf.train.Checkpoint before and after the optimizer has variables: 3 and 2 steps, compared with 5."""
    results = {}
    for label, make in {"before": lambda: wrap(TOPK, scaled(sgd())), "afterwards": lambda: wrap(TOPK)}.items():
        whole, first, second = net(), net(), net(seed=1)
        by_hand(whole, applying(make(), whole), 5)
        optimizer = make()
        by_hand(first, applying(optimizer, first), 3)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(model=first, optimizer=optimizer).save(f"{folder}/own")
            optimizer = make()
            if label == "afterwards":
                optimizer.build(second.trainable_variables)
            status = tf.train.Checkpoint(model=second, optimizer=optimizer).restore(path)
            by_hand(second, applying(optimizer, second), 2, start=3)
            status.assert_consumed()
        results[label] = [digest(model.weights) for model in (whole, second)]
    return results


def one_file() -> dict[str, Any]:
    """Load a file of rank 0 on every rank. Its residuals belong to rank 0 only."""
    model = _compiled(wrap(TOPK))
    fit(model, 3)
    before = states(model.optimizer.grace)
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, name="folder")
    path = os.path.join(folder, "model.keras")
    if hvd.rank() == 0:
        model.save(path)
    hvd.allreduce(tf.zeros([]), name="saved")
    loaded, expected = keras.models.load_model(path), keras.models.load_model(path)
    inherited = states(loaded.optimizer.grace)
    _, *memories = expected.optimizer.grace.of_this_rank
    for memory in memories if hvd.rank() else []:
        memory.assign(tf.zeros_like(memory))
    callbacks = [BroadcastGlobalVariablesCallback(0)]
    for m in (loaded, expected):
        fit(m, 2, start=3, callbacks=callbacks)
    return {
        "inherited": [inherited == before, inherited],
        "weights": [digest(loaded.weights), digest(expected.weights)],
        "states": states(loaded.optimizer.grace) == states(expected.optimizer.grace),
        "step": loaded.optimizer.grace.stats()["step"],
    }


def round_trip() -> dict[str, Any]:
    """Use get_config and from_config, also through JSON and Keras' own functions."""
    rules = [{"match": "*bias", "compressor": "fp16"}]
    optimizer = wrap({**TOPK, "rules": rules}, Own(3.0), op=hvd.Sum, sparse_as_dense=True)
    copies = {
        "from_config": type(optimizer).from_config(json.loads(json.dumps(optimizer.get_config()))),
        "serialize": keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        "again": type(optimizer).from_config(type(optimizer).from_config(optimizer.get_config()).get_config()),
    }
    results = {
        label: [copy.grace.settings() == optimizer.grace.settings(), copy.factor, isinstance(copy, Own)]
        for label, copy in copies.items()
    }
    passes = wrap(TOPK, backward_passes_per_step=2)
    passes = type(passes).from_config(passes.get_config())
    earlier = {**optimizer.get_config(), "local_steps": 4}
    results["earlier"] = error_of(lambda: type(optimizer).from_config(earlier))
    return {**results, "passes": [passes.gradient_accumulation_steps, passes.get_config()["summed_passes"]]}


FRESH = """
import json, sys
import horovod.tensorflow as hvd, keras, numpy as np, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import grace.tensorflow
from tests.adapters.tensorflow.model import digest, sgd, wrap
from tests.adapters.tensorflow.usage_model import NONE, TOPK, error_of, fit, net, samples
results = {"wrapped": error_of(lambda: wrap(TOPK)), "taped": error_of(
    lambda: grace.tensorflow.DistributedGradientTape(tf.GradientTape(), TOPK))}
model = keras.models.load_model(sys.argv[1])
results["state"] = digest(model.optimizer.variables)
results["predicted"] = digest([model.predict(samples(1, 0)[0], verbose=0)])
results["step"] = error_of(lambda: fit(model, 1) if hvd.is_initialized() else model.fit(*samples(1, 0), verbose=0))
results["initialized"] = hvd.is_initialized()
hvd.init()
fit(model, 2, start=3)
results["weights"] = digest(model.weights)
with tf.distribute.MirroredStrategy().scope():
    replicas = net()
    replicas.compile(wrap(NONE), "mse")
results["mirrored"] = error_of(lambda: fit(replicas, 1))
print("RESULT", json.dumps(results))
"""

OTHER_BACKEND = """
import json
import horovod.tensorflow as hvd, keras
hvd.init()
import grace.tensorflow
from grace.tensorflow import DistributedOptimizer
try:
    DistributedOptimizer(keras.optimizers.SGD(), {"compressor": "topk"})
    refused = ""
except Exception as error:
    refused = f"{type(error).__name__}: {error}"
print("RESULT", json.dumps({"backend": keras.backend.backend(), "refused": refused}))
"""


def _start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output.rpartition("RESULT ")[2])


def fresh_process() -> dict[str, Any]:
    """Load a model in another process, use it without Horovod, then train it. Also try set-ups that need a process."""
    # Both processes spend most of their time on imports. Let them do so at once.
    other = _start(OTHER_BACKEND, KERAS_BACKEND="torch")
    model = _compiled(wrap(TOPK))
    fit(model, 3)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        result = _result(_start(FRESH, f"{folder}/model.keras"))
    expected = {
        "state": digest(model.optimizer.variables),
        "predicted": digest([model.predict(samples(1, 0)[0], verbose=0)]),
    }
    fit(model, 2, start=3)
    expected["weights"] = digest(model.weights)
    return {"result": result, "expected": expected, "torch": _result(other)}
