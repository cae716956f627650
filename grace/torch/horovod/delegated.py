"""Gradients that stay dense: Horovod's optimizer reduces them, and grace waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grace.core.errors import StepError
from grace.torch import library
from grace.torch.horovod.transport import HorovodTransport


class Delegated(library.Delegated):
    """The start of reductions by Horovod's optimizer, under names that contain `prefix`."""

    def __init__(self, wrapped: Any, transport: HorovodTransport, prefix: str) -> None:
        self._wrapped, self._transport = wrapped, transport
        self._names: dict[torch.nn.Parameter, str] = wrapped._parameter_names
        self._parameters = {name: p for p, name in self._names.items()}
        # Horovod names its collectives after the parameters. Two models may have the same names.
        wrapped._parameter_names = {p: f"{prefix}/{name}" for p, name in self._names.items()}
        self._horovod_start = wrapped._allreduce_grad_async
        self._prefix = prefix
        transport.start_delegated = self._start_with_zeros
        # By tensor, the sparse dimensions of gradients that are sparse.
        self._sparse_dims: dict[str, int] = {}

    def agree_on_sparse(self) -> None:
        # Horovod would wait for the others forever: the collectives of dense and of sparse gradients have other names.
        if self._wrapped.sparse_as_dense:
            return
        mine = {
            name: p.grad.sparse_dim() if p.grad.is_sparse else 0
            for p, name in self._names.items()
            if p.grad is not None
        }
        everyone = self._transport.gather_objects(mine, f"{self._prefix}/sparse", "the first step")
        for name, dims in [item for theirs in everyone for item in theirs.items()]:
            if any(theirs.get(name, dims) != dims for theirs in everyone):
                raise StepError(
                    f"the gradient of '{name}' is sparse on some ranks and dense on others; compute it the same way on "
                    "all ranks, or pass sparse_as_dense=True."
                )
            if dims:
                self._sparse_dims[name] = dims

    def start(self, p: torch.nn.Parameter) -> Any:
        """Start the reduction of a gradient; return what Horovod's `_allreduce_grad_async` may return."""
        name = self._names[p]
        if p.grad is None and name in self._sparse_dims:
            p.grad = _without_rows(p, self._sparse_dims[name])
        if p.grad is not None and p.grad.is_sparse and not self._wrapped.sparse_as_dense:
            collective = self._wrapped._parameter_names[p]
            return self._transport.reduce_rows(p.grad, name, self._wrapped.op, collective).wait, None
        handle, context = self._horovod_start(p)
        return self._transport.take_dense(name, handle).wait, context

    def _start_with_zeros(self, call: Mapping[str, Any]) -> None:
        """Start a reduction that other ranks have started and this one has not, with a gradient of zeros."""
        p = self._parameters[call["delegated"]]
        p.grad = _without_rows(p, call["sparse_dim"]) if "sparse_dim" in call else torch.zeros_like(p)
        self.start(p)


def _without_rows(p: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """Return a sparse gradient of a parameter that has no rows."""
    indices = torch.zeros(sparse_dim, 0, dtype=torch.int64, device=p.device)
    values = p.new_zeros(0, *p.shape[sparse_dim:])
    return torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)
