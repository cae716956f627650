"""Scenarios about TensorFlow's exchange, run by each rank."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import horovod.tensorflow.keras
import keras
import numpy as np
import tensorflow as tf

import grace.tensorflow
from grace.core.ops import get_ops
from grace.core.session.simulation import Simulation
from grace.core.transport.collectives import Collective
from grace.core.transport.transport import Handle, Transport
from grace.tensorflow.transport import HorovodTransport
from grace.testing.transport_contract import run_transport_contract
from tests.adapters.tensorflow.model import (
    BATCH,
    PROCESS_SETS,
    compiled,
    data,
    digest,
    fit,
    joined,
    loss_function,
    make_model,
    make_small,
    sgd,
    spy,
    state_of,
    through_tape,
    wrap,
)
from tests.adapters.tensorflow.usage_model import error_of
from tests.support import nodes
from tests.support.cases import EVERYTHING, config_of, filled, label_of

# Every tensor takes time to trace. So use one that is a matrix only to methods that reshape it, and one scalar.
SHAPES = {"kernel": (3, 3, 4, 12), "scalar": ()}
# Added if tensors are fused and split.
LONG = {"long": (30, 200)}
# The methods that train the larger model: gathered, summed, with a proposal, and of run-time length.
LARGE = ("none", "topk", "powersgd", "threshold")
ROWS = list[dict[str, Any]]


def trained(rows: ROWS) -> dict[str, Any]:
    """Train by fit: exact weights, reported bytes and bytes really sent."""
    results = {}
    for row in rows:
        model = compiled(config_of(row), make_model() if row["method"] in LARGE else make_small())
        before = digest(model.trainable_variables)
        with spy() as sent:
            loss = fit(model, 3)
        exchange = model.optimizer.grace
        results[label_of(row)] = {
            "weights": digest(model.trainable_variables),
            "moved": digest(model.trainable_variables) != before,
            "finite": bool(np.isfinite(loss)),
            **_bytes(row, exchange, sent()),
        }
    return results


def second_gradients() -> dict[str, Any]:
    """Exchange two gradients per step, eagerly and in graphs by turns, and simulate it; leave the second out once."""
    results, size, rank = {}, hvd.size(), hvd.rank()
    shapes = {"matrix": (30, 20), "vector": (7,)}

    def given(step: int, place: int, second: bool) -> dict[str, Any]:
        random = np.random.default_rng((step, place, second))
        return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    for memory in ({"name": "marina", "period": 3}, {"name": "lsvrg", "period": 3, "then": "residual"}):
        config = {"compressor": "topk", "compress_ratio": 0.1, "memory": memory, "default_rules": False}
        exchange, simulation = (make(config) for make in (grace.tensorflow.Exchange, partial(Simulation, size, shapes)))
        variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
        exchange.build(variables)
        graph = tf.function(lambda g, r, e=exchange: e(g, references=r), autograph=False)
        full, equal = [], True
        for step in range(8):
            full.append(exchange.full_round)
            mine, others = (list(given(step, rank, second).values()) for second in (False, True))
            call = graph if step % 2 else lambda g, r, e=exchange: e(g, references=r)
            merged = call(list(map(tf.constant, mine)), None if full[-1] else list(map(tf.constant, others)))
            first, second = ([given(step, place, which) for place in range(size)] for which in (False, True))
            assert simulation.full_round == full[-1]
            expected = simulation.step(first, references=None if full[-1] else second)[rank]
            equal &= all(np.array_equal(x, expected[name]) for name, x in zip(shapes, merged, strict=True))
        wrong = partial(exchange, mine, references=mine if exchange.full_round else None)
        results[memory["name"]] = {"full": full, "equal": equal, "error": error_of(wrong)}
    return results


class _Line:
    """A model of one vector with a random number in each gradient, its exchange, and an optimizer; all by hand."""

    def __init__(self, memory: dict[str, Any]) -> None:
        config = {"compressor": "topk", "compress_ratio": 0.1, "memory": memory, "default_rules": False}
        self.exchange = grace.tensorflow.Exchange(config)
        self.w = tf.Variable(tf.zeros([60]), name="w")
        self.drawing = keras.random.SeedGenerator(hvd.rank())
        self.exchange.build([self.w])
        self.graph = tf.function(self.step, autograph=False)

    def step(self, batch: tf.Tensor, full: bool) -> None:
        """Take a step; the gradient of a batch x is w - x and noise."""

        def closure() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                noise = keras.random.normal([60], seed=self.drawing)
                loss = tf.reduce_sum((self.w - batch) ** 2 / 2 + noise * self.w)
            return tape.gradient(loss, [self.w])

        (merged,) = self.exchange.evaluate(closure, full=full, restored=[self.drawing.state])
        self.w.assign_sub(0.25 * merged)

    def checkpoint(self) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(w=self.w, exchange=self.exchange, drawing=self.drawing.state.value)


def second_gradients_of_closures() -> dict[str, Any]:
    """Let closures be evaluated twice, eagerly and in graphs by turns, beside a simulation; go on from checkpoints."""
    memories = ({"name": "marina", "period": 3}, {"name": "lsvrg", "period": 3, "then": "residual"})
    with tempfile.TemporaryDirectory() as folder:
        return {memory["name"]: _evaluated(memory, f"{folder}/{memory['name']}") for memory in memories}


def _evaluated(memory: dict[str, Any], path: str) -> dict[str, Any]:
    size, rank = hvd.size(), hvd.rank()
    batches = np.random.default_rng(1).integers(-9, 9, (8, size, 60)).astype(np.float32) / 8
    line, loaded, copied = (_Line(memory) for _ in range(3))
    simulation = Simulation(size, {"w": (60,)}, line.exchange.config)
    drawing = [keras.random.SeedGenerator(each) for each in range(size)]
    w = earlier = np.zeros(60, np.float32)
    full, equal = [], {"simulated": [], "restored": [], "copied": []}
    for number, batch in enumerate(batches):
        full.append(line.exchange.full_round)
        (line.graph if number % 2 else line.step)(tf.constant(batch[rank]), full[-1])
        noise = [keras.random.normal([60], seed=each).numpy() for each in drawing]
        first, second = ([{"w": v - x + r} for x, r in zip(batch, noise, strict=True)] for v in (w, earlier))
        merged = simulation.step(first, references=None if full[-1] else second)[rank]["w"]
        if full[-1] or memory["name"] == "marina":
            earlier = w
        w = w - np.float32(0.25) * merged
        equal["simulated"].append(np.array_equal(line.w.numpy(), w))
        if number == 3:
            # What the first `evaluate` makes is read then.
            status = loaded.checkpoint().read(line.checkpoint().write(path))
            copied.w.assign(line.w)
            copied.drawing.state.assign(line.drawing.state)
            copied.exchange.load_state_dict(line.exchange.state_dict())
        elif number > 3:
            for name, other in (("restored", loaded), ("copied", copied)):
                other.step(tf.constant(batch[rank]), full[-1])
                equal[name].append(np.array_equal(other.w.numpy(), w))
    status.assert_consumed()
    unknown = tf.function(lambda: line.exchange.evaluate(list))
    return {"full": full, **equal, "error": error_of(unknown)}


def _bytes(row: dict[str, Any], exchange: grace.tensorflow.Exchange, sent: dict[str, int]) -> dict[str, Any]:
    plan = exchange.plan
    return {
        "reported": exchange.stats()["wire_bytes"],
        "sent": sum(sent.values()),
        # Of shards, the mean over the ranks is predicted.
        "fixed": all(b.route.fixed for b in plan.buckets) and not plan.shards,
        "predicted": sum(b.nbytes for b in plan.buckets)
        + sum(p.spec.nbytes for p in plan.delegated)
        + filled(row, plan, hvd.rank()),
        "padding": sum(b.nbytes % 4 for b in plan.buckets),
    }


def none_and_one_process() -> dict[str, Any]:
    """Train with compressor none in three ways, and with plain Keras on the joined batches of all ranks."""
    steps, size = 6, hvd.size()
    everyone = [data(steps, rank) for rank in range(size)]
    # For each step, the batches of all ranks, concatenated.
    whole = [np.concatenate([np.split(d[i], steps) for d in everyone], axis=1) for i in (0, 1)]
    x, y = (w.reshape(steps * size * BATCH, *w.shape[2:]) for w in whole)
    alone = make_model()
    alone.compile(sgd(), loss_function(), jit_compile=False)
    alone.fit(x, y, batch_size=size * BATCH, shuffle=False, verbose=0)

    def by_hand(with_tape: bool) -> keras.Model:
        model, optimizer = make_model(), sgd() if with_tape else wrap({"compressor": "none"})
        loss = loss_function()

        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            if with_tape:
                tape = grace.tensorflow.DistributedGradientTape(tape, {"compressor": "none", **EVERYTHING})
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for pair in zip(*(np.split(d, steps) for d in everyone[hvd.rank()]), strict=True):
            step(*map(tf.constant, pair))
        return model

    fitted = compiled({"compressor": "none"})
    fit(fitted, steps)
    expected, before = joined(alone.trainable_variables), joined(make_model().trainable_variables)
    results = {}
    for label, model in {"fit": fitted, "apply": by_hand(False), "tape": by_hand(True)}.items():
        weights = joined(model.trainable_variables)
        results[label] = {
            "distance": float(np.abs(weights - expected).max() / np.abs(expected).max()),
            "moved": float(np.abs(expected - before).max()),
        }
    return results


def none_and_horovod() -> dict[str, Any]:
    """Compute gradients with Horovod's own tape and with grace's tape and compressor none."""
    model, results = make_model(), {}
    x, y = data(1, hvd.rank())
    for label, arguments in {
        "plain": {},
        "sum": {"op": hvd.Sum},
        "predivide": {"gradient_predivide_factor": 2.0},
    }.items():
        gradients = []
        for make in (hvd.DistributedGradientTape, grace.tensorflow.DistributedGradientTape):
            with tf.GradientTape() as tape:
                loss = loss_function()(y, model(x))
            config = {} if make is hvd.DistributedGradientTape else {"compressor": "none", **EVERYTHING}
            # Horovod's tape needs the TensorFlow variables inside Keras' variables.
            variables = [v.value for v in model.trainable_variables]
            gradients.append(joined(make(tape, **config, **arguments).gradient(loss, variables)))
        results[label] = {
            "distance": float(np.abs(gradients[0] - gradients[1]).max()),
            "size": float(np.abs(gradients[0]).max()),
        }
    return results


# NaN and infinity on the last rank, after two steps that fill the states, and then a good step.
GIVEN = (0.0, 0.0, np.nan, np.inf, 0.0)
# A checkpoint after this many steps is loaded at the end, and the steps after it run again.
SAVED = 1


def given(rows: ROWS) -> dict[str, Any]:
    """Exchange given gradients, some of them not finite, and again from a checkpoint; simulate the same exchanges.

    A row does so in a graph, eagerly, or in both by turns. Every rank gets the same results, so that each simulates
    only some of the exchanges, of all ranks.
    """
    results, merged = {}, {}
    for row in rows:
        shapes = _shapes(row)
        variables = [tf.Variable(tf.zeros(shape), name=label) for label, shape in shapes.items()]
        exchange = grace.tensorflow.Exchange(config_of(row))
        graph = tf.function(lambda *g, e=exchange, v=variables: through_tape(e, v, g), autograph=False)
        checkpoint = tf.train.Checkpoint(grace=exchange)
        steps, found = [], []
        with spy() as sent, tempfile.TemporaryDirectory() as folder:
            for step in (*range(len(GIVEN)), *range(SAVED, len(GIVEN))):
                if len(found) == SAVED:
                    path = checkpoint.save(f"{folder}/begun")
                elif len(found) == len(GIVEN):
                    checkpoint.restore(path).assert_consumed()
                before = _state(exchange)
                mine = list(map(tf.constant, _gradients(step, hvd.rank(), shapes).values()))
                in_graph = row["mode"] == "graph" or (row["mode"] == "by turns" and step % 2 == 0)
                got = graph(*mine) if in_graph else through_tape(exchange, variables, mine)
                found.append(dict(zip(shapes, map(np.asarray, got), strict=True)))
                finite = {name: bool(np.isfinite(x).all()) for name, x in found[-1].items()}
                bad = finite.pop("kernel")
                kept = _state(exchange) == before
                steps.append({"finite": bad, "others finite": all(finite.values()), "state kept": kept})
        first, again = found[: len(GIVEN)], found[SAVED - len(GIVEN) :]
        merged[label_of(row)] = first
        results[label_of(row)] = {
            "merged": digest(np.nan_to_num(x, nan=1.0, posinf=2.0, neginf=3.0) for s in found for x in s.values()),
            # In the first step no element stands out of its noise yet: `variance` sends nothing.
            "moved": bool(np.abs(first[-1]["kernel"]).max() > 0),
            "steps": steps[: len(GIVEN)],
            "resumed": max(_distance(a, b) for a, b in zip(first[SAVED:], again, strict=True)),
            "guarded": any(p.spec.name == "kernel" and p.guarded for p in exchange.plan.assignments),
            **_bytes(row, exchange, sent()),
        }
    for row in rows[hvd.rank() :: hvd.size()]:
        shapes = _shapes(row)
        reference, worst = Simulation(hvd.size(), shapes, config_of(row)), 0.0
        for step, found in enumerate(merged[label_of(row)]):
            with np.errstate(all="ignore"):
                expected = reference.step([_gradients(step, rank, shapes) for rank in range(hvd.size())])[hvd.rank()]
            worst = max(worst, _distance(found, expected))
        results[label_of(row)]["worst"] = worst
    return results


def _shapes(row: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return SHAPES if row["granularity"] == "layer" else {**SHAPES, **LONG}


def _distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the largest difference between the elements of two results, infinite if different ones are finite."""
    worst = 0.0
    for name, x in a.items():
        if not np.array_equal(np.isfinite(x), np.isfinite(b[name])):
            return math.inf
        if np.isfinite(x).all():
            worst = max(worst, float(np.abs(x - b[name]).max()))
    return worst


