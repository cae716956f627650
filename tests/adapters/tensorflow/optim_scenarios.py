"""Scenarios of Keras' optimizers that exchange what they need themselves, run by each rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import grace
from grace.tensorflow.optim import Lamb, Lans, OneBitAdam, OneBitLamb, ZeroOneAdam
from tests.adapters.tensorflow.model import digest
from tests.adapters.tensorflow.usage_model import (
    applying,
    by_hand,
    error_of,
    fit,
    gradients,
    net,
    samples,
    small_net,
    traces_of,
)
from tests.support.cases import LAYERS
from tests.support.covering import ALL
from tests.support.one_bit import MomentaOfThePaper

LR, FREEZE, BETAS = 0.01, 3, (0.9, 0.999)


class OfAllRanks:
    """The model of each rank in one process, with its gradients."""

    def __init__(self) -> None:
        self.nets = [small_net() for _ in range(hvd.size())]
        self.names = [v.path for v in self.nets[0].trainable_variables]

    def gradients(self, step: int) -> list[dict[str, np.ndarray]]:
        """Return the flat gradients of all ranks, each at its own weights."""
        found = []
        for rank, model in enumerate(self.nets):
            x, y = (part[-4:] for part in samples(step + 1, rank))
            grads = gradients(model, tf.constant(x), tf.constant(y))
            found.append({name: g.numpy().reshape(-1) for name, g in zip(self.names, grads, strict=True)})
        return found

    def weights(self, rank: int = 0) -> dict[str, np.ndarray]:
        """Return copies of the flat weights of a rank."""
        variables = self.nets[rank].trainable_variables
        return {name: v.numpy().reshape(-1).copy() for name, v in zip(self.names, variables, strict=True)}

    def write(self, rank: int, weights: dict[str, np.ndarray]) -> None:
        """Set the weights of a rank."""
        for name, v in zip(self.names, self.nets[rank].trainable_variables, strict=True):
            v.assign(weights[name].reshape(v.shape))

    def off(self, model: keras.Model) -> float:
        """Return how far a model of this rank is from them."""
        mine = self.nets[hvd.rank()]
        pairs = zip(model.trainable_variables, mine.trainable_variables, strict=True)
        return max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)


def mean(each: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.mean([mine[name] for mine in each], axis=0, dtype=np.float32) for name in each[0]}


def compared(
    make: Callable[[], Any], follow: Iterator[OfAllRanks], steps: int, loaded: tuple[int, ...]
) -> dict[str, Any]:
    """Train by `fit` beside a reference, and go on from files that were saved before some of the steps."""
    model, off, after, saved = small_net(), [], [], {}
    model.compile(make(), "mse")
    traces = traces_of(model)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(steps):
            if step in loaded:
                saved[step] = save(model, f"{folder}/{step}")
            fit(model, 1, start=step)
            off.append(next(follow).off(model))
            after.append(digest(model.trainable_variables))
        resumed = []
        for number, (step, paths) in enumerate(saved.items()):
            # Each way of loading is traced again.
            for way in WAYS if ALL else [[*WAYS][number % len(WAYS)]]:
                again = WAYS[way](paths, make)
                fit(again, steps - step, start=step)
                same = [digest(x) == digest(y) for x, y in zip(kept(again), kept(model), strict=True)]
                resumed.append(all(same) or f"{way}, {step}")
    stats = model.optimizer.grace.stats()
    return {"off": off, "after": after, "resumed": resumed, "traces": len(traces), "stats": stats}


def save(model: keras.Model, path: str) -> tuple[str, str]:
    """Save a model by Keras and by TensorFlow; return the paths."""
    model.save(f"{path}.keras")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    return f"{path}.keras", checkpoint.write(f"{path}/checkpoint")


def kept(model: keras.Model) -> list[list[Any]]:
    """Return the weights, and all that the optimizer keeps."""
    return [model.weights, model.optimizer.variables]


def by_keras(paths: tuple[str, str], make: Callable[[], Any]) -> keras.Model:
    return keras.saving.load_model(paths[0])


def before_built(paths: tuple[str, str], make: Callable[[], Any], steps: int = 0) -> keras.Model:
    """Restore a checkpoint of TensorFlow into another model, whose optimizer has no variables yet."""
    model = small_net(seed=1)
    model.compile(make(), "mse")
    fit(model, steps) if steps else None
    status = tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(paths[1])
    if steps:
        status.assert_consumed()
    return model


def after_steps(paths: tuple[str, str], make: Callable[[], Any]) -> keras.Model:
    """Restore a checkpoint of TensorFlow into another model that has taken steps."""
    return before_built(paths, make, 2)


#: The ways to go on from what `save` has written.
WAYS = {"Keras": by_keras, "before built": before_built, "after steps": after_steps}


def following(rule: Any, plan: Callable[[], Any] | None = None) -> Iterator[OfAllRanks]:
    """Yield the weights after each step of a rule of the core in NumPy; with a plan, momenta travel as signs."""
    ops, ranks = grace.get_ops("numpy"), OfAllRanks()
    states = {name: rule.init(ops, w) for name, w in ranks.weights().items()}
    paper = None
    for number in range(1, 100):
        each, weights = ranks.gradients(number - 1), ranks.weights()
        if plan is not None and number == FREEZE + 1:
            scales = {name: state["scale"] for name, state in states.items()}
            unit = {n: np.where(x > 0, 1 / x, np.inf) if rule.scaled else np.ones_like(x) for n, x in scales.items()}
            paper = MomentaOfThePaper(plan(), {n: s["exp_avg"] for n, s in states.items()}, unit, hvd.size())
        merged = mean(each)
        if number > FREEZE:
            sent = [{n: rule.momentum(ops, weights[n], mine[n], states[n]) for n in weights} for mine in each]
            merged = mean(sent) if paper is None else {n: m.copy() for n, m in paper.step(each).items()}
        for name, w in weights.items():
            step = rule.step if number <= FREEZE else rule.frozen_step
            weights[name], states[name] = step(ops, w, merged[name], states[name], LR, number)
            if number == FREEZE:
                states[name] = rule.freeze(ops, states[name], number)
        for rank in range(hvd.size()):
            ranks.write(rank, weights)
        yield ranks


# All elements, added in the order of the ranks: which tensors Horovod adds up together depends on the time, and with it
# the last bits of sums of more than two.
IN_ORDER = {"compressor": "topk", "compress_ratio": 1.0}


def keras_one_bit(scaled: bool) -> dict[str, Any]:
    """Compare 1-bit Adam with the recursion of the paper, and 1-bit LAMB without compression with its rule."""
    made: list[Any] = []

    def make() -> Any:
        made.append(OneBitAdam(LR, freeze_step=FREEZE, scaled=scaled, weight_decay=0.01, **LAYERS))
        return made[-1]

    rule = OneBitAdam.rule(weight_decay=0.01, decoupled_weight_decay=True, scaled=scaled)
    results = {"adam": compared(make, following(rule, lambda: made[0].grace.plan), 6, (2, 4, 5) if ALL else (2, 5))}
    results["frozen"] = made[0].frozen
    if scaled:
        results["lamb"] = compared(
            lambda: OneBitLamb(LR, freeze_step=FREEZE, weight_decay=0.01, **IN_ORDER, **LAYERS),
            following(OneBitLamb.rule(weight_decay=0.01)),
            5,
            (4,) if ALL else (),
        )
    return results


def following_zero_one() -> Iterator[OfAllRanks]:
    """Yield the weights after each step of 0/1 Adam in NumPy."""
    ops, ranks, rule = grace.get_ops("numpy"), OfAllRanks(), ZeroOneAdam.rule(decoupled_weight_decay=True, eps=1e-4)
    states = [{name: rule.init(ops, w) for name, w in ranks.weights().items()} for _ in ranks.nets]
    rates, learnt = 0.0, 0
    for number in range(1, 100):
        each, rate = ranks.gradients(number - 1), rule.rate(LR, number)
        # After one gradient v is due every second step, after two every fourth; the freeze comes after step 4.
        learns, rates = number in (1, 3), rates + rate
        learnt += learns
        syncs = number <= 4 or number - 4 in (1, 2, 5)
        for name, g in mean(each).items():
            new = [ranks.weights(rank)[name] for rank in range(hvd.size())]
            for rank, mine in enumerate(states):
                state = rule.learn(ops, new[rank], g, mine[name]) if learns else mine[name]
                mine[name] = rule.advance(ops, new[rank], each[rank][name], state, rate, learnt)
            sent = np.mean([rule.sent(ops, mine[name], learnt) for mine in states], axis=0, dtype=np.float32)
            for rank, mine in enumerate(states):
                own = (ops, new[rank])
                new[rank], mine[name] = (
                    rule.sync(*own, sent, mine[name], LR, 1 / rates, learnt)
                    if syncs
                    else rule.alone(*own, mine[name], LR, rate, learnt)
                )
                ranks.write(rank, {**ranks.weights(rank), name: new[rank]})
        rates = 0.0 if syncs else rates
        yield ranks


def keras_zero_one() -> dict[str, Any]:
    """Compare 0/1 Adam without compression with its rule in NumPy."""
    options = {"every": {2: 3}, "var_update_scaler": 1, "freeze_step": 4, "epsilon": 1e-4, **IN_ORDER}
    return compared(lambda: ZeroOneAdam(LR, **options, **LAYERS), following_zero_one(), 9, (2, 7, 8) if ALL else (7,))


def keras_one_bit_settles() -> dict[str, Any]:
    """Train by 1-bit Adam in a loop of its own, until the second moments settle by the rule of the paper.

    It has what Keras offers: a schedule of the learning rate, passes, clipping, averages. Once a rank has no gradient.
    """
    model, apart = net(), []
    variables = model.trainable_variables
    slopes = [tf.random.stateless_normal(v.shape, [hvd.rank(), i]) for i, v in enumerate(variables)]
    optimizer = OneBitAdam(
        keras.optimizers.schedules.ExponentialDecay(LR, 2, 0.9),
        beta_2=0.5,
        global_clipnorm=0.5,
        gradient_accumulation_steps=2,
        use_ema=True,
        compressor="topk",
        communicator="two_shot",
        **LAYERS,
    )
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    apply, empty = (tf.function(lambda g=g: optimizer.apply(g, variables)) for g in (slopes, [None, *slopes[1:]]))
    for step in range(20):
        (empty if step == 18 and hvd.rank() == 0 else apply)()
        apart.append(digest(variables))
    return {"apart": apart, "frozen": optimizer.frozen, "steps": int(optimizer.grace.stats()["step"])}


def keras_layerwise_optimizers() -> dict[str, Any]:
    """Use LAMB and LANS with compressed gradients, and compare LAMB with its rule."""
    results: dict[str, Any] = {}
    for kind, options in ((Lamb, {"compressor": "qsgd"}), (Lans, {"compressor": "topk", "communicator": "two_shot"})):
        trained = net()
        trained.compile(grace.tensorflow.DistributedOptimizer(kind(LR), **options, **LAYERS), "mse")
        fit(trained, 3)
        results[kind.__name__] = digest(trained.trainable_variables)
    # The rules themselves.
    ranks, ops = OfAllRanks(), grace.get_ops("numpy")
    exact, rule = small_net(), Lamb.rule(weight_decay=0.01)
    wrapped = grace.tensorflow.DistributedOptimizer(Lamb(LR, weight_decay=0.01), compressor="none", **LAYERS)
    exact.compile(wrapped, "mse")
    states = {name: rule.init(ops, w) for name, w in ranks.weights().items()}
    for number in (1, 2):
        merged, weights = mean(ranks.gradients(number - 1)), ranks.weights()
        for name, w in weights.items():
            weights[name], states[name] = rule.step(ops, w, merged[name], states[name], LR, number)
        for rank in range(hvd.size()):
            ranks.write(rank, weights)
    fit(exact, 2)
    results["off"] = ranks.off(exact)
    return results


def keras_optimizer_refusals() -> dict[str, str]:
    """Return the errors of what cannot work."""
    model = net()

    def train(optimizer: Any) -> None:
        by_hand(model, applying(optimizer, model), 1)

    calls = {
        "both": lambda: OneBitAdam(freeze_step=3, total_steps=9),
        "rate": lambda: OneBitAdam(-1.0),
        "betas": lambda: OneBitAdam(beta_1=1.0),
        "typo": lambda: OneBitAdam(weight_dacay=0.1),
        "lamb": lambda: Lamb(weight_dacay=0.1),
        "outer": lambda: OneBitAdam(outer="update"),
        "neither": lambda: ZeroOneAdam(),
        "scaler": lambda: ZeroOneAdam(freeze_step=1, var_update_scaler=0),
        "wrapped": lambda: grace.tensorflow.DistributedOptimizer(OneBitAdam(), compressor="none"),
        "some": lambda: _some(model),
        "differ": lambda: train(OneBitAdam(freeze_step=3 + hvd.rank())),
        "loss scaling": lambda: train(keras.optimizers.LossScaleOptimizer(OneBitAdam(freeze_step=3))),
    }
    return {name: error_of(call) for name, call in calls.items()}


def _some(model: keras.Model) -> None:
    """Apply gradients of some of the variables."""
    optimizer = OneBitAdam(freeze_step=1)
    optimizer.build(model.trainable_variables)
    optimizer.apply([tf.zeros([8, 16])], model.trainable_variables[:1])
