"""Gradients that stay dense: plain allreduces of many at once, or an allgather of the rows of sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from grace.core.state.run import Run
from grace.core.transport.transport import Handle
from grace.torch import library
from grace.torch.distributed.transport import ProcessGroupTransport
from grace.torch.tensors import Rows

if TYPE_CHECKING:
    from grace.torch.distributed.library import TorchDistributed


class _Bucket:
    """Gradients of one dtype and device, end to end in a buffer, that one allreduce sums."""

    def __init__(self, name: str, buffer: torch.Tensor) -> None:
        self.name, self.buffer, self.used = name, buffer, 0
        self.handle: Handle | None = None
        # The sum, and how many gradients have not been taken from it.
        self.total: torch.Tensor | None = None
        self.left = 0
        self._stream: Any = None

    def room(self, x: torch.Tensor) -> bool:
        """Return whether a flat tensor may be added."""
        alike = (x.dtype, x.device) == (self.buffer.dtype, self.buffer.device)
        return alike and self.used + len(x) <= len(self.buffer)

    def add(self, x: torch.Tensor) -> slice:
        """Copy a flat tensor to the end, and return its place."""
        if x.is_cuda:
            # The backward pass may compute gradients on several streams, and the last one starts the allreduce.
            stream = torch.cuda.current_stream(x.device)
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
                self.buffer.record_stream(stream)
            self._stream = stream
        place = slice(self.used, self.used + len(x))
        self.buffer[place].copy_(x)
        self.used, self.left = place.stop, self.left + 1
        return place

    def start(self, transport: ProcessGroupTransport) -> None:
        """Start the allreduce."""
        self.handle = transport.allreduce(self.buffer[: self.used], op="sum", name=self.name)

    def wait(self) -> torch.Tensor:
        """Return the sum."""
        if self.total is None:
            assert self.handle is not None
            self.total = self.handle.wait()
        return self.total


class Delegated(library.Delegated):
    """The exchange of dense gradients, in the order of the plan.

    Neighbours share an allreduce of at most `bucket_bytes`. They have a transport of their own. All ranks must create
    this object, and call `forget`, at the same time.
    """

    def __init__(
        self,
        over: TorchDistributed,
        run: Run,
        names: Mapping[torch.nn.Parameter, str],
        settings: library.Settings = library.PLAIN,
        bucket_bytes: int = 0,
    ) -> None:
        self._library, self._run, self._names = over, run, names
        self._average, self._predivide = over.averages(settings.op), settings.gradient_predivide_factor
        self._sparse_as_dense, self._bucket_bytes = settings.sparse_as_dense, bucket_bytes
        self._transport = self._open_early()
        # By tensor, the gradients that wait for their turn, and what waits for the results of the others.
        self._arrived: dict[str, torch.Tensor] = {}
        self._waits: dict[str, Callable[[torch.Tensor | None], torch.Tensor]] = {}
        self._started: set[str] = set()
        # The bucket that takes further gradients, and the buffers that nobody reads any more: new pages take longer
        # than a copy.
        self._filling: _Bucket | None = None
        self._free: list[torch.Tensor] = []

    def _open(self, what: str) -> ProcessGroupTransport:
        transport = self._library.connect_dense(what)
        transport.explain = self._explain
        return transport

    def _open_early(self) -> ProcessGroupTransport | None:
        """Return a transport if a stage has dense tensors, so that no backward pass waits for a rank that discards."""
        dense = any(plan.delegated for _, plan in self._run.stages)
        return self._open("the connections for tensors that stay dense") if dense else None

    def _explain(self, name: str) -> str:
        return f"step {self._run.step}, the gradient of '{name}'"

    def forget(self) -> None:
        """Forget what was started in a step that was dropped, and connect to the other ranks again."""
        # What was started may still be written to the buffers.
        for collection in (self._arrived, self._waits, self._started, self._free):
            collection.clear()
        self._filling = None
        old, self._transport = self._transport, None
        if old is not None:
            old.close()
        self._transport = self._open_early()

    def start(self, p: torch.nn.Parameter) -> tuple[Callable[..., torch.Tensor], None]:
        """Start the exchange of a gradient, after those of all tensors before it.

        Returns a function that waits for the result. It takes a tensor of the gradient's shape that a dense result may
        be written to.
        """
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
        if len(self._started) == len(self._run.plan.delegated):
            self._send()
        return lambda out=None: self._result(name, out), None

    def _send(self) -> None:
        """Start the allreduce of the bucket that was being filled."""
        if self._filling is not None:
            assert self._transport is not None
            self._filling.start(self._transport)
            self._filling = None

    def _result(self, name: str, out: torch.Tensor | None) -> torch.Tensor:
        result = self._waits.pop(name)(out)
        if not self._waits:
            self._started.clear()
        return result

    def _begin(self, name: str, gradient: torch.Tensor) -> Callable[[torch.Tensor | None], torch.Tensor]:
        # After a change, a tensor may stay dense that was compressed.
        self._transport = transport = self._transport or self._open(self._explain(name))
        if gradient.is_sparse:
            self._send()

            def gather(part: torch.Tensor, kind: str) -> Handle:
                return transport.allgather(part, name=f"{name}.{kind}")

            rows = Rows(gradient, transport.size if self._average else 1, gather)
            return lambda _: rows.wait()
        x = _real(gradient.detach()).contiguous().view(-1)
        if self._filling is not None and not self._filling.room(x):
            self._send()
        if self._filling is None:
            self._filling = _Bucket(name, self._buffer(x))
        # A copy, because the backward pass may still need the gradient.
        bucket, place = self._filling, self._filling.add(x)
        if self._predivide != 1.0:
            bucket.buffer[place] /= self._predivide
        if bucket.used == len(bucket.buffer):
            self._send()
        return lambda out: self._fetch(bucket, place, gradient, out)

    def _buffer(self, x: torch.Tensor) -> torch.Tensor:
        """Return a buffer for a bucket that begins with a flat tensor."""
        dense = sum(item.spec.nbytes for item in self._run.plan.delegated)
        length = max(len(x), min(dense, self._bucket_bytes) // x.element_size())
        for i, buffer in enumerate(self._free):
            if (buffer.dtype, len(buffer)) == (x.dtype, length):
                return self._free.pop(i)
        return torch.empty(length, dtype=x.dtype, device=x.device)

    def _fetch(self, bucket: _Bucket, place: slice, gradient: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Return the result of a gradient in a bucket, which is free when all were written elsewhere."""
        if bucket is self._filling:
            self._send()
        total = bucket.wait()[place].view(_real(gradient).shape)
        result = total if out is None else _real(out)
        if self._average:
            assert self._transport is not None
            torch.div(total, self._transport.size, out=result)
        elif out is not None:
            result.copy_(total)
        if self._predivide != 1.0:
            result *= self._predivide
        if out is None:
            return torch.view_as_complex(result) if gradient.is_complex() else result
        bucket.left -= 1
        # On a GPU, a buffer may be in use by other streams, and PyTorch keeps its memory anyway.
        if not bucket.left and bucket.buffer.device.type == "cpu":
            self._free.append(bucket.buffer)
        return out


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