def _gradients(step: int, rank: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    made = {label: np.asarray(rng.normal(size=shape), np.float32) for label, shape in shapes.items()}
    if rank == hvd.size() - 1:
        made["kernel"][1, 2, 3, 5] += GIVEN[step]
    return made


def _state(exchange: grace.tensorflow.Exchange) -> str:
    """Return the state of the tensor "kernel", if it exists."""
    return state_of(exchange, "kernel") if exchange.built and "kernel" in exchange.plan.places else ""


def constant_gradients() -> dict[str, Any]:
    """Exchange constant gradients in a graph: None on odd ranks, ones on even ranks, for two tensors of one shape."""
    results = {}
    shape = (6, 5)
    for name in ("none", "topk", "bf16"):
        variables = [tf.Variable(tf.zeros(shape), name=label) for label in ("a", "b", "c")]
        config = {"compressor": name, **({"compress_ratio": 1.0} if name == "topk" else {}), **EVERYTHING}
        exchange = grace.tensorflow.Exchange(config)
        known = None if hvd.rank() % 2 else tf.ones(shape)

        @tf.function(autograph=False)
        def step(g: tf.Tensor, exchange: Any = exchange, variables: Any = variables, known: Any = known) -> list[Any]:
            return through_tape(exchange, variables, [known, known, g])

        with spy() as sent:
            merged = [step(tf.fill(shape, float(i + hvd.rank()))) for i in range(3)]
        results[name] = {
            "merged": [[float(m[0, 0]) for m in step] for step in merged],
            "uniform": all(bool(np.ptp(m) == 0) for step in merged for m in step),
            "collectives": len(sent()),
        }
    return results


def reductions() -> dict[str, Any]:
    """Compare op=Sum with op=Average on the same gradients, and use a predivision that must change nothing."""
    results = {}
    mine = [tf.constant(g) for g in _gradients(0, hvd.rank(), SHAPES).values()]
    for name in ("none", "qsgd"):
        merged = {}
        for label, arguments in {
            "average": {},
            "sum": {"op": hvd.Sum},
            "predivide": {"gradient_predivide_factor": 4.0},
        }.items():
            variables = [tf.Variable(tf.zeros(shape), name=key) for key, shape in SHAPES.items()]
            exchange = grace.tensorflow.Exchange({"compressor": name, **EVERYTHING}, **arguments)
            merged[label] = joined(through_tape(exchange, variables, mine))
        results[name] = {
            "sum": float(np.abs(merged["sum"] - merged["average"] * hvd.size()).max()),
            "predivide": float(np.abs(merged["predivide"] - merged["average"]).max()),
            "size": float(np.abs(merged["average"]).max()),
        }
    return results


def process_sets(names: Sequence[str] = ("none", "topk", "powersgd", "bf16", "broadcast")) -> dict[str, Any]:
    """Train even and odd ranks separately, then together."""
    mine = PROCESS_SETS[hvd.rank() % 2]
    results = {}
    for label in names:
        config = {"compressor": label}
        if label == "broadcast":
            config = {"compressor": "topk", "communicator": label}
        model = compiled({**config, **EVERYTHING}, make_small(), process_set=mine)
        fit(model, 2)
        results[label] = digest(model.trainable_variables)
    if hvd.rank() % 2:
        compiled({"compressor": "topk"}, make_small(), process_set=mine)
    # Odd ranks have wrapped one more optimizer than even ranks. This must not matter here.
    model = compiled({"compressor": "topk", **EVERYTHING}, make_small())
    fit(model, 2)
    results["together"] = digest(model.trainable_variables)
    return results


def two_optimizers() -> dict[str, Any]:
    """Use two wrapped optimizers and a tape in one traced step, as in a GAN."""
    models = [make_small(seed) for seed in range(3)]
    optimizers = [wrap({"compressor": "topk", **EVERYTHING}), wrap({"compressor": "qsgd", **EVERYTHING}), sgd()]

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            with tf.GradientTape() as tape:
                loss = loss_function()(y, model(x))
            if i == 2:
                tape = grace.tensorflow.DistributedGradientTape(tape, {"compressor": "topk", **EVERYTHING})
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    x, y = data(3, hvd.rank())
    with spy() as sent:
        for pair in zip(np.split(x, 3), np.split(y, 3), strict=True):
            step(*map(tf.constant, pair))
    return {"weights": [digest(m.trainable_variables) for m in models], "collectives": sorted(sent())}


def different_numbers_of_models() -> dict[str, Any]:
    """Build one more model on the last rank, so that Keras numbers its layers differently."""

    def attempt(**names: str) -> str:
        keras.utils.clear_session()
        if hvd.rank() == hvd.size() - 1:
            keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10, name=names.get("layer"))]
        model = keras.Sequential(layers, name=names.get("model"))
        model.trainable_variables[0].assign(make_small().trainable_variables[0])
        try:
            fit(compiled({"compressor": "topk", **EVERYTHING}, model), 2)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return digest(model.trainable_variables)

    return {"named": attempt(model="net", layer="only"), "numbered": attempt()}


