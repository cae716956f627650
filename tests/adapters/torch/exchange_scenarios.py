"""Scenarios about the exchange of PyTorch, run by each rank."""

from __future__ import annotations

import copy
import io
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import grace.torch.distributed.transport
from grace.core.config.registry import compressors
from grace.core.ops import get_ops
from grace.core.session.simulation import Simulation
from grace.core.spec import TensorSpec
from grace.core.transport.collectives import sum_halves
from grace.testing.harness import run_program
from grace.testing.transport_contract import run_transport_contract
from grace.torch.distributed import ProcessGroupTransport
from tests.adapters.torch.launched import (
    GROUPS,
    Group,
    by_torchrun,
    everyone,
    my_rank,
    total,
    transport_of,
    world_size,
)
from tests.adapters.torch.model import (
    batches,
    digest,
    exchange,
    flat,
    make_net,
    outcome,
    sgd,
    spy,
    train,
    wrap,
)
from tests.support import half_precision, nodes
from tests.support.cases import EVERYTHING, config_of, filled, label_of

# More steps than the phases of every method (see cases.py), two of them after the checkpoint, which is within a phase.
STEPS, SAVED = 7, 5
ROWS = list[dict[str, Any]]


def trained(rows: ROWS) -> dict[str, Any]:
    """Train with each method, and continue from a checkpoint file: weights, reported bytes and sent bytes."""
    results = {}
    for row in rows:
        config, arguments = config_of(row), {"gradient_as_bucket_view": row["view"]}
        model = make_net()
        optimizer = wrap(model, config, **arguments)
        train(model, optimizer, SAVED)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(model, optimizer, STEPS - SAVED - 1, start=SAVED)
        with spy(optimizer) as sent:
            loss = train(model, optimizer, 1, start=STEPS - 1)
        stats = optimizer.grace.stats()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        second = make_net(seed=1)
        second.load_state_dict(saved["model"])
        resumed = wrap(second, config, **arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.load_state_dict(saved["optimizer"])
        train(second, resumed, STEPS - SAVED, start=SAVED)
        ends = [torch.cat([p.detach().reshape(-1) for p in net.parameters()]) for net in (model, second)]
        results[label_of(row)] = {
            "weights": [digest([end]) for end in ends],
            "equal": bool((ends[0] == ends[1]).all()),
            "distance": float((ends[0] - ends[1]).abs().max()),
            "finite": bool(np.isfinite(loss)),
            "reported": stats["wire_bytes"] - sum(p.spec.nbytes for p in optimizer.grace.plan.delegated),
            "sent": sum(nbytes for _, nbytes in sent),
            # Of shards, the mean over the ranks is predicted.
            "fixed": all(b.route.fixed for b in optimizer.grace.plan.buckets) and not optimizer.grace.plan.shards,
            "predicted": sum(b.nbytes for b in optimizer.grace.plan.buckets)
            + filled(row, optimizer.grace.plan, my_rank()),
        }
    return results


def plainly_wrapped(model: torch.nn.Module, **arguments: Any) -> Any:
    """Return the optimizer of Horovod. For torch.distributed, one that reduces each gradient in its step."""
    if not by_torchrun():
        return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **arguments)
    optimizer, predivide = sgd(model), arguments.get("gradient_predivide_factor", 1.0)

    def reduce(*_: Any) -> None:
        for p in model.parameters():
            p.grad /= predivide
            dist.all_reduce(p.grad)
            p.grad *= 1.0 if "op" in arguments else predivide
            p.grad /= 1 if "op" in arguments else world_size()

    optimizer.register_step_pre_hook(reduce)
    return optimizer


def none_and_horovod() -> dict[str, Any]:
    """Train without grace and with compressor none, also with accumulation, predivision and bfloat16."""
    results = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "accumulate": {"backward_passes_per_step": 2},
        "predivide": {"gradient_predivide_factor": 2.0},
        "sum": {"op": total()},
        # Horovod cannot add it.
        **({"bfloat16": {}} if by_torchrun() else {}),
    }
    for label, arguments in ways.items():
        weights, dtype = [], torch.bfloat16 if label == "bfloat16" else torch.float32
        for kind in ("horovod", "grace"):
            model = make_net().to(dtype)
            if kind == "horovod":
                optimizer = plainly_wrapped(model, **arguments)
            else:
                optimizer = wrap(model, {"compressor": "none"}, **arguments)
            passes = arguments.get("backward_passes_per_step", 1)
            # Momentum has an effect from the second step on, which is the fourth pass if two passes make a step.
            for i, (x, y) in enumerate(batches(4, my_rank())):
                F.cross_entropy(model(x.to(dtype)), y).backward()
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


