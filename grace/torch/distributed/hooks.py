"""`Hooked`: an optimizer whose hooks start the exchange of gradients during the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from grace.core.errors import StepError
from grace.torch.adapter import give_own_class

Wait = Callable[[], torch.Tensor]


class Hooked:
    """Mixin for the class of an optimizer; see `hook`. Its methods are those of Horovod's optimizer."""

    _allreduce_grad_async: Callable[[torch.nn.Parameter], tuple[Wait, Any]]
    _parameter_names: Mapping[torch.nn.Parameter, str]
    # What waits for a gradient, or None while further backward passes will add to it.
    _handles: dict[torch.nn.Parameter, tuple[Wait | None, Any]]
    # The number of backward passes that are missing until the exchange of a gradient.
    _missing: dict[torch.nn.Parameter, int]
    _synchronized = False
    _should_synchronize = True
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are added before they are exchanged."""
        self.backward_passes_per_step = passes
        self._missing = dict.fromkeys(self._missing, passes)

    def _passed(self, p: torch.nn.Parameter) -> None:
        """Take note of a gradient; start its exchange after the last backward pass of the step."""
        if not self._missing[p]:
            raise StepError(
                f"the gradient of '{self._parameter_names[p]}' was computed more than "
                f"{self.backward_passes_per_step} times before step(); raise backward_passes_per_step to add the "
                "gradients of several backward passes."
            )
        self._missing[p] -= 1
        self._handles[p] = (None, None) if self._missing[p] else self._allreduce_grad_async(p)

    def synchronize(self) -> None:
        """Complete the exchange: all gradients are then those of all ranks."""
        for p in self._missing:
            if self._handles.get(p, (None, None))[0] is None:
                self._handles[p] = self._allreduce_grad_async(p)
        for p, (wait, _) in self._handles.items():
            assert wait is not None
            result = wait()
            assert p.grad is not None
            if p.grad.is_sparse:
                p.grad = result if result.is_sparse else result.to_sparse()
            else:
                p.grad.set_(result)
        self._handles.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._synchronized = True


def hook(optimizer: Any, names: Mapping[torch.nn.Parameter, str], backward_passes_per_step: int) -> None:
    """Change an optimizer in place so that hooks pass each finished gradient to its `_allreduce_grad_async`."""
    give_own_class(optimizer, Hooked)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    optimizer._parameter_names, optimizer._handles = names, {}
    optimizer._missing = dict.fromkeys(trained, 0)
    optimizer.set_backward_passes_per_step(backward_passes_per_step)
    # A hook lives as long as its parameter, which must not keep the optimizer.
    alive = weakref.ref(optimizer)

    def passed(p: torch.nn.Parameter) -> None:
        hooked = alive()
        if hooked is not None:
            hooked._passed(p)

    for p in trained:
        p.register_post_accumulate_grad_hook(passed)
