"""Gradients that stay dense: Horovod's optimizer reduces them, and grace waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grace.torch.horovod.transport import HorovodTransport


class Delegated:
    """The start of reductions by Horovod's optimizer, under names that contain `prefix`."""

    def __init__(self, wrapped: Any, transport: HorovodTransport, prefix: str) -> None:
        self._wrapped, self._transport = wrapped, transport
        self._names: dict[torch.nn.Parameter, str] = wrapped._parameter_names
        self._parameters = {name: p for p, name in self._names.items()}
        # Horovod names its collectives after the parameters. Two models may have the same names.
        wrapped._parameter_names = {p: f"{prefix}/{name}" for p, name in self._names.items()}
        self._horovod_start = wrapped._allreduce_grad_async

    def start(self, p: torch.nn.Parameter) -> Any:
        """Start the reduction of a gradient; return what Horovod's `_allreduce_grad_async` may return."""
        name = self._names[p]
        if p.grad is not None and p.grad.is_sparse and not self._wrapped.sparse_as_dense:
            collective = self._wrapped._parameter_names[p]
            return self._transport.delegated_rows(p.grad, name, self._wrapped.op, collective).wait, None
        handle, context = self._horovod_start(p)
        return self._transport.delegated(name, handle).wait, context

    def forget(self) -> None:
        """Do nothing: the transport itself knows which collectives are under way."""

    def start_with_zeros(self, call: Mapping[str, Any]) -> None:
        """Start a reduction that other ranks have started and this one has not, with a gradient of zeros."""
        p = self._parameters[call["delegated"]]
        p.grad = torch.zeros_like(p)
        if "sparse_dim" in call:
            indices = torch.zeros(call["sparse_dim"], 0, dtype=torch.int64, device=p.device)
            values = p.new_zeros(0, *p.shape[call["sparse_dim"] :])
            p.grad = torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)
        self.start(p)
