"""Scenarios about optimizers to which something was done before they were wrapped, run by each rank."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.adapters.torch.launched import my_rank
from tests.adapters.torch.model import batches, digest, make_net, outcome, sgd, train, wrap
from tests.support.covering import ALL

STEPS = 6
TOPK = {"compressor": "topk", "compress_ratio": 0.2}
# Every scheduler of PyTorch, as it changes the learning rate within a few steps.
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=10),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)]
    ),
    "SWALR": lambda o: SWALR(o, 0.002, anneal_epochs=4),
}


def known_schedulers() -> dict[str, list[str]]:
    """Return the names of PyTorch's schedulers, and of those that have a case."""
    found = {x for x in vars(lr_scheduler).values() if isinstance(x, type) and issubclass(x, lr_scheduler.LRScheduler)}
    names = {x.__name__ for x in found} - {"LRScheduler", "_LRScheduler"} | {"SWALR"}
    return {"known": sorted(names), "cases": sorted(SCHEDULERS)}


def schedulers() -> dict[str, Any]:
    """Train with each scheduler, made before and after the optimizer is wrapped, also across a checkpoint."""
    results: dict[str, Any] = {}
    for label, arguments in (("gradients", {}), ("local", {"local_steps": 2})):
        for name, make in SCHEDULERS.items():
            if not ALL and label == "local" and name != "OneCycleLR":
                continue
            results[f"{label}/{name}"] = [_scheduled(make, before, arguments) for before in (True, False)]
    return results


def _scheduled(make: Callable[..., Any], before: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train with a scheduler; load a checkpoint half-way, and go on from there."""
    model, saved, rates = make_net(), {}, []
    plain = sgd(model, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = make(plain) if before else None
        optimizer = wrap(model, TOPK, optimizer=plain, **arguments)
        scheduler = scheduler or make(optimizer)
        for i, (x, y) in enumerate(batches(STEPS, my_rank())):
            if i == STEPS // 2:
                saved = optimizer.state_dict()
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            rates.append(optimizer.param_groups[0]["lr"])
    return {
        "weights": digest(model.parameters()),
        "rates": rates,
        "exchanges": optimizer.grace.run.completed,
        "told": [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)],
    }


def prepared() -> dict[str, Any]:
    """Wrap optimizers with methods that were replaced, with hooks, and with states of earlier steps."""
    results: dict[str, Any] = {}
    for label, arguments in (("gradients", {}), ("local", {"local_steps": 2})):
        model = make_net()
        plain = sgd(model)
        calls: list[str] = []

        def note(method: Callable[..., Any], name: str, calls: list[str], *given: Any, **options: Any) -> Any:
            calls.append(name)
            return method(*given, **options)

        for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
            setattr(plain, name, functools.partial(note, getattr(plain, name), name, calls))
        plain.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        plain.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        optimizer = wrap(model, TOPK, optimizer=plain, **arguments)
        train(model, optimizer, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        usual = make_net()
        train(usual, wrap(usual, TOPK, **arguments), 2)
        results[label] = {"calls": calls, "weights": [digest(m.parameters()) for m in (model, usual)]}
        results[f"{label}, again"] = outcome(functools.partial(wrap, model, TOPK, optimizer=plain))
        # Momentum of earlier steps goes on, and so does the plain optimizer's view of groups and states.
        model = make_net()
        plain = sgd(model, momentum=0.9)
        with torch.no_grad():
            for p in itertools.chain(*(group["params"] for group in plain.param_groups)):
                p.grad = torch.ones_like(p)
        plain.step()
        optimizer = wrap(model, TOPK, optimizer=plain, **arguments)
        momentum = optimizer.state[model.head.bias]["momentum_buffer"].tolist()
        shared = optimizer.state is plain.state and optimizer.param_groups is plain.param_groups
        results[f"{label}, states"] = {"momentum": momentum, "shared": shared}
    return results
