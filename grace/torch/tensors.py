"""PyTorch's tensors as the core describes them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from grace.core.values.errors import StepError
from grace.core.values.spec import TensorSpec

# The parameters of registered models, each with its exchange.
_registered: Any = WeakIdKeyDictionary()


def note_registered(parameters: Iterable[torch.Tensor], exchange: object) -> None:
    """Take note that an exchange of `grace.torch.register` has the gradients of these parameters."""
    for p in parameters:
        _registered[p] = weakref.ref(exchange)


def is_registered(p: torch.Tensor) -> bool:
    """Return whether a registered model that still exists has the parameter."""
    exchange = _registered.get(p)
    return exchange is not None and exchange() is not None


def is_sharded(p: torch.Tensor) -> bool:
    """Return whether the tensor is a `DTensor`, of which each rank has a part."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(p, kind)


def refuse_unfrozen(frozen: Mapping[str, torch.Tensor], when: str, instead: str) -> None:
    """Raise StepError if one of the parameters that were frozen at the time `when` has a gradient now."""
    for name, p in frozen.items():
        if p.requires_grad and p.grad is not None:
            raise StepError(
                f"parameter '{name}' was frozen when {when}, and has a gradient now. It is not exchanged, so the ranks "
                f"would train apart. {instead}"
            )


def spec_of(name: str, p: torch.Tensor) -> TensorSpec:
    """Return the spec of the gradient of a parameter."""
    return TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device))
