"""Gradients that stay dense: a plain allreduce of each, or an allgather of the rows of sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from grace.core.state.run import Run
from grace.core.transport.transport import Handle
from grace.torch.distributed.transport import ProcessGroupTransport


class Delegated:
    """The exchange of dense gradients, in the order of the plan.

    They have a transport of their own, because their order among the buckets differs between ranks. `connect(what)`
    makes it. All ranks must create this object, and call `forget`, at the same time.
    """

    def __init__(
        self,
        connect: Callable[[str], ProcessGroupTransport],
        run: Run,
        names: Mapping[torch.nn.Parameter, str],
        *,
        average: bool,
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        self._connect, self._run, self._names = connect, run, names
        self._average, self._predivide, self._sparse_as_dense = average, predivide, sparse_as_dense
        self._transport = self._open_early()
        # By tensor, the gradients that wait for their turn, and what waits for the results of the others.
        self._arrived: dict[str, torch.Tensor] = {}
        self._waits: dict[str, Callable[[], torch.Tensor]] = {}
        self._started: set[str] = set()

    def _open(self, what: str) -> ProcessGroupTransport:
        transport = self._connect(what)
        transport.explain = self._explain
        assert isinstance(self._run.transport, ProcessGroupTransport)
        transport.join_waits(self._run.transport)
        return transport

    def _open_early(self) -> ProcessGroupTransport | None:
        """Return a transport if a stage has dense tensors, so that no backward pass waits for a rank that discards."""
        dense = any(plan.delegated for _, plan in self._run.stages)
        return self._open("the connections for tensors that stay dense") if dense else None

    def _explain(self, name: str) -> str:
        return f"step {self._run.step}, the gradient of '{name}'"

    def agree_on_sparse(self) -> None:
        """Do nothing: the transport finds collectives that differ."""

    def forget(self) -> None:
        """Forget what was started in a step that was dropped, and connect to the other ranks again."""
        for collection in (self._arrived, self._waits, self._started):
            collection.clear()
        old, self._transport = self._transport, None
        if old is not None:
            old.close()
        self._transport = self._open_early()

    def start(self, p: torch.nn.Parameter) -> tuple[Callable[[], torch.Tensor], None]:
        """Start the exchange of a gradient, after those of all tensors before it."""
        name = self._names[p]
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = gradient
        self._arrived[name] = gradient.to_dense() if gradient.is_sparse and self._sparse_as_dense else gradient
        # The backward pass reaches the last tensors first.
        for item in reversed(self._run.plan.delegated):
            if item.spec.name in self._started:
                continue
            if item.spec.name not in self._arrived:
                break
            self._started.add(item.spec.name)
            self._waits[item.spec.name] = self._begin(item.spec.name, self._arrived.pop(item.spec.name))
        return lambda: self._result(name), None

    def _result(self, name: str) -> torch.Tensor:
        result = self._waits.pop(name)()
        if not self._waits:
            self._started.clear()
        return result

    def _begin(self, name: str, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        # After a change, a tensor may stay dense that was compressed.
        self._transport = transport = self._transport or self._open(self._explain(name))
        size = transport.size
        if gradient.is_sparse:
            return _begin_rows(transport, name, gradient, size if self._average else 1)
        # A copy, because the backward pass may still need the buffer.
        x = gradient.detach().clone(memory_format=torch.contiguous_format).view(-1)
        if gradient.is_complex():
            x = torch.view_as_real(x).view(-1)
        if self._predivide != 1.0:
            x /= self._predivide
        handle = transport.allreduce(x, op="sum", name=name)

        def wait() -> torch.Tensor:
            total = handle.wait()
            if self._average:
                total /= size
            if self._predivide != 1.0:
                total *= self._predivide
            if gradient.is_complex():
                total = torch.view_as_complex(total.view(-1, 2))
            return total.view(gradient.shape)  # type: ignore[no-any-return]

        return wait


def _begin_rows(
    transport: ProcessGroupTransport, name: str, gradient: torch.Tensor, divisor: int
) -> Callable[[], torch.Tensor]:
    indices, values = gradient._indices(), gradient._values()
    parts = {"indices": indices.t().reshape(-1), "values": values.reshape(-1)}
    handles: dict[str, Handle] = {
        kind: transport.allgather(part, name=f"{name}.{kind}") for kind, part in parts.items()
    }

    def wait() -> torch.Tensor:
        of_all: dict[str, Any] = {kind: handle.wait() for kind, handle in handles.items()}
        rows = of_all["indices"].view(-1, len(indices)).t()
        summed = of_all["values"].view(-1, *values.shape[1:]) / divisor
        # Otherwise PyTorch warns that it leaves out its checks.
        return torch.sparse_coo_tensor(rows, summed, gradient.shape, check_invariants=False)

    return wait