def hazard() -> dict[str, Any]:
    """Train with Horovod's own Keras optimizer and with grace's, both uncompressed."""
    results = {}
    for label, optimizer in {
        "horovod": horovod.tensorflow.keras.DistributedOptimizer(sgd()),
        "grace": wrap({"compressor": "none"}),
    }.items():
        model = make_model()
        model.compile(optimizer, loss_function(), jit_compile=False)
        fit(model, 3)
        results[label] = digest(model.trainable_variables)
    return results


def shapes() -> dict[str, Any]:
    """Train with batches of different sizes, in one fit, and in an order that differs between ranks."""
    model = compiled({"compressor": "topk", **EVERYTHING})
    x, y = data(4, hvd.rank())
    model.fit(x[:-3], y[:-3], batch_size=BATCH, shuffle=False, verbose=0)
    other, optimizer = make_model(), wrap({"compressor": "powersgd", **EVERYTHING})

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_function()(y, other(x))
        optimizer.apply(tape.gradient(loss, other.trainable_variables), other.trainable_variables)

    sizes = (8, 5) if hvd.rank() % 2 else (5, 8)
    with spy() as sent:
        for size in (*sizes, *sizes):
            step(tf.constant(x[:size]), tf.constant(y[:size]))
    return {
        "fitted": digest(model.trainable_variables),
        "traces of fit": model.optimizer.grace.traces,
        "stepped": digest(other.trainable_variables),
        "traces of steps": optimizer.grace.traces,
        # TensorFlow leaves the number of samples open after the second one.
        "traces of the function": step.experimental_get_tracing_count(),
        "collectives": sorted(sent()),
    }


