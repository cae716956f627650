"""Scenarios about Keras' features with a wrapped optimizer, run by each rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from tests.adapters.tensorflow.model import digest, sgd, wrap
from tests.adapters.tensorflow.usage_model import (
    BATCH,
    NONE,
    POWERSGD,
    TOPK,
    against_one_process,
    applying,
    by_hand,
    distance,
    everybody,
    fit,
    gradients,
    net,
)
from tests.support import rank

METHODS = {"none": NONE, "topk": TOPK, "powersgd": POWERSGD}
COMPILED = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "several steps": {"steps_per_execution": 3},
    "unrolled": {"steps_per_execution": 3},
}


def ways_to_train(methods: Sequence[str]) -> dict[str, Any]:
    """Run the same six steps in every way that Keras supports, with the same method: exact weights."""
    results: dict[str, Any] = {}
    for label in methods:
        config = METHODS[label]
        ways = COMPILED if label == "topk" else {"graph": {}}
        weights = {}
        for way, options in ways.items():
            model = net()
            model.unrolled_steps_per_execution = 3 if way == "unrolled" else 1
            model.compile(wrap(config), "mse", **options)
            fit(model, 6)
            weights[way] = digest(model.weights)
        for pairs, graph in itertools.product((False, True), repeat=2) if label == "topk" else [(False, False)]:
            model = net()
            by_hand(model, applying(wrap(config), model, pairs=pairs, graph=graph), 6)
            weights[f"{pairs=}, {graph=}"] = digest(model.weights)
        results[label] = weights
    return results


def _scheduled() -> keras.optimizers.Optimizer:
    return sgd(learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 4))


def _several() -> keras.optimizers.Optimizer:
    """Return a MultiOptimizer with one optimizer for the first layer and one for the rest."""
    parts = keras.optimizers.OptimizerMap(sgd(clipnorm=0.1), {"net/hidden/.*": keras.optimizers.Adam(0.01)})
    return keras.optimizers.MultiOptimizer(parts)


OPTIMIZERS = {
    "momentum": lambda: sgd(nesterov=True),
    "clipnorm": lambda: sgd(clipnorm=0.05),
    "global_clipnorm": lambda: sgd(global_clipnorm=0.1),
    "clipvalue": lambda: sgd(clipvalue=0.02),
    "use_ema": lambda: sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "weight_decay": lambda: sgd(weight_decay=0.1),
    "schedule": _scheduled,
    "loss_scale_factor": lambda: sgd(loss_scale_factor=0.5),
    "accumulation": lambda: sgd(gradient_accumulation_steps=2, clipnorm=0.05),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "several": _several,
}


def options_of_optimizers(compressed: Sequence[str]) -> dict[str, Any]:
    """Use every option with `none`, compared with one process on the joined batches, and some with topk."""
    results = {}
    for label, make in OPTIMIZERS.items():
        model, away, moved = against_one_process(make)
        results[label] = {"distance": away, "moved": moved, "weights": digest(model.weights)}
        if label in compressed:
            model = net()
            by_hand(model, applying(wrap(TOPK, make()), model), 4)
            results[label]["compressed"] = digest(model.weights)
    return results


def all_optimizers() -> dict[str, Any]:
    """Run one step of every built-in optimizer, and compare with one process on the joined batch."""
    results = {}
    without_rate = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer, keras.optimizers.Optimizer)
    for label in dir(keras.optimizers):
        kind = getattr(keras.optimizers, label)
        if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer) and kind not in without_rate:
            model, away, moved = against_one_process(lambda kind=kind: kind(learning_rate=0.01), steps=1)
            results[label] = {"distance": away, "moved": moved, "weights": digest(model.weights)}
    return results


def passes_per_step() -> dict[str, Any]:
    """Run four passes in two steps: the number of exchanges, and the combination of passes."""
    models, results = {}, {}
    for label, optimizer in {
        "sum": wrap(NONE, backward_passes_per_step=2),
        "mean": wrap(NONE, backward_passes_per_step=2, average_aggregated_gradients=True),
        "of Keras": wrap(NONE, sgd(gradient_accumulation_steps=2)),
        "sum of topk": wrap(TOPK, backward_passes_per_step=2),
    }.items():
        model = models[label] = net()
        by_hand(model, applying(optimizer, model), 4)
        stats = optimizer.grace.stats()
        results[label] = {"weights": digest(model.weights), "step": stats["step"], "bytes": stats["wire_bytes"]}
    for label, factor in {"sum": 2.0, "mean": 1.0}.items():
        # One process gets the data of all passes and ranks of a step in one batch.
        reference, expected = net(), sgd()
        expected.build(reference.trainable_variables)
        batches, size = everybody(4), 2 * BATCH * hvd.size()
        for i in (0, size):
            made = gradients(reference, *(tf.constant(a[i : i + size]) for a in batches))
            expected.apply([g * factor for g in made])
        results[label]["distance"] = distance(models[label], reference)
    return results


def digits(framework: str, arguments: list[str]) -> int:
    """Run the digits example of Keras or of the tape with these arguments, and return its exit status."""
    return rank.run_digits(framework, arguments)


def program(code: str) -> str:
    """Run a program in this process, which has imported the framework."""
    return rank.run_program(code)
