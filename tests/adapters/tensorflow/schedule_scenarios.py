"""Scenarios about schedules in TensorFlow, run by each rank."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import grace
from grace.tensorflow import DistributedGradientTape, Exchange, ScheduleCallback
from tests.adapters.tensorflow.model import digest, wrap
from tests.adapters.tensorflow.optim_scenarios import WAYS, OfAllRanks, kept, save
from tests.adapters.tensorflow.usage_model import (
    BATCH,
    NONE,
    applying,
    by_hand,
    distance,
    error_of,
    fit,
    net,
    samples,
    small_net,
)
from tests.support.cases import CORRECTED_BY, EVERYTHING
from tests.support.covering import ALL

# The first step and the settings of each stage, with all kinds of state: residual, momentum, both, none, warm start.
STAGES = {
    0: {"compressor": "topk", "compress_ratio": 0.1},
    2: {"compressor": "dgc", "compress_ratio": 0.2, "momentum": 0.5},
    4: {"compressor": "powersgd", "compress_rank": 1},
    6: {"compressor": "none"},
    8: {"compressor": "topk", "compress_ratio": 0.3},
}
FIRST = {**STAGES[0], **EVERYTHING}
SCHEDULED = {**FIRST, "schedule": [{"step": step, **STAGES[step]} for step in list(STAGES)[1:]]}
STEPS = 10


class Sent(keras.callbacks.Callback):
    """A callback that records the bytes of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.bytes.append(self.model.optimizer.grace.stats()["wire_bytes"])


