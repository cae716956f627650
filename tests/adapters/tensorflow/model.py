"""Model, data and helpers of TensorFlow's scenarios."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import grace.tensorflow

PROCESS_SETS: list[Any] = []

BATCH = 8


@keras.saving.register_keras_serializable("tests")
class Scale(keras.layers.Layer):
    """A layer that multiplies by one trainable scalar."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x * self.factor


def make_model(seed: int = 0) -> keras.Model:
    """Return a model with a convolution, two matrices, a vector and a scalar, equal on all ranks."""
    rng = np.random.default_rng(seed)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu", use_bias=False, name="conv"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(24, activation="relu", name="hidden"),
            Scale(name="scale"),
            keras.layers.Dense(10, use_bias=False, name="head"),
        ],
        name="net",
    )
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:
            variable.assign(rng.normal(0.0, 0.1, variable.shape))
    return model


def make_small(seed: int = 0) -> keras.Model:
    """Return a model with a matrix and a vector, which is fast to trace."""
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10, name="only")]
    model = keras.Sequential(layers, name="small")
    kernel = model.trainable_variables[0]
    kernel.assign(np.random.default_rng(seed).normal(0.0, 0.1, kernel.shape))
    return model


def data(steps: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return batches, concatenated. They differ between ranks and are equal in every scenario."""
    rng = np.random.default_rng([seed, rank])
    x = rng.normal(size=(steps * BATCH, 8, 8, 1)).astype(np.float32)
    return x, rng.integers(0, 10, steps * BATCH)


def loss_function() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(**{"learning_rate": 0.05, "momentum": 0.5, **options})


def wrap(config: dict[str, Any], optimizer: Any = None, **arguments: Any) -> Any:
    """Return a wrapped optimizer, which compares the replicas every second step unless the configuration says else."""
    return grace.tensorflow.DistributedOptimizer(optimizer or sgd(), {"check_replicas": 2, **config}, **arguments)


def compiled(config: dict[str, Any], model: keras.Model | None = None, **arguments: Any) -> keras.Model:
    """Return a compiled model with a wrapped optimizer."""
    model = model or make_model()
    model.compile(wrap(config, **arguments), loss_function(), jit_compile=False)
    return model


def fit(model: keras.Model, steps: int, *, start: int = 0, seed: int = 0, rank: int | None = None) -> float:
    """Train by model.fit on this rank's batches `start` to `start + steps`, unshuffled. Return the mean loss."""
    x, y = data(start + steps, hvd.rank() if rank is None else rank, seed)
    first = start * BATCH
    return model.fit(x[first:], y[first:], batch_size=BATCH, shuffle=False, verbose=0).history["loss"][0]


def digest(tensors: Any) -> str:
    """Return a hash of the exact bits of several tensors or variables."""
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(np.asarray(tf.cast(tf.convert_to_tensor(t), tf.float64)).tobytes())
    return sha.hexdigest()


def joined(variables: Any) -> np.ndarray:
    """Return all elements of several variables in one float64 vector."""
    return np.concatenate([np.asarray(tf.cast(tf.convert_to_tensor(v), tf.float64)).reshape(-1) for v in variables])


def through_tape(
    exchange: grace.tensorflow.Exchange, variables: Sequence[tf.Variable], gradients: Sequence[Any]
) -> list[Any]:
    """Pass given gradients through a distributed tape and return its result. None means that a variable is unused."""
    with tf.GradientTape() as tape:
        losses = [tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True) if g is not None]
    return grace.tensorflow.DistributedGradientTape(tape, exchange).gradient(losses, list(variables))


def state_of(exchange: grace.tensorflow.Exchange, tensor: str) -> str:
    """Return a hash of this rank's memories of a tensor, and of its compressors' states."""
    held = []
    for unit, start, piece in exchange.plan.places[tensor]:
        states = exchange.run.stage.read()[unit.spec.name]
        for value in (states[kind][key] for kind in ("memory", "compressor") for key in sorted(states[kind])):
            held.append(value[start : start + piece.numel] if value.shape == (unit.spec.numel,) else value)
    return digest(held)


@contextmanager
def spy() -> Iterator[Callable[[], dict[str, int]]]:
    """Count the bytes that this rank passes to each Horovod collective, in graphs that are traced meanwhile.

    Yields a function that returns the bytes of the last step by the name of the collective. Some bytes are known only
    when the graph runs.
    """
    # Variables must be made before tracing.
    free = [tf.Variable(0, trainable=False) for _ in range(64)]
    counters: dict[str, tf.Variable] = {}
    originals = {kind: getattr(hvd, kind) for kind in ("allreduce", "allgather", "broadcast", "alltoall")}

    def watch(kind: str) -> Callable[..., Any]:
        def call(x: tf.Tensor, *positional: Any, **arguments: Any) -> Any:
            if kind != "broadcast" or [*positional, arguments.get("root_rank")][0] == hvd.rank():
                name = arguments["name"]
                # Comparisons of replicas are no part of a step, nor are handshakes, which run on threads of their name.
                if ".replicas" in name or threading.current_thread().name == name:
                    return originals[kind](x, *positional, **arguments)
                if name not in counters:
                    counters[name] = free.pop()
                own = arguments["splits"][hvd.rank()] if kind == "alltoall" else 0
                counters[name].assign((tf.size(x) - own) * x.dtype.size)
            return originals[kind](x, *positional, **arguments)

        return call

    for kind in originals:
        setattr(hvd, kind, watch(kind))
    try:
        yield lambda: {name: int(counter) for name, counter in counters.items()}
    finally:
        for kind, original in originals.items():
            setattr(hvd, kind, original)
