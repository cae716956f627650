"""PyTorch's parameters and gradients as the core describes them, and hooks that keep no object alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from grace.core.errors import StepError
from grace.core.spec import TensorSpec
from grace.core.transport.transport import Handle, Transport


def parameters_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model, but for those that DDP ignores, by their names in the plain model."""
    ignored: Collection[str] = ()
    if isinstance(model, DistributedDataParallel):
        model, ignored = model.module, model.parameters_to_ignore
    # torch.compile() adds this to names.
    return {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters() if name not in ignored}


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


def refuse_sparse(name: str, gradient: torch.Tensor, instead: str = "Exclude") -> None:
    """Raise StepError if the gradient of a compressed tensor is sparse; `instead` begins what else can be done."""
    if gradient.is_sparse:
        raise StepError(
            f"tensor '{name}' has a sparse gradient, and compressors need dense gradients. {instead} the tensor from "
            f"compression by a rule, for example rules=[{{'match': '{name}', 'compressor': 'none'}}]."
        )


def resolve_signs(p: torch.Tensor) -> None:
    """Let the memory of a gradient have its signs: PyTorch may only have noted them, and memory is what is sent."""
    if p.grad is not None and (p.grad.is_conj() or p.grad.is_neg()):
        p.grad = p.grad.resolve_conj().resolve_neg()


def own_part(p: torch.Tensor) -> torch.Tensor:
    """Return the elements of a parameter that this rank holds: all, or its part of a sharded one; shares memory."""
    return p.detach().to_local() if is_sharded(p) else p.detach()


def spec_of(name: str, p: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Return the spec of the gradient of a parameter, which is exchanged in its own dtype if no other is given."""
    return TensorSpec(name, tuple(p.shape), str(dtype or p.dtype).removeprefix("torch."), str(p.device))


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method as long as its object lives.

    A hook lives as long as its parameter, and Python never frees an object that a hook and its parameter own together.
    """
    alive = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = alive()
        if bound is not None:
            bound(*arguments)

    return call


class Rows(Handle):
    """The sum of a sparse gradient over all ranks, divided by a number: its indices and values are gathered.

    `gather(part, kind)` starts to join flat parts.
    """

    def __init__(self, gradient: torch.Tensor, divisor: int, gather: Callable[[torch.Tensor, str], Handle]) -> None:
        self._like, self._divisor = gradient, divisor
        indices, values = gradient._indices().t().reshape(-1), gradient._values().reshape(-1)
        self._handles = gather(indices, "indices"), gather(values, "values")

    def wait(self) -> torch.Tensor:
        indices, values = (handle.wait() for handle in self._handles)
        rows = indices.view(-1, self._like.sparse_dim()).t()
        summed = values.view(rows.shape[1], *self._like._values().shape[1:]) / self._divisor
        # Otherwise PyTorch warns that it leaves out its checks.
        return torch.sparse_coo_tensor(rows, summed, self._like.shape, check_invariants=False)


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
