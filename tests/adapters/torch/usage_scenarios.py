"""Scenarios about the usage of PyTorch's optimizer, run by each rank."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import grace
from grace.core.config.registry import About
from grace.core.guards import agreement
from grace.torch.trainers.compression import Compression
from tests.adapters.torch.launched import GROUPS, broadcast, broadcast_state, by_torchrun, my_rank, world_size
from tests.adapters.torch.model import (
    Net,
    batches,
    digest,
    flat,
    make_net,
    outcome,
    sgd,
    spy,
    train,
    wrap,
)
from tests.support import rank
from tests.support.cases import EVERYTHING, LAYERS


def foreign_checkpoint() -> dict[str, Any]:
    """Load the checkpoint of rank 0 on every rank, as in scripts that save on one rank only."""
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", "communicator": "allgather", **LAYERS})
    train(model, optimizer, 3)
    mine = optimizer.state_dict()
    saved = mine if my_rank() == 0 else copy.deepcopy(mine)
    saved["grace"]["rank"] = 0
    fresh = wrap(model, {"compressor": "topk", "communicator": "allgather", **LAYERS})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fresh.load_state_dict(saved)
        messages = [str(w.message) for w in caught]
    state, step = (
        fresh.grace.run.state_dict()["tensors"]["left.weight"]["memory"]["residual"],
        fresh.grace.run.step,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = {k: v for k, v in saved.items() if k != "grace"}
        fresh.load_state_dict(plain)
        without = [str(w.message) for w in caught]
    # As if a run of another number of ranks had saved it, each of which held the same.
    count = world_size() + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict([{**mine, "grace": {**mine["grace"], "rank": i, "size": count}} for i in range(count)])
    merged = fresh.state_dict()["grace"]["tensors"]["left.weight"]["memory"]["residual"]
    return {
        "merged": bool((merged == mine["grace"]["tensors"]["left.weight"]["memory"]["residual"]).all()),
        "messages": messages,
        "residual": float(state.norm()),
        "step": step,
        "without": without,
    }


def damaged_checkpoint() -> dict[str, Any]:
    """Load checkpoints of which one part is damaged. What was loaded of the other part would be half a load."""
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", **LAYERS}, optimizer=sgd(model, momentum=0.9))
    train(model, optimizer, 1)
    early = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2)

    def contents() -> list[Any]:
        state = optimizer.state_dict()
        buffers = [state["state"][i]["momentum_buffer"] for i in sorted(state["state"])]
        residuals = [t["memory"]["residual"] for t in state["grace"]["tensors"].values()]
        return [state["grace"]["step"], state["param_groups"][0]["lr"], digest(buffers), digest(residuals)]

    name = next(iter(early["grace"]["tensors"]))
    unit = early["grace"]["tensors"][name]
    half = {**unit, "memory": {"residual": unit["memory"]["residual"].half()}}
    sparse = {**unit, "memory": {"residual": unit["memory"]["residual"].to_sparse()}}
    other = {**unit, "memory": {"residual": unit["memory"]["residual"].numpy()}}
    of_units = {
        kind: {**early, "grace": {**early["grace"], "tensors": {**early["grace"]["tensors"], name: made}}}
        for kind, made in (("half", half), ("sparse", sparse), ("numpy", other), ("nothing", None))
    }
    cases = {
        **of_units,
        "no mapping": [1, 2],
        "groups": {**early, "param_groups": early["param_groups"] * 2},
        "no groups": {key: value for key, value in early.items() if key != "param_groups"},
        "no groups, no grace": {"state": early["state"]},
        "grace is a list": {**early, "grace": [1]},
    }
    before, refused, changed = contents(), {}, []
    for kind, state in cases.items():
        try:
            optimizer.load_state_dict(state)
            refused[kind] = ""
        except Exception as error:
            refused[kind] = f"{type(error).__name__}: {error}"
        if contents() != before:
            changed.append(kind)
    optimizer.load_state_dict(early)
    return {"refused": refused, "changed": changed, "loaded": contents()[0]}


def partly_loaded() -> dict[str, str]:
    """Load a checkpoint of an earlier step on rank 0 only, and continue."""
    results = {}
    for name in ("topk", "randomk", "powersgd"):
        model = make_net()
        optimizer = wrap(model, {"compressor": name, **grace.compressors.required(name), **EVERYTHING})
        train(model, optimizer, 2)
        state = copy.deepcopy(optimizer.state_dict())
        # After four steps the ranks compare their replicas. The error must be about their steps all the same.
        train(model, optimizer, 2)
        if my_rank() == 0:
            optimizer.load_state_dict(state)
        broadcast_state(optimizer)
        try:
            train(model, optimizer, 1)
            results[name] = ""
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def _evaluate(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def closures() -> dict[str, Any]:
    """Compare step(closure) with the same steps without a closure."""
    weights = []
    for with_closure in (True, False):
        model = make_net()
        optimizer = wrap(model, {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING})
        losses = []
        for x, y in batches(4, my_rank()):
            evaluate = functools.partial(_evaluate, model, optimizer, x, y)
            if with_closure:
                losses.append(float(optimizer.step(evaluate).detach()))
            else:
                losses.append(float(evaluate().detach()))
                optimizer.step()
        weights.append([digest(model.parameters()), losses])
    try:
        wrap(make_net(), {"compressor": "topk"}, optimizer=torch.optim.LBFGS(make_net().parameters()))
        refused = ""
    except Exception as error:
        refused = str(error)
    return {"weights": weights[0][0], "equal": weights[0] == weights[1], "refused": refused}


class _Line:
    """Least squares of each rank, in batches, and the steps of a simulation."""

    def __init__(self, config: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.y = (torch.randn(world_size(), 4, 8, n, generator=generator) for n in (12, 5))
        self.config = {"compressor": "blockwise", "communicator": "allgather", "default_rules": False, **config}
        self.simulation = grace.Simulation(world_size(), {"weight": (5, 12)}, self.config, framework="torch")
        self.w = self.earlier = torch.zeros(5, 12)

    def gradients(self, w: torch.Tensor, batch: int | None) -> list[dict[str, torch.Tensor]]:
        """Return the gradients of a batch on all ranks, or of all batches."""
        chosen = slice(None) if batch is None else slice(batch, batch + 1)
        each = (self.x @ w.T - self.y).mT @ self.x * (2 / 40)
        return [{"weight": mine.mean(dim=0)} for mine in each[:, chosen]]

    def evaluate(self, optimizer: Any, model: torch.nn.Module, number: int, drawn: list[float]) -> torch.Tensor:
        """Compute the gradients of a batch, or in a full round of all batches; note a random number."""
        optimizer.zero_grad()
        drawn.append(float(torch.rand(1)))
        mine, full = my_rank(), optimizer.grace.full_round
        for batch in range(4) if full else [number % 4]:
            loss = F.mse_loss(model(self.x[mine, batch]), self.y[mine, batch]) / (4 if full else 1)
            loss.backward()
        return loss

    def step(self, number: int, bad: bool = False) -> torch.Tensor:
        """Take a step of the simulation with learning rate 0.1, and return the new weights.

        If the gradient of rank 0 is `bad`, the weights stay.
        """
        full = self.simulation.full_round
        second = None if full else self.gradients(self.earlier, number % 4)
        given = self.gradients(self.w, None if full else number % 4)
        if bad:
            given[0]["weight"] = given[0]["weight"] * float("inf")
        merged = self.simulation.step(given, references=second)
        if bad:
            return self.w
        if full or self.config["memory"]["name"] == "marina":
            self.earlier = self.w
        self.w = self.w - 0.1 * merged[my_rank()]["weight"]
        return self.w


def second_gradients() -> dict[str, Any]:
    """Train with closures that are evaluated twice, as a simulation does; load in the middle, and leave one out."""
    report: dict[str, Any] = {"wrong": [], "drawn": [], "weights": []}
    for memory in ({"name": "marina", "period": 3}, {"name": "lsvrg", "period": 3, "then": "residual"}):
        line = _Line({"memory": memory})
        model, again = (torch.nn.Linear(12, 5, bias=False) for _ in "ab")
        torch.nn.init.zeros_(model.weight)
        # Also with gradients that are views into flat storage.
        views = {"gradient_as_bucket_view": memory["name"] == "lsvrg"}
        optimizer, resumed = (
            wrap(each, line.config, optimizer=sgd(each, lr=0.1, momentum=0.0), **views) for each in (model, again)
        )

        for number in range(8):
            drawn: list[float] = []
            optimizer.step(functools.partial(line.evaluate, optimizer, model, number, drawn))
            if not torch.allclose(model.weight, line.step(number), atol=1e-5):
                report["wrong"].append((memory["name"], number))
            report["drawn"].append(drawn)
            if number > 4:
                resumed.step(functools.partial(line.evaluate, resumed, again, number, []))
            if number == 4:
                again.load_state_dict(model.state_dict())
                resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        report["weights"].append([digest(net.parameters()) for net in (model, again)])
        report["without"] = outcome(lambda which=optimizer: which.step())
    scaler = torch.amp.GradScaler("cpu")
    report["scaled"] = outcome(lambda: wrap(make_net(), {"compressor": "qsgd", "memory": "marina"}, grad_scaler=scaler))
    both = [{"match": "left.*", "compressor": "qsgd", "memory": "lsvrg"}]
    report["both"] = outcome(lambda: wrap(make_net(), {"compressor": "qsgd", "memory": "marina", "rules": both}))
    return report


def second_gradients_of_models() -> dict[str, Any]:
    """Train registered models by `evaluate`, as a simulation does; load in the middle, and leave `evaluate` out.

    With a GradScaler, the gradient of rank 0 overflows in one step.
    """
    report: dict[str, Any] = {"wrong": [], "drawn": [], "weights": []}
    ways = ("ddp", "views", "unused", "plain")
    memories = ({"name": "marina", "period": 3}, {"name": "lsvrg", "period": 3, "then": "residual"})
    for way, memory, scaled in itertools.product(ways, memories, (False, True)):
        line = _Line({"memory": memory})
        one, other = (_Registered(line, way, scaled) for _ in "ab")
        for number in range(8):
            bad = scaled and number == 5
            drawn = one.step(number, bad)
            if not torch.allclose(one.model.weight, line.step(number, bad), atol=1e-5):
                report["wrong"].append((way, memory["name"], scaled, number))
            report["drawn"].append(drawn)
            if number > 4:
                other.step(number, bad)
            if number == 4:
                other.load(one)
        report["weights"].append([digest(each.model.parameters()) for each in (one, other)])
    number = 8
    while one.exchange.full_round:
        one.step(number)
        number += 1
    report["without"] = outcome(lambda: one.net(line.x[0, 0]).sum().backward())
    one.exchange.discard()
    # Several exchanges before a step of the optimizer.
    with mock.patch.object(one.exchange.run, "put_back") as put_back:
        for _ in range(6):
            one.exchange.evaluate(lambda: one.net(line.x[0, 0]).sum().backward())
    report["dropped"] = put_back.call_count
    marina = {"compressor": "qsgd", "memory": "marina"}
    both = [{"match": "left.*", "compressor": "qsgd", "memory": "lsvrg"}]
    static = torch.nn.parallel.DistributedDataParallel(make_net(), static_graph=True)
    report["static"] = outcome(lambda: grace.torch.register(static, marina))
    every = {**marina, "default_rules": False}
    report["sharded"] = outcome(lambda: grace.torch.register(fully_shard(torch.nn.Linear(8, 8)), every))
    report["by a trainer"] = outcome(lambda: Compression(marina).register(make_net()))
    report["both"] = outcome(lambda: grace.torch.register(make_net(), {**marina, "rules": both}))
    return report


class _Registered:
    """A registered model that learns `_Line`, in DDP or plain."""

    def __init__(self, line: _Line, way: str, scaled: bool) -> None:
        self.line, self.model = line, torch.nn.Linear(12, 5, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        options = {"views": {"gradient_as_bucket_view": True}, "unused": {"find_unused_parameters": True}}.get(way, {})
        ddp = torch.nn.parallel.DistributedDataParallel
        self.net: Any = self.model if way == "plain" else ddp(self.model, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        self.exchange: Any = grace.torch.register(self.net, line.config, grad_scaler=self.scaler)
        self.no_sync = (self.exchange if way == "plain" else self.net).no_sync
        self.optimizer = sgd(self.model, lr=0.1, momentum=0.0)

    def step(self, number: int, bad: bool = False) -> list[float]:
        """Take a step, and return the random numbers of the closure's calls."""
        drawn: list[float] = []
        mine, some = my_rank(), range(4) if self.exchange.full_round else [number % 4]

        def closure() -> None:
            self.optimizer.zero_grad()
            drawn.append(float(torch.rand(1)))
            for batch in some:
                with nullcontext() if batch == some[-1] else self.no_sync():
                    loss = F.mse_loss(self.net(self.line.x[mine, batch]), self.line.y[mine, batch]) / len(some)
                    self.scaler.scale(loss * (float("inf") if bad and mine == 0 else 1.0)).backward()

        self.exchange.evaluate(closure)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return drawn

    def load(self, other: _Registered) -> None:
        """Go on from where another one is."""
        self.model.load_state_dict(other.model.state_dict())
        self.scaler.load_state_dict(other.scaler.state_dict())
        self.exchange.load_state_dict(copy.deepcopy(other.exchange.state_dict()))


