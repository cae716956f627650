"""Scenarios about elastic states, run by each rank; the ranks stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

from grace.tensorflow import DistributedGradientTape, Exchange, KerasState
from grace.tensorflow.optim import OneBitAdam, ZeroOneAdam
from tests.adapters.tensorflow.model import digest, joined, sgd, wrap
from tests.adapters.tensorflow.usage_model import by_hand, error_of, fit, small_net
from tests.support.cases import EVERYTHING
from tests.support.records import Records

CONFIG = {"compressor": "topk", "compress_ratio": 0.1, "communicator": "two_shot", **EVERYTHING}


class Run:
    """A model that trains in one of the ways, and its state, as in elastic mode."""

    def __init__(
        self, way: str, config: dict[str, Any] = CONFIG, model: keras.Model | None = None, **more: Any
    ) -> None:
        self.way, self.model = way, model or small_net()
        with mock.patch.dict("os.environ", HOROVOD_ELASTIC="1"):
            if way == "tape":
                self.exchange, optimizer = Exchange(config), sgd()
            else:
                optimizer = wrap(config, **more)
                self.exchange = optimizer.grace
        self.model.compile(optimizer, "mse", jit_compile=False)
        self.restart()

    def state(self) -> KerasState:
        exchanges = {"tapes": self.exchange} if self.way == "tape" else {}
        return KerasState(self.model, batch=0, **exchanges)

    def restart(self) -> None:
        """Make the function of a step, as the function does that Horovod runs."""

        def apply(gradients: Any) -> None:
            self.model.optimizer.apply(gradients, self.model.trainable_variables)

        self._apply = tf.function(apply)

    def train(self, steps: int, start: int = 0, callbacks: Any = ()) -> None:
        if self.way == "fit":
            fit(self.model, steps, start=start, callbacks=list(callbacks))
            return
        by_hand(self.model, self._exchanged if self.way == "tape" else self._apply, steps, start=start)

    def _exchanged(self, gradients: Any) -> None:
        with tf.GradientTape() as tape:
            variables = self.model.trainable_variables
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)])
        self._apply(DistributedGradientTape(tape, self.exchange).gradient(loss, variables))

    def held(self) -> np.ndarray:
        return joined(self.exchange.run.of_this_rank)

    def share(self) -> float:
        """Return the sum of what this rank holds back of the mean, also as the owner of shards."""
        return sum(
            float(x.sum(dtype=np.float64)) / (1 if name.startswith("mean of ") else hvd.size())
            for name, x in self.exchange.state_dict()["tensors"].items()
            if "/memory/" in name
        )

    def contents(self) -> str:
        return digest([*self.model.weights, *self.model.optimizer.variables, *self.exchange.run.variables])


def elastic(way: str) -> dict[str, Any]:
    """Commit and restore, go on after a reset, and let rank 1 take itself for a new one."""
    run, results = Run(way), {}
    with Records() as records:
        state = run.state()
        state.sync()
        run.train(3)
        state.batch = 3
        state.commit()
        committed = run.contents()
        run.train(2, start=3)
        state.batch = 5
        results["went on"] = run.contents() != committed
        state.restore()
        results["restored"] = [run.contents() == committed, state.batch]
        results["share"], count = [run.share()], len(run.model.optimizer.variables)
        state.on_reset()
        results["step"] = run.exchange.run.step
        results["variables"] = len(run.model.optimizer.variables) - count
        results["share"].append(run.share())
        results["stale"] = error_of(lambda: run.train(1)) if way == "apply" else ""
        if way == "apply":
            state.restore()
        if hvd.rank() == 1:
            # As a process that has started just now, and has loaded something.
            run = Run(way)
            state = run.state()
            for variable in run.exchange.run.of_this_rank:
                variable.assign(tf.ones_like(variable))
        run.restart()
        before = run.held()
        state.sync()
        results["own"] = bool((run.held() == before).all())
        results["holds"] = bool(run.held().any())
        results["synchronized"] = [state.batch, run.exchange.run.step, int(run.model.optimizer.iterations)]
        momentum = [v for v in run.model.optimizer.variables if "momentum" in v.path]
        results["momentum"] = [digest(momentum), bool(joined(momentum).any())]
        callbacks = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(state)]
        run.train(2, start=3, callbacks=callbacks)
        results["committed"] = state.batch
        results["weights"] = digest(run.model.weights)
        results["names"] = run.exchange._step.transport._prefix
    results["told"] = records.texts
    return results


def elastic_second_gradients() -> dict[str, Any]:
    """Take steps with second gradients, and let rank 1 take itself for a new one: the earlier weights of the ranks."""
    config = {"compressor": "topk", "compress_ratio": 0.1, "memory": {"name": "marina", "period": 3}, **EVERYTHING}
    run = Run("tape", config)
    state = run.state()
    state.sync()
    variables = run.model.trainable_variables
    for _ in range(3):
        # The gradients of half of the squares of all weights.
        merged = run.exchange.evaluate(lambda: [tf.identity(v) for v in variables])
        for v, gradient in zip(variables, merged, strict=True):
            v.assign_sub(0.1 * gradient)
    before = digest(run.exchange._earlier)
    state.on_reset()
    if hvd.rank() == 1:
        run = Run("tape", config)
        state = run.state()
    state.sync()
    return {"before": before, "after": digest(run.exchange._earlier), "weights": digest(run.model.trainable_variables)}


def elastic_change() -> dict[str, Any]:
    """Call `change` after a commit, and restore."""
    run = Run("apply")
    state = run.state()
    run.train(2)
    state.save()
    committed = run.contents()
    run.exchange.change(compress_ratio=0.5)
    run.restart()
    run.train(1, start=2)
    state.restore()
    results = {"ratio": run.exchange.config.method.compressor.compress_ratio, "restored": run.contents() == committed}
    state.on_reset()
    state.sync()
    run.restart()
    run.train(1, start=2)
    return {**results, "step": run.exchange.run.step, "weights": digest(run.model.weights)}


def elastic_accumulation() -> dict[str, Any]:
    """Synchronize between two passes whose gradients are accumulated."""
    run = Run("apply", backward_passes_per_step=2)
    state = run.state()
    run.train(3)
    sums = digest(run.model.optimizer._accumulated_gradients)
    state.sync()
    return {"own": digest(run.model.optimizer._accumulated_gradients) == sums, "sums": sums}


# After four steps, with a pending exchange or in mid-period. No rank owns what others hold back, or gives it up after a
# reset.
GATHERED = {**CONFIG, "communicator": "allgather"}
SYNCS: dict[str, Callable[[], Any]] = {
    "streaming": lambda: wrap(
        GATHERED, sgd(), outer={"every": 6, "momentum": 0.9, "fragments": 2, "delay": 2, "alpha": 0.5}
    ),
    "0/1 Adam": lambda: ZeroOneAdam(0.01, freeze_step=2, every=4, **GATHERED),
    "1-bit Adam": lambda: OneBitAdam(0.01, freeze_step=3, **GATHERED),
}


def elastic_syncs(name: str) -> dict[str, Any]:
    """Go on after a reset between two syncs, with the same ranks and with rank 1 as a new one."""

    def made() -> keras.Model:
        model = small_net()
        with mock.patch.dict("os.environ", HOROVOD_ELASTIC="1"):
            model.compile(SYNCS[name](), "mse", jit_compile=False)
        return model

    def contents(model: keras.Model) -> str:
        return digest([*model.weights, *model.optimizer.variables])

    whole, model, results = made(), made(), {}
    whole.optimizer.grace.synchronized = True
    fit(whole, 10)
    state = KerasState(model, batch=0)
    state.sync()
    fit(model, 4)
    state.save()
    committed = contents(model)
    fit(model, 2, start=4)
    state.restore()
    results["restored"] = contents(model) == committed
    weights = digest(model.weights)
    state.on_reset()
    state.sync()
    results["stayed"] = digest(model.weights) == weights
    state.save()
    fit(model, 6, start=4)
    results["went on"] = digest(model.weights) == digest(whole.weights)
    state.restore()
    if hvd.rank() == 1:
        # As a process that has started just now.
        model = made()
        state = KerasState(model, batch=0)
    else:
        state.on_reset()
    state.sync()
    results["weights"] = digest(model.weights)
    fit(model, 6, start=4)
    model.optimizer.grace.check_replicas()
    results["end"] = digest(model.weights)
    return results


def elastic_refusals() -> list[str]:
    """Return the errors of what does not work in elastic mode."""

    def without_state() -> None:
        Run("apply").train(1)

    def of_process_set() -> None:
        run = Run("apply")
        run.model.optimizer.build(run.model.trainable_variables)
        run.exchange.process_set = hvd.ProcessSet([0, 1])
        run.state()

    qsgd = {"compressor": "qsgd", "communicator": "allgather", **EVERYTHING}
    attempts: list[Callable[[], Any]] = [
        without_state,
        lambda: Run("apply", {**qsgd, "memory": "diana"}).state(),
        lambda: Run("apply", qsgd, outer={"every": 2, "weight": [1.0, 1.0]}).state(),
        of_process_set,
        lambda: Run("apply", model=keras.Sequential([keras.layers.Dense(2)])).state(),
    ]
    return [error_of(attempt) for attempt in attempts]
