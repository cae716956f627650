"""Scenarios about what is exchanged by TensorFlow: what one rank does, and what it reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras
import keras
import numpy as np
import tensorflow as tf

import grace.tensorflow
from grace.core.registry import compressors
from grace.core.simulate import Simulation
from tests.adapters.tensorflow.model import (
    BATCH,
    EVERYTHING,
    LAYERS,
    PROCESS_SETS,
    UNITS,
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
    valid_configs,
    wrap,
)

# What trains the larger model in every_method: a gathered, a summed and a two-step method, and one of unknown lengths.
LARGE = ("none/allreduce", "topk/broadcast", "powersgd/allreduce", "threshold/allgather")
SHAPES = {"matrix": (24, 20), "kernel": (3, 3, 2, 8), "scalar": ()}


def every_method() -> dict[str, Any]:
    """Steps of fit with every method and communicator: exact weights, bytes reported and bytes really sent."""
    return {label: _trained(config, label in LARGE) for label, config in valid_configs()}


def every_compressor() -> dict[str, Any]:
    """The same with every method's own communicator, and once with the one that nothing has by default."""
    configs = dict(valid_configs(every_communicator=False))
    configs["topk/broadcast"] = {**configs["topk/allgather"], "communicator": "broadcast"}
    return {label: _trained(config, large=False) for label, config in configs.items()}


def _trained(config: dict[str, Any], large: bool) -> dict[str, Any]:
    model = compiled(config, make_model() if large else make_small())
    before = digest(model.trainable_variables)
    with spy() as sent:
        loss = fit(model, 3)
    exchange = model.optimizer.grace
    return {
        "weights": digest(model.trainable_variables),
        "moved": digest(model.trainable_variables) != before,
        "finite": bool(np.isfinite(loss)),
        "reported": exchange.stats()["wire_bytes"],
        "sent": sum(sent().values()),
        "fixed": all(part.compressor.fixed_size for part in exchange.plan.parts),
        "predicted": sum(b.nbytes for b in exchange.plan.buckets) + sum(p.spec.nbytes for p in exchange.plan.delegated),
    }


def none_and_one_process() -> dict[str, Any]:
    """Training with compressor none, in three ways, against plain Keras on the joined batches of all ranks."""
    steps, size = 6, hvd.size()
    everyone = [data(steps, rank) for rank in range(size)]
    # Step by step, the batches of all ranks one after another.
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
                tape = grace.tensorflow.DistributedGradientTape(tape, {"compressor": "none"})
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
    """The gradients of Horovod's own tape and of grace's with compressor none."""
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
            config = {} if make is hvd.DistributedGradientTape else {"compressor": "none"}
            # Horovod's tape does not know the variables of Keras, but those of TensorFlow inside them.
            variables = [v.value for v in model.trainable_variables]
            gradients.append(joined(make(tape, **config, **arguments).gradient(loss, variables)))
        results[label] = {
            "distance": float(np.abs(gradients[0] - gradients[1]).max()),
            "size": float(np.abs(gradients[0]).max()),
        }
    return results