def synchronized_twice() -> dict[str, Any]:
    """Call synchronize() and then step(), which Horovod allows; compare with one exchange.

    Also load during a step, and between synchronize() and zero_grad().
    """
    weights = []
    for twice in (False, True):
        model = make_net()
        config = {"compressor": "dgc", "compress_ratio": 0.5, **EVERYTHING}
        optimizer = wrap(model, config, optimizer=sgd(model, momentum=0.0))
        for x, y in batches(4, my_rank()):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if twice:
                    optimizer.synchronize()
                optimizer.step()
        weights.append(digest(model.parameters()))
    x, y = next(batches(1, my_rank()))
    F.cross_entropy(model(x), y).backward()
    try:
        optimizer.load_state_dict(optimizer.state_dict())
        refused = ""
    except Exception as error:
        refused = str(error)
    optimizer.synchronize()
    optimizer.zero_grad()
    saved, held = copy.deepcopy(optimizer.state_dict()), digest(memories(optimizer))
    train(model, optimizer, 1)
    after, moved = digest(model.parameters()), digest(memories(optimizer))
    F.cross_entropy(model(x), y).backward()
    optimizer.synchronize()
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    loaded = digest(memories(optimizer)) == held != moved
    return {"weights": weights, "refused": refused, "after": after, "loaded": loaded}