def transport_contract() -> dict[str, list[str]]:
    """Run the contract of transports among all ranks and among groups of some. Return the names of its tests."""
    groups = [everyone(), *(group for group in GROUPS if group.included)]
    return {str(list(g.ranks)): run_transport_contract(transport_of(g), get_ops("torch")) for g in groups}


def without_a_store() -> dict[str, Any]:
    """Train over a process group with a store and one without, as of MPI: weights, and the errors of vain waits."""
    config = {
        "compressor": "topk",
        "timeout": 20,
        **EVERYTHING,
        "rules": [{"match": "left.weight", "compressor": "none"}],
    }
    results: dict[str, Any] = {"weights": []}
    hidden = mock.patch.object(grace.torch.distributed.transport, "_get_default_store", return_value=None)
    for context in (nullcontext(), hidden):
        with context:
            model = make_net()
            optimizer = wrap(model, config)
            train(model, optimizer, 2)
            optimizer.grace.discard()
            train(model, optimizer, 2)
        results["weights"].append(digest(model.parameters()))
    turns = dist.new_group()
    with hidden:
        included = [group for group in GROUPS if group.included]
        results["groups"] = {
            str(list(g.ranks)): transport_of(g).gather_objects(my_rank(), "ranks", "this test") for g in included
        }
        # Rank 0 opens a store that nobody needs any more.
        for first in (False, True):
            if (my_rank() == 0) == first:
                results["late"] = outcome(lambda: ProcessGroupTransport(timeout=1))
            dist.barrier(turns)
    return results


def ranks_of_nodes() -> dict[str, Any]:
    """Return the ranks on a node that the transport finds here, and on other nodes, where an exchange needs them."""
    results: dict[str, Any] = {"here": transport_of(everyone()).local_size}
    config = {"compressor": "topk", "communicator": "hierarchical", **EVERYTHING}
    for placed in nodes.FOUND[world_size()]:
        told = dict(zip(("cross_rank", "local_rank", "local_size"), nodes.told(placed, my_rank()), strict=True))
        names = {"GROUP_RANK": "cross_rank", "LOCAL_RANK": "local_rank", "LOCAL_WORLD_SIZE": "local_size"}
        by_environment = mock.patch.dict(os.environ, {name: str(told[key]) for name, key in names.items()})
        by_horovod = mock.patch.multiple(hvd, **{key: lambda value=value: value for key, value in told.items()})
        with by_environment if by_torchrun() else by_horovod:
            found = transport_of(everyone()).local_size
            results[placed] = {"local_size": found, "error": outcome(lambda: wrap(make_net(), config))}
    return results


def fails_beside() -> dict[str, str]:
    """Differ at one of two transports, and wait at the other, where rank 0 starts nothing more; return the errors."""
    first, second = (ProcessGroupTransport(timeout=10) for _ in "ab")
    first.join_waits(second)
    # Rank 0 comes last, and may see the difference as soon as it starts its collective.
    differs = None if my_rank() == 0 else second.allgather(torch.ones(2), name="on the others")
    dist.barrier()
    transport, name = (second, "on rank 0") if differs is None else (first, "alone")
    waited = outcome(lambda: transport.allgather(torch.ones(2), name=name).wait())
    dist.barrier()
    first.discard()
    second.close()
    return {"waited": waited, "after": outcome(first.allgather(torch.ones(2), name="all").wait)}


def data_without_calls() -> list[bool]:
    """Start collectives and call the transport no more: return whether the data of each start, and all arrive."""
    transport, found = transport_of(everyone()), []
    mine = torch.full((100_000 + my_rank(),), float(my_rank()))
    handles = [transport.allgather(mine, name=f"alone {i}") for i in range(3)]
    deadline = time.monotonic() + 20
    while not all(handle.phase for handle in handles) and time.monotonic() < deadline:
        time.sleep(0.01)
    found += [handle.phase == 1 for handle in handles]
    parts = [torch.full((100_000 + rank,), float(rank)) for rank in range(world_size())]
    return [*found, all(torch.equal(handle.wait(), torch.cat(parts)) for handle in handles)]


def missing_rank() -> list[str]:
    """Wait in vain for the last rank, and then for rank 1: rank 0 at one transport, the others at another one."""
    transports, turns, told = [ProcessGroupTransport(timeout=3) for _ in range(2)], dist.new_group(), []
    for missing in (world_size() - 1, 1):
        dist.barrier(turns)
        if my_rank() != missing:
            transport, name = transports[my_rank() > 0], "one" if my_rank() == 0 else "other"
            told.append(outcome(lambda t=transport, n=name: t.allreduce(torch.ones(1), op="sum", name=n).wait()))
        dist.barrier(turns)
        for transport in transports:
            transport.discard()
    return told