def tf_schedules() -> dict[str, Any]:
    """Change the method by the configuration in one graph, by `change`, and by the callback; continue from a file."""
    by_config, sent = net(), Sent()
    by_config.compile(wrap(SCHEDULED), "mse")
    fit(by_config, 5, callbacks=[sent])
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.keras")
        by_config.save(path)
        resumed = keras.saving.load_model(path)
    for model, callbacks in ((by_config, [sent]), (resumed, [])):
        fit(model, STEPS - 5, start=5, callbacks=callbacks)
    eager = net()
    optimizer = wrap(FIRST)
    for step in range(STEPS):
        if step in list(STAGES)[1:]:
            optimizer.grace.change(**STAGES[step])
        by_hand(eager, lambda g: optimizer.apply(g, eager.trainable_variables), 1, start=step)
    by_callback = net()
    by_callback.compile(wrap(FIRST), "mse")
    callback = ScheduleCallback(lambda epoch: STAGES[2 * epoch])
    for epoch in range(STEPS // 2):
        fit(by_callback, 2, start=2 * epoch, initial_epoch=epoch, epochs=epoch + 1, callbacks=[callback])
    models = {"config": by_config, "hand": eager, "callback": by_callback, "resumed": resumed}
    return {
        "weights": {name: digest(model.trainable_variables) for name, model in models.items()},
        "sent": sent.bytes,
        "traces": by_config.optimizer.grace.traces,
    }


def tf_first_steps() -> dict[str, Any]:
    """Roll back the first step of a stage whose units differ, and change the method before the first step.

    The last case has a variable whose gradient comes as rows.
    """
    schedule = [{"step": 2, "compressor": "efsignsgd", "lr": 0.25}]
    config = {**FIRST, "granularity": "layer", "schedule": schedule}
    variables = [tf.Variable(tf.zeros([8, 16]), name=name) for name in "ab"]
    slope = tf.random.stateless_normal([8, 16], [1, 2])
    last = {
        "dropped": ([slope, slope * float("nan")], {"loss_scale": tf.constant(1.0)}),
        "left out": ([None, slope], {"absent": frozenset([0])}),
        "NaN without roll-back": ([slope, slope * float("nan")], {}),
        "skipped without roll-back": ([slope, slope * 1e9], {"loss_scale": tf.constant(1e38)}),
    }
    results: dict[str, Any] = {}
    for case, (gradients, options) in last.items():
        exchange = Exchange({**config, "rollback": "without roll-back" not in case})
        exchange.build(variables)
        for _ in range(2):
            exchange([slope, slope], **({"loss_scale": tf.constant(1.0)} if "loss_scale" in options else {}))
        norms = [exchange_norm(exchange, 0)]
        exchange(gradients, **options)
        # The NaN is in the other variable.
        norms.append(exchange_norm(exchange, 1, "b" if "NaN" in case else "a"))
        results[case] = norms[1] / norms[0]
    rows = tf.IndexedSlices(tf.ones([2, 16]), tf.constant([1, 2]), tf.constant([40, 16]))
    exchange = Exchange({"compressor": "none", **EVERYTHING})
    exchange.build([tf.Variable(tf.zeros([40, 16]), name="rows")], [rows])
    exchange.change(**STAGES[0])
    results["rows"] = error_of(lambda: exchange([rows]))
    return results


def exchange_norm(exchange: Exchange, stage: int, name: str = "a") -> float:
    states = exchange.run._stages[stage].read()
    return float(tf.norm(states[name]["memory"]["residual"]))


def tf_changes_that_differ() -> dict[str, Any]:
    """Try changes that differ between ranks, a graph from before a change, and a change despite a schedule."""
    model, optimizer = net(), wrap(FIRST)
    apply = tf.function(lambda g: optimizer.apply(g, model.trainable_variables))
    by_hand(model, apply, 1)
    errors = [
        error_of(lambda: optimizer.grace.change(compress_ratio=0.5 + 0.1 * hvd.rank())),
        error_of(lambda: optimizer.grace.change(**{"compress_rate" if hvd.rank() else "beta": 0.5})),
    ]
    by_hand(model, apply, 1, start=1)
    optimizer.grace.change(compress_ratio=0.5)
    errors.append(error_of(lambda: by_hand(model, apply, 1, start=2)))
    by_hand(model, tf.function(lambda g: optimizer.apply(g, model.trainable_variables)), 1, start=2)
    scheduled = wrap(SCHEDULED)
    errors.append(error_of(lambda: scheduled.grace.change(compress_ratio=0.5)))
    return {"errors": errors, "weights": digest(model.trainable_variables)}


def tf_learning_rates() -> dict[str, Any]:
    """Apply constant gradients under changing learning rates.

    Return the errors of weights and residuals, by communicator.
    """
    return {name: _learning_rates(communicator) for name, communicator in CORRECTED_BY.items()}


def _learning_rates(communicator: Any) -> dict[str, Any]:
    rates = [0.1, 0.1, 0.4, 0.05, 0.01]
    variable = tf.Variable(tf.zeros([40, 30]), name="w")
    slopes = [tf.random.stateless_normal([40, 30], [rank, 1]) for rank in range(hvd.size())]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2, 3], [0.1, 0.4, 0.05, 0.01])
    config = {"compressor": "topk", "compress_ratio": 0.05, "lr_correction": True, "communicator": communicator}
    optimizer = wrap({**config, **EVERYTHING}, keras.optimizers.SGD(schedule))
    apply = tf.function(lambda: optimizer.apply([slopes[hvd.rank()]], [variable]))
    for _ in rates:
        apply()
    states, mine = optimizer.grace.run.stage.read(), tf.zeros(1200)
    for name, unit in optimizer.grace.plan.stateful.items():
        if unit.is_kept_by(hvd.rank()):
            # The mean of all ranks follows. A residual of an owner is one of the mean already.
            residual = states[name]["memory"]["residual"] * (1 if unit.owners is None else hvd.size())
            (piece,) = unit.pieces
            mine += tf.pad(residual, [[piece.start, 1200 - piece.stop]])
    held = tf.reshape(hvd.allreduce(mine, op=hvd.Average, name="held"), [40, 30])
    meant = sum(rates) * sum(slopes) / hvd.size()
    off = tf.reduce_max(tf.abs(rates[-1] * held - variable - meant))
    tape = DistributedGradientTape(tf.GradientTape(), config={**config, **EVERYTHING})
    with tape:
        loss = tf.reduce_sum(variable)
    return {
        "off": float(off),
        "moved": digest([variable]),
        "tape": error_of(lambda: tape.gradient(loss, [variable])),
    }


