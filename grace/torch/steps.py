"""Steps of optimizers in PyTorch: their watchers, and an optimizer as the core sees it."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from grace.core.config.recommended import Optimizer
from grace.core.errors import ConfigError


class Watcher(Protocol):
    """An object that is told of the steps of all optimizers of this process."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step of an optimizer."""


_watching: weakref.WeakSet[Watcher] = weakref.WeakSet()
# PyTorch calls it after each step of every optimizer of this process, once there is a watcher.
_hooked: list[Any] = []


def watch(watcher: Watcher) -> None:
    """Call `watcher.stepped(optimizer)` after each step of every optimizer, as long as the watcher lives."""
    _watching.add(watcher)
    if not _hooked:
        _hooked.append(register_optimizer_step_post_hook(_stepped))


def _stepped(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
    for watcher in list(_watching):
        watcher.stepped(optimizer)


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
