"""Scenarios about gradients that are exchanged and then applied, kept or dropped, run by each rank."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import grace.torch
from tests.adapters.torch.ddp_scenarios import held_by
from tests.adapters.torch.launched import by_torchrun, mean, my_rank
from tests.adapters.torch.model import Net, batches, digest, make_net, sgd, wrap
from tests.support.cases import EVERYTHING

TOPK = {"compressor": "topk", "compress_ratio": 0.1, "communicator": "allgather", **EVERYTHING}
METHODS: dict[str, dict[str, Any]] = {
    "topk": TOPK,
    "model": {**TOPK, "granularity": "model"},
    "two_shot": {**TOPK, "communicator": "two_shot"},
    "efsignsgd": {"compressor": "efsignsgd", **EVERYTHING},
    "dgc": {**TOPK, "memory": "dgc"},
    "diana": {**TOPK, "memory": "diana"},
}
# How a loop drops gradients.
DROPS: dict[str, Callable[[torch.nn.Module, Any], None]] = {
    "None": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
}


def _backward(forward: torch.nn.Module, seed: int) -> None:
    x, y = next(batches(1, my_rank(), seed=seed))
    F.cross_entropy(forward(x), y).backward()


def dropped_passes() -> dict[str, Any]:
    """Train with passes between the steps whose gradients are dropped, and without them: weights."""
    results: dict[str, Any] = {}
    for label, config in METHODS.items():
        for way, drop in DROPS.items():
            weights = []
            for dropping in (False, True):
                model = make_net()
                optimizer: Any = sgd(model, momentum=0.0)
                if by_torchrun():
                    forward: Any = DistributedDataParallel(model, gradient_as_bucket_view=way == "zeros")
                    grace.torch.register(forward, config)
                else:
                    forward, optimizer = model, wrap(model, config, optimizer=optimizer)
                for step in range(3):
                    if dropping:
                        _backward(forward, 10 + step)
                        if not by_torchrun():
                            optimizer.synchronize()
                        drop(model if by_torchrun() else optimizer, optimizer)
                    _backward(forward, step)
                    optimizer.step()
                    drop(model if by_torchrun() else optimizer, optimizer)
                weights.append(digest(model.parameters()))
            results[f"{label}/{way}"] = {"weights": weights[1], "equal": weights[0] == weights[1]}
    return results


class _Loop:
    """A loop over a model in DDP with an optimizer for each of two parts, which counts the gradients that it keeps."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp, self.model = ddp, ddp.module
        names = dict(self.model.named_parameters())
        self.parts = [[n for n in names if n.startswith("left")], [n for n in names if not n.startswith("left")]]
        self.optimizers = [torch.optim.SGD([names[n] for n in part], lr=0.1) for part in self.parts]
        # By tensor: what was computed since the last step or drop, what was kept in all, and what was applied.
        self.now, self.given, self.applied = ({n: torch.zeros_like(p) for n, p in names.items()} for _ in range(3))

    def backward(self, seed: int, alone: bool) -> None:
        x, y = next(batches(1, my_rank(), seed=seed))
        local = Net()
        local.load_state_dict(self.model.state_dict())
        F.cross_entropy(local(x), y).backward()
        for name, p in local.named_parameters():
            self.now[name] += p.grad
        with self.ddp.no_sync() if alone else contextlib.nullcontext():
            F.cross_entropy(self.ddp(x), y).backward()

    def step(self, part: int, by_hand: bool, none: bool) -> None:
        parameters = dict(self.model.named_parameters())
        for name in self.parts[part]:
            self.given[name] += self.now[name]
            self.applied[name] += parameters[name].grad
            if by_hand:
                with torch.no_grad():
                    parameters[name] -= 0.1 * parameters[name].grad
        if not by_hand:
            self.optimizers[part].step()
        self.drop(part, none)

    def drop(self, part: int, none: bool) -> None:
        self.optimizers[part].zero_grad(set_to_none=none)
        for name in self.parts[part]:
            self.now[name].zero_()

    def lost(self, exchange: Any) -> float:
        """Return how far what was applied and what is held are from what was kept."""
        held = held_by(exchange)
        return max(
            float((mean(self.given[n], n) - self.applied[n] - mean(held[n], f"r.{n}").view_as(p)).abs().max())
            for n, p in self.model.named_parameters()
        )