def tf_local_steps() -> dict[str, Any]:
    """Exchange weights every third step: with none, the mean over ranks; with topk, equal weights on all ranks."""
    results: dict[str, Any] = {}
    for name, config in {
        "none": {"compressor": "none"},
        "qsparse": {"compressor": "qsparse", "compress_ratio": 0.2},
    }.items():
        model = net()
        model.compile(wrap({**config, **EVERYTHING}, keras.optimizers.SGD(0.1, 0.9), local_steps=3), "mse")
        apart = []
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            for step in range(7):
                if step == 5:
                    model.save(path)
                fit(model, 1, start=step)
                apart.append(digest(model.trainable_variables))
            again = keras.saving.load_model(path)
        fit(again, 2, start=5)
        results[name] = {"apart": apart, "resumed": digest(again.trainable_variables) == apart[-1]}
        if name == "none":
            alone = net()
            alone.compile(keras.optimizers.SGD(0.1, 0.9), "mse", run_eagerly=True)
            for sync in range(2):
                fit(alone, 3, start=3 * sync)
                for i, v in enumerate(alone.trainable_variables):
                    v.assign(hvd.allreduce(v.value, op=hvd.Average, name=f"alone.{i}"))
            fit(alone, 1, start=6)
            results[name]["off"] = distance(model, alone)
    return results


def tf_outer_steps() -> dict[str, Any]:
    """Compare outer steps with the published recursion by hand, and go on from a saved model."""
    results: dict[str, Any] = {}
    outer = {"every": 3, "lr": 0.7, "momentum": 0.9, "nesterov": True, "warmup": 2}
    for name, config, options, last in (
        ("none", {"compressor": "none"}, {**outer, "alpha": 0.25}, 6),
        ("elastic", {"compressor": "none"}, {"every": 3, "optimizer": "elastic", "warmup": 2}, 4),
        ("topk", {"compressor": "topk", "compress_ratio": 0.2, **EVERYTHING}, outer, 3),
    ):
        model, alone, apart, off = small_net(), small_net(), [], []
        model.compile(wrap(config, keras.optimizers.SGD(0.1, 0.9), outer=options), "mse")
        alone.compile(keras.optimizers.SGD(0.1, 0.9), "mse", run_eagerly=True)
        anchors = [v.numpy().astype(np.float64) for v in alone.trainable_variables]
        momenta = [np.zeros_like(anchor) for anchor in anchors]
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            for step in range(8):
                fit(model, 1, start=step)
                fit(alone, 1, start=step)
                for i, v in enumerate(alone.trainable_variables):
                    mean = hvd.allreduce(v.value, op=hvd.Average, name=f"outer.{i}").numpy().astype(np.float64)
                    if step < 2:
                        anchors[i] = mean
                        v.assign(mean)
                    elif step in (4, 7):
                        change = anchors[i] - mean
                        if name == "elastic":
                            v.assign(v.numpy() + 0.225 * (anchors[i] - v.numpy()))
                            anchors[i] = anchors[i] - 0.9 * change
                            continue
                        momenta[i] = 0.9 * momenta[i] + change
                        anchors[i] = anchors[i] - 0.7 * (change + 0.9 * momenta[i])
                        v.assign(0.25 * v.numpy() + 0.75 * anchors[i])
                off.append(distance(model, alone))
                apart.append(digest(model.trainable_variables))
                if step == last:
                    model.save(path)
            again = keras.saving.load_model(path)
            fit(again, 7 - last, start=last + 1)
        results[name] = {"apart": apart, "off": off, "resumed": digest(again.trainable_variables) == apart[-1]}
    report = model.optimizer.grace.report()
    results["report"] = report.partition("\n")[0]
    return results


