"""Scenarios of a Keras optimizer with outer steps beside a simulation of all ranks, run by each rank."""

from __future__ import annotations

import tempfile
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import grace
from tests.adapters.tensorflow.model import PROCESS_SETS, wrap
from tests.adapters.tensorflow.outer_cases import CASES, NONE, sizes_of
from tests.adapters.tensorflow.usage_model import error_of
from tests.support.covering import ALL

# Each tensor takes time in every trace.
SHAPES = {"w": (6, 5), "b": (5,), **({"c": (4, 3)} if ALL else {})}
# A power of two, with which inner steps round once in any order of operations.
LR, STEPS = 0.125, 13


def drawn(rank: int, step: int) -> dict[str, np.ndarray]:
    """Return gradients of few bits, which differ between ranks."""
    rng = np.random.default_rng([rank, step])
    return {name: (rng.integers(-8, 12, shape) / 16).astype(np.float32) for name, shape in SHAPES.items()}


class Kept:
    """Variables and their optimizer, whose steps are a graph."""

    def __init__(self, start: dict[str, np.ndarray], optimizer: Any) -> None:
        self.variables = [tf.Variable(x, name=name) for name, x in start.items()]
        self.optimizer = optimizer
        optimizer.build(self.variables)
        self._apply = tf.function(lambda *grads: optimizer.apply(list(grads), self.variables))

    def step(self, rank: int, number: int) -> dict[str, np.ndarray]:
        """Take an inner step with the gradients of a rank; return the weights."""
        return self.apply(drawn(rank, number))

    def apply(self, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Apply gradients; return the weights."""
        self._apply(*map(tf.constant, gradients.values()))
        return self.weights()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: v.numpy() for name, v in zip(SHAPES, self.variables, strict=True)}

    def checkpoint(self) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(variables=self.variables, optimizer=self.optimizer)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in SHAPES)


def tf_outer_bits(name: str) -> dict[str, Any]:
    """Compare the weights after each step with those of a simulation, on all ranks and on the first two."""
    sets = {4: hvd.global_process_set, 2: PROCESS_SETS[0]}
    # Each number of ranks is traced.
    sizes = sizes_of(name) if ALL else sizes_of(name)[-1:]
    return {str(size): _bits(name, sets[size]) for size in sizes if sets[size].included()}


def _bits(name: str, mine: Any) -> dict[str, Any]:
    (config, outer), rank, size = CASES[name], mine.rank(), len(mine.ranks)
    if outer.get("weight"):
        outer = {**outer, "weight": [1.0, 3.0, 2.0, 4.0][:size]}
    start = {key: np.full(shape, 0.5, np.float32) + drawn(9, 9)[key] for key, shape in SHAPES.items()}

    def made() -> Kept:
        inner = keras.optimizers.SGD(LR, 0.5 if beside else 0.0)
        return Kept(start, wrap(config, inner, outer=outer, process_set=mine))

    # In the simulation, the states of the inner optimizer are tensors beside the weights.
    state = outer.get("state")
    beside = {f"m {key}": np.zeros(shape, np.float32) for key, shape in SHAPES.items() if state}
    rounds = 1 if state == "average" else (state or {}).get("momentum", 0)
    specs = [
        *(grace.TensorSpec(*x) for x in SHAPES.items()),
        *(grace.TensorSpec(key, x.shape, rounds=rounds) for key, x in beside.items()),
    ]
    options = {key: x for key, x in outer.items() if key != "state"}
    kept, sim = made(), grace.Simulation(size, specs, config, outer=options)
    kept.optimizer.grace.track_norms = sim.track_norms = True
    sim.begin({**start, **beside})
    weights, equal, after = [{**start, **beside}] * size, [], []
    resumed = []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(STEPS):
            moved = []
            for each, own in enumerate(weights):
                variates = sim.variates(each) if outer.get("variates") else dict.fromkeys(SHAPES, np.float32(0))
                grads = drawn(each, step)
                steps = {key: -np.float32(LR) * (grads[key] - variates[key]) for key in SHAPES}
                momenta = {key: np.float32(0.5) * x + steps[key[2:]] for key, x in own.items() if key in beside}
                weighed = {key: own[key] + momenta.get(f"m {key}", steps[key]) for key in SHAPES}
                moved.append({**weighed, **momenta})
            weights = sim.step(moved, lr=LR)
            after.append(kept.step(rank, step))
            equal.append(same(after[-1], weights[rank]))
            if step == 6 and ALL:
                path = kept.checkpoint().write(f"{folder}/kept")
                again = made()
                again.checkpoint().read(path).assert_consumed()
        if ALL:
            resumed = [same(again.step(rank, step), after[step]) for step in range(7, STEPS)]
    common = kept.optimizer.grace.common_weights()
    # In pairs, each rank has its own.
    expected = sim.outers[rank].reshape(sim.outers[rank].state.anchors)
    return {
        "equal": equal,
        "resumed": resumed,
        "common": same({key: x.numpy() for key, x in common.items()}, expected),
        "variates": not outer.get("variates")
        or same({key: x.numpy() for key, x in kept.optimizer.grace.variates().items()}, sim.variates(rank)),
        "stats": [kept.optimizer.grace.stats()["outer"], sim.stats(rank)["outer"]],
    }


class Passes:
    """An optimizer whose inner steps take two passes each, or leave out what is not finite; and the reference of it."""

    def __init__(self, name: str) -> None:
        # Each pass less the control variates, which are no numbers of few bits, is rounded.
        self.config, self.outer = CASES["fragments" if name.startswith("accumulated") else "variates"]
        self.passes = 2 if name.startswith("accumulated") else 1
        inner = wrap(self.config, keras.optimizers.SGD(LR), outer=self.outer)
        if self.passes > 1:
            inner.gradient_accumulation_steps = self.passes
        self.grace = inner.grace
        self.scaled = name.endswith("overflow")
        inner.loss_scale_factor = 2.0 if name == "scaled" else None
        self.factor = 2.0 if name == "scaled" else 1.0
        self.optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**8) if self.scaled else inner

    def overflows(self, rank: int, step: int) -> bool:
        """Return whether a rank leaves an inner step out; none of them does so alone in all of them."""
        return self.scaled and (rank + step) % 5 == 2

    def gradients(self, rank: int, step: int) -> list[dict[str, np.ndarray]]:
        """Return the gradients of the passes of an inner step."""
        return [drawn(rank, self.passes * step + i) for i in range(self.passes)]


def tf_outer_passes(name: str) -> dict[str, Any]:
    """Accumulate, scale losses, or let each rank leave steps out; compare with a simulation after each step."""
    case, start, rank = Passes(name), drawn(9, 9), hvd.rank()
    kept = Kept(start, case.optimizer)
    sim = grace.Simulation(hvd.size(), [grace.TensorSpec(*x) for x in SHAPES.items()], case.config, outer=case.outer)
    sim.begin(start)
    weights, equal, losses = [start] * hvd.size(), [], []
    for step in range(STEPS):
        moved = []
        for each, own in enumerate(weights):
            given = case.gradients(each, step)
            mean = {key: np.float32(1 / len(given)) * sum(g[key] for g in given) for key in SHAPES}
            variates = sim.variates(each) if case.outer.get("variates") else dict.fromkeys(SHAPES, np.float32(0))
            steps = {key: -np.float32(LR) * (mean[key] - variates[key]) for key in SHAPES}
            moved.append(own if case.overflows(each, step) else {key: own[key] + steps[key] for key in SHAPES})
        weights = sim.step(moved, lr=LR)
        factor = float(case.optimizer.scale_loss(tf.constant(1.0 + step)) / (1.0 + step))
        for number, g in enumerate(case.gradients(rank, step)):
            # The first pass overflows, or the last one.
            lost = case.overflows(rank, step) and number == step % case.passes
            result = kept.apply({key: (np.float32("inf") if lost else factor) * x for key, x in g.items()})
        equal.append(same(result, weights[rank]))
        losses.append(case.grace.stats()["outer"]["loss"])
    scale = float(case.optimizer.dynamic_scale) if case.scaled else case.factor
    rounds = [case.grace.stats()["outer"]["rounds"], sim.stats(rank)["outer"]["rounds"]]
    return {"equal": equal, "losses": losses, "scale": scale, "rounds": rounds}


RESETS = {
    "momentum": (lambda: keras.optimizers.SGD(LR, 0.5), {"every": 3}),
    "Adam": (lambda: keras.optimizers.Adam(LR), {"every": 4, "fragments": 2, "delay": 1}),
    "Adagrad": (lambda: keras.optimizers.Adagrad(LR), {"every": 2, "warmup": 2}),
}


def tf_outer_resets(name: str) -> list[float]:
    """Compare with new optimizers for what has synced; return how far weights are apart after each step."""
    make, outer = RESETS[name]
    start = drawn(9, 9)
    kept = Kept(start, wrap(NONE, make(), outer={**outer, "state": "reset"}))
    sim = grace.Simulation(hvd.size(), [grace.TensorSpec(*x) for x in SHAPES.items()], NONE, outer=outer)
    sim.begin(start)
    variables = [{key: tf.Variable(x) for key, x in start.items()} for _ in range(hvd.size())]
    inner = [{key: make() for key in SHAPES} for _ in variables]
    parts, settings, apart = sim.config.outer.divide(sim._specs), sim.config.outer, []
    for step in range(STEPS):
        for rank, mine in enumerate(variables):
            for key, g in drawn(rank, step).items():
                inner[rank][key].apply([tf.constant(g)], [mine[key]])
        met = sim.step([{key: v.numpy() for key, v in mine.items()} for mine in variables])
        again = [key for i, part in enumerate(parts) if settings.applies(step + 1, i) for key in part]
        for rank, mine in enumerate(variables):
            for key, v in mine.items():
                v.assign(met[rank][key])
            inner[rank] |= {key: make() for key in again}
        weights, mine = kept.step(hvd.rank(), step), variables[hvd.rank()]
        apart.append(max(float(np.abs(weights[key] - mine[key].numpy()).max()) for key in SHAPES))
    return apart


def tf_outer_of_others() -> dict[str, Any]:
    """Load what another rank has saved; return sums of control variates before and after, and the error of pairs."""

    def loaded(name: str) -> tuple[Kept, Kept]:
        config, outer = CASES[name]
        kept, again = (Kept(drawn(9, 9), wrap(config, keras.optimizers.SGD(LR), outer=outer)) for _ in range(2))
        for step in range(5):
            kept.step(hvd.rank(), step)
        with tempfile.TemporaryDirectory() as folder:
            again.checkpoint().read(kept.checkpoint().write(f"{folder}/kept")).assert_consumed()
        again.optimizer.grace.run.origin.assign([1 - hvd.rank(), hvd.size()])
        return kept, again

    def held(kept: Kept) -> float:
        return float(sum(np.abs(v.numpy()).sum() for v in kept.optimizer.grace.outer.variates))

    kept, again = loaded("variates")
    before = [held(kept), held(again)]
    again.step(hvd.rank(), 5)
    own = {id(v) for v in kept.optimizer.grace.of_this_rank}
    kept.optimizer.grace.move()
    _, paired = loaded("pairs")
    return {
        "own": all(id(v) in own for v in kept.optimizer.grace.outer.variates),
        "before": before,
        "after": [held(kept), held(again)],
        "pairs": error_of(lambda: paired.step(hvd.rank(), 5)),
    }
