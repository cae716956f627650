"""PyTorch's tensors as the core describes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch

from grace.core.errors import StepError
from grace.core.spec import TensorSpec
from grace.core.transport.transport import Handle, Transport


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


def own_part(p: torch.Tensor) -> torch.Tensor:
    """Return the elements of a parameter that this rank holds: all, or its part of a sharded one; shares memory."""
    return p.detach().to_local() if is_sharded(p) else p.detach()


def spec_of(name: str, p: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Return the spec of the gradient of a parameter, which is exchanged in its own dtype if no other is given."""
    return TensorSpec(name, tuple(p.shape), str(dtype or p.dtype).removeprefix("torch."), str(p.device))


def start_gathering(transport: Transport, data: bytes, name: str) -> Handle:
    """Start to join the bytes of all ranks in rank order, as a tensor."""
    return transport.allgather(torch.frombuffer(bytearray(data), dtype=torch.uint8), name=name)


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """Return the name of each parameter of the optimizer. Without given names, names are made from indices.

    Raises ValueError, as Horovod does, if parameters have no name or share one.
    """
    groups = optimizer.param_groups
    if named_parameters is None:
        return {p: f"parameter.{i}.{j}" for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
    names = {p: name for name, p in named_parameters}
    unnamed = sum(p not in names for group in groups for p in group["params"])
    if unnamed or len(set(names.values())) < len(names):
        raise ValueError(
            f"named_parameters: {unnamed} parameters of the optimizer have no name, and names must be unique; "
            "pass model.named_parameters()."
        )
    return {p: names[p] for group in groups for p in group["params"]}
