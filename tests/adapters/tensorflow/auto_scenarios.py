"""Scenarios about the compressor "auto" in TensorFlow, run by each rank."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.core.errors import GraceError
from grace.tensorflow import DistributedGradientTape, Exchange
from tests.adapters.tensorflow.model import digest, wrap
from tests.adapters.tensorflow.usage_model import BATCH, by_hand, error_of, fit, gradients, samples
from tests.support.auto import preferring
from tests.support.cases import EVERYTHING

AUTO = {"compressor": "auto", **EVERYTHING}
NONE = {"compressor": "none", **EVERYTHING}
# 5 steps are not counted, and 10 are.
STEPS = 20


def net() -> keras.Model:
    """Return a model with one tensor to train, which is large enough to be compressed and measured.

    Which of several tensors Horovod adds at once depends on the time, and with it the order of sums of three ranks.
    """
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(160, activation="relu", use_bias=False, name="hidden")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(4, trainable=False, name="out")], name="net")


class Changing(keras.callbacks.Callback):
    """A callback that changes the method by hand before a batch."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == self.step:
            self.model.optimizer.grace.change(compressor="topk")
            self.model.make_train_function(force=True)


def tf_auto() -> dict[str, Any]:
    """Train by fit, by an optimizer without graphs and by tapes; with "auto", and with the same change by hand."""
    refused = [_in_a_graph(), _in_a_step_of_its_own()]
    return {"fit": _by_fit(), "hand": _in_a_loop(), "tape": _by_tapes(), "refused": refused}


def _result(models: list[keras.Model], stats: dict[str, Any]) -> dict[str, Any]:
    """Return what auto has decided and when, and what both models are; the second was changed by hand."""
    auto = stats["auto"]
    return {**{key: auto[key] for key in ("since", "compressor")}, "digests": [digest(m.variables) for m in models]}


def _by_fit() -> dict[str, Any]:
    model = net()
    model.compile(wrap(AUTO), "mse")
    with preferring("topk"):
        fit(model, STEPS)
    stats = model.optimizer.grace.stats()
    plain = net()
    plain.compile(wrap(NONE), "mse")
    fit(plain, STEPS, callbacks=[Changing(stats["auto"]["since"])])
    return _result([model, plain], stats)


def _in_a_loop() -> dict[str, Any]:
    models = [net(), net()]
    optimizer = wrap(AUTO)
    with preferring("topk"):
        by_hand(models[0], lambda g: optimizer.apply(g, models[0].trainable_variables), STEPS)
    stats = optimizer.grace.stats()
    since, other = stats["auto"]["since"], wrap(NONE)
    by_hand(models[1], lambda g: other.apply(g, models[1].trainable_variables), since)
    other.grace.change(compressor="topk")
    by_hand(models[1], lambda g: other.apply(g, models[1].trainable_variables), STEPS - since, start=since)
    return _result(models, stats)


def _by_tapes() -> dict[str, Any]:
    x, y = samples(STEPS, hvd.rank())

    def train(model: keras.Model, exchange: Exchange, start: int, stop: int) -> None:
        optimizer = keras.optimizers.SGD(0.1)
        for i in range(start * BATCH, stop * BATCH, BATCH):
            with DistributedGradientTape(tf.GradientTape(), exchange) as tape:
                loss = tf.reduce_mean(tf.square(model(x[i : i + BATCH]) - y[i : i + BATCH]))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    models, exchange, other = [net(), net()], Exchange(AUTO), Exchange(NONE)
    with preferring("topk"):
        train(models[0], exchange, 0, STEPS)
    stats = exchange.stats()
    since = stats["auto"]["since"]
    train(models[1], other, 0, since)
    other.change(compressor="topk")
    train(models[1], other, since, STEPS)
    return _result(models, stats)


def _in_a_graph() -> str:
    """Return the error of a graph that the user has traced."""
    model, optimizer = net(), wrap(AUTO)
    optimizer.build(model.trainable_variables)
    x, y = samples(1, hvd.rank())

    @tf.function(autograph=False)
    def step() -> None:
        optimizer.apply(gradients(model, tf.constant(x), tf.constant(y)), model.trainable_variables)

    try:
        step()
    except GraceError as error:
        return str(error)
    return ""


class Traced(keras.Sequential):
    """A model whose step is a graph of its own, which stays when Keras traces its function again."""

    @tf.function(autograph=False)
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def _in_a_step_of_its_own() -> str:
    """Return the error of a model that decorates its step."""
    model = Traced(net().layers)
    model.compile(wrap(AUTO), "mse")
    return error_of(lambda: fit(model, 1))
