"""Small model, data and one-process references of the scenarios about usage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from tests.adapters.tensorflow.model import wrap
from tests.support.cases import EVERYTHING

BATCH = 4
NONE = {"compressor": "none", **EVERYTHING}
TOPK = {"compressor": "topk", "compress_ratio": 0.25, **EVERYTHING}
POWERSGD = {"compressor": "powersgd", **EVERYTHING}


def net(seed: int = 0, name: str = "net", *, biases: bool = True) -> keras.Model:
    """Return two dense layers, which are fast to trace. Ranks with the same seed have the same weights."""
    rng = np.random.default_rng(seed)
    layers = [
        keras.layers.Dense(16, activation="relu", use_bias=biases, name="hidden"),
        keras.layers.Dense(4, use_bias=biases, name="out"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers], name=name)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0.0, 0.3, variable.shape))
    return model


def small_net(seed: int = 0) -> keras.Model:
    """Return `net` without biases. Each tensor takes time in every trace, and two are enough for many rules."""
    return net(seed, biases=False)


def samples(steps: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the batches of a rank, concatenated. More steps begin with the same batches."""
    values = np.random.default_rng([seed, rank]).normal(size=(steps * BATCH, 12)).astype(np.float32)
    return values[:, :8], values[:, 8:]


def everybody(steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the data of all ranks: for every step the batches of all ranks."""
    columns = zip(*(samples(steps, rank, seed) for rank in range(hvd.size())), strict=True)
    return tuple(
        np.stack([a.reshape(steps, BATCH, -1) for a in column], axis=1).reshape(-1, column[0].shape[1])
        for column in columns
    )


def fit(model: keras.Model, steps: int, *, alone: bool = False, start: int = 0, **options: Any) -> Any:
    """Train by model.fit on this rank's batches, or `alone` on those of all ranks. Return the History."""
    x, y = everybody(start + steps) if alone else samples(start + steps, hvd.rank())
    size = BATCH * (hvd.size() if alone else 1)
    options = {"shuffle": False, "verbose": 0, **options}
    return model.fit(x[start * size :], y[start * size :], batch_size=size, **options)


def traces_of(model: keras.Model) -> list[None]:
    """Return a list that grows with every trace of the model's train_step."""
    traces: list[None] = []
    train_step = model.train_step

    def traced(data: Any) -> Any:
        traces.append(None)
        return train_step(data)

    model.train_step = traced
    return traces


def gradients(model: keras.Model, x: Any, y: Any) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return tape.gradient(loss, model.trainable_variables)


def applying(optimizer: Any, model: keras.Model, *, pairs: bool = False, graph: bool = False) -> Callable[[Any], None]:
    """Return a function that takes a model's gradients and applies them by an optimizer."""

    def apply(made: Any) -> None:
        if pairs:
            optimizer.apply_gradients(zip(made, model.trainable_variables, strict=True))
        else:
            optimizer.apply(made, model.trainable_variables)

    return tf.function(apply) if graph else apply


def by_hand(
    model: keras.Model, apply: Callable[[Sequence[Any]], Any], steps: int, *, start: int = 0, alone: bool = False
) -> None:
    """Train on the data of `fit`, with gradients passed to `apply`."""
    x, y = everybody(start + steps) if alone else samples(start + steps, hvd.rank())
    size = BATCH * (hvd.size() if alone else 1)
    for i in range(start * size, (start + steps) * size, size):
        apply(gradients(model, tf.constant(x[i : i + size]), tf.constant(y[i : i + size])))


def against_one_process(
    make: Callable[[], keras.optimizers.Optimizer], steps: int = 4, **arguments: Any
) -> tuple[keras.Model, float, float]:
    """Train a model with `none` on all ranks. Return its distance to training in one process, and its own change.

    `make` returns a new optimizer with the same arguments each time.
    """
    models = []
    for alone in (False, True):
        model = net()
        optimizer = make() if alone else wrap(NONE, make(), **arguments)
        optimizer.build(model.trainable_variables)
        by_hand(model, optimizer.apply, steps, alone=alone)
        models.append(model)
    return models[0], distance(*models), distance(models[0], net())


def distance(model: keras.Model, other: keras.Model) -> float:
    """Return the largest difference between two models' weights."""
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return float(max(np.abs(a - b).max() for a, b in pairs))


def error_of(attempt: Callable[[], Any]) -> str:
    """Return the type and text of the error that an attempt raises, empty if none."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