def half_sums() -> dict[str, Any]:
    """Compute sums and means of 16-bit floats over all ranks, and over those of a group."""

    def reductions(group: Group) -> dict[str, Any]:
        transport = transport_of(group)

        def reduce(x: np.ndarray, op: Any, name: str) -> Callable[[], np.ndarray]:
            dtype = torch.float16 if x.dtype == np.float16 else torch.bfloat16
            mine = torch.from_numpy(x.view(np.int16)).view(dtype)
            if op == "mean":
                # At an odd offset, at which no 32-bit integer can begin.
                mine = torch.cat([mine[:1], mine])[1:]
            factor = 1 / transport.size if op == "mean" else 1.0
            program = sum_halves(get_ops("torch"), mine, transport.rank, transport.size, factor)
            name = f"halves.{group.ranks}.{name}"
            return lambda: run_program(program, transport, name).view(torch.int16).numpy().view(x.dtype)

        return half_precision.reductions(reduce, group.ranks, my_rank())

    groups = [everyone(), *(group for group in GROUPS if group.included)]
    return {str(list(group.ranks)): reductions(group) for group in groups}


# NaN and infinity on the last rank, after two steps that fill the states, each followed by a good step.
GIVEN = (0.0, 0.0, math.nan, 0.0, math.inf, 0.0)


def given(rows: ROWS) -> dict[str, Any]:
    """Exchange given gradients, some of them not finite, and simulate the same exchanges.

    The gradients are views into one flat storage in every second step, so that they lie end to end. Every rank gets the
    same results, so that each simulates only some of the exchanges, of all ranks.
    """
    results = {}
    rank, size = my_rank(), world_size()
    shapes = {name: tuple(p.shape) for name, p in make_net().named_parameters()}
    specs = [TensorSpec(n, s) for n, s in shapes.items()]
    merged: dict[str, list[dict[str, torch.Tensor]]] = {}
    for row in rows:
        model = make_net()
        optimizer = wrap(model, config_of(row), gradient_as_bucket_view=row["view"])
        run, plan, steps, found = optimizer.grace.run, optimizer.grace.plan, [], []
        with spy(optimizer) as sent:
            for step in range(len(GIVEN)):
                mine = _gradients(shapes, step, rank)
                flat_storage = torch.cat([mine[n].reshape(-1) for n in reversed(shapes)])
                views = flat_storage.split([math.prod(shapes[n]) for n in reversed(shapes)])
                mine = dict(zip(reversed(shapes), views, strict=True)) if step % 2 else mine
                for n, p in model.named_parameters():
                    p.grad = mine[n].reshape(shapes[n])
                before = copy.deepcopy(run.state_dict()["tensors"].get("left.weight"))
                sent.clear()
                exchange(optimizer)
                found.append({n: p.grad.clone() for n, p in model.named_parameters()})
                finite = {n: bool(torch.isfinite(x).all()) for n, x in found[-1].items()}
                left = finite.pop("left.weight")
                kept = flat(before) == flat(run.state_dict()["tensors"].get("left.weight"))
                steps.append({"finite": left, "others finite": all(finite.values()), "state kept": kept})
        merged[label_of(row)] = found
        compressed = [
            sum(compressors.name_of(item.compressor) == config_of(row)["compressor"] for item in parts)
            for parts in (plan.stateful.values(), plan.exchanged)
        ]
        units = run.state_dict()["tensors"].values()
        results[label_of(row)] = {
            "merged": digest(x.nan_to_num(1.0, 2.0, 3.0) for step in found for x in step.values()),
            "steps": steps,
            "guarded": any(p.spec.name == "left.weight" and p.guarded for p in plan.assignments),
            "states finite": all(bool(torch.isfinite(v).all()) for unit in units for v in unit["memory"].values()),
            "reported": optimizer.grace.stats()["wire_bytes"] - sum(p.spec.nbytes for p in plan.delegated),
            "sent": sum(nbytes for _, nbytes in sent),
            "units": compressed,
        }
    for row in rows[rank::size]:
        reference, worst, alike = Simulation(size, specs, config_of(row), framework="torch"), 0.0, True
        for step, found in enumerate(merged[label_of(row)]):
            expected = reference.step([_gradients(shapes, step, r) for r in range(size)])[rank]
            for n, x in found.items():
                alike &= bool(torch.equal(torch.isfinite(x), torch.isfinite(expected[n])))
                worst = max(worst, float((x - expected[n]).nan_to_num(0.0, 0.0, 0.0).abs().max()))
        results[label_of(row)] |= {"worst": worst, "as simulated": alike}
    return results


