"""Steps of optimizers in PyTorch: their watchers, and an optimizer as the core sees it."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from grace.core.config.recommended import Optimizer


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
