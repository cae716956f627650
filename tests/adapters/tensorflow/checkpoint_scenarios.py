"""Scenarios about TensorFlow's checkpoints, run by each rank."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import grace.tensorflow
from tests.adapters.tensorflow.model import (
    BATCH,
    compiled,
    data,
    digest,
    fit,
    joined,
    loss_function,
    make_small,
    sgd,
    state_of,
    wrap,
)
from tests.support.cases import EVERYTHING


@contextmanager
def _folder() -> Iterator[Path]:
    """Return a folder of this rank."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _deferred(saved: keras.Model, config: dict[str, Any], folder: Path) -> keras.Model:
    """Restore a checkpoint before the optimizer has variables."""
    path = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer).save(str(folder / "deferred"))
    model = compiled(config, make_small(seed=1))
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
    return model


def _built(saved: keras.Model, config: dict[str, Any], folder: Path) -> keras.Model:
    """Restore a checkpoint into an optimizer that has run other steps before."""
    path = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer).save(str(folder / "built"))
    model = compiled(config, make_small(seed=1))
    fit(model, 2)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path).assert_consumed()
    return model


def _loaded(saved: keras.Model, config: dict[str, Any], folder: Path) -> keras.Model:
    """Save and load a model by Keras, which makes the optimizer from its saved configuration."""
    saved.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


WAYS = {"deferred": _deferred, "built": _built, "loaded": _loaded}
# Methods with a residual, with factors that are equal on all ranks, and with momentum and a step number.
RESUMED = {"topk": ["deferred", "loaded"], "powersgd": ["built", "loaded"], "dgc": ["deferred"]}


def resume(chosen: dict[str, list[str]] = RESUMED) -> dict[str, Any]:
    """Steps in one go; and a checkpoint half-way, from which fresh models take the same steps.

    All methods go on from a checkpoint in `trained`, by the model that wrote it, without the time for another trace.
    """
    results = {}
    for name, ways in chosen.items():
        config = {"compressor": name, **EVERYTHING}
        model = compiled(config, make_small())
        fit(model, 3)
        with _folder() as folder:
            resumed = {way: WAYS[way](model, config, folder) for way in ways}
            fit(model, 3, start=3)
            whole = joined(model.trainable_variables)
            # The first step reads values that were restored before their variables existed.
            for way, other in resumed.items():
                fit(other, 3, start=3)
                results[f"{name}/{way}"] = _compared(whole, joined(other.trainable_variables))
    return results


def _compared(whole: np.ndarray, resumed: np.ndarray) -> dict[str, Any]:
    return {
        "weights": digest([resumed]),
        "equal": bool((whole == resumed).all()),
        "distance": float(np.abs(whole - resumed).max()),
        "moved": float(np.abs(whole - joined(make_small().trainable_variables)).max()),
    }


def resume_tape() -> dict[str, Any]:
    """Do the same with a tape, whose exchange is part of the checkpoint."""
    results = {}
    for name in ("topk", "powersgd"):
        models, steps, parts = [], [], []
        for seed in (0, 1):
            model, optimizer = make_small(seed), sgd()
            exchange = grace.tensorflow.Exchange({"compressor": name, **EVERYTHING})
            models.append(model)
            steps.append(_step(model, optimizer, exchange))
            parts.append({"model": model, "optimizer": optimizer, "grace": exchange})
        x, y = (np.split(part, 6) for part in data(6, hvd.rank()))
        for i in range(3):
            steps[0](x[i], y[i])
        with _folder() as folder:
            path = tf.train.Checkpoint(**parts[0]).save(str(folder / "tape"))
            tf.train.Checkpoint(**parts[1]).restore(path)
            for step in steps:
                for i in range(3, 6):
                    step(x[i], y[i])
        results[name] = _compared(*(joined(model.trainable_variables) for model in models))
    return results


