"""Scenarios about rare usage, run by each rank: two steps in one graph, other variables, lazy models, frozen layers."""

from __future__ import annotations

import time
import weakref
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from grace.tensorflow import BroadcastGlobalVariablesCallback, DistributedGradientTape, DistributedOptimizer, Exchange
from tests.adapters.tensorflow.loss_scaling_scenarios import scaled
from tests.adapters.tensorflow.model import digest, sgd, state_of, wrap
from tests.adapters.tensorflow.usage_model import NONE, TOPK, error_of, fit, net, samples, small_net
from tests.support.cases import EVERYTHING
from tests.support.covering import ALL


def two_steps_in_one_graph() -> dict[str, list[float]]:
    """Run two steps in one graph. Their order could differ between ranks 0 and 1."""

    def late(value: float, waits: bool) -> tf.Tensor:
        def ready() -> np.ndarray:
            time.sleep(0.2 * waits)
            return np.full(64, value, np.float32)

        return tf.ensure_shape(tf.numpy_function(ready, [], tf.float32), [64])

    results = {}
    # Each method is traced. Two are enough: tensors that Horovod adds up, and a bucket.
    for method in ("none", "fp16", "bf16", "signsgd") if ALL else ("none", "signsgd"):
        exchange, rank = Exchange({"compressor": method, **EVERYTHING}), hvd.rank()
        exchange.build([tf.Variable(tf.zeros(64), name="v")])

        @tf.function
        def both(exchange: Exchange = exchange, rank: int = rank) -> list[tf.Tensor]:
            one = exchange([late(rank + 1.0, rank % 2 == 0)])
            two = exchange([late(100.0 * (rank + 1.0), rank % 2 == 1)])
            return [one[0], two[0]]

        both()
        results[method] = [float(total[0]) for total in both()]
    return results


def wrapped_after_steps() -> dict[str, Any]:
    """Wrap an optimizer that has trained, with and without compiling again, and return the steps of the exchange."""
    results: dict[str, Any] = {}
    for label in ("compiled again", "kept", "scaled"):
        model, plain = small_net(seed=hvd.rank()), sgd()
        model.compile(scaled(plain) if label == "scaled" else plain, "mse")
        fit(model, 2)
        traced = model.train_function
        wrap(TOPK, plain)
        if label == "compiled again":
            model.compile(plain, "mse")
        broadcast = BroadcastGlobalVariablesCallback(0)
        fit(model, 2, start=2, callbacks=[broadcast])
        kept = model.train_function
        fit(model, 1, start=4)
        results[label] = {
            "weights": digest(model.weights),
            "step": plain.grace.stats()["step"],
            "new": kept is not traced,
            "kept": model.train_function is kept,
        }
    return results


def lists_of_variables() -> dict[str, Any]:
    """Use one Exchange with its variables in another order, and with other variables."""
    a, b, other = (tf.Variable(tf.zeros(8), name=name) for name in ("a", "b", "other"))
    exchange = Exchange({"compressor": "topk", "compress_ratio": 0.5, "granularity": "layer", **EVERYTHING})

    def gradients(sources: list[tf.Variable]) -> list[tf.Tensor]:
        with DistributedGradientTape(tf.GradientTape(), exchange) as tape:
            loss = tf.reduce_sum(a) + 100.0 * tf.reduce_sum(b) + tf.reduce_sum(other)
        return tape.gradient(loss, sources)

    sums = np.zeros(2)
    for _ in range(2):
        sums += [float(tf.reduce_sum(g)) for g in gradients([a, b])]
        sums += [float(tf.reduce_sum(g)) for g in gradients([b, a])][::-1]
    return {"sums": sums.tolist(), "other": error_of(lambda: gradients([a, other]))}


def lazy_model() -> dict[str, Any]:
    """Train a Sequential without Input, which its first batch builds, after on_train_begin."""
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)])
    model.compile(wrap(TOPK), "mse")
    built = model.built
    fit(model, 3, callbacks=[BroadcastGlobalVariablesCallback(0)])
    return {"built": built, "weights": digest(model.weights)}


