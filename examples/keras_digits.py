"""Train a small convolutional network on handwritten digits with compressed gradients, by Keras' compile and fit.

    horovodrun -np 2 --gloo python examples/keras_digits.py --compressor none qsgd topk efsignsgd powersgd
    mpirun -np 2 python examples/keras_digits.py --config examples/grace.toml
    python examples/keras_digits.py --compressor topk --set compress_ratio=0.001

The data are 1,797 images of 8 x 8 pixels, which come with scikit-learn; nothing is downloaded. Several compressors are
trained one after the other. At the end, rank 0 prints a table and optionally writes a JSON file. The exit status is 1
if the ranks have different weights at the end of a run.

The code for grace is in `train`, between the two lines marked GRACE. Settings, data and table are in digits.py.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it when it is imported

import digits
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import grace


def network() -> keras.Model:
    """Return a network with two convolutions and one hidden layer: 151,306 parameters."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu", name="conv1"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu", name="conv2"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="output"),
        ],
        name="network",  # without it, Keras would number the names of the weights in each run
    )


class Show(keras.callbacks.Callback):
    """A callback that passes the progress of `fit` to the progress bar."""

    def __init__(self, progress: digits.Progress) -> None:
        super().__init__()
        self._progress = progress

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._progress.step(self.model.optimizer.grace.stats())

    def on_epoch_end(self, epoch: int, logs: dict) -> None:
        self._progress.epoch(logs["loss"])


def train(run: digits.Run, data: digits.Data, args: argparse.Namespace) -> digits.Outcome:
    """Train one network and return its result."""
    keras.utils.set_random_seed(args.seed)
    model = network()
    images, labels = data.train.images[..., np.newaxis], data.train.labels
    chosen = digits.batches(len(labels), args, hvd.rank(), hvd.size())
    steps = args.epochs * chosen.shape[1]
    schedule = keras.optimizers.schedules.CosineDecay(run.lr, steps)
    optimizer = keras.optimizers.SGD(schedule, momentum=run.momentum)

    # GRACE: everything that compressed gradients add to a script ----------------------------------------------------
    optimizer = grace.DistributedOptimizer(
        optimizer,
        config=run.config,  # or a dictionary such as {"compressor": "qsgd"}, or a TOML file
    )
    callbacks = [grace.tensorflow.BroadcastGlobalVariablesCallback(0), grace.tensorflow.MetricAverageCallback()]
    # GRACE: end -----------------------------------------------------------------------------------------------------

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA cannot compile Horovod's collectives. The default "auto" uses XLA on a GPU.
    model.compile(optimizer, loss, jit_compile=False)
    dataset = tf.data.Dataset.from_tensor_slices(chosen.reshape(steps, -1))
    dataset = dataset.map(lambda rows: (tf.gather(images, rows), tf.gather(labels, rows))).prefetch(2)
    with digits.Progress(run.label, steps, hvd.rank()) as progress:
        model.fit(
            dataset,
            epochs=args.epochs,
            steps_per_epoch=chosen.shape[1],
            callbacks=[*callbacks, Show(progress)],
            shuffle=False,  # `digits.batches` has shuffled already
            verbose=0,
        )
    return digits.Outcome(
        accuracy=evaluate(model, data.test),
        fingerprint=digits.fingerprint({weight.path: weight.numpy() for weight in model.weights}),
        per_step=progress.per_step(),
    )


def evaluate(model: keras.Model, data: digits.Images) -> float:
    """Return the share of images that the model classifies correctly."""
    scores = model.predict_on_batch(data.images[..., np.newaxis])
    return float(np.mean(scores.argmax(axis=1) == data.labels))


if __name__ == "__main__":
    # The ranks share the cores of one machine. A collective that waits for another rank blocks none of these threads.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    sys.exit(digits.main("keras", __doc__, hvd, train))