def tf_outer_beside() -> dict[str, Any]:
    """Let states and buffers sync, weigh the ranks, and let periods grow, against the same by hand."""

    def normed() -> keras.Model:
        first, last = (keras.layers.Dense(units, use_bias=False) for units in (5, 4))
        made = keras.Sequential([keras.Input((8,)), first, keras.layers.BatchNormalization(momentum=0.5), last])
        rng = np.random.default_rng(0)
        for v in made.trainable_variables:
            v.assign(rng.normal(0.5, 0.3, v.shape))
        return made

    cases: dict[str, tuple[dict[str, Any], list[int]]] = {
        "average": ({"every": 2, "state": "average"}, [2, 4, 6, 8]),
        "periods": ({"every": 2, "state": {"momentum": 2}, "buffers": "first"}, [2, 4, 6, 8]),
        "growing": ({"every": 2, "adapt": 0.5, "weight": [1, 3], "buffers": "local"}, [2, 5, 9]),
        "fragments": ({"every": 4, "fragments": 2, "lr": 0.7, "momentum": 0.9, "alpha": 0.5}, [4, 8]),
    }
    results: dict[str, Any] = {}
    for name, (outer, syncs) in cases.items():
        # Each case is traced twice.
        if name != "periods" and not ALL:
            continue
        model, alone = normed(), normed()
        # All elements are sent, but by a compressor.
        method = {"compressor": "topk", "compress_ratio": 1.0} if name == "fragments" else {"compressor": "none"}
        model.compile(wrap({**method, **EVERYTHING}, keras.optimizers.SGD(0.05, 0.9), outer=outer), "mse")
        alone.compile(keras.optimizers.SGD(0.05, 0.9), "mse", run_eagerly=True)
        anchors = [v.numpy() for v in alone.trainable_variables]
        moved = [np.zeros_like(anchor) for anchor in anchors]
        share = 2 * [1, 3][hvd.rank()] / 4 if "weight" in outer else 1

        def mean(v: Any, label: str, factor: float = share) -> None:
            v.assign(hvd.allreduce(v.value * factor, op=hvd.Average, name=label))

        off = []
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            for step in range(1, 10):
                fit(model, 1, start=step - 1)
                fit(alone, 1, start=step - 1)
                if name == "fragments" and step % 2 == 0:
                    # The first one syncs in the middle of a period, and the second one at its end.
                    for i in model.optimizer.grace.outer.fragments[step % 4 == 0]:
                        v = alone.trainable_variables[i]
                        change = anchors[i] - hvd.allreduce(v.value, op=hvd.Average, name=f"part.{i}").numpy()
                        moved[i] = 0.9 * moved[i] + change
                        anchors[i] = anchors[i] - 0.7 * moved[i]
                        v.assign(0.5 * v.numpy() + 0.5 * anchors[i])
                if step in syncs:
                    for i, v in enumerate(alone.trainable_variables if name != "fragments" else []):
                        mean(v, f"weights.{i}")
                    momenta = alone.optimizer.variables[2:] if name == "average" or step % 4 == 0 else []
                    for i, v in enumerate(momenta if name in ("average", "periods") else []):
                        mean(v, f"momenta.{i}")
                    for i, v in enumerate(alone.non_trainable_weights if name != "growing" else []):
                        mean(v, f"buffers.{i}", 2 * (hvd.rank() == 0) if name == "periods" else 1)
                off.append(distance(model, alone))
                if step == 5:
                    model.save(path)
            again = keras.saving.load_model(path)
            fit(again, 4, start=5)
        results[name] = {"off": off, "resumed": digest(again.weights) == digest(model.weights)}
    in_a_loop, told = normed(), []
    for buffers in (None, in_a_loop.non_trainable_weights):
        optimizer = wrap({"compressor": "none"}, outer={"every": 1, "buffers": "first"})
        if buffers:
            optimizer.grace.note_buffers(buffers)
            in_a_loop.non_trainable_weights[0].assign(tf.fill([5], float(hvd.rank() + 1)))
        told.append(error_of(lambda o=optimizer: by_hand(in_a_loop, applying(o, in_a_loop), 1)))
    results["loop"] = {"told": told, "buffer": in_a_loop.non_trainable_weights[0].numpy().tolist()}
    results["unknown"] = error_of(
        lambda: wrap({"compressor": "none"}, outer={"state": {"velocity": 2}}).build(in_a_loop.trainable_variables)
    )
    return results