def _gradients(step: int, rank: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return {label: rng.normal(size=shape).astype(np.float32) for label, shape in shapes.items()}


def simulation() -> dict[str, Any]:
    """The exchange of real processes against the simulated one, on the same gradients, eagerly and in a graph by turns.

    Then with NaN, and with infinity, in one tensor on the last rank only.
    """
    return _simulated(compressors, LAYERS)


def simulation_some() -> dict[str, Any]:
    """The same for methods that are gathered, summed, summed in 16 bits, and exchanged in two steps."""
    return _simulated(("qsgd", "randomk", "fp16", "bf16", "powersgd"), LAYERS)


def simulation_units() -> dict[str, Any]:
    """The same of tensors that are fused and cut, and as one model, with every kind of communicator."""
    shapes, results = {**SHAPES, "long": (30, 200)}, {}
    # Graphs take time: of every way through the engine one.
    methods = {"bucket": ("fp16", "topk", "threshold", "efsignsgd"), "model": ("fp16", "topk", "powersgd")}
    for label, options in UNITS.items():
        found = _simulated(methods[label], options, shapes)
        results.update({f"{label}/{name}": result for name, result in found.items()})
    broadcast = {**UNITS["bucket"], "communicator": "broadcast"}
    results["bucket/topk by broadcast"] = _simulated(["topk"], broadcast, shapes)["topk"]
    return results


def _simulated(
    names: Iterable[str], options: dict[str, Any], shapes: dict[str, tuple[int, ...]] = SHAPES
) -> dict[str, Any]:
    results = {}
    rank, size = hvd.rank(), hvd.size()
    for number, name in enumerate(names):
        config = {"compressor": name, **options}
        variables = [tf.Variable(tf.zeros(shape), name=label) for label, shape in shapes.items()]
        exchange = grace.tensorflow.Exchange(config)
        graph = tf.function(lambda *g, e=exchange, v=variables: through_tape(e, v, g), autograph=False)
        reference = Simulation(size, shapes, config)
        worst, bad_steps = 0.0, {}
        for step, bad in enumerate([0.0, 0.0, 0.0, np.nan, np.inf, 0.0]):
            everyone = [_gradients(step, r, shapes) for r in range(size)]
            everyone[-1]["matrix"][3, 5] += bad
            before = _state(exchange)
            mine = map(tf.constant, everyone[rank].values())
            merged = graph(*mine) if (step + number) % 2 else through_tape(exchange, variables, list(mine))
            with np.errstate(all="ignore"):
                expected = reference.step(everyone)[rank]
            found = dict(zip(shapes, map(np.asarray, merged), strict=True))
            if bad != 0.0:
                bad_steps[str(bad)] = {
                    "as simulated": all(
                        np.array_equal(np.isfinite(m), np.isfinite(expected[n])) for n, m in found.items()
                    ),
                    "bad tensor finite": bool(np.isfinite(found.pop("matrix")).all()),
                    "others finite": bool(all(np.isfinite(m).all() for m in found.values())),
                    "state kept": _state(exchange) == before,
                }
            found = {label: m for label, m in found.items() if np.isfinite(m).all()}
            worst = max(worst, *(float(np.abs(m - expected[label]).max()) for label, m in found.items()), 0.0)
        results[name] = {
            "worst": worst,
            "bad": bad_steps,
            "moved": bool(np.abs(found["matrix"]).max() > 0),
            "guarded": any(p.spec.name == "matrix" and p.guarded for p in exchange.plan.parts),
        }
    return results


def _state(exchange: grace.tensorflow.Exchange) -> str:
    """State of the tensor "matrix", if the exchange has one for it yet."""
    return state_of(exchange, "matrix") if exchange.built and "matrix" in exchange.plan.places else ""


def constant_gradients() -> dict[str, Any]:
    """Gradients that a graph knows beforehand: none on odd ranks, ones on even ranks, of two tensors of one shape."""
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
    """op=Sum against op=Average of the same gradients, and a predivision that must change nothing."""
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


def process_sets() -> dict[str, Any]:
    """Even and odd ranks train apart, then together."""
    mine = PROCESS_SETS[hvd.rank() % 2]
    results = {}
    for label, config in {
        "none": {"compressor": "none"},
        "topk": {"compressor": "topk"},
        "powersgd": {"compressor": "powersgd"},
        "bf16": {"compressor": "bf16"},
        "broadcast": {"compressor": "topk", "communicator": "broadcast"},
    }.items():
        model = compiled({**config, **EVERYTHING}, make_small(), process_set=mine)
        fit(model, 2)
        results[label] = digest(model.trainable_variables)
    if hvd.rank() % 2:
        compiled({"compressor": "topk"}, make_small(), process_set=mine)
    # Odd ranks have wrapped one more optimizer than even ones, which must not matter here.
    model = compiled({"compressor": "topk", **EVERYTHING}, make_small())
    fit(model, 2)
    results["together"] = digest(model.trainable_variables)
    return results


def two_optimizers() -> dict[str, Any]:
    """Two wrapped optimizers and a tape in one traced step, as in a GAN."""
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
    """The last rank has built a model more than the others, so that Keras numbers its layers differently."""

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
    """The same training with Horovod's own Keras optimizer and with grace's, uncompressed."""
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
    """Batches of different sizes: in one fit, and in an order that differs between ranks."""
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
        "collectives": sorted(sent()),
    }


def dtypes() -> dict[str, Any]:
    """Half, bfloat16 and double variables and an empty one in one exchange; policies of Keras; frozen layers."""
    results = {}
    for name in compressors:
        variables = [tf.Variable(tf.zeros((40, 32), d), name=d) for d in ("float16", "bfloat16", "float64")]
        variables.append(tf.Variable(tf.zeros((0, 3)), name="empty"))
        exchange = grace.tensorflow.Exchange({"compressor": name, **EVERYTHING})
        for step in range(2):
            rng = np.random.default_rng([step, hvd.rank()])
            mine = [tf.cast(rng.normal(size=v.shape), v.dtype) for v in variables]
            merged = through_tape(exchange, variables, mine)
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
        "planned": any("hidden" in part.spec.name for part in model.optimizer.grace.plan.parts),
    }
    return results