def memories(optimizer: Any) -> list[torch.Tensor]:
    """Return the arrays of all memories of an optimizer."""
    return [x for state in optimizer.grace.run.memories().values() for x in state.values()]


def contract_of_horovod() -> dict[str, Any]:
    """Check the properties of Horovod's optimizer that users rely on."""
    model = make_net()
    plain = sgd(model)
    optimizer = wrap(model, {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}, optimizer=plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    x, y = next(batches(1, my_rank()))
    F.cross_entropy(model(x), y).backward()
    optimizer.synchronize()
    synchronized = digest(p.grad for p in model.parameters())
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    with optimizer.skip_synchronize():
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=False)
    zeroed = all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    cleared = all(p.grad is None for p in model.parameters())
    F.cross_entropy(model(x), y).backward()
    try:
        optimizer.zero_grad()
        early = ""
    except Exception as error:
        early = str(error)
    optimizer.step()
    broadcast_state(optimizer)
    broadcast(model.state_dict())
    train(model, optimizer, 2)
    return {
        "instance": isinstance(optimizer, torch.optim.SGD),
        "lr": optimizer.param_groups[0]["lr"],
        "synchronized": synchronized,
        "norm": norm,
        "zeroed": zeroed,
        "cleared": cleared,
        "early": early,
        "weights": digest(model.parameters()),
    }


