"""Scenarios about Horovod's elastic state, run by each rank; the ranks stay the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import grace
from grace.core.session import start
from grace.torch.horovod import TorchState
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
    for wrong, arguments in (({"memory": "diana", "communicator": "allgather"}, {}), ({}, {"local_steps": 2})):
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
