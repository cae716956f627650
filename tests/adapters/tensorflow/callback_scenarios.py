"""Scenarios about callbacks, run by each rank."""

from __future__ import annotations

import gc
import logging
import logging.handlers
import os
import tempfile
import weakref
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.tensorflow import BroadcastGlobalVariablesCallback, MetricAverageCallback, StatisticsCallback
from tests.adapters.tensorflow.loss_scaling_scenarios import mixed_float16, scaled, states
from tests.adapters.tensorflow.model import PROCESS_SETS, digest, sgd, wrap
from tests.adapters.tensorflow.usage_model import NONE, TOPK, error_of, fit, net, samples, small_net, traces_of


class Look(keras.callbacks.Callback):
    """A callback that records the state when training begins and after its first batch."""

    def on_train_begin(self, logs: Any = None) -> None:
        exchange = self.model.optimizer.grace
        self.weights, self.states = digest(self.model.weights), states(exchange)
        mine = {id(v) for v in exchange.of_this_rank}
        self.optimizer = digest([v for v in self.model.optimizer.variables if id(v.value) not in mine])


def broadcast() -> dict[str, Any]:
    """Broadcast between ranks with different weights, in a new model and in a trained one."""
    fresh = net(seed=hvd.rank())
    fresh.compile(wrap(TOPK), "mse")
    own = digest(fresh.weights)
    first = Look()
    fit(fresh, 2, callbacks=[BroadcastGlobalVariablesCallback(0), first])
    # Make the ranks differ in variables that are broadcast, and in others that are not.
    for variable in (*fresh.weights, *(v for v in fresh.optimizer.variables if "momentum" in v.path)):
        variable.assign(variable + hvd.rank())
    apart, before = digest(fresh.weights), states(fresh.optimizer.grace)
    second = Look()
    fit(fresh, 2, callbacks=[BroadcastGlobalVariablesCallback(hvd.size() - 1), second])
    with mixed_float16():
        mixed = net(seed=hvd.rank())
    mixed.compile(scaled(wrap(TOPK)), "mse")
    fit(mixed, 2, callbacks=[BroadcastGlobalVariablesCallback(0)])
    plain = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, use_bias=hvd.rank() > 0)])
    plain.compile(sgd(), "mse")
    return {
        "own": own,
        "first": [first.weights, first.optimizer],
        "apart": apart,
        "second": [second.weights, second.optimizer],
        "states": second.states == before,
        "weights": [digest(fresh.weights), digest(mixed.weights)],
        "different": error_of(lambda: fit(plain, 1, callbacks=[BroadcastGlobalVariablesCallback(0)])),
    }


def repeated_fits() -> dict[str, Any]:
    """Train one model by many calls of fit, and equal models after it; return what TensorFlow logs about its traces."""
    handler = logging.handlers.BufferingHandler(10_000)
    logger = tf.get_logger()
    logger.addHandler(handler)
    try:
        model = net(seed=hvd.rank())
        model.compile(wrap(TOPK), "mse")
        for _ in range(6):
            fit(model, 1, callbacks=[BroadcastGlobalVariablesCallback(0), MetricAverageCallback()])
        others = [net(seed=hvd.rank()) for _ in range(2)]
        for other in others:
            other.compile(wrap(TOPK), "mse")
            fit(other, 1, callbacks=[BroadcastGlobalVariablesCallback(0)])
        kept = [weakref.ref(v.value) for other in others for v in other.weights]
        del other, others
        keras.utils.clear_session()
        for _ in range(2):
            gc.collect()
    finally:
        logger.removeHandler(handler)
    logged = [record.getMessage() for record in handler.buffer]
    return {
        "traces": model.optimizer.grace.traces,
        "weights": digest(model.weights),
        "kept": sum(reference() is not None for reference in kept),
        # Keras makes a function for every model, of which TensorFlow warns, too.
        "warnings": [text for text in logged if "retracing" in text and "TensorFlowTrainer" not in text],
    }