def changed_gradients() -> dict[str, str]:
    """Change gradients between backward() and step(), in several ways, and return the error of each."""

    def clip(model: Net) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    def replace(model: Net) -> None:
        weight = model.left.weight
        assert weight.grad is not None
        weight.grad = weight.grad.clone()

    def leave(model: Net) -> None:
        pass

    steps = {
        "clip": (clip, lambda optimizer: optimizer.step()),
        "replace": (replace, lambda optimizer: optimizer.step()),
        "clip, synchronize": (clip, lambda optimizer: optimizer.synchronize()),
        "leave": (leave, lambda optimizer: optimizer.step()),
    }
    errors = {}
    for label, (change, step) in steps.items():
        for method in ("topk", "none"):
            for views in (False, True):
                model = make_net()
                optimizer = wrap(model, {"compressor": method, **EVERYTHING}, gradient_as_bucket_view=views)
                optimizer.zero_grad()
                x, y = next(batches(1, my_rank()))
                F.cross_entropy(model(x), y).backward()
                change(model)
                try:
                    step(optimizer)
                    error = ""
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
                errors[f"{label}/{method}/{views}"] = error
    return errors


def forgotten_broadcast() -> dict[str, str]:
    """Train replicas that start with other weights on each rank, and return the error of the first exchange."""
    errors = {}
    for label, config, options in (
        ("topk", {"compressor": "topk", **EVERYTHING}, {}),
        ("none", {"compressor": "none"}, {}),
        ("local", {"compressor": "topk", **EVERYTHING}, {"local_steps": 2}),
        ("broadcast", {"compressor": "topk", **EVERYTHING}, {}),
    ):
        model = make_net()
        with torch.no_grad():
            model.head.bias[3] += my_rank()
        optimizer = wrap(model, config, **options)
        if label == "broadcast":
            broadcast(model.state_dict())
        try:
            train(model, optimizer, options.get("local_steps", 1))
            errors[label] = ""
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}"
    return errors