def dtypes(methods: list[str]) -> dict[str, Any]:
    """Exchange half, bfloat16, double and empty variables together; use Keras' policies and frozen layers."""
    results = {}
    for name in methods:
        variables = [tf.Variable(tf.zeros((40, 32), d), name=d) for d in ("float16", "bfloat16", "float64")]
        variables.append(tf.Variable(tf.zeros((0, 3)), name="empty"))
        exchange = grace.tensorflow.Exchange({"compressor": name, **EVERYTHING})
        graph = tf.function(lambda *g, e=exchange, v=variables: through_tape(e, v, g), autograph=False)
        for step in range(2):
            rng = np.random.default_rng([step, hvd.rank()])
            merged = graph(*(tf.cast(rng.normal(size=v.shape), v.dtype) for v in variables))
        results[name] = {
            "merged": digest(merged),
            "moved": all(bool(tf.reduce_any(m != 0)) for m in merged[:-1]),
            "finite": bool(np.isfinite(joined(merged)).all()),
            "dtypes": [m.dtype.name for m in merged] == [v.dtype.name for v in variables],
        }
    for policy in ("float16", "bfloat16", "float64"):
        keras.config.set_dtype_policy(policy)
        try:
            model = compiled({"compressor": "topk", **EVERYTHING}, make_small())
        finally:
            keras.config.set_dtype_policy("float32")
        before = digest(model.trainable_variables)
        loss = fit(model, 2)
        results[f"policy {policy}"] = {
            "merged": digest(model.trainable_variables),
            "moved": digest(model.trainable_variables) != before,
            "finite": bool(np.isfinite(loss)),
            "dtypes": model.trainable_variables[0].dtype == policy,
        }
    model = make_model()
    model.get_layer("hidden").trainable = False
    frozen = digest(model.get_layer("hidden").variables)
    fit(compiled({"compressor": "topk", **EVERYTHING}, model), 2)
    results["frozen"] = {
        "merged": digest(model.trainable_variables),
        "kept": digest(model.get_layer("hidden").variables) == frozen,
        "planned": any("hidden" in item.spec.name for item in model.optimizer.grace.plan.assignments),
    }
    return results