def metrics() -> dict[str, Any]:
    """Record the metrics of an epoch: those of this rank, and those that callbacks after MetricAverageCallback see."""
    model, own = net(), {}
    model.compile(wrap(NONE), "mse", metrics=["mae"])
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.update(logs))
    validation = samples(2, hvd.rank() + 100)
    history = fit(model, 3, validation_data=validation, callbacks=[note, MetricAverageCallback()])

    def different() -> None:
        other = net()
        other.compile(wrap(NONE), "mse", metrics=["mae"] if hvd.rank() == hvd.size() - 1 else [])
        fit(other, 1, callbacks=[MetricAverageCallback()])

    return {
        "own": {name: float(value) for name, value in own.items()},
        "history": {name: values[0] for name, values in history.history.items()},
        "different": error_of(different),
    }


def learning_rates() -> dict[str, Any]:
    """Use callbacks that change the learning rate after metrics are averaged, and averaged weights."""
    model = net()
    model.compile(wrap(TOPK, sgd(use_ema=True, ema_momentum=0.5)), "mse")
    rates: list[float] = []
    history = fit(
        model,
        3,
        epochs=4,
        callbacks=[
            MetricAverageCallback(),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 if epoch == 0 else rate),
            # No improvement is large enough, so the rate is halved after every epoch except the first.
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0),
            keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: rates.append(float(_rate(model)))),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        ],
    )
    averages = [v for v in model.optimizer.variables if v.path.endswith("average")]
    return {
        "rates": rates,
        "loss": history.history["loss"],
        "weights": digest(model.weights),
        "averages": [len(averages), digest(averages)],
    }


def _rate(model: keras.Model) -> Any:
    return model.optimizer.learning_rate


def statistics() -> dict[str, Any]:
    """Record the statistics in History and in TensorBoard's files, without and with norms."""
    results: dict[str, Any] = {}
    for norms in (False, True):
        # In a unit with other tensors, all elements of a bias may be sent. So use one unit per layer.
        model, optimizer = net(), wrap({**TOPK, "granularity": "layer"})
        traces = traces_of(model)
        early = error_of(optimizer.grace.stats), error_of(optimizer.grace.report)
        optimizer.grace.track_norms = norms
        model.compile(optimizer, "mse", steps_per_execution=3 if norms else 1)
        with tempfile.TemporaryDirectory() as folder:
            callbacks = [StatisticsCallback(), keras.callbacks.TensorBoard(folder)]
            history = fit(model, 3, epochs=2, callbacks=callbacks).history
            written = _tags(f"{folder}/train")
        stats = optimizer.grace.stats()
        results["with norms" if norms else "without"] = {
            "early": early,
            "traces": len(traces),
            "late": error_of(lambda o=optimizer: setattr(o.grace, "track_norms", True)),
            "history": {key: values for key, values in history.items() if key.startswith("grace")},
            "written": written,
            "stats": {key: stats[key] for key in ("step", "wire_bytes", "dense_bytes")},
            "norms": [[t["relative_error"], t["residual_norm"]] for t in stats["tensors"].values()],
            "report": optimizer.grace.report(),
        }
    plain = net()
    plain.compile(sgd(), "mse")
    results["refused"] = error_of(lambda: fit(plain, 1, callbacks=[StatisticsCallback()]))
    return results


def _tags(folder: str) -> list[str]:
    """Return grace's tags in the event files of a folder."""
    tags = set()
    for file in os.listdir(folder):
        for record in tf.data.TFRecordDataset(os.path.join(folder, file)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            tags |= {value.tag for value in event.summary.value if "grace" in value.tag}
    return sorted(tags)


def apart() -> dict[str, Any]:
    """Train even and odd ranks separately: optimizer, callbacks, and a loaded model that needs its process set."""
    mine = PROCESS_SETS[hvd.rank() % 2]
    model = small_net(seed=hvd.rank())
    model.compile(wrap(TOPK, process_set=mine), "mse", run_eagerly=True)
    callbacks = [BroadcastGlobalVariablesCallback(hvd.rank() % 2, mine), MetricAverageCallback(mine)]
    history = fit(model, 2, callbacks=callbacks).history["loss"]
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        loaded = keras.models.load_model(f"{folder}/model.keras")
    unset = error_of(lambda: fit(loaded, 1, start=2))
    loaded.optimizer.grace.process_set = mine
    for m in (model, loaded):
        fit(m, 2, start=2)
    # The first rank to finish must not shut Horovod down for the others.
    hvd.allreduce(tf.zeros([]), name="apart")
    return {"loss": history, "unset": unset, "weights": [digest(model.weights), digest(loaded.weights)]}
