"""A training script that elastic Horovod starts: the process of one host ends in the middle of a step.

Arguments: how it trains ("fit", "outer", "apply" or "tape"), a file that exists after that, the seconds per step then.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

import grace.tensorflow
from grace.tensorflow import KerasState

STEPS, END = 14, 6
CONFIG = {"compressor": "topk", "compress_ratio": 0.01, "communicator": "two_shot", "check_replicas": 2}
# The process ends in mid-period, after a sync, and the last step is a sync.
OUTER = {"every": 4, "lr": 1.0, "momentum": 0.5, "warmup": 2}
way, died, pause = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
logging.basicConfig(level=logging.WARNING)
tf.config.threading.set_intra_op_parallelism_threads(1)
hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, name="only")])
sgd = keras.optimizers.SGD(0.01, momentum=0.5)
settings = {"outer": OUTER} if way == "outer" else {}
given = {"exchange": grace.tensorflow.Exchange(CONFIG)} if way == "tape" else {}
optimizer = sgd if way == "tape" else grace.tensorflow.DistributedOptimizer(sgd, {**CONFIG, **settings})
model.compile(optimizer, "mse", jit_compile=False)
state = KerasState(model, batch=0, **given)
exchange = given.get("exchange", getattr(optimizer, "grace", None))
doomed = os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1"


def held() -> float:
    """Return the sum of what this rank holds back of the mean, also as the owner of shards."""
    saved = exchange.state_dict()
    return sum(
        float(x.astype(np.float64).sum()) / (1 if name.startswith("mean of ") else saved["size"])
        for name, x in saved["tensors"].items()
        if "/memory/" in name
    )


def tell(what: str, batch: int) -> None:
    line = {"what": what, "rank": hvd.rank(), "size": hvd.size(), "batch": batch, "held": held(), "pid": os.getpid()}
    weights = sum(float(np.asarray(v, np.float64).sum()) for v in model.trainable_variables)
    step = int(optimizer.iterations) if way == "outer" else exchange.run.step
    print(json.dumps({**line, "step": step, "weights": weights}), flush=True)


def data(batch: int) -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng([batch, hvd.rank()]).normal(size=(8, 96)).astype(np.float32)
    return values[:, :64], values[:, 64:]


def die(batch: Any) -> np.int64:
    """End this process if it is the one that dies."""
    if int(batch) == END and doomed and not died.exists():
        died.touch()
        os._exit(1)
    return np.int64(batch)


def after_step(batch: int) -> None:
    if died.exists():
        time.sleep(pause)
    tell("commit", batch)
    state.commit()


class Steps(keras.callbacks.Callback):
    """A callback that commits after every batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        die(state.batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        state.batch += 1
        after_step(state.batch)


def by_fit() -> None:
    parts = [data(batch) for batch in range(state.batch, STEPS)]
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Steps()])


def by_hand() -> None:
    @tf.function
    def step(batch: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.control_dependencies([tf.numpy_function(die, [batch], tf.int64)]):
            x = tf.identity(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        if way == "tape":
            tape = grace.tensorflow.DistributedGradientTape(tape, exchange)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    while state.batch < STEPS:
        step(tf.constant(state.batch, tf.int64), *map(tf.constant, data(state.batch)))
        state.batch += 1
        after_step(state.batch)


@hvd.elastic.run  # type: ignore[untyped-decorator]
def train(state: KerasState) -> None:
    tell("enter", state.batch)
    by_fit() if way in ("fit", "outer") else by_hand()
    exchange.check_replicas()
    tell("done", state.batch)


train(state)