# The configuration and the outer steps of a simulation, and the steps before which a file is saved.
SIMULATED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    # While an exchange is pending, in mid-period, and between two fragments.
    "streaming": (
        {"compressor": "topk", "compress_ratio": 0.5, "schedule": [{"step": 2, "compress_ratio": 1.0}]},
        {"every": 6, "lr": 0.7, "momentum": 0.9, "nesterov": True, "fragments": 2, "delay": 2, "alpha": 0.5},
        (4, 6) if ALL else (4,),
    ),
    # Gathered changes are added in the order of the ranks. Horovod fuses sums by time, so that their rounding varies.
    "delayed": (
        {"compressor": "none", "communicator": "allgather"},
        {"every": 3, "delay": 1, "warmup": 2, "weight": True, "clip": 0.05},
        (6,),
    ),
    "dense": ({"compressor": "topk", "compress_ratio": 0.3}, {"every": 2, "fragments": 2, "dense_every": 2}, (5,)),
    "adacomm": ({"compressor": "none", "communicator": "allgather"}, {"every": 3, "adapt": "loss"}, (4,)),
    # `CHANGE` comes while a change of the weights is on its way.
    "changed": ({"compressor": "topk", "compress_ratio": 0.5}, {"every": 4, "delay": 2, "momentum": 0.9}, (7,)),
}
CHANGE = {5: {"compress_ratio": 0.2}}


def tf_outer_like_a_simulation(name: str) -> dict[str, Any]:
    """Compare outer steps of a Keras optimizer with a simulation of all ranks, and go on from files."""
    config, outer, saved = SIMULATED[name]
    config, steps, ranks = {**config, **EVERYTHING}, 13, OfAllRanks()
    if outer.get("weight"):
        outer = {**outer, "weight": [rank + 1.0 for rank in range(hvd.size())]}
    model, off, files, resumed = small_net(), [], {}, []
    model.compile(wrap(config, keras.optimizers.SGD(0.1, 0.9), outer=outer), "mse")
    shapes = {v.path: tuple(v.shape) for v in ranks.nets[0].trainable_variables}
    sim = grace.Simulation(hvd.size(), [grace.TensorSpec(n, s) for n, s in shapes.items()], config, outer=outer)
    momenta = [{n: np.zeros(s, np.float32) for n, s in shapes.items()} for _ in ranks.nets]
    sim.begin({n: x.reshape(shapes[n]) for n, x in ranks.weights().items()})
    with tempfile.TemporaryDirectory() as folder:
        for step in range(steps):
            if name == "changed" and step in CHANGE:
                sim.change(**CHANGE[step])
                model.optimizer.grace.change(**CHANGE[step])
                model.make_train_function(force=True)
            if step in saved:
                files[step] = save(model, f"{folder}/{step}")
            if outer.get("adapt"):
                sim.note_loss(*(_loss(each, step, rank) for rank, each in enumerate(ranks.nets)))
            moved = []
            for rank, mine in enumerate(ranks.gradients(step)):
                own = momenta[rank]
                for n, g in mine.items():
                    own[n] = np.float32(0.9) * own[n] - np.float32(0.1) * g.reshape(shapes[n])
                moved.append({n: x.reshape(shapes[n]) + own[n] for n, x in ranks.weights(rank).items()})
            for rank, met in enumerate(sim.step(moved)):
                ranks.write(rank, {n: x.reshape(-1) for n, x in met.items()})
            fit(model, 1, start=step)
            off.append(ranks.off(model))
        for number, (step, paths) in enumerate(files.items()):
            # Only a file of Keras has the configurations before a change.
            for way in WAYS if ALL and name != "changed" else [[*WAYS][number % len(WAYS)]]:
                again = WAYS[way](paths, lambda: wrap(config, keras.optimizers.SGD(0.1, 0.9), outer=outer))
                fit(again, steps - step, start=step)
                same = [digest(x) == digest(y) for x, y in zip(kept(again), kept(model), strict=True)]
                resumed.append(all(same) or f"{way}, {step}")
    common = model.optimizer.grace.common_weights()
    apart = max(float(np.abs(x - common[n].numpy()).max()) for n, x in sim.common_weights().items())
    return {"off": off, "resumed": resumed, "common": apart, "rounds": sim.stats()["outer"]["rounds"]}


