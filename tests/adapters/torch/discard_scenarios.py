"""Scenarios about steps that fail or are dropped, and the rollback, run by each rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import grace.torch
from grace.core.compressors.powersgd import PowerSGD
from grace.core.compressors.topk import TopK
from grace.core.memories.residual import Residual
from grace.core.step.unit_step import UnitStep
from tests.adapters.torch.launched import GROUPS, Group, barrier, by_torchrun, everyone, my_rank, transport_of
from tests.adapters.torch.model import batches, digest, make_net, outcome, sgd, train, wrap

# One collective per tensor, so that some are complete and others not begun when a step fails.
LAYERS = {"granularity": "layer", "bucket_bytes": 0}
# Time limit of a rank that waits, in seconds.
SHORT = 2
# That of a rank for which no other comes.
LONE = 1
Attempt = Callable[[torch.nn.Module, Any], None]


def backward(model: torch.nn.Module, optimizer: Any) -> None:
    """Compute gradients that belong to no step, of a batch that nothing else uses."""
    x, y = next(batches(1, my_rank(), seed=7))
    F.cross_entropy(model(x), y).backward()


def failing(kind: type, method: str, ranks: tuple[int, ...], call: int, *, step: bool = True) -> Attempt:
    """Return an attempt at a step in which a method raises an error on some ranks, in its call of that number."""

    def attempt(model: torch.nn.Module, optimizer: Any) -> None:
        real, calls = getattr(kind, method), 0

        def fail(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if my_rank() in ranks and calls == call:
                raise ZeroDivisionError("for this test")
            return real(*arguments)

        with mock.patch.object(kind, method, fail):
            backward(model, optimizer)
            if step:
                optimizer.step()

    return attempt


def _slow(call: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.2)
        return call(*arguments)

    return slow


def synchronized(model: torch.nn.Module, optimizer: Any) -> None:
    """Exchange gradients and apply none of them."""
    backward(model, optimizer)
    optimizer.synchronize()


def begun_but_on_rank_1(model: torch.nn.Module, optimizer: Any) -> None:
    """Drop a step, and begin the next one on all ranks but one."""
    backward(model, optimizer)
    optimizer.grace.discard()
    if my_rank() != 1:
        backward(model, optimizer)


def completed_but_on_rank_1(model: torch.nn.Module, optimizer: Any) -> None:
    """Fail in a merge on rank 1, when the other ranks have completed the exchange."""
    real = TopK.merge

    def fail(*arguments: Any) -> Any:
        if my_rank() == 1:
            barrier()
            raise ZeroDivisionError("for this test")
        return real(*arguments)

    with mock.patch.object(TopK, "merge", fail):
        synchronized(model, optimizer)
    barrier()


TOPK = {"compressor": "topk", "compress_ratio": 0.2, "check_replicas": 2}
POWERSGD = {"compressor": "powersgd", "compress_rank": 2, "check_replicas": 1}
ATTEMPTS: dict[str, tuple[dict[str, Any], Attempt]] = {
    # Dense tensors, which Horovod exchanges, are on their way as well.
    "compress, others wait": ({**TOPK, **LAYERS, "timeout": SHORT}, failing(Residual, "terms", (1,), 2)),
    "compress": ({**TOPK, **LAYERS}, failing(Residual, "terms", (1,), 1, step=False)),
    "merge": ({**TOPK, **LAYERS}, failing(TopK, "merge", (0, 1, 2, 3), 2)),
    "merge, one rank": ({**TOPK, **LAYERS}, completed_but_on_rank_1),
    "proposal": ({**POWERSGD, **LAYERS}, failing(UnitStep, "_check_proposal", (0,), 2, step=False)),
    "negotiated": ({**POWERSGD, **LAYERS, "timeout": SHORT}, failing(PowerSGD, "compress", (0,), 1)),
    "no error": (TOPK, backward),
    "no error, dense": ({"compressor": "none"}, backward),
    "one rank has not begun": ({"compressor": "none", "timeout": SHORT}, begun_but_on_rank_1),
    "synchronized": ({**TOPK, "memory": "dgc"}, synchronized),
}


def discarded() -> dict[str, Any]:
    """Drop steps in several ways, and compare the training with one that never saw them."""
    results = {}
    for label, (config, attempt) in ATTEMPTS.items():
        weights, errors = [], {}
        for interrupted in (False, True):
            model = make_net()
            optimizer = wrap(model, config, optimizer=sgd(model, momentum=0.0))
            train(model, optimizer, 2)
            if interrupted:
                optimizer.zero_grad()
                # Ranks that wait in it are to give up.
                limit = LONE if config.get("timeout") == SHORT else optimizer.grace.transport.timeout
                with mock.patch.object(optimizer.grace.transport, "timeout", limit):
                    errors["attempt"] = outcome(lambda a=attempt, m=model, o=optimizer: a(m, o))
                if label not in ("synchronized", "merge, one rank", "one rank has not begun"):
                    errors["zero_grad"] = outcome(optimizer.zero_grad)
                    errors["load"] = outcome(lambda o=optimizer: o.load_state_dict(o.state_dict()))
                if errors["attempt"]:
                    errors["step"] = outcome(optimizer.step)
                optimizer.grace.discard()
            train(model, optimizer, 2, start=2)
            weights.append([digest(model.parameters()), optimizer.grace.run.step])
        results[label] = {"weights": weights[1], "equal": weights[0] == weights[1], "errors": errors}
    return results


def lone_discards() -> dict[str, Any]:
    """Let single ranks time out in discard(), one after another, until all call it, twice; then train on."""
    results: dict[str, Any] = {}
    for label, group in {"all": everyone(), **{str(group.ranks): group for group in GROUPS}}.items():
        if group.included:
            results[label] = _discarded_alone(group)
    if by_torchrun():
        results["ddp"] = _discarded_alone(everyone(), ddp=True)
    return results


def _discarded_alone(group: Group, ddp: bool = False) -> dict[str, Any]:
    ranks = list(group.ranks)
    meet, weights, errors = functools.partial(transport_of(group).gather_objects, 0, "meet", "the test"), [], []
    for interrupted in (False, True):
        model = make_net()
        optimizer: Any = sgd(model, momentum=0.0)
        if ddp:
            forward: Any = DistributedDataParallel(model)
            exchange = grace.torch.register(forward, TOPK)
        else:
            forward, optimizer = model, wrap(model, TOPK, optimizer=optimizer, **group.argument)
            exchange = optimizer.grace
        train(forward, optimizer, 2)
        for alone in ((ranks[0], ranks[-1]), (ranks[-1], ranks[-1])) if interrupted else ():
            optimizer.zero_grad()
            if not ddp:
                backward(forward, optimizer)
            for rank in alone:
                meet()
                if my_rank() == rank:
                    # No other rank comes. Only here: on a busy machine, four ranks need longer to meet.
                    with mock.patch.object(exchange.transport, "timeout", 0.1):
                        errors.append(outcome(exchange.discard))
                    go_on = functools.partial(backward, forward, optimizer) if ddp else optimizer.step
                    errors.append(outcome(go_on))
            meet()
            exchange.discard()
        train(forward, optimizer, 2, start=2)
        weights.append([digest(model.parameters()), exchange.run.step])
    return {"weights": weights[1], "equal": weights[0] == weights[1], "errors": errors}


def discarded_with_options() -> dict[str, Any]:
    """Drop a step of optimizers with further arguments, on some ranks before its exchange began."""
    results = {}
    embedding = {"compressor": "topk", "rules": [{"match": "weight", "compressor": "none"}], "default_rules": False}

    def rows(model: torch.nn.Module, optimizer: Any, number: int) -> None:
        model(torch.arange(number, number + 4 + my_rank())).square().sum().backward()

    def images(model: torch.nn.Module, optimizer: Any, number: int) -> None:
        x, y = next(batches(1, my_rank(), seed=number))
        F.cross_entropy(model(x), y).backward()

    cases: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
        "views": (make_net, images, {**TOPK, **LAYERS}, {"gradient_as_bucket_view": True}),
        "passes": (make_net, images, TOPK, {"backward_passes_per_step": 2}),
        "local": (make_net, images, TOPK, {"local_steps": 2}),
        "sparse": (_embedding, rows, embedding, {}),
    }
    for label, (make, go, config, arguments) in cases.items():
        passes = arguments.get("backward_passes_per_step", 1)
        weights = []
        for interrupted in (False, True):
            model = make()
            optimizer = wrap(model, config, optimizer=sgd(model, momentum=0.0), **arguments)
            for number in range(4):
                if interrupted and number == 2:
                    optimizer.zero_grad()
                    # Rank 0 is in discard() meanwhile, and must not have closed the connections.
                    with mock.patch.object(Residual, "terms", _slow(Residual.terms)):
                        for _ in range(passes if my_rank() else 0):
                            go(model, optimizer, 9)
                    if label == "local" and my_rank():
                        optimizer.step()
                    optimizer.grace.discard()
                optimizer.zero_grad()
                for i in range(passes):
                    go(model, optimizer, 10 * number + i)
                optimizer.step()
            weights.append(digest(model.parameters()))
        results[label] = {"weights": weights[1], "equal": weights[0] == weights[1]}
    return results


def discarded_with_a_scaler() -> dict[str, Any]:
    """Drop a step of scaled gradients at every point, and compare with a training that never saw it.

    The scale grows after every second step.
    """
    results: dict[str, Any] = {}
    for label in ("backward", "unscaled", "overflow", "error in unscale_", "error in step"):
        ends, errors = [], ""
        for interrupted in (False, True):
            model, scaler = make_net(), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            config = {**TOPK, **LAYERS}
            optimizer = wrap(model, config, optimizer=sgd(model, momentum=0.0), grad_scaler=scaler)
            for number in range(5):
                if interrupted and number == 3:
                    optimizer.zero_grad()
                    errors = outcome(lambda m=model, o=optimizer, s=scaler, at=label: _scaled_attempt(m, o, s, at))
                    optimizer.grace.discard()
                optimizer.zero_grad()
                _scaled_backward(model, scaler, number)
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            ends.append([digest(model.parameters()), scaler.get_scale(), optimizer.grace.run.step])
        results[label] = {"weights": ends[1], "equal": ends[0] == ends[1], "error": errors}
    return results


def discarded_without_rollback() -> dict[str, Any]:
    """Drop a step by hand and by a scaler: the norms of residuals before and after it, and the weights at the end."""
    results: dict[str, Any] = {}
    for label in ("discard", "begun by one rank", "scaler"):
        model, scaler = make_net(), torch.amp.GradScaler("cpu", init_scale=64.0)
        config = {**TOPK, **LAYERS, "rollback": False}
        optimizer = wrap(model, config, optimizer=sgd(model, momentum=0.0), grad_scaler=scaler)
        norms, moved = [], []
        for number in range(5):
            before = digest(model.parameters())
            optimizer.zero_grad()
            dropped = number == 2
            overflows = dropped and label == "scaler" and my_rank() == 1
            if not dropped or label != "begun by one rank" or my_rank() == 0:
                _scaled_backward(model, scaler, number, float("inf") if overflows else 1.0)
            if dropped and label != "scaler":
                if label == "discard":
                    optimizer.synchronize()
                    norms.append(_norms(optimizer))
                optimizer.grace.discard()
            else:
                scaler.step(optimizer)
                scaler.update()
            norms.append(_norms(optimizer))
            moved.append(before != digest(model.parameters()))
        results[label] = {"norms": norms, "moved": moved, "weights": digest(model.parameters())}
    return results


def _norms(optimizer: Any) -> list[float]:
    return [float(state["residual"].norm()) for state in optimizer.grace.run.memories().values() if state]


def _scaled_backward(model: torch.nn.Module, scaler: Any, number: int, factor: float = 1.0) -> None:
    x, y = next(batches(1, my_rank(), seed=number))
    scaler.scale(factor * F.cross_entropy(model(x), y)).backward()


def _scaled_attempt(model: torch.nn.Module, optimizer: Any, scaler: Any, label: str) -> None:
    """Begin a step, and stop where the label says."""
    overflows = label == "overflow" and my_rank() == 1
    _scaled_backward(model, scaler, 9, float("inf") if overflows else 1.0)
    if label == "backward":
        return
    calls = 0

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError("for this test")
        return merge(*arguments)

    merge = TopK.merge
    with mock.patch.object(TopK, "merge", fail if "error" in label else merge):
        if label == "error in step":
            scaler.step(optimizer)
        scaler.unscale_(optimizer)


def _embedding() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Embedding(64, 32, sparse=True)


def parted() -> dict[str, Any]:
    """Let one rank fail when the others apply the step already, and go on from a checkpoint."""
    model = make_net()
    optimizer = wrap(model, {**TOPK, **LAYERS}, optimizer=sgd(model, momentum=0.0))
    train(model, optimizer, 2)
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    backward(model, optimizer)
    optimizer.synchronize()
    if my_rank() != 1:
        with optimizer.skip_synchronize():
            optimizer.step()
    discarded = outcome(optimizer.grace.discard)
    model.load_state_dict(before)
    optimizer.load_state_dict(saved)
    train(model, optimizer, 2, start=2)
    weights, fresh = digest(model.parameters()), make_net()
    train(fresh, wrap(fresh, {**TOPK, **LAYERS}, optimizer=sgd(fresh, momentum=0.0)), 4)
    return {"discarded": discarded, "weights": weights, "equal": weights == digest(fresh.parameters())}


def waits() -> dict[str, Any]:
    """Make calls on one rank only. Return what it and the others are told, and whether they train on together."""
    first, results, config = my_rank() == 0, {}, {**TOPK, **LAYERS, "timeout": SHORT}
    told: list[str] = []
    model, twin = make_net(), make_net()
    optimizer, other = wrap(model, config), wrap(twin, {"compressor": "none", "timeout": SHORT})
    train(model, optimizer, 1)
    train(twin, other, 1)
    cases: dict[str, Callable[[], Any]] = {
        "change": lambda: optimizer.grace.change(compress_ratio=0.5) if first else train(model, optimizer, 1, start=1),
        "one more step": lambda: train(model, optimizer, 1, start=1) if first else None,
        "one more dense step": lambda: train(twin, other, 1, start=1) if first else None,
        "order": lambda: train(model, optimizer, 1, start=1) if first else train(twin, other, 1, start=1),
    }
    for label, call in cases.items():
        told.clear()
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            tell = mock.patch.object(
                logging.getLogger("grace"), "warning", lambda *words, t=told: t.append(words[0] % words[1:])
            )
            stack.enter_context(tell)
            for exchange in (optimizer.grace, other.grace):
                stack.enter_context(mock.patch.object(exchange.transport, "timeout", LONE))
            error = outcome(call)
        results[label] = {"error": error, "told": list(told), "seconds": time.monotonic() - began}
        optimizer.grace.discard()
        other.grace.discard()
    train(model, optimizer, 1, start=1)
    train(twin, other, 1, start=1)
    late = make_net()
    began = time.monotonic()
    lone = {**config, "timeout": LONE}
    error = outcome(lambda: None if first else wrap(late, lone))
    results["wrap"] = {"error": error, "told": [], "seconds": time.monotonic() - began}
    barrier()
    if first or by_torchrun():
        # Over Horovod, the other rank's message is still there.
        wrap(late, lone)
    results["weights"] = digest([*model.parameters(), *twin.parameters()])
    return results