def half_precision_weights() -> str:
    """Broadcast weights of a dtype for which Horovod has no broadcast."""
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.Input((8,)), keras.layers.Dense(16, dtype="bfloat16"), keras.layers.Dense(4, dtype="bfloat16")]
    model = keras.Sequential(layers)
    model.compile(wrap(NONE), "mse")
    fit(model, 3, callbacks=[BroadcastGlobalVariablesCallback(0)])
    return digest(model.weights)


def frozen_layer() -> dict[str, Any]:
    """Continue with the same optimizer and fewer variables."""
    model, optimizer = net(), wrap(TOPK)
    model.compile(optimizer, "mse")
    fit(model, 2)
    frozen = model.layers[0]
    before = digest(frozen.weights), state_of(optimizer.grace, frozen.kernel.path)
    frozen.trainable = False
    model.compile(optimizer, "mse")
    fit(model, 2, start=2)
    after = digest(frozen.weights), state_of(optimizer.grace, frozen.kernel.path)
    return {"kept": before == after, "weights": digest(model.weights), "step": optimizer.grace.stats()["step"]}


def changing_kinds() -> dict[str, float]:
    """Pass gradients in another form than in the first step, and on some ranks only."""
    results = {}
    for name in ("dense first", "rows first"):
        table = tf.Variable(tf.zeros((4, 2)), name="table")
        exchange = Exchange({"compressor": "none", **EVERYTHING})
        dense = tf.fill([4, 2], float(hvd.rank() + 1))
        forms = [dense, tf.IndexedSlices(dense, tf.range(4)), tf.IndexedSlices(dense, tf.range(4, dtype=tf.int64))]
        first = forms[0] if name == "dense first" else forms[1]
        exchange.build([table], [first])
        exchange([first])
        merged = exchange([forms[hvd.rank() % 3 if hvd.rank() else 2]])[0]
        results[name] = float(tf.convert_to_tensor(merged)[3, 1])
    return results


def different_iterations() -> str:
    """Load an optimizer on one rank, while the others start from zero."""
    model, optimizer = net(), wrap(TOPK)
    optimizer.build(model.trainable_variables)
    optimizer._iterations.assign(hvd.rank())
    x, y = samples(1, hvd.rank())
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    return error_of(lambda: optimizer.apply(gradients, model.trainable_variables))


class Unregistered(keras.optimizers.schedules.LearningRateSchedule):
    """A learning-rate schedule that Keras can save, and can load only with `custom_objects`."""

    def __call__(self, step: Any) -> float:
        return 0.1

    def get_config(self) -> dict[str, Any]:
        return {}


def odds_and_ends() -> dict[str, Any]:
    """Check various refusals, a saved optimizer, and that a tape is released."""
    multi = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd()))
    exchange, variable = Exchange(TOPK), tf.Variable(tf.zeros((8, 8)), name="v")
    exchange.build([variable])
    saved = keras.optimizers.serialize(DistributedOptimizer(keras.optimizers.SGD(Unregistered()), NONE))
    tape = DistributedGradientTape(tf.GradientTape(persistent=True), NONE)
    with tape:
        loss = tf.reduce_sum(variable)
    tape.gradient(loss, [variable])
    gone = weakref.ref(tape)
    del tape
    return {
        "multi": error_of(lambda: DistributedOptimizer(multi, NONE, backward_passes_per_step=2)),
        "built twice": error_of(lambda: exchange.build([variable])),
        "process set": error_of(lambda: DistributedOptimizer(sgd(), NONE, process_set=None)),
        "saved": saved["config"]["optimizer"]["class_name"],
        "tape is gone": gone() is None,
        "scaled": keras.optimizers.LossScaleOptimizer(wrap(TOPK)).grace.config.to_dict()["compressor"]["name"],
        "not scaled": hasattr(keras.optimizers.LossScaleOptimizer(sgd()), "grace"),
    }
