"""Scenarios about the comparison of replicas, run by each rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.tensorflow import BroadcastGlobalVariablesCallback, DistributedGradientTape
from tests.adapters.tensorflow.model import digest, sgd, wrap
from tests.adapters.tensorflow.usage_model import NONE, POWERSGD, TOPK, by_hand, error_of, fit, net, samples


def forgotten_broadcast() -> dict[str, str]:
    """Train replicas that start with other weights on each rank, with and without a broadcast."""

    def by_fit(*callbacks: Any) -> None:
        model = net(seed=hvd.rank())
        model.compile(wrap(TOPK), "mse")
        fit(model, 3, callbacks=list(callbacks))

    def in_a_loop(*, broadcast: bool) -> None:
        model = net(seed=hvd.rank())
        optimizer = wrap(NONE)
        by_hand(model, _applied(optimizer, model), 1)
        if broadcast:
            hvd.broadcast_variables([v.value for v in model.weights], root_rank=0)
        by_hand(model, _applied(optimizer, model), 2, start=1)

    def by_tapes() -> None:
        model, plain = net(seed=hvd.rank()), sgd()
        x, y = map(tf.constant, samples(1, hvd.rank()))
        for _ in range(3):
            with DistributedGradientTape(tf.GradientTape(), TOPK) as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            plain.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return {
        "fit": error_of(by_fit),
        "loop": error_of(lambda: in_a_loop(broadcast=False)),
        "tapes": error_of(by_tapes),
        "broadcast, fit": error_of(lambda: by_fit(BroadcastGlobalVariablesCallback(0))),
        "broadcast, loop": error_of(lambda: in_a_loop(broadcast=True)),
    }


def _applied(optimizer: Any, model: keras.Model) -> Callable[[Any], None]:
    return lambda made: optimizer.apply(made, model.trainable_variables)


def drifting_replicas(labels: list[str]) -> dict[str, str]:
    """Change something on the last rank alone after four batches, and return the errors of four more."""

    def train(config: dict[str, Any], change: Callable[[Any], Any], **options: Any) -> str:
        model = net()
        model.compile(wrap(config, **options), "mse")
        fit(model, 4)
        if hvd.rank() == hvd.size() - 1:
            change(model)
        return error_of(lambda: fit(model, 4, start=4))

    def move(model: Any) -> None:
        model.trainable_variables[1].assign_add([1e-3] * 16)

    def move_state(model: Any) -> None:
        q = next(v for v in model.optimizer.variables if v.path.endswith("compressor_q"))
        q.assign(q + 1)

    def move_residual(model: Any) -> None:
        (residual,) = [v for v in model.optimizer.variables if v.path.endswith("residual")]
        residual.assign(residual + 1)

    layers = {"granularity": "layer"}
    cases: dict[str, Callable[[], str]] = {
        "weight": lambda: train(TOPK, move),
        "local": lambda: train(TOPK, move, local_steps=2),
        "state": lambda: train({**POWERSGD, **layers}, move_state),
        "residual": lambda: train(TOPK, move_residual),
        "off": lambda: train({**TOPK, "check_replicas": 0, "checksum": True}, move),
    }
    return {label: cases[label]() for label in labels}


def loaded_after_an_error() -> dict[str, Any]:
    """Fail in a step on all ranks, load a checkpoint into the same objects, and go on; compare with a whole run."""
    model = net()
    model.compile(wrap({**TOPK, "check_replicas": 3}), "mse")
    fit(model, 5)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.save(f"{folder}/saved")
        fit(model, 3, start=5)
        weights = [digest(model.weights)]
        checkpoint.restore(path).assert_consumed()
        if hvd.rank() == hvd.size() - 1:
            model.trainable_variables[1].assign_add([1e-3] * 16)
        # One step goes well, and the next one finds that the replicas have parted.
        error = error_of(lambda: fit(model, 3, start=5))
        checkpoint.restore(path).assert_consumed()
    fit(model, 3, start=5)
    return {"error": error, "weights": [*weights, digest(model.weights)], "step": model.optimizer.grace.stats()["step"]}


def compared_by_hand() -> list[str]:
    """Compare at once: equal weights, and weights that differ on the last rank."""
    model = net()
    optimizer = wrap(TOPK)
    optimizer.build(model.trainable_variables)
    errors = [error_of(optimizer.grace.check_replicas)]
    if hvd.rank() == hvd.size() - 1:
        model.trainable_variables[2].assign_add([[1e-3] * 4] * 16)
    return [*errors, error_of(optimizer.grace.check_replicas)]