def _step(model: keras.Model, optimizer: Any, exchange: grace.tensorflow.Exchange) -> Callable[..., None]:
    @tf.function(input_signature=[tf.TensorSpec([BATCH, 8, 8, 1]), tf.TensorSpec([BATCH], tf.int64)])
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_function()(y, model(x))
        tape = grace.tensorflow.DistributedGradientTape(tape, exchange)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return step


@contextmanager
def _stderr() -> Iterator[list[str]]:
    """Capture all that the process writes to stderr meanwhile, also from C++, and pass it on."""
    written: list[str] = []
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            file.seek(0)
            written.append(file.read().decode(errors="replace"))
            sys.stderr.write(written[0])


def _apply(optimizer: Any, model: keras.Model, step: int) -> None:
    """Run one eager step with generated gradients of this rank."""
    rng = np.random.default_rng([step, hvd.rank()])
    optimizer.apply([tf.cast(rng.normal(size=v.shape), v.dtype) for v in model.trainable_variables])


def _foreign(written: list[str]) -> list[str]:
    return [line for line in written[0].splitlines() if "grace:" in line]


def foreign_checkpoint() -> dict[str, Any]:
    """Restore the checkpoint of rank 0 on every rank, as in scripts that save on one rank only, and run two steps."""
    config = {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}

    def fresh(past: range) -> tuple[keras.Model, Any]:
        model, optimizer = make_small(), wrap(config)
        optimizer.build(model.trainable_variables)
        for step in past:
            _apply(optimizer, model, step)
        return model, optimizer

    # topk depends only on the gradients, not on the step number.
    _, with_past = fresh(range(4))
    _, without_past = fresh(range(2, 4))
    model, mine = fresh(range(2))
    with _folder() as folder:
        path = tf.train.Checkpoint(optimizer=mine).save(str(folder / "foreign"))
        tf.train.Checkpoint(optimizer=mine).restore(hvd.broadcast_object(path, root_rank=0)).assert_consumed()
        whole = compiled(config, make_small())
        fit(whole, 1)
        whole.save(folder / "foreign.keras")
        loaded = keras.saving.load_model(hvd.broadcast_object(folder / "foreign.keras", root_rank=0))
        # No rank removes its folder before all ranks have read it.
        hvd.allgather_object(None)
    with _stderr() as restored:
        for step in (2, 3):
            _apply(mine, model, step)
    with _stderr() as fitted:
        fit(loaded, 2, start=1)
    (tensor,) = (part.spec.name for part in mine.grace.plan.assignments if part.spec.name.endswith("only/kernel"))
    states = [state_of(optimizer.grace, tensor) for optimizer in (mine, with_past, without_past)]
    return {
        "messages": [_foreign(restored), _foreign(fitted)],
        "step": mine.grace.run.step,
        "as with it": states[0] == states[1],
        "as without a past": states[0] == states[2],
        "weights": digest(loaded.trainable_variables),
    }


def partly_loaded(names: list[str]) -> dict[str, Any]:
    """Restore a checkpoint of an earlier step on rank 0 only, and continue with several buckets."""
    results = {}
    for name in names:
        rules = {"compressor": "topk", "rules": [{"match": "*bias", "compressor": "none"}]}
        # The weights differ as well. Whichever comparison comes first in a graph, the error is the one about the steps.
        config = {**(rules if name == "rules" else {"compressor": name}), "bucket_bytes": 0, **EVERYTHING}
        model = compiled(config, make_small())
        with _folder() as folder:
            fit(model, 2)
            path = tf.train.Checkpoint(optimizer=model.optimizer).save(str(folder / "part"))
            fit(model, 3, start=2)
            if hvd.rank() == 0:
                tf.train.Checkpoint(optimizer=model.optimizer).restore(path)
        for way in ("fit", "apply"):
            try:
                fit(model, 1) if way == "fit" else _apply(model.optimizer, model, 0)
                results[f"{name}/{way}"] = ""
            except Exception as error:
                results[f"{name}/{way}"] = f"{type(error).__name__}: {error}"
    return results