def unfrozen() -> dict[str, Any]:
    """Let a parameter train that was frozen when the optimizer was wrapped: the error of the step, and if it moved."""

    def by_closure(model: Net, optimizer: Any, steps: int) -> None:
        for x, y in batches(steps, my_rank()):
            optimizer.step(functools.partial(_evaluate, model, optimizer, x, y))

    results = {}
    for label, go, options in (
        ("gradients", train, {}),
        ("local", train, {"local_steps": 2}),
        ("local, closure", by_closure, {"local_steps": 2}),
    ):
        model = make_net()
        weight = model.left.weight.requires_grad_(False)
        optimizer = wrap(model, {"compressor": "topk", **EVERYTHING}, **options)
        train(model, optimizer, 2)
        before = digest([weight])
        weight.requires_grad_(True)
        error = outcome(functools.partial(go, model, optimizer, 1))
        results[label] = {"error": error, "kept": digest([weight]) == before}
    return results


def frozen_in_mid_run() -> dict[str, Any]:
    """Freeze a parameter for some steps; return what moved meanwhile, and what moved after it was unfrozen."""
    results = {}
    for label, config, options in (
        ("layers", {"compressor": "topk", **LAYERS}, {}),
        ("one unit", {"compressor": "signsgd", "memory": "residual", "granularity": "model", **EVERYTHING}, {}),
        ("dense", {"compressor": "none"}, {}),
        ("local", {"compressor": "topk", **LAYERS}, {"local_steps": 2}),
    ):
        model = make_net()
        weight = model.left.weight
        optimizer = wrap(model, config, optimizer=sgd(model, weight_decay=0.1), **options)

        def kept(weight: torch.Tensor = weight, optimizer: Any = optimizer) -> str:
            run, held = optimizer.grace.run, []
            saved = run.state_dict()["tensors"]
            for unit, start, piece in run.plan.places.get("left.weight", ()):
                residual = saved[unit.spec.name]["memory"].get("residual")
                if residual is not None:
                    held.append(residual[start : start + piece.numel])
            return digest([weight, *held])

        train(model, optimizer, 2)
        before, others = kept(), digest([model.right.weight])
        weight.requires_grad_(False)
        train(model, optimizer, 4, start=2)
        frozen = {"kept": kept() == before, "others moved": digest([model.right.weight]) != others}
        frozen["no gradient"] = weight.grad is None
        weight.requires_grad_(True)
        train(model, optimizer, 2, start=6)
        results[label] = {**frozen, "moved later": kept() != before, "weights": digest(model.parameters())}
    return results


def scaled(form: str, model: Net, optimizer: Any, scaler: Any, steps: int, overflow_at: int | None) -> dict[str, Any]:
    """Train with a loss scaler. In the step `overflow_at`, one gradient of the last rank overflows."""
    history = []
    bad = False
    if my_rank() == world_size() - 1:
        model.left.weight.register_hook(lambda gradient: gradient * float("inf") if bad else gradient)
    for i, (x, y) in enumerate(batches(steps, my_rank())):
        before = digest(model.parameters())
        residuals = states_of(optimizer)
        optimizer.zero_grad()
        bad = i == overflow_at
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if form == "clipped":
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        kept = [a == b for a, b in zip(residuals, states_of(optimizer), strict=True)]
        history.append(
            {
                "moved": digest(model.parameters()) != before,
                "states kept": all(kept),
                "scale": scaler.get_scale(),
            }
        )
    return {"history": history, "weights": digest(model.parameters()), "states": states_of(optimizer)}


def states_of(optimizer: Any) -> list[str]:
    return [flat(states) for states in optimizer.grace.run.state_dict()["tensors"].values()]


