"""The promises of every exchange, kept by an optimizer of PyTorch on each rank."""

from __future__ import annotations

from typing import Any

import torch

import grace.torch
from tests.adapters.torch.launched import my_rank
from tests.support.promises import TENSORS, Run, gradients, joined, kept


def promises() -> dict[str, str]:
    return kept(_run)


def promises_of_a_model() -> dict[str, str]:
    """Return the same of a plain model that is registered."""
    return kept(_run_of_a_model)


def _run_of_a_model(config: dict[str, Any]) -> Run:
    model = torch.nn.ParameterDict({name: torch.ones(shape) for name, shape in TENSORS.items()})
    exchange = grace.torch.register(model, config)

    def step(number: int) -> bytes:
        model.zero_grad()
        given = gradients(number, my_rank())
        sum((p * torch.from_numpy(given[name])).sum() for name, p in model.items()).backward()
        with torch.no_grad():
            for p in model.values():
                p -= 0.1 * p.grad
        return joined({name: p.grad for name, p in model.items()})

    return Run(exchange, step)


def _run(config: dict[str, Any]) -> Run:
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in TENSORS.items()}
    plain = torch.optim.SGD(parameters.values(), lr=0.1)
    optimizer = grace.torch.DistributedOptimizer(plain, parameters.items(), config)

    def step(number: int) -> bytes:
        optimizer.zero_grad()
        given = gradients(number, my_rank())
        sum((p * torch.from_numpy(given[name])).sum() for name, p in parameters.items()).backward()
        optimizer.step()
        return joined({name: p.grad for name, p in parameters.items()})

    return Run(optimizer.grace, step)