class _Ended(Handle):
    def __init__(self, result: tf.Tensor) -> None:
        self._result = result

    def wait(self) -> tf.Tensor:
        return self._result


class _InGraphs(Transport):
    """A transport that runs every collective in a graph of its own."""

    def __init__(self, transport: HorovodTransport) -> None:
        self.rank, self.size, self._transport = transport.rank, transport.size, transport

    def _start(self, collective: Collective, name: str) -> Handle:
        def run(*buffers: tf.Tensor) -> tf.Tensor:
            return self._transport.start(collective._replace(buffers=buffers), name).wait()

        return _Ended(tf.function(run, autograph=False)(*collective.buffers))


def transport_contract() -> dict[str, list[str]]:
    """Run the contract of transports among all ranks and in each process set of this rank; return the tests' names."""
    ops, results = get_ops("tensorflow"), {}
    for process_set in (hvd.global_process_set, *(mine for mine in PROCESS_SETS if mine.included())):
        transport = HorovodTransport(process_set, f"contract.{process_set.process_set_id}")
        for label, each in {"eager": transport, "graph": _InGraphs(transport)}.items():
            results[f"{process_set.ranks}, {label}"] = run_transport_contract(each, ops)
    return results


def unread_results() -> dict[str, Any]:
    """Run a graph with every kind of collective, in it and in a branch, whose results only rank 0 reads."""
    transport, rank, size = HorovodTransport(hvd.global_process_set, "unread"), hvd.rank(), hvd.size()

    def start(x: tf.Tensor, where: str) -> list[tf.Tensor]:
        pieces = [tf.cast(x, tf.uint8)] * size
        rows = tf.IndexedSlices(tf.reshape(x, [-1, 1]), tf.range(tf.size(x)), tf.constant([9, 1]))
        handles = [
            transport.allreduce(x, op="sum", name=f"{where}.sum"),
            transport.allgather(pieces[0][: rank + 1], name=f"{where}.gather"),
            transport.alltoall(pieces, name=f"{where}.all"),
            transport.alltoall([p[:0] for p in pieces], name=f"{where}.nothing"),
            transport.broadcast(x, root=size - 1, name=f"{where}.broadcast"),
        ]
        gathered = transport.average(rows, op=hvd.Sum, predivide=1.0, name=f"{where}.rows").values
        results = [*(handle.wait() for handle in handles), tf.reshape(gathered, [-1])]
        transport.end_turn()
        return [tf.cast(r, tf.int64) for r in results] if rank == 0 else []

    def none_started() -> list[tf.Tensor]:
        return [tf.zeros([0], tf.int64)] * (6 if rank == 0 else 0)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        first = start(x, "step")
        # A branch without a result has one that does not matter.
        in_branch = tf.cond(x[0] >= 0, lambda: [*start(x, "branch"), x[0]], lambda: [*none_started(), x[0]])
        return [*first, *in_branch[:-1]]

    return {f"step {i}": [r.numpy().tolist() for r in step(tf.constant([rank + i, 1, 2, 3]))] for i in range(2)}