def mixed_precision() -> dict[str, Any]:
    """Use a loss scaler in each form, with an overflow on one rank and without."""
    results: dict[str, Any] = {}
    topk = {"compressor": "topk", "compress_ratio": 0.1, **LAYERS}
    forms: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "usual": (topk, {}),
        "clipped": (topk, {}),
        "fused": (topk, {"fused": True}),
        "powersgd": ({"compressor": "powersgd", **EVERYTHING}, {}),
        "none": ({"compressor": "none"}, {}),
        # Their thresholds and bounds are absolute numbers.
        "threshold": ({"compressor": "threshold", "threshold": 1e-3, **EVERYTHING}, {}),
        "hardthreshold": ({"compressor": "hardthreshold", "threshold": 1e-3, **EVERYTHING}, {}),
        "inceptionn": ({"compressor": "inceptionn", "relative": False, "memory": "residual", **EVERYTHING}, {}),
    }
    for form, (config, options) in forms.items():
        for overflow_at in (1, None):
            model = make_net()
            # Without an overflow, the scale grows after every step. It is exact, because it is a power of two.
            interval = 2000 if overflow_at is not None else 1
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=interval)
            optimizer = wrap(model, config, optimizer=sgd(model, **options), grad_scaler=scaler)
            kind = "overflow" if overflow_at is not None else "growth"
            results[f"{form}/{kind}"] = scaled(form, model, optimizer, scaler, 4, overflow_at)
        # Unscaled: the same steps, and those without the one that overflows.
        for kind, parts in {"unscaled": ((0, 4),), "left out": ((0, 1), (2, 2))}.items():
            model = make_net()
            optimizer = wrap(model, config, optimizer=sgd(model, **options))
            for start, steps in parts:
                train(model, optimizer, steps, start=start)
            results[f"{form}/{kind}"] = {"weights": digest(model.parameters()), "states": states_of(optimizer)}
    # "clipped" completes the exchange before the scaler looks at the gradients.
    for method, config in (("topk", topk), ("none", {"compressor": "none"})):
        for form in ("usual", "clipped"):
            results[f"not told, {method}, {form}"] = _not_told(form, config)
    for label, arguments in {
        "no scaler": {"grad_scaler": 65536.0},
    }.items():
        try:
            wrap(make_net(), topk, **arguments)
            results[label] = ""
        except Exception as error:
            results[label] = f"{type(error).__name__}: {error}"
    return results


def _not_told(form: str, config: dict[str, Any]) -> list[str]:
    """Take two steps with a loss scaler that the optimizer does not know; return the warnings and the error."""
    gc.collect()
    model = make_net()
    optimizer = wrap(model, config)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = outcome(lambda: scaled(form, model, optimizer, scaler, 2, None))
    told = [f"{w.category.__name__}: {w.message}" for w in caught]
    return [*told, error] if error else told


def sparse_gradients() -> dict[str, Any]:
    """Use an embedding with sparse gradients: compressed as dense, left to Horovod by a rule, or refused."""
    results: dict[str, Any] = {}

    def run(config: dict[str, Any], **arguments: Any) -> str:
        torch.manual_seed(0)
        model = torch.nn.Embedding(64, 32, sparse=True)
        optimizer = wrap(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
        for step in range(3):
            model(torch.tensor([step, my_rank() + 5, 9])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest(model.parameters())

    results["as dense"] = run({"compressor": "topk", "compress_ratio": 0.5}, sparse_as_dense=True)
    results["by rule"] = run({"compressor": "topk", "rules": [{"match": "weight", "compressor": "none"}]})
    try:
        run({"compressor": "topk"})
        results["refused"] = ""
    except Exception as error:
        results["refused"] = f"{type(error).__name__}: {error}"
    return results


def unused_embedding() -> dict[str, Any]:
    """Train an embedding with sparse gradients that one rank does not use in some steps.

    Return the error, if any, and that of ranks that differ in the kind.
    """
    rules = [{"match": "weight", "compressor": "none"}]

    def loss(model: torch.nn.Module, step: int, number: int) -> torch.Tensor | None:
        return None if number == 0 and step != 1 else model(torch.tensor([step, number + 5, 9])).square().sum()

    def train() -> None:
        torch.manual_seed(0)
        model, right = (torch.nn.Embedding(64, 32, sparse=True) for _ in "ab")
        right.load_state_dict(model.state_dict())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, right)]
        optimizer = wrap(model, {"compressor": "topk", "rules": rules, "timeout": 20}, optimizer=optimizers[0])
        for step in range(3):
            mine = loss(model, step, my_rank())
            if mine is not None:
                mine.backward()
            optimizer.step()
            optimizer.zero_grad()
            for each in range(world_size()):
                one = loss(right, step, each)
                if one is not None:
                    (one / world_size()).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        assert torch.allclose(model.weight, right.weight, atol=1e-6)

    def mixed() -> None:
        model = torch.nn.Embedding(64, 32, sparse=my_rank() == 0)
        optimizer = wrap(model, {"compressor": "topk", "rules": rules, "timeout": 20}, optimizer=sgd(model))
        try:
            # Over torch.distributed a rank may learn of the other kind in either call.
            model(torch.tensor([1])).sum().backward()
            optimizer.step()
        finally:
            # Nothing of it must be left for the next scenario.
            optimizer.grace.discard()

    return {"unused": outcome(train), "mixed": outcome(mixed)}