def conserved_whatever_is_dropped(loops: int) -> list[float]:
    """Run random loops; return how far what was applied and what is held are from what was kept."""
    worst = []
    for number in range(loops):
        choose = random.Random(number)
        options = choose.choice([{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
        granularity = choose.choice(["layer", "model", "bucket"])
        ddp = DistributedDataParallel(make_net(), **options)
        exchange = grace.torch.register(ddp, {**TOPK, "granularity": granularity})
        loop = _Loop(ddp)
        for i in range(6):
            none = choose.random() < 0.5
            passes = choose.choice([1, 1, 2])
            for k in range(passes):
                alone = k < passes - 1 and choose.random() < 0.5
                # PyTorch itself fails if the first pass of a static graph is within no_sync().
                loop.backward(100 * number + 10 * i + k, alone=alone and (i > 0 or "static_graph" not in options))
            for part in (0, 1):
                choice = choose.choice(["step", "step", "by hand", "drop", "keep"])
                if choice in ("step", "by hand"):
                    loop.step(part, choice == "by hand", none)
                elif choice == "drop":
                    loop.drop(part, none)
        # The last gradients of all are dropped, and the next pass finds it.
        for part in (0, 1):
            loop.drop(part, none=True)
        with ddp.no_sync():
            _backward(ddp, 0)
        worst.append(loop.lost(exchange))
    return worst


def zeros_kept() -> float:
    """Apply one part's gradients and keep the other's, most of which are zeros; return what is lost."""
    ddp = DistributedDataParallel(make_net(), gradient_as_bucket_view=True)
    exchange = grace.torch.register(ddp, {**TOPK, "compress_ratio": 0.001, "granularity": "bucket"})
    loop = _Loop(ddp)
    for step in range(2):
        loop.backward(step, alone=False)
        loop.step(0, by_hand=False, none=False)
    loop.step(1, by_hand=False, none=False)
    return loop.lost(exchange)


def told_of_gradients() -> dict[str, list[str]]:
    """Use registered models in several ways; return the warnings about gradients."""

    def usual(ddp: Any, optimizer: Any) -> None:
        for _ in range(2):
            _backward(ddp, 0)
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()

    def local(ddp: Any, optimizer: Any) -> None:
        for step in range(4):
            with ddp.no_sync() if step % 2 else contextlib.nullcontext():
                _backward(ddp, step)
            optimizer.step()
            optimizer.zero_grad()

    def frozen(ddp: Any, optimizer: Any) -> None:
        usual(ddp, optimizer)
        with torch.no_grad():
            ddp(next(batches(1, 0))[0])
        optimizer.step()

    def penalized(ddp: Any, optimizer: Any) -> None:
        for _ in range(2):
            x, y = next(batches(1, my_rank()))
            loss = F.cross_entropy(ddp(x), y)
            torch.autograd.grad(loss, list(ddp.module.parameters()), retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def by_closure(ddp: Any, optimizer: Any) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            _backward(ddp, 0)
            return 0.0

        optimizer.step(closure)
        optimizer.step(closure)

    def past(ddp: Any, optimizer: Any) -> None:
        usual(ddp, optimizer)
        usual(ddp.module, optimizer)

    def unseen(ddp: Any, optimizer: Any) -> None:
        optimizer.param_groups.clear()
        for _ in range(3):
            _backward(ddp, 0)
            ddp.zero_grad()

    results = {}
    for use in (usual, local, frozen, penalized, by_closure, past, unseen):
        model = make_net()
        ddp = DistributedDataParallel(model)
        grace.torch.register(ddp, TOPK)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use(ddp, sgd(model))
        results[use.__name__] = [str(each.message) for each in caught if "grace.torch.register" in str(each.message)]
    return results
