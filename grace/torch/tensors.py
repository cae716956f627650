"""PyTorch's tensors as the core describes them."""

from __future__ import annotations

import torch

from grace.core.values.spec import TensorSpec
from grace.core.values.unit import Assignment


def spec_of(name: str, p: torch.Tensor) -> TensorSpec:
    """Return the spec of the gradient of a parameter."""
    return TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device))


def is_delegated(item: Assignment) -> bool:
    """Return whether the library reduces the tensor: it is dense and not bfloat16, which Horovod cannot add."""
    return item.dense and item.spec.dtype != "bfloat16"