def overlap() -> dict[str, Any]:
    """Record whether the first collective of a step starts before the backward pass ends."""
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", "communicator": "allgather", "bucket_bytes": 0, **EVERYTHING})
    train(model, optimizer, 2)
    x, y = next(batches(1, my_rank()))
    optimizer.zero_grad()
    progress: list[int] = []
    with spy(optimizer) as sent:
        # The backward pass reaches the convolution last. Everything sent by then was sent during the backward pass.
        model.conv.weight.register_hook(lambda gradient: progress.append(len(sent)))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"before the last gradient": progress, "total": len(sent)}


def two_optimizers() -> dict[str, Any]:
    """Use two optimizers in one process whose exchanges overlap, as in a GAN."""
    models = [make_net(seed) for seed in (0, 1)]
    optimizers = [wrap(m, {"compressor": c, **EVERYTHING}) for m, c in zip(models, ("topk", "qsgd"), strict=True)]
    for x, y in batches(4, my_rank()):
        sum(F.cross_entropy(m(x), y) for m in models).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": [digest(m.parameters()) for m in models]}


def two_threads() -> list[list[str]]:
    """Train two optimizers one after the other, and again in two threads. Return the weights."""
    results = []
    for at_once in (False, True):
        models = [make_net(seed) for seed in range(2)]
        optimizers = [wrap(model, {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}) for model in models]
        threads = [
            threading.Thread(target=train, args=(model, optimizer, 20))
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        for thread in threads:
            thread.start()
            if not at_once:
                thread.join()
        for thread in threads:
            thread.join()
        results.append([digest(model.parameters()) for model in models])
    return results


def refusals() -> dict[str, str]:
    """Pass arguments that are not supported. Return the errors."""
    model = make_net()

    def attempt(**arguments: Any) -> str:
        try:
            wrap(model, arguments.pop("config", {"compressor": "topk"}), **arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    wrapped = wrap(model, {"compressor": "topk"})
    try:
        wrapped.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        group = ""
    except Exception as error:
        group = str(error)
    return {
        "compression": attempt(compression=hvd.Compression.fp16),
        "groups": attempt(groups=2),
        "num_groups": attempt(num_groups=2),
        "op": attempt(op=dist.ReduceOp.MAX if by_torchrun() else hvd.Adasum),
        "typo": attempt(config={"compressor": "topk", "compres_ratio": 0.1}),
        "typo of an argument": attempt(sparse_as_dens=True),
        "unknown argument": attempt(backward_passes=2),
        "wrapped": attempt(optimizer=wrapped),
        "not an optimizer": attempt(optimizer=model),
        "process set": attempt(process_set=hvd.ProcessSet([0])),
        "add_param_group": group,
    }


def both_libraries() -> dict[str, Any]:
    """Train over either library when Horovod and torch.distributed are initialized: the transports and the weights."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        store = hvd.broadcast_object(f"file://{folder}/store", 0)
        dist.init_process_group("gloo", init_method=store, rank=hvd.rank(), world_size=hvd.size())
        try:
            for backend in (None, "horovod", "torch"):
                model = make_net()
                optimizer = wrap(model, {"compressor": "topk", **EVERYTHING}, backend=backend)
                train(model, optimizer, 3)
                results[str(backend)] = {
                    "transport": type(optimizer.grace.transport).__name__,
                    "weights": digest(model.parameters()),
                }
        finally:
            # Rank 0 removes the store.
            dist.barrier()
            dist.destroy_process_group()
    return results


class Wrapper:
    """A wrapper that forwards what it does not know and takes on the class of the optimizer, as Lightning's does."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Wrapper" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self) -> Any:
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def inside_a_wrapper() -> dict[str, list[str]]:
    """Train through a wrapper and without one, clipping. Return the weights and the warnings of both."""
    results = {}
    for name, around in (("plain", lambda optimizer: optimizer), ("wrapper", Wrapper)):
        model = make_net()
        optimizer = around(wrap(model, {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, y in batches(3, my_rank()):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
        results[name] = [digest(model.parameters()), str("grace" in saved), *(str(w.message) for w in caught)]
    return results


def copies() -> dict[str, str]:
    """Copy and pickle a wrapped optimizer. Return the errors."""
    results = {}
    for label, options in (("", {}), (" with local steps", {"local_steps": 2})):
        optimizer = wrap(make_net(), {"compressor": "topk"}, **options)
        for name, copied in (("copy", copy.copy), ("deepcopy", copy.deepcopy), ("pickle", pickle.dumps)):
            try:
                copied(optimizer)
                results[name + label] = ""
            except Exception as error:
                results[name + label] = f"{type(error).__name__}: {error}"
        copy.deepcopy(optimizer.state_dict())
    return results


def momentum_twice() -> dict[str, list[str]]:
    """Wrap optimizers with and without momentum. Return the warnings."""
    results = {}
    for name, made in (
        ("sgd", sgd),
        ("adam", lambda model: torch.optim.AdamW(model.parameters())),
        ("none", lambda model: sgd(model, momentum=0.0)),
        ("rmsprop", lambda model: torch.optim.RMSprop(model.parameters())),
    ):
        model = make_net()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrap(model, {"compressor": "signum"}, optimizer=made(model))
        results[name] = [f"{w.category.__name__}: {w.message}" for w in caught]
    return results


def process_sets() -> dict[str, Any]:
    """Train even and odd ranks separately."""
    mine = GROUPS[my_rank() % 2].argument
    results = {}
    for name in ("none", "topk", "powersgd", "bf16"):
        model = make_net()
        optimizer = wrap(model, {"compressor": name, **EVERYTHING}, **mine)
        train(model, optimizer, 4)
        results[name] = digest(model.parameters())
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", "communicator": "broadcast", **EVERYTHING}, **mine)
    train(model, optimizer, 4)
    results["broadcast"] = digest(model.parameters())
    outside = make_net()
    # Ranks outside of a process set may wrap an optimizer that exchanges nothing.
    if GROUPS[0].included or not by_torchrun():
        train(outside, wrap(outside, {"compressor": "topk"}, **GROUPS[0].argument), 2)
    results["only even"] = digest(outside.parameters())
    if my_rank() % 2:
        wrap(make_net(), {"compressor": "topk"}, **mine)
    # Odd ranks have made one more optimizer than even ranks. This must not matter here.
    together = make_net()
    optimizer = wrap(together, {"compressor": "topk"})
    train(together, optimizer, 2)
    results["together"] = digest(together.parameters())
    return results


def statistics() -> dict[str, Any]:
    """Compare stats() with norms to the values of an error feedback with a known residual."""
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING})
    train(model, optimizer, 1)
    cheap = optimizer.grace.stats()["tensors"]["left.weight"]
    optimizer.grace.track_norms = True
    train(model, optimizer, 1, start=1)
    tensor = optimizer.grace.stats()["tensors"]["left.weight"]
    return {
        "cheap": [cheap["relative_error"], cheap["residual_norm"]],
        "relative_error": tensor["relative_error"],
        "residual_norm": tensor["residual_norm"],
        "report": optimizer.grace.report(),
    }


def _mismatch(configs: Callable[[int], dict[str, Any]], model: torch.nn.Module) -> dict[str, Any]:
    started = time.monotonic()
    try:
        wrap(model, configs(my_rank()))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - started}
    return {"refused": "", "seconds": time.monotonic() - started}


def different_configurations() -> dict[str, Any]:
    """Give the last rank another ratio, an impossible configuration, other parameters, and other formats of bytes."""
    last = world_size() - 1
    ratio = _mismatch(lambda rank: {"compressor": "topk", "compress_ratio": 0.02 if rank == last else 0.01}, make_net())
    typo = _mismatch(lambda rank: {"compressor": "topkk" if rank == last else "topk"}, make_net())
    net = make_net()
    if my_rank() == last:
        net.head = torch.nn.Linear(40, 11)
    parameters = _mismatch(lambda rank: {"compressor": "topk"}, net)
    with pytest.MonkeyPatch.context() as patch:
        if my_rank() == last:
            patch.setattr(agreement, "WIRE_FORMAT", 0)
        wire = _mismatch(lambda rank: {"compressor": "topk"}, make_net())
        patch.undo()
        if my_rank() == last:
            patch.setattr(grace.compressors, "about", lambda name: About(payload_format=1 + (name == "signsgd")))
        payload = _mismatch(lambda rank: {"compressor": "signsgd", **EVERYTHING}, make_net())
    agreed = _mismatch(lambda rank: {"compressor": "topk"}, make_net())
    formats = {"wire format": wire, "payload format": payload}
    return {"ratio": ratio, "typo": typo, "parameters": parameters, **formats, "agreed": agreed}


def dispatch() -> list[bool]:
    """Wrap an optimizer by the function of both frameworks."""
    parameters = torch.nn.Linear(2, 2).parameters()
    optimizer = grace.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), compressor="topk")
    return [isinstance(optimizer, torch.optim.SGD), optimizer.grace.plan is not None]


def digits(framework: str, arguments: list[str]) -> int:
    """Run the digits example of a framework with these arguments, and return its exit status."""
    return rank.run_digits(framework, arguments)


def program(code: str) -> str:
    """Run a program in this process, which has imported the framework."""
    return rank.run_program(code)