def three_ranks(listed: Sequence[Any]) -> dict[str, Any]:
    """Exchange on three ranks of four, in a graph and eagerly, and return the distance to the simulated exchange."""
    (mine,) = (each for each in PROCESS_SETS if len(each.ranks) == 3)
    results: dict[str, Any] = {}
    for communicator in listed if mine.included() else ():
        config = {"compressor": "topk", "compress_ratio": 0.1, "communicator": communicator, **EVERYTHING}
        shapes = {**SHAPES, **LONG}
        reference, worst, moved = Simulation(3, shapes, config), 0.0, 0.0
        variables = [tf.Variable(tf.zeros(shape), name=label) for label, shape in shapes.items()]
        exchange = grace.tensorflow.Exchange(config, process_set=mine)
        graph = tf.function(lambda *g, e=exchange, v=variables: through_tape(e, v, g), autograph=False)
        for step in range(2):
            everyone = [_gradients(0, step * 3 + rank, shapes) for rank in range(3)]
            given = list(map(tf.constant, everyone[mine.rank()].values()))
            got = graph(*given) if step == 0 else through_tape(exchange, variables, given)
            found = dict(zip(shapes, map(np.asarray, got), strict=True))
            worst = max(worst, _distance(found, reference.step(everyone)[mine.rank()]))
            moved += float(np.abs(found["kernel"]).max())
        results[str(communicator)] = {"worst": worst, "moved": moved}
    return results


def ranks_of_nodes() -> dict[str, Any]:
    """Return the ranks on a node that the exchange finds here, and on other nodes, and the error of a plan for them."""

    def built(**options: Any) -> grace.tensorflow.Exchange:
        exchange = grace.tensorflow.Exchange({"compressor": "topk", **options, **EVERYTHING})
        exchange.build([tf.Variable(tf.zeros((40, 32)), name="w")])
        return exchange

    results: dict[str, Any] = {"here": built().ranks.local_size}
    for process_set in PROCESS_SETS:
        results[f"set {process_set.ranks}"] = HorovodTransport(process_set, "nodes").local_size
    for placed in nodes.FOUND[hvd.size()]:
        told = dict(zip(("cross_rank", "local_rank", "local_size"), nodes.told(placed, hvd.rank()), strict=True))
        with mock.patch.multiple(hvd, **{key: lambda value=value: value for key, value in told.items()}):
            found = built().ranks.local_size
            results[placed] = {
                "local_size": found,
                "error": error_of(lambda: built(communicator="hierarchical")),
                "named": error_of(lambda: built(communicator="hierarchical", local_size=2)),
            }
    return results
