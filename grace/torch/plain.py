"""`PlainMethods`: the methods of an optimizer before it was wrapped."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# By these marks, a learning-rate scheduler finds that it counts the steps of an optimizer.
_COUNTED = ("_wrapped_by_lr_sched", "_with_counter")


class PlainMethods(NamedTuple):
    """The methods of an optimizer before it was wrapped, some of which others may have replaced on the instance."""

    step: Callable[..., Any]
    zero_grad: Callable[..., None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> PlainMethods:
        """Return the methods that the optimizer has now."""
        return cls(*(getattr(optimizer, name) for name in cls._fields))

    def replace_step(self, optimizer: Any, step: Callable[..., Any]) -> None:
        """Replace the step of an optimizer by `step(self, closure=None)`, which calls the plain one."""
        for mark in _COUNTED:
            if hasattr(self.step, mark):
                setattr(step, mark, getattr(self.step, mark))
        # A bound method, because schedulers that are made later read its __func__.
        optimizer.step = types.MethodType(step, optimizer)
