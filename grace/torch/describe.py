"""Optimizers of PyTorch as the core sees them."""

from __future__ import annotations

from typing import Any

import torch

from grace.core.config.recommended import Optimizer
from grace.core.errors import ConfigError


def describe(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Describe an optimizer by the largest momentum of its parameter groups; Adam's first beta is momentum, too."""
    momenta = [group.get("momentum") or next(iter(group.get("betas") or ()), 0.0) for group in optimizer.param_groups]
    return Optimizer.of(type(optimizer), float(max(momenta, default=0.0)))


def check_optimizer(optimizer: Any, where: str) -> None:
    """Raise TypeError or ConfigError unless it is an optimizer of PyTorch that takes one step per call, not wrapped."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{where}: expected a torch.optim.Optimizer, received {type(optimizer).__qualname__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{where}: LBFGS is not supported, because it evaluates its closure several times per step and grace "
            "exchanges gradients once per step; use another optimizer."
        )
    if hasattr(optimizer, "_allreduce_grad_async") or hasattr(optimizer, "grace"):
        raise ConfigError(f"{where}: the optimizer is already wrapped; pass the plain optimizer.")
