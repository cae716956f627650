"""Scenarios about gradients that come as rows, run by each rank."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from grace.tensorflow import DistributedGradientTape
from tests.adapters.tensorflow.loss_scaling_scenarios import scaled
from tests.adapters.tensorflow.model import digest, sgd, spy, wrap
from tests.adapters.tensorflow.usage_model import NONE, distance

ROWS, WIDTH, WORDS, BATCH = 32, 40, 3, 4
RULE = {"compressor": "topk", "compress_ratio": 0.1}


def words_net() -> keras.Model:
    """Return a model with an embedding of 1,280 elements and a small matrix."""
    rng = np.random.default_rng(0)
    embedding, out = keras.layers.Embedding(ROWS, WIDTH, name="words"), keras.layers.Dense(2, name="out")
    model = keras.Sequential([keras.Input((WORDS,), dtype="int32"), embedding, keras.layers.Flatten(), out], name="net")
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0.0, 0.3, variable.shape))
    return model


def sentences(steps: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    words = rng.integers(0, ROWS, (steps * BATCH, WORDS)).astype(np.int32)
    return words, rng.normal(size=(steps * BATCH, 2)).astype(np.float32)


def trained(optimizer: keras.optimizers.Optimizer, alone: bool = False) -> keras.Model:
    """Train a model for 4 steps, on the words of this rank or of all ranks."""
    model, ranks = words_net(), range(hvd.size()) if alone else [hvd.rank()]
    columns = zip(*(sentences(4, rank) for rank in ranks), strict=True)
    x, y = (np.stack([a.reshape(4, BATCH, -1) for a in c], axis=1).reshape(-1, c[0].shape[1]) for c in columns)
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=BATCH * len(ranks), shuffle=False, verbose=0)
    return model


def embeddings(labels: list[str]) -> dict[str, Any]:
    """Train an embedding as rows, dense, accumulated, clipped, scaled and compressed. Compare with one process."""
    results = {}
    alone = trained(sgd(), alone=True)
    for label, config, make, arguments in [
        ("rows", {"compressor": "none"}, sgd, {}),
        ("rows beside topk", {"compressor": "topk"}, lambda: keras.optimizers.Adam(0.01), {}),
        ("as dense", {"compressor": "none"}, sgd, {"sparse_as_dense": True}),
        ("accumulated", {"compressor": "none"}, lambda: sgd(gradient_accumulation_steps=2), {}),
        ("clipped", {"compressor": "none"}, lambda: sgd(global_clipnorm=0.1), {}),
        ("scaled", {"compressor": "none"}, lambda: scaled(sgd()), {}),
        ("compressed", {"compressor": "none", "rules": [{"match": "*embeddings*", **RULE}]}, sgd, {}),
    ]:
        if label not in labels:
            continue
        optimizer = wrap(config, make(), **arguments)
        with spy() as sent:
            model = trained(optimizer)
        results[label] = {
            "weights": digest(model.weights),
            "distance": distance(model, alone if make is sgd else trained(make(), alone=True)),
            # Names are "grace.<process set>.<exchange>.<collective>".
            "sent": {name.split(".", 3)[3]: nbytes for name, nbytes in sent().items()},
            "reported": optimizer.grace.stats()["wire_bytes"],
            "gathered": optimizer.grace.stats()["collectives"]["allgather"],
        }
    return results


def rows_of_a_table() -> dict[str, Any]:
    """Look up different rows of a variable on every rank, and different numbers of them, under the tape."""
    results = {}
    for label, config, arguments in [
        ("average", NONE, {}),
        ("sum", NONE, {"op": hvd.Sum}),
        ("compressed", {**NONE, "rules": [{"match": "table", **RULE, "communicator": "allgather"}]}, {}),
    ]:
        table = tf.Variable(tf.ones([ROWS, WIDTH]), name="table")

        def step(rows: tf.Tensor, table: Any = table, config: Any = config, arguments: Any = arguments) -> None:
            with DistributedGradientTape(tf.GradientTape(), config, **arguments) as tape:
                loss = tf.reduce_sum(tf.gather(table, rows) * tf.range(1.0, WIDTH + 1.0))
            table.assign_sub(tf.convert_to_tensor(tape.gradient(loss, table)))

        step = tf.function(step, input_signature=[tf.TensorSpec([None], tf.int32)])
        with spy() as sent:
            # Rows 0 to the rank, and one more in the second step.
            for count in (hvd.rank() + 1, hvd.rank() + 2):
                step(tf.range(count))
        results[label] = {
            "column": table.numpy()[:, 0].tolist(),
            "table": digest([table]),
            "sent": sum(sent().values()),
        }
    return results


def without_rows() -> dict[str, Any]:
    """Train without a gradient of the embedding: on the last rank, and in the second of three steps on all ranks."""
    model, optimizer = words_net(), wrap({"compressor": "none"})
    weights, moved = [], []
    for step in range(3):
        x, y = sentences(1, hvd.rank())
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        given = tape.gradient(loss, model.trainable_variables)
        if step == 1 or hvd.rank() == hvd.size() - 1:
            given[0] = None
        before = digest(model.weights[:1])
        optimizer.apply(given, model.trainable_variables)
        weights.append(digest(model.weights))
        moved.append(digest(model.weights[:1]) != before)
    return {"weights": weights, "moved": moved}