def _loss(model: keras.Model, step: int, rank: int) -> float:
    x, y = (part[-BATCH:] for part in samples(step + 1, rank))
    return float(np.mean((model(x) - y) ** 2))


def tf_outer_noise() -> dict[str, Any]:
    """Let the ranks send nothing but noise, and note losses at the wrong time or of the wrong sign."""
    model, outer = net(), {"every": 1, "clip": 0.1, "noise": 0.5, "buffers": "local"}
    before = np.concatenate([v.numpy().reshape(-1) for v in model.trainable_variables])
    model.compile(wrap(NONE, keras.optimizers.SGD(0.0), outer=outer), "mse")
    fit(model, 1)
    drawn = np.concatenate([v.numpy().reshape(-1) for v in model.trainable_variables]) - before
    following = wrap(NONE, outer="adacomm")
    told = [error_of(lambda: following.scale_loss(tf.constant(1.0)))]
    following.build(model.trainable_variables)
    told.append(error_of(lambda: following.scale_loss(tf.constant(-1.0))))
    apply = applying(following, model)
    told.append(error_of(lambda: [by_hand(model, apply, 1) for _ in range(16)]))
    return {"std": float(drawn.std()), "weights": digest(model.trainable_variables), "told": told}


class Started(keras.optimizers.SGD):
    """SGD whose state does not begin with one number."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.add_optimizer_variables(variables, ["drawn"], ["random_normal"])


def tf_outer_refusals() -> list[str]:
    """Wrap with what a graph or a tape cannot do; return the errors."""
    taken = keras.optimizers.SGD()
    taken.apply([tf.constant([1.0])], [tf.Variable([1.0])])
    return [
        error_of(lambda: wrap(FIRST, keras.optimizers.Nadam(), outer={"every": 4, "state": "reset"})),
        error_of(lambda: wrap(FIRST, taken, outer={"every": 4, "state": "reset"})),
        error_of(lambda: wrap({"compressor": "none"}, keras.optimizers.Adam(), outer={"every": 4, "variates": True})),
        error_of(lambda: wrap(FIRST, Started(), outer={"every": 4, "state": "reset"}).build([tf.Variable([1.0, 1.0])])),
        error_of(lambda: wrap(FIRST, outer="diloco", backward_passes_per_step=2)),
        error_of(lambda: DistributedGradientTape(tf.GradientTape(), config={**FIRST, "outer": "diloco"})),
    ]


def tf_changed_and_saved() -> dict[str, Any]:
    """Save a model after two changes, which made and dropped variables, and continue from the file."""
    model = net()
    model.compile(wrap(FIRST, keras.optimizers.Adam(0.01)), "mse")
    changes = {1: STAGES[4], 2: STAGES[2]}
    callback = ScheduleCallback(lambda epoch: changes.get(epoch))
    for epoch in range(3):
        fit(model, 2, start=2 * epoch, initial_epoch=epoch, epochs=epoch + 1, callbacks=[callback])
    exchange = model.optimizer.grace
    before = exchange.stats()["wire_bytes"]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.keras")
        model.save(path)
        resumed = keras.saving.load_model(path)
    fit(model, 2, start=6)
    fit(resumed, 2, start=6)
    last = exchange.stats()["wire_bytes"]
    exchange.change(compressor="none")
    return {
        "weights": [digest(m.trainable_variables) for m in (model, resumed)],
        "sent": [before > 0, exchange.stats()["wire_bytes"] == last],
    }
