"""Scenarios about gradient tapes, run by each rank."""

from __future__ import annotations

import gc
import itertools
import math
import tempfile
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from grace.tensorflow import DistributedGradientTape, Exchange
from grace.tensorflow import tape as tape_module
from tests.adapters.tensorflow.model import PROCESS_SETS, digest, joined, sgd, through_tape, wrap
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
from tests.support.cases import EVERYTHING

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


def unconnected() -> dict[str, Any]:
    """Ask for the gradients of variables that no rank, rank 0 only, or a later step uses, in both ways of TensorFlow.

    One of them gets rows on rank 0 in the first step.
    """
    results = {}
    none, zero = tf.UnconnectedGradients.NONE, tf.UnconnectedGradients.ZERO
    for label, arguments in {"none": (None, none), "zero": (None, zero), "text": (None, "zero")}.items():
        a, b, later = (tf.Variable([1.0, 2.0], name=name) for name in ("a", "b", "later"))
        table = tf.Variable(tf.ones((3, 2)), name="embeddings")
        exchange, own = Exchange(NONE), tf.Variable([1.0], name="own")
        found = []
        for step in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(a * (hvd.rank() + 1.0))
                if hvd.rank() == 0:
                    loss += tf.reduce_sum(b) + tf.reduce_sum(tf.gather(table, [1]))
                if step == 1 and label != "none":
                    loss += tf.reduce_sum(later)
            tape = DistributedGradientTape(tape, exchange)
            tape.register_local_source(own)
            given = {"used": a, "others": [b, later, table, own]}
            if label == "text":
                got = tape.gradient(loss, given, unconnected_gradients="zero", output_gradients=tf.constant(2.0))
            else:
                got = tape.gradient(loss, given, *arguments)
            found.append(
                {
                    v.name.partition(":")[0]: None if g is None else tf.convert_to_tensor(g).numpy().tolist()
                    for v, g in zip(tf.nest.flatten(given), tf.nest.flatten(got), strict=True)
                }
            )
        results[label] = found
    variable = tf.Variable([1.0, 2.0])
    with DistributedGradientTape(tf.GradientTape(), Exchange(NONE)) as tape:
        loss = tf.reduce_sum(variable)
    local, everyone = tape.get_local_and_global_gradients(loss, [variable])
    results["horovod"] = [len(local), everyone[0][1].numpy().tolist()]
    return results


def unused_in_turn(listed: list[dict[str, Any]]) -> dict[str, Any]:
    """Exchange gradients that ranks lack in turn, then zeros until all has arrived; return what was lost on the way."""
    results = {}
    for process_set in (hvd.global_process_set, *(s for s in PROCESS_SETS if len(s.ranks) == 3 and s.included())):
        for config in listed:
            shapes = {"matrix": (12, 10), "vector": (40,)}
            variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
            exchange = Exchange({**config, **EVERYTHING}, process_set=process_set)
            size, rank = len(process_set.ranks), process_set.rank()
            given, applied = (np.zeros(sum(map(math.prod, shapes.values()))) for _ in range(2))
            for step in range(24):
                rng = np.random.default_rng(step)
                everyone = [
                    [
                        None if (step + number + place) % size == 1 else rng.normal(size=shape).astype(np.float32)
                        for place, shape in enumerate(shapes.values())
                    ]
                    for number in range(size)
                ]
                if step >= 6:
                    everyone = [[np.zeros(shape, np.float32) for shape in shapes.values()]] * size
                mine = [None if g is None else tf.constant(g) for g in everyone[rank]]
                merged = through_tape(exchange, variables, mine)
                applied += joined(merged)
                for each in everyone:
                    whole = [np.zeros(s) if g is None else g for s, g in zip(shapes.values(), each, strict=True)]
                    given += joined(whole) / size
            results[f"{size} ranks, {config}"] = {
                "lost": float(np.abs(given - applied).max()),
                "given": float(np.abs(given).max()),
                "applied": digest([tf.constant(applied)]),
            }
    return results


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
