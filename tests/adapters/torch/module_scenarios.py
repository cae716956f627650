"""Scenarios about `grace.torch.register` with plain models, run by each rank."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import grace.torch
from grace.advice import probe
from tests.adapters.torch.ddp_scenarios import METHODS, TOPK
from tests.adapters.torch.launched import my_rank
from tests.adapters.torch.model import Net, batches, digest, make_net, outcome, sgd
from tests.support.auto import preferring
from tests.support.cases import EVERYTHING

# The ways in which a loop uses its model, each with a method of `METHODS`.
WAYS = {
    "usual": "fp16",
    "unused": "topk",
    "accumulated": "signsgd",
    "added": "two_shot",
    "dropped": "topk",
    "scaled": "qsgd",
}


def trained_plainly() -> dict[str, Any]:
    """Train in each way, in DDP and without it: gradients of each step, and weights."""
    results: dict[str, Any] = {}
    for way, method in WAYS.items():
        results[way] = []
        for parallel in (True, False):
            # Both give all ranks the weights of rank 0.
            model = make_net(my_rank())
            used = DistributedDataParallel(model, find_unused_parameters=True) if parallel else model
            results[way].append(_trained(used, model, METHODS[method], way))
    return results


def advised() -> dict[str, Any]:
    """Ask for advice, and let "auto" choose, in DDP, with a plain model and with a wrapped optimizer."""
    results: dict[str, Any] = {}
    for way in ("ddp", "plain", "wrapped"):
        for method in ("none", "qsgd", "auto"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
            torch.manual_seed(my_rank())
            used = DistributedDataParallel(model) if way == "ddp" else model
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            if way == "wrapped":
                optimizer = grace.torch.DistributedOptimizer(
                    optimizer, named_parameters=model.named_parameters(), config={"compressor": method}
                )
            exchange = optimizer.grace if way == "wrapped" else grace.torch.register(used, {"compressor": method})
            advice = []
            with mock.patch.object(probe, "SECONDS", 0.005):
                for _ in range(24 if method == "auto" else 6):
                    optimizer.zero_grad()
                    used(torch.randn(8, 64)).square().mean().backward()
                    optimizer.step()
                    if method != "auto":
                        advice.append(exchange.advise(steps=3))
            told = next((a for a in advice if a), None)
            results[f"{way}, {method}"] = {
                "advice": told and told.to_dict(),
                "when": [a is not None for a in advice],
                "auto": exchange.stats().get("auto"),
                "config": exchange.config.to_dict(),
                "digest": digest(model.parameters()),
            }
        results[f"{way}, twice"] = outcome(lambda exchange=exchange: exchange.advise())
    return results


def _trained(used: Any, model: Net, config: dict[str, Any], way: str) -> list[Any]:
    optimizer = sgd(model, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if way == "scaled" else None
    exchange = grace.torch.register(used, {"check_replicas": 2, **config}, grad_scaler=scaler)
    alone = getattr(used, "no_sync", None) or exchange.no_sync
    told: list[Any] = []
    for i, (x, y) in enumerate(batches(4, my_rank())):
        right = way != "unused" or not (i == 2 or (i == 1 and my_rank() == 0))
        optimizer.zero_grad()
        passes = 2 if way in ("accumulated", "added") else 1
        for k in range(passes):
            with alone() if way == "accumulated" and k == 0 else nullcontext():
                loss = F.cross_entropy(used(x + k, right), y)
                if i == 1 and my_rank() == 0 and way in ("scaled", "usual"):
                    # Overflows, or else arrives as NaN on all ranks.
                    loss = loss * torch.inf
                (loss if scaler is None else scaler.scale(loss)).backward()
        told.append([None if p.grad is None else digest([p.grad]) for p in model.parameters()])
        if way == "dropped" and i == 1:
            continue
        if scaler is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters()):
                optimizer.step()
            continue
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [*told, digest(model.parameters()), exchange.stats()["wire_bytes"]]


class Stack(torch.nn.Module):
    """Layers that are computed again in the backward pass, between a layer and its transpose, with a buffer."""

    def __init__(self, again: str, last: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.first = torch.nn.Linear(16, 16)
        self.unused = torch.nn.Linear(16, 16)
        self.register_buffer("shift", torch.full((2,), float(my_rank())))
        self.again, self.last = again, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.again == "reentrant") if self.again else layer(x)
        return F.linear(x, self.first.weight.t()) if self.last else x


def computed_again() -> dict[str, Any]:
    """Train models with layers that are computed again, shared weights, buffers, frozen parameters, and compiled."""
    results: dict[str, Any] = {}
    for last in (True, False):
        for again in ("", "reentrant", "not reentrant", "compiled"):
            torch.manual_seed(my_rank())
            model = Stack("" if again == "compiled" else again, last)
            # Without the first layer, all gradients come from layers that are computed again.
            (model.layers[1] if last else model.first).requires_grad_(False)
            used = torch.compile(model, backend="eager") if again == "compiled" else model
            exchange = grace.torch.register(used, {**TOPK, "granularity": "layer"})
            optimizer = sgd(model)
            for x, _ in batches(3, my_rank()):
                optimizer.zero_grad()
                used(x.flatten(1)[:, :16].requires_grad_()).square().mean().backward()
                optimizer.step()
            kept = [name for name, p in model.named_parameters() if p.grad is None]
            found = {"weights": digest(model.parameters()), "buffer": model.shift.tolist(), "without": kept}
            found["names"] = [item.spec.name for item in exchange.plan.assignments]
            found["steps"] = exchange.stats()["step"]
            twin = copy.deepcopy(model)
            twin(torch.ones(1, 16, requires_grad=True)).sum().backward()
            found["steps of a copy"] = exchange.stats()["step"] - found["steps"]
            freed = weakref.ref(exchange)
            del model, used, exchange, optimizer, twin
            torch._dynamo.reset()
            for _ in range(1000):
                gc.collect()
                if freed() is None:
                    break
            found["freed"] = freed() is None
            results[f"{again}, {last}"] = found
    return results


def refused_plainly() -> dict[str, Any]:
    """Do what cannot work with plain models: the errors."""

    def registered(**options: Any) -> Any:
        model = make_net()
        return model, grace.torch.register(model, {**TOPK, **options})

    def backward(model: torch.nn.Module, data: Any = None) -> None:
        x, y = next(iter(batches(1, my_rank()))) if data is None else data
        F.cross_entropy(model(x), y).backward()

    def converted() -> None:
        model, _ = registered()
        F.cross_entropy(model.to(torch.bfloat16)(torch.ones(8, 1, 8, 8).bfloat16()), torch.zeros(8).long()).backward()

    def unfrozen() -> None:
        model = make_net()
        model.head.requires_grad_(False)
        grace.torch.register(model, TOPK)
        model.head.requires_grad_(True)
        backward(model)

    def sparse(rules: list[dict[str, Any]]) -> Any:
        model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 4))
        grace.torch.register(model, {**TOPK, "rules": rules})
        model(torch.tensor([1, 2, 3 + my_rank()])).sum().backward()
        means = model[0].weight.grad.to_dense().sum(1)
        return [float(means[i]) for i in (1, 3)]

    def shared() -> None:
        model = Stack("reentrant", True)
        model.layers[2] = model.layers[0]
        grace.torch.register(model, TOPK)
        model(torch.ones(1, 16)).sum().backward()

    def in_ddp() -> None:
        ddp = DistributedDataParallel(make_net())
        exchange = grace.torch.register(ddp, TOPK)
        try:
            grace.torch.register(ddp.module, TOPK)
        finally:
            assert exchange.plan

    model, _ = registered()
    calls: dict[str, Callable[[], Any]] = {
        "twice": lambda: grace.torch.register(model, TOPK),
        "a part": lambda: grace.torch.register(torch.nn.Sequential(model.head), TOPK),
        "then in ddp": lambda: grace.torch.register(DistributedDataParallel(model), TOPK),
        "ddp and plain": in_ddp,
        "converted": converted,
        "unfrozen": unfrozen,
        "sparse": lambda: sparse([]),
        "shared": shared,
        "on one rank": lambda: registered(**({"compress_ratio": 7} if my_rank() == 0 else {})),
    }
    results: dict[str, Any] = {label: outcome(call) for label, call in calls.items()}
    results["sparse and dense"] = sparse([{"match": "0.weight", "compressor": "none"}])
    return results


def interrupted_pass() -> dict[str, Any]:
    """Interrupt a backward pass, drop the step and go on: weights, those without the interruption, and the errors."""
    results: dict[str, Any] = {}
    for interrupts in (True, False):
        model = make_net()
        exchange, optimizer = grace.torch.register(model, {**TOPK, **EVERYTHING}), sgd(model)
        for i, (x, y) in enumerate(batches(3, my_rank())):
            loss = F.cross_entropy(model(x), y)
            if i == 1 and interrupts:

                def fail(_: torch.Tensor) -> None:
                    raise ArithmeticError("interrupted")

                hook = model.conv.weight.register_hook(fail)
                results["first"] = outcome(lambda loss=loss: loss.backward(retain_graph=True))
                hook.remove()
                results["second"] = outcome(loss.backward)
                exchange.discard()
                assert all(p.grad is None for p in model.parameters())
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results["interrupted" if interrupts else "whole"] = digest(model.parameters())
    dist.barrier()
    return results


def _held(state: dict[str, Any]) -> torch.Tensor:
    """Return the sums of what the memories hold back."""
    return torch.stack([x.sum() for states in state["tensors"].values() for x in states["memory"].values()])


def resumed_with_auto() -> dict[str, Any]:
    """Let "auto" choose topk on the first two ranks; resume there, and on all three, and let it choose fp16."""
    two, mine = dist.new_group([0, 1]), None

    def train(exchange: Any, model: Any, choice: str) -> list[str]:
        """Return the methods of 40 steps, in which "auto" prefers one."""
        methods = []
        with preferring(choice):
            for _ in range(40):
                model(torch.randn(8, 64)).square().mean().backward()
                methods.append(exchange.config.to_dict()["compressor"]["name"])
                model.zero_grad()
        return methods

    torch.manual_seed(my_rank())
    if my_rank() < 2:
        model = torch.nn.Linear(64, 64)
        exchange = grace.torch.register(model, compressor="auto", process_group=two)
        methods = train(exchange, model, "topk")
        mine = {"config": exchange.config.to_dict(), "state": exchange.state_dict(), "methods": methods}
    saved: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(saved, mine)
    results = {"saved": saved[0]["methods"]}
    for size, group in ((2, two), (3, None)):
        if my_rank() < size:
            model = torch.nn.Linear(64, 64)
            exchange = grace.torch.register(model, saved[0]["config"], process_group=group)
            exact = exchange.load_state_dict([each["state"] for each in saved[:2]])
            sums = _held(exchange.state_dict())
            dist.all_reduce(sums, group=group)
            expected = sum(_held(each["state"]) for each in saved[:2])
            # The mean over the ranks is what is applied.
            difference = float((sums / size - expected / 2).abs().max() / expected.abs().max())
            results[f"on {size}"] = [exact, difference, train(exchange, model, "fp16"), exchange.config.auto]
    return results
