"""Scenarios about what is exchanged: what one rank does, and what it reports."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F

from grace.core.simulate import Simulation
from grace.core.spec import TensorSpec
from grace.torch.transport import HorovodTransport
from tests.adapters.torch.model import (
    EVERYTHING,
    LAYERS,
    PROCESS_SETS,
    UNITS,
    batches,
    digest,
    exchange,
    flat,
    make_net,
    sgd,
    spy,
    train,
    valid_configs,
    wrap,
)
from tests.support import half_precision
from tests.support.launch import FULL, methods


def every_method() -> dict[str, Any]:
    """20 steps with every method and communicator: exact weights, bytes reported and bytes really sent."""
    results = {}
    for label, config in valid_configs():
        model = make_net()
        optimizer = wrap(model, config)
        loss = train(model, optimizer, 19)
        with spy(optimizer) as sent:
            train(model, optimizer, 1, start=19)
        stats = optimizer.grace.stats()
        results[label] = {
            "weights": digest(model.parameters()),
            "finite": bool(np.isfinite(loss)),
            "reported": stats["wire_bytes"] - sum(p.spec.nbytes for p in optimizer.grace.plan.delegated),
            "sent": sum(nbytes for _, nbytes in sent),
            "fixed": all(p.compressor.fixed_size for p in optimizer.grace.plan.parts),
            "predicted": sum(b.nbytes for b in optimizer.grace.plan.buckets),
        }
    return results


def none_and_horovod() -> dict[str, Any]:
    """The same training with plain Horovod and with compressor none, also with accumulation and predivision."""
    results = {}
    for label, arguments in {
        "plain": {},
        "accumulate": {"backward_passes_per_step": 2},
        "predivide": {"gradient_predivide_factor": 2.0},
        "sum": {"op": hvd.Sum},
    }.items():
        weights = []
        for kind in ("horovod", "grace"):
            model = make_net()
            if kind == "horovod":
                optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **arguments)
            else:
                optimizer = wrap(model, {"compressor": "none"}, **arguments)
            passes = arguments.get("backward_passes_per_step", 1)
            for i, (x, y) in enumerate(batches(20, hvd.rank())):
                F.cross_entropy(model(x), y).backward()
                if (i + 1) % passes == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        results[label] = {
            "equal": bool((weights[0] == weights[1]).all()),
            "distance": float((weights[0] - weights[1]).abs().max()),
            "moved": float((weights[0] - torch.cat([p.detach().reshape(-1) for p in make_net().parameters()])).norm()),
        }
    return results


def simulation() -> dict[str, Any]:
    """The exchange of real processes against the simulated one, on the same gradients."""
    results = {}
    rank, size = hvd.rank(), hvd.size()
    shapes = {name: tuple(p.shape) for name, p in make_net().named_parameters()}

    def gradient(step: int, of_rank: int, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * 1000 + of_rank * 100 + len(name))
        return torch.randn(shapes[name], generator=generator)

    for name in methods():
        config = {"compressor": name, **EVERYTHING}
        model = make_net()
        optimizer = wrap(model, config)
        specs = [TensorSpec(n, s) for n, s in shapes.items()]
        reference = Simulation(size, specs, config, framework="torch")
        worst = 0.0
        for step in range(4):
            for n, p in model.named_parameters():
                p.grad = gradient(step, rank, n)
            exchange(optimizer)
            merged = reference.step([{n: gradient(step, r, n) for n in shapes} for r in range(size)])
            for n, p in model.named_parameters():
                worst = max(worst, float((p.grad - merged[rank][n]).abs().max()))
        results[name] = worst
    return results


def half_sums() -> dict[str, Any]:
    """Sums and means of 16-bit floats over all ranks, and over those of a process set."""

    def reductions(process_set: Any) -> dict[str, Any]:
        transport = HorovodTransport(process_set)

        def reduce(x: np.ndarray, op: Any, name: str) -> Callable[[], np.ndarray]:
            dtype = torch.float16 if x.dtype == np.float16 else torch.bfloat16
            mine = torch.from_numpy(x.view(np.int16)).view(dtype)
            if op == "mean":
                # Where no 32-bit integers can begin.
                mine = torch.cat([mine[:1], mine])[1:]
            handle = transport.allreduce(mine, op=op, name=f"halves.{process_set.process_set_id}.{name}")
            return lambda: handle.wait().view(torch.int16).numpy().view(x.dtype)

        return half_precision.reductions(reduce, process_set.ranks, hvd.rank())

    results = {"all": reductions(hvd.global_process_set)}
    for process_set in PROCESS_SETS:
        if process_set.included() and len(process_set.ranks) > 1:
            results["set"] = reductions(process_set)
    # A rank that is done would end Horovod for the others.
    hvd.barrier()
    return results


# Every way through the engine: gathered, summed, of run-time length, settled first, with states, by shape.
_ALL_OF_THEM = [f"{launcher}-{ranks}" for launcher, ranks in FULL]
_EVERY_WAY = ("none", "fp16", "topk", "randomk", "threshold", "signsgd", "terngrad", "powersgd")


def units() -> dict[str, Any]:
    """Every granularity and communicator: training, and given gradients against the simulation, one of them not finite.

    The gradients are views into one flat storage in every second step, so that they lie end to end.
    """
    results = {}
    rank, size = hvd.rank(), hvd.size()
    shapes = {name: tuple(p.shape) for name, p in make_net().named_parameters()}
    specs = [TensorSpec(n, s) for n, s in shapes.items()]
    for (granularity, options), (label, config) in itertools.product(UNITS.items(), valid_configs()):
        name = config["compressor"]
        if name not in (_EVERY_WAY if os.environ["GRACE_TEST_LAUNCH"] in _ALL_OF_THEM else ("topk", "fp16")):
            continue
        config = {**config, **options}
        model = make_net()
        optimizer = wrap(model, config, gradient_as_bucket_view=granularity != "layer")
        train(model, optimizer, 3)
        trained = digest(model.parameters())
        model = make_net()
        optimizer, reference = wrap(model, config), Simulation(size, specs, config, framework="torch")
        engine, worst, finite, alike = optimizer.grace.engine, 0.0, [], True
        with spy(optimizer) as sent:
            for step in range(4):
                everyone = [_given(shapes, step, r, bad=step == 2 and r == size - 1) for r in range(size)]
                flat_storage = torch.cat([everyone[rank][n].reshape(-1) for n in reversed(shapes)])
                views = flat_storage.split([math.prod(shapes[n]) for n in reversed(shapes)])
                mine = dict(zip(reversed(shapes), views, strict=True)) if step % 2 else everyone[rank]
                for n, p in model.named_parameters():
                    p.grad = mine[n].reshape(shapes[n])
                # Before the exchange, which writes its results into the gradients.
                merged = reference.step(everyone)[rank]
                sent.clear()
                exchange(optimizer)
                for n, p in model.named_parameters():
                    alike &= bool(torch.equal(torch.isfinite(p.grad), torch.isfinite(merged[n])))
                    difference = (p.grad - merged[n]).nan_to_num(0.0, 0.0, 0.0).abs()
                    worst = max(worst, float(difference.max()))
                finite.append(bool(torch.isfinite(model.left.weight.grad).all()))
        states = engine.state_dict()["tensors"].values()
        stats = optimizer.grace.stats()
        results[f"{granularity}/{label}"] = {
            "trained": trained,
            "weights": digest(p.grad for p in model.parameters()),
            "worst": worst,
            "as simulated": alike,
            "finite": finite,
            "states finite": all(
                bool(torch.isfinite(value).all()) for unit in states for value in unit["memory"].values()
            ),
            "reported": stats["wire_bytes"] - sum(p.spec.nbytes for p in optimizer.grace.plan.delegated),
            "sent": sum(nbytes for _, nbytes in sent),
            "units": len(optimizer.grace.plan.units),
        }
    return results


def _given(shapes: dict[str, Any], step: int, rank: int, bad: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if bad:
        given["left.weight"][3, 5] = float("nan")
    return given


def hook_order() -> dict[str, Any]:
    """Gradients that become ready in one order on all ranks, and in opposite orders on odd and even ranks."""
    results = {}
    for name in ("topk", "powersgd", "signsgd", "randomk"):
        weights = []
        for opposite in (False, True):
            model = make_net()
            optimizer = wrap(model, {"compressor": name, "bucket_bytes": 0, **EVERYTHING})
            for x, y in batches(5, hvd.rank()):
                optimizer.zero_grad()
                branches = [model.left, model.right]
                h = model.features(x).detach()
                # Separate losses, so that this order of backward calls is the order of the hooks.
                losses = [F.cross_entropy(branch(h)[:, :10], y) for branch in branches]
                if opposite and hvd.rank() % 2:
                    losses.reverse()
                for loss in losses:
                    loss.backward()
                optimizer.step()
            weights.append(digest(model.parameters()))
        results[name] = weights
    return results


def unused_parameters() -> dict[str, Any]:
    """One branch takes no part on odd ranks, and on no rank in every second step."""
    results = {}
    for name in ("none", "topk", "qsgd", "powersgd", "randomk"):
        model = make_net()
        optimizer = wrap(model, {"compressor": name, **EVERYTHING})
        before = digest(model.right.parameters())
        for i, (x, y) in enumerate(batches(6, hvd.rank())):
            optimizer.zero_grad()
            F.cross_entropy(model(x, right=i % 2 == 0 and hvd.rank() % 2 == 0), y).backward()
            optimizer.step()
        results[name] = {
            "weights": digest(model.parameters()),
            "right moved": digest(model.right.parameters()) != before,
        }
    return results


def not_finite() -> dict[str, Any]:
    """NaN, then infinity, in one tensor on the last rank only; then a good step."""
    results = {}
    for name, bad in itertools.product(methods(), (float("nan"), float("inf"))):
        model = make_net()
        optimizer = wrap(model, {"compressor": name, **LAYERS})
        train(model, optimizer, 3)
        engine = optimizer.grace.engine
        guarded = any(p.spec.name == "left.weight" and p.guarded for p in optimizer.grace.plan.parts)
        before = copy.deepcopy(engine.state_dict()["tensors"].get("left.weight"))
        for n, p in model.named_parameters():
            p.grad = torch.full_like(p, 0.01)
            if n == "left.weight" and hvd.rank() == hvd.size() - 1:
                p.grad[3, 5] = bad
        exchange(optimizer)
        after = engine.state_dict()["tensors"].get("left.weight")
        gradients = {n: bool(torch.isfinite(p.grad).all()) for n, p in model.named_parameters()}
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.01)
        exchange(optimizer)
        results[f"{name}/{bad}"] = {
            "guarded": guarded,
            "bad tensor finite": gradients.pop("left.weight"),
            "others finite": all(gradients.values()),
            "state kept": guarded is False or flat(before) == flat(after),
            "next finite": all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()),
        }
    return results


def gradient_buffers() -> dict[str, Any]:
    """Gradients whose memory belongs to somebody else, before, during and after the exchange."""
    config = {"compressor": "topk", "compress_ratio": 0.1, "bucket_bytes": 0, **EVERYTHING}
    w = torch.nn.Parameter(torch.ones(20, 12))
    position = torch.nn.Parameter(torch.ones(20))
    model = torch.nn.Module()
    model.w, model.position = w, position
    optimizer = wrap(model, config, optimizer=torch.optim.SGD([w, position], lr=0.0))
    generator = torch.Generator().manual_seed(hvd.rank())
    x, target = torch.randn(1, 20, generator=generator), torch.randn(1, 12, generator=generator)
    seen: list[float] = []
    w.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    # The gradient of `position` is a view of what the backward pass still needs for w.
    for _ in range(3):
        optimizer.zero_grad()
        ((x + position.view(1, -1)) @ w * target).sum().backward()
        optimizer.step()
    buffer, given = torch.zeros(20), []
    sent = torch.zeros(20)
    optimizer = wrap(model, config, optimizer=torch.optim.SGD([w, position], lr=0.0))
    for step in range(3):
        buffer.copy_(torch.randn(20, generator=torch.Generator().manual_seed(step)))
        given.append(buffer.clone())
        position.grad, w.grad = buffer.view_as(position), torch.zeros_like(w)
        exchange(optimizer)
        sent += position.grad
        # What the optimizer or the user does with the merged gradient must not reach the residual either.
        position.grad.mul_(100.0)
    residual = optimizer.grace.engine.state_dict()["tensors"]["position"]["memory"]["residual"]
    return {"norms": seen, "lost": float((sent + residual - sum(given)).abs().max()), "size": float(residual.norm())}


def accumulation() -> dict[str, Any]:
    """backward_passes_per_step=2 against one backward pass of the summed losses."""
    weights = []
    for passes in (2, 1):
        model = make_net().double()
        config = {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}
        optimizer = wrap(model, config, backward_passes_per_step=passes)
        data = list(batches(8, hvd.rank()))
        for (x0, y0), (x1, y1) in zip(data[::2], data[1::2], strict=True):
            losses = [F.cross_entropy(model(x.double()), y) for x, y in ((x0, y0), (x1, y1))]
            if passes == 2:
                for loss in losses:
                    loss.backward()
            else:
                (losses[0] + losses[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return {"distance": float((weights[0] - weights[1]).abs().max()), "weights": digest([weights[0]])}


def reductions() -> dict[str, Any]:
    """op=Sum against op=Average of the same gradients, and a predivision that must change nothing."""
    gradients = {}
    for label, arguments in {
        "average": {},
        "sum": {"op": hvd.Sum},
        "predivide": {"gradient_predivide_factor": 4.0},
    }.items():
        model = make_net()
        optimizer = wrap(model, {"compressor": "qsgd", **EVERYTHING}, **arguments)
        x, y = next(batches(1, hvd.rank()))
        F.cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        gradients[label] = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    return {
        "sum": float((gradients["sum"] - gradients["average"] * hvd.size()).abs().max()),
        "predivide": float((gradients["predivide"] - gradients["average"]).abs().max()),
        "size": float(gradients["average"].abs().max()),
    }


def dtypes_and_layouts() -> dict[str, Any]:
    """Half, bfloat16 and double parameters, channels-last and frozen ones, sparse gradients."""
    results = {}
    for name, dtype in itertools.product(methods(), (torch.float16, torch.bfloat16, torch.float64)):
        model = torch.nn.Linear(64, 40, bias=False).to(dtype)
        with torch.no_grad():
            model.weight.fill_(0.5)
        optimizer = wrap(model, {"compressor": name})
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            model.weight.grad = torch.randn(40, 64, generator=generator).to(dtype)
            optimizer.step()
        key = f"{name}/{str(dtype).removeprefix('torch.')}"
        results[key] = {
            "weights": digest(model.parameters()),
            "moved": bool((model.weight != 0.5).any()),
            "finite": bool(torch.isfinite(model.weight).all()),
            "dtype": str(model.weight.grad.dtype) == str(dtype),
        }
    model = make_net().to(memory_format=torch.channels_last)
    model.left.weight.requires_grad_(False)
    frozen = digest([model.left.weight])
    optimizer = wrap(model, {"compressor": "topk", **EVERYTHING})
    train(model, optimizer, 3)
    results["channels last"] = {"weights": digest(model.parameters())}
    results["frozen"] = {
        "kept": digest([model.left.weight]) == frozen,
        "planned": any(p.spec.name == "left.weight" for p in optimizer.grace.plan.parts),
    }
    return results
