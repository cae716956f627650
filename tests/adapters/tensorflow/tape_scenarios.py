"""Scenarios about gradient tapes, run by each rank."""

from __future__ import annotations

import gc
import itertools
import tempfile
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.tensorflow import DistributedGradientTape, Exchange
from grace.tensorflow import tape as tape_module
from tests.adapters.tensorflow.model import digest, sgd, wrap
from tests.adapters.tensorflow.usage_model import (
    BATCH,
    NONE,
    POWERSGD,
    TOPK,
    applying,
    by_hand,
    gradients,
    net,
    samples,
)

METHODS = {"none": NONE, "topk": TOPK, "powersgd": POWERSGD}


def loss_of(model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(model(x) - y))


def train(
    model: keras.Model, config: Any, steps: int, *, graph: bool = False, optimizer: Any = None, start: int = 0
) -> None:
    """Train by a custom loop, with a new tape in every step."""
    optimizer = optimizer or sgd()
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with DistributedGradientTape(tf.GradientTape(), config) as tape:
            loss = loss_of(model, x, y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(step) if graph else step
    x, y = samples(start + steps, hvd.rank())
    for i in range(start * BATCH, (start + steps) * BATCH, BATCH):
        step(tf.constant(x[i : i + BATCH]), tf.constant(y[i : i + BATCH]))


def tapes(methods: list[str]) -> dict[str, Any]:
    """Train by a tape, eagerly and in a graph, with a configuration and an Exchange. Compare with the optimizer."""
    results = {}
    for label in methods:
        config = METHODS[label]
        model, optimizer = net(), wrap(config)
        by_hand(model, applying(optimizer, model), 4)
        weights = {"optimizer": digest(model.weights)}
        for graph, shared in itertools.product((False, True), repeat=2) if label == "topk" else [(True, False)]:
            model = net()
            train(model, Exchange(config) if shared else config, 4, graph=graph)
            weights[f"{graph=}, {shared=}"] = digest(model.weights)
        results[label] = weights
    return results


def tape_checkpoint() -> dict[str, Any]:
    """Save an Exchange in a tf.train.Checkpoint: 3 steps, a file and 2 more steps, compared with 5 at once."""
    whole, first, second = net(), net(), net(seed=1)
    train(whole, TOPK, 5)
    optimizer, exchange = sgd(), Exchange(TOPK)
    train(first, exchange, 3, optimizer=optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(model=first, optimizer=optimizer, grace=exchange).save(f"{folder}/own")
        optimizer, exchange = sgd(), Exchange(TOPK)
        optimizer.build(second.trainable_variables)
        status = tf.train.Checkpoint(model=second, optimizer=optimizer, grace=exchange).restore(path)
        train(second, exchange, 2, optimizer=optimizer, start=3)
        # All values in the file are restored by now, also those of variables that were made later.
        status.assert_consumed()
    return {"weights": [digest(model.weights) for model in (whole, second)], "step": exchange.stats()["step"]}


def local_sources() -> dict[str, Any]:
    """Use a variable that is not exchanged, with and without Horovod's scaling."""
    results = {}
    for scaled in (True, False):
        model = net()
        batch = [tf.constant(a) for a in samples(1, hvd.rank())]
        tape = DistributedGradientTape(tf.GradientTape(), NONE, scale_local_gradients=scaled)
        tape.register_local_source(model.trainable_variables[0])
        with tape:
            loss = loss_of(model, *batch)
        given, own = tape.gradient(loss, model.trainable_variables), gradients(model, *batch)
        results["scaled" if scaled else "as it is"] = {
            "factor": float(tf.norm(given[0]) / tf.norm(own[0])),
            "error": float(tf.reduce_max(tf.abs(given[0] * (hvd.size() if scaled else 1) - own[0]))),
            "others": digest(given[1:]),
            "exchanged": list(tape.grace.names),
        }
    return results


def shapes_of_sources() -> dict[str, Any]:
    """Use a persistent tape, one and several sources, a gradient of one rank only, and a gradient of no rank."""
    a, b, c = (tf.Variable([1.0, 2.0], name=name) for name in "abc")
    with DistributedGradientTape(tf.GradientTape(persistent=True), NONE) as tape:
        first = tf.reduce_sum(a * 2.0) * (hvd.rank() + 1.0)
        second = first + (tf.reduce_sum(b) if hvd.rank() == 0 else 0.0)
    structure = tape.gradient(second, {"used": a, "others": [b, c]})
    return {
        "single": tape.gradient(first, a).numpy().tolist(),
        "used": structure["used"].numpy().tolist(),
        "on rank 0": structure["others"][0].numpy().tolist(),
        "nowhere": structure["others"][1] is None,
    }


def two_models() -> dict[str, Any]:
    """Train two models in turn, each with its own residuals. Check that nothing remains when they are deleted."""
    gc.collect()
    before = len(tape_module._exchanges)
    apart, together = ([net(name="one"), net(seed=1, name="two")] for _ in range(2))
    optimizers = [sgd() for _ in together]
    for model in apart:
        train(model, TOPK, 3)
    for step in range(3):
        for model, optimizer in zip(together, optimizers, strict=True):
            train(model, TOPK, 1, optimizer=optimizer, start=step)
    kept = len(tape_module._exchanges) - before
    weights = [digest(model.weights) for model in (*apart, *together)]
    del model, apart, together, optimizers, optimizer
    keras.utils.clear_session()
    for _ in range(2):
        # What finalizers of the first collection still held is garbage only afterwards.
        gc.collect()
    return {"weights": weights, "kept": kept, "afterwards": len(tape_module._exchanges) - before}
