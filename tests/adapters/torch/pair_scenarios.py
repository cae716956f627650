"""Scenarios about optimizers and methods that are known to train badly together, run by each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import grace.torch
from grace.core.errors import GraceWarning
from tests.adapters.torch import fsdp_scenarios
from tests.adapters.torch.launched import by_torchrun, my_rank, world_size
from tests.adapters.torch.model import batches, make_net, wrap
from tests.support.cases import EVERYTHING


def _told(act: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    told = [w for w in caught if issubclass(w.category, GraceWarning)]
    # They point at a line of the script, not at one of PyTorch's or grace's.
    assert all("/tests/" in w.filename for w in told), [w.filename for w in told]
    return [str(w.message) for w in told]


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _trained(way: str, make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> list[list[str]]:
    if way in ("fsdp", "hsdp"):
        model: Any = fsdp_scenarios.shard(fsdp_scenarios.make(), replicas=2 if way == "hsdp" else 1)
        data = list(fsdp_scenarios.batches(6))
    else:
        model, data = make_net(), list(batches(6, my_rank()))
    optimizer: Any = make_optimizer(model)
    # An optimizer of another model is none of this exchange's.
    other = _adam(torch.nn.Linear(2, 2))
    config = {"compressor": "efsignsgd", **EVERYTHING}
    forward: Any = DistributedDataParallel(model) if way == "ddp" else model
    made: list[Any] = []

    def set_up() -> None:
        if way == "optimizer":
            made.append(wrap(model, config, optimizer=optimizer))
        else:
            made.append(grace.torch.register(forward, config))

    def train(*steps: Any) -> None:
        stepping = made[0] if way == "optimizer" else optimizer
        for x, y in steps:
            other.step()
            stepping.zero_grad()
            torch.nn.functional.cross_entropy(forward(x), y).backward()
            stepping.step()

    def change(**changes: Any) -> None:
        (made[0].grace if way == "optimizer" else made[0]).change(**changes)

    return [
        _told(set_up),
        _told(lambda: train(*data[:2])),
        _told(lambda: change(compressor="topk", compress_ratio=0.01)),
        _told(lambda: change(compressor="qsgd")),
        _told(lambda: train(*data[2:])),
    ]


def told_of_pairs() -> dict[str, list[list[str]]]:
    """Train with efsignsgd, change to topk and to qsgd; the warnings of each pair at each of five moments."""
    ways = ["optimizer", *(("ddp", "fsdp") if by_torchrun() else ()), *(("hsdp",) if world_size() == 4 else ())]
    return {
        f"{way}, {name}": _trained(way, make) for way in ways for name, make in {"adam": _adam, "sgd": _sgd}.items()
    }