def _gradients(shapes: dict[str, Any], step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if rank == world_size() - 1:
        made["left.weight"][3, 5] += GIVEN[step]
    return made


def hook_order() -> dict[str, Any]:
    """Make gradients ready in one order on all ranks, and in opposite orders on odd and even ranks."""
    results = {}
    for name in ("topk", "powersgd", "signsgd", "randomk"):
        weights = []
        for opposite in (False, True):
            model = make_net()
            optimizer = wrap(model, {"compressor": name, **compressors.required(name), "bucket_bytes": 0, **EVERYTHING})
            # Residuals have an effect from the second step on.
            for x, y in batches(3, my_rank()):
                optimizer.zero_grad()
                branches = [model.left, model.right]
                h = model.features(x).detach()
                # Separate losses, so that this order of backward calls is the order of the hooks.
                losses = [F.cross_entropy(branch(h)[:, :10], y) for branch in branches]
                if opposite and my_rank() % 2:
                    losses.reverse()
                for loss in losses:
                    loss.backward()
                optimizer.step()
            weights.append(digest(model.parameters()))
        results[name] = weights
    return results


def unused_parameters() -> dict[str, Any]:
    """Leave one branch out on odd ranks, and on all ranks in every second step."""
    results = {}
    for name in ("none", "topk", "qsgd", "powersgd", "randomk"):
        model = make_net()
        optimizer = wrap(model, {"compressor": name, **compressors.required(name), **EVERYTHING})
        before = digest(model.right.parameters())
        for i, (x, y) in enumerate(batches(4, my_rank())):
            optimizer.zero_grad()
            F.cross_entropy(model(x, right=i % 2 == 0 and my_rank() % 2 == 0), y).backward()
            optimizer.step()
        results[name] = {
            "weights": digest(model.parameters()),
            "right moved": digest(model.right.parameters()) != before,
        }
    return results


def gradient_buffers() -> dict[str, Any]:
    """Exchange gradients whose memory other code uses before, during and after the exchange."""
    config = {"compressor": "topk", "compress_ratio": 0.1, "bucket_bytes": 0, **EVERYTHING}
    w = torch.nn.Parameter(torch.ones(20, 12))
    position = torch.nn.Parameter(torch.ones(20))
    model = torch.nn.Module()
    model.w, model.position = w, position
    optimizer = wrap(model, config, optimizer=torch.optim.SGD([w, position], lr=0.0))
    generator = torch.Generator().manual_seed(my_rank())
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
        # Changes of the merged gradient by the optimizer or the user must not reach the residual.
        position.grad.mul_(100.0)
    residual = optimizer.grace.run.state_dict()["tensors"]["position"]["memory"]["residual"]
    return {"norms": seen, "lost": float((sent + residual - sum(given)).abs().max()), "size": float(residual.norm())}


def accumulation() -> dict[str, Any]:
    """Compare backward_passes_per_step=2 with one backward pass of the summed losses."""
    weights = []
    for passes in (2, 1):
        model = make_net().double()
        config = {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}
        optimizer = wrap(model, config, backward_passes_per_step=passes)
        data = list(batches(8, my_rank()))
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
    """Compare op=Sum with op=Average on the same gradients, and use a predivision that must change nothing."""
    gradients = {}
    for label, arguments in {
        "average": {},
        "sum": {"op": total()},
        "predivide": {"gradient_predivide_factor": 4.0},
    }.items():
        model = make_net()
        optimizer = wrap(model, {"compressor": "qsgd", **EVERYTHING}, **arguments)
        x, y = next(batches(1, my_rank()))
        F.cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        gradients[label] = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    return {
        "sum": float((gradients["sum"] - gradients["average"] * world_size()).abs().max()),
        "predivide": float((gradients["predivide"] - gradients["average"]).abs().max()),
        "size": float(gradients["average"].abs().max()),
    }


def dtypes(rows: ROWS) -> dict[str, Any]:
    """Half, bfloat16 and double parameters."""
    results = {}
    for row in rows:
        dtype = getattr(torch, row["dtype"])
        model = torch.nn.Linear(64, 40, bias=False).to(dtype)
        with torch.no_grad():
            # Next to larger weights, 16 bits round small changes away.
            model.weight.zero_()
        optimizer = wrap(model, {"compressor": row["method"], **compressors.required(row["method"])})
        # The second step uses the states of the first.
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + my_rank())
            model.weight.grad = torch.randn(40, 64, generator=generator).to(dtype)
            optimizer.step()
        results[label_of(row)] = {
            "weights": digest(model.parameters()),
            "moved": bool((model.weight != 0).any()),
            "finite": bool(torch.isfinite(model.weight).all()),
            "dtype": model.weight.grad.dtype == dtype,
        }
    return results


def layouts() -> dict[str, Any]:
    """Train channels-last and frozen parameters."""
    model = make_net().to(memory_format=torch.channels_last)
    model.left.weight.requires_grad_(False)
    frozen = digest([model.left.weight])
    optimizer = wrap(model, {"compressor": "topk", **EVERYTHING})
    train(model, optimizer, 3)
    return {
        "weights": digest(model.parameters()),
        "kept": digest([model.left.weight]) == frozen,
        "planned": any(p.spec.name == "left.weight" for p in optimizer.grace.plan.assignments),
    }
