"""Scenarios about dynamic loss scaling, run by each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from tests.adapters.tensorflow.model import digest, sgd, state_of, wrap
from tests.adapters.tensorflow.usage_model import BATCH, NONE, POWERSGD, TOPK, applying, gradients, net, samples

METHODS = {"none": NONE, "topk": TOPK, "powersgd": POWERSGD}
SCALE = 2.0**10


@contextmanager
def mixed_float16() -> Iterator[None]:
    """Set the policy mixed_float16 for layers that are made inside the context."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def scaled(optimizer: Any, **options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=SCALE, **options)


def states(exchange: Any) -> list[str]:
    """Return hashes of this rank's memories of every tensor."""
    return [state_of(exchange, item.spec.name) for item in exchange.plan.exchanged]


def watched(model: keras.Model, optimizer: Any, step: Callable[[int], Any], steps: int) -> dict[str, Any]:
    """Run steps. Return the changes of each step, the scale, and the weights."""
    inner = optimizer.inner_optimizer
    optimizer.build(model.trainable_variables)

    def look() -> dict[str, Any]:
        momenta = [v for v in inner.variables if "momentum" in v.path]
        return {"weights": digest(model.weights), "momenta": digest(momenta), "states": states(inner.grace)}

    history, before = [], look()
    for i in range(steps):
        step(i)
        after = look()
        moved = [key for key in after if after[key] != before[key]]
        history.append({"moved": moved, "scale": float(optimizer.dynamic_scale), "weights": after["weights"]})
        before = after
    return {"history": history, "finite": all(np.isfinite(w).all() for w in model.get_weights())}


def overflow_in_fit(methods: list[str]) -> dict[str, Any]:
    """Train with mixed precision by model.compile. The last rank's second batch overflows float16."""
    results = {}
    for label in methods:
        for eager in (False, True) if label == "topk" else (False,):
            with mixed_float16():
                model = net()
            model.compile(wrap(METHODS[label]), "mse", run_eagerly=eager)
            x, y = samples(4, hvd.rank())
            if hvd.rank() == hvd.size() - 1:
                x[BATCH] = 1e9

            def step(i: int, model: keras.Model = model, x: np.ndarray = x, y: np.ndarray = y) -> None:
                batch = slice(i * BATCH, (i + 1) * BATCH)
                model.train_on_batch(x[batch], y[batch])

            results[f"{label}, {'eager' if eager else 'graph'}"] = watched(model, model.optimizer, step, 4)
    return results


def _overflow(optimizer: Any, graph: bool, steps: int) -> dict[str, Any]:
    """Run steps without fit. The second step has one infinite tensor on the last rank."""
    model = net()
    apply = applying(optimizer, model, graph=graph)

    def step(i: int) -> None:
        made = [g * SCALE for g in gradients(model, *map(tf.constant, samples(1, hvd.rank(), seed=i)))]
        if i == 1 and hvd.rank() == hvd.size() - 1:
            made[2] *= float("inf")
        apply(made)

    return watched(model, optimizer, step, steps)


def overflow_by_hand() -> dict[str, Any]:
    """Use a wrapped LossScaleOptimizer, and accumulate passes: 0, 2, 3 and 4 count, because 1 overflows."""
    results = {}
    for label, config in METHODS.items():
        for graph in (False, True) if label == "topk" else (True,):
            results[f"{label}, {'graph' if graph else 'eager'}"] = _overflow(wrap(config, scaled(sgd())), graph, 3)
    for label in ("none", "topk"):
        accumulating = wrap(METHODS[label], scaled(sgd()), backward_passes_per_step=2)
        results[f"{label}, accumulating"] = _overflow(accumulating, label == "topk", 5)
    return results


def scale_of_the_day(methods: list[str]) -> dict[str, Any]:
    """Run the same steps without scaling, with a fixed scale, and with a scale that grows every second step."""
    results = {}
    for label in methods:
        weights = {}
        for kind, growth in (("without", 0), ("fixed", 1000), ("growing", 2)):
            model, plain = net(), wrap(METHODS[label])
            optimizer = scaled(plain, dynamic_growth_steps=growth) if growth else plain
            optimizer.build(model.trainable_variables)
            for i in range(5):
                scale = float(optimizer.scale_loss(1.0))
                made = gradients(model, *map(tf.constant, samples(1, hvd.rank(), seed=i)))
                optimizer.apply([g * scale for g in made], model.trainable_variables)
            weights[kind] = [digest(model.weights), states(plain.grace), scale]
        results[label] = weights
    return results
