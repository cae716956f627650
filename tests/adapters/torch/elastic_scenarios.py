"""Scenarios about Horovod's elastic state, run by each rank; the ranks stay the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import grace
from grace.core.session import start
from grace.torch.horovod import TorchState
from grace.torch.optim import OneBitAdam, ZeroOneAdam
from tests.adapters.torch.launched import my_rank
from tests.adapters.torch.model import Net, digest, make_net, sgd, train
from tests.support.cases import EVERYTHING
from tests.support.records import Records

CONFIG = {"compressor": "topk", "compress_ratio": 0.1, "communicator": "two_shot", **EVERYTHING}


def elastic() -> dict[str, Any]:
    """Commit and restore, go on after a reset, and let rank 1 take itself for a new one."""
    results: dict[str, Any] = {"refused": refused()}
    model, optimizer = wrapped(CONFIG)
    with Records() as records:
        state = TorchState(model=model, optimizer=optimizer, batch=0)
        state.sync()
        train(model, optimizer, 3)
        state.batch = 3
        state.save()
        committed = digest(contents(optimizer, model))
        train(model, optimizer, 2, start=3)
        results["went on"] = digest(contents(optimizer, model)) != committed
        state.restore()
        results["restored"] = [digest(contents(optimizer, model)) == committed, state.batch]
        held = optimizer.grace.run.memories()
        state.on_reset()
        results["step"] = optimizer.grace.run.step
        state.sync()
        results["stayed"] = any(bool(x.any()) for memory in held.values() for x in memory.values())
        if my_rank() == 1:
            # As a process that has started just now, and made its first optimizer as the others have.
            start._started["grace/0."] -= 1
            model, optimizer = wrapped(CONFIG)
            state = TorchState(model=model, optimizer=optimizer, batch=0)
        before = digest(memory for memory in residuals(optimizer))
        state.sync()
        results["own"] = digest(memory for memory in residuals(optimizer)) == before
        results["nothing"] = not any(bool(x.any()) for x in residuals(optimizer))
        results["synchronized"] = [state.batch, optimizer.grace.run.step]
        results["momentum"] = digest(entry["momentum_buffer"] for entry in optimizer.state.values())
        train(model, optimizer, 2, start=3)
        results["weights"] = digest(model.parameters())
    results["told"] = records.texts
    return results


# No rank owns what others hold back, and gives it up after a reset.
GATHERED = {**CONFIG, "communicator": "allgather"}
# Local states in mid-period and, with a delay, while an exchange is pending: after four steps.
LOCAL = {
    "streaming": {"every": 6, "lr": 0.7, "momentum": 0.9, "fragments": 2, "delay": 2, "alpha": 0.5},
    "local SGD": {"every": 3, "state": "average"},
    "update": {"every": 1, "buffers": "first"},
}
OWN = {
    "ZeroOneAdam": lambda model: ZeroOneAdam(model.named_parameters(), 0.01, freeze_step=2, every=4, **GATHERED),
    "OneBitAdam": lambda model: OneBitAdam(model.named_parameters(), 0.01, freeze_step=3, **GATHERED),
}


def elastic_syncs() -> dict[str, Any]:
    """Go on after a reset between two syncs, with the same ranks and with rank 1 as a new one."""
    results = {}
    for name in (*LOCAL, *OWN):

        def made(name: str = name) -> tuple[Net, Any]:
            if name in LOCAL:
                return wrapped(GATHERED, outer=LOCAL[name])
            model = make_net()
            with mock.patch.dict("os.environ", HOROVOD_ELASTIC="1"):
                return model, OWN[name](model)

        whole, never = made()
        never.grace.synchronized = True
        train(whole, never, 14)
        model, optimizer = made()
        state = TorchState(model=model, optimizer=optimizer, batch=0)
        state.sync()
        train(model, optimizer, 4)
        state.save()
        committed = digest(contents(optimizer, model))
        # Here Horovod does not restart, and what is on its way must have arrived.
        train(model, optimizer, 4, start=4)
        state.restore()
        restored = digest(contents(optimizer, model)) == committed
        state.on_reset()
        state.sync()
        stayed = digest(contents(optimizer, model)) == committed
        state.save()
        train(model, optimizer, 10, start=4)
        went_on = digest(model.parameters()) == digest(whole.parameters())
        state.restore()
        if my_rank() == 1:
            # As a process that has started just now, and made its first optimizer as the others have.
            for kind in ("",) if name in LOCAL else ("momentum", "gradient"):
                start._started[f"grace/0.{kind}"] -= 1
            model, optimizer = made()
            state = TorchState(model=model, optimizer=optimizer, batch=0)
        else:
            state.on_reset()
        state.sync()
        weights = digest(model.parameters())
        train(model, optimizer, 10, start=4)
        optimizer.grace.check_replicas()
        results[name] = {
            "restored": restored,
            "stayed": stayed,
            "went on": went_on,
            "weights": weights,
            "end": digest(model.parameters()),
        }
    return results


def wrapped(config: dict[str, Any], **arguments: Any) -> tuple[Net, Any]:
    """Return a model and its optimizer, as in elastic mode."""
    model = make_net()
    with mock.patch.dict("os.environ", HOROVOD_ELASTIC="1"):
        optimizer = grace.torch.DistributedOptimizer(sgd(model), model.named_parameters(), config, **arguments)
    return model, optimizer


def refused() -> list[str]:
    """Return the errors of what does not work in elastic mode."""
    told = []
    model, optimizer = wrapped(CONFIG)
    try:
        train(model, optimizer, 1)
    except grace.core.errors.StepError as error:
        told.append(str(error))
    weighted = {"outer": {"every": 2, "weight": [1.0, 1.0]}}
    flying = {"outer": {"every": 2, "participation": 0.5, "delay": 1}}
    for wrong, arguments in (({"memory": "diana", "communicator": "allgather"}, {}), ({}, weighted), ({}, flying)):
        model, optimizer = wrapped({"compressor": "qsgd", **EVERYTHING, **wrong}, **arguments)
        try:
            TorchState(model=model, optimizer=optimizer)
        except grace.core.errors.ConfigError as error:
            told.append(str(error))
    return told


def residuals(optimizer: Any) -> list[torch.Tensor]:
    return [x for memory in optimizer.grace.run.memories().values() for x in memory.values()]


def contents(optimizer: Any, model: Net) -> list[torch.Tensor]:
    return [*residuals(optimizer), *model.parameters()]
