"""The transport over Horovod's PyTorch collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import horovod.torch as hvd
import torch

from grace.core.errors import ConfigError, StepError, WaitError
from grace.core.guards.started import Dropping, Started
from grace.core.guards.waiting import wait_until
from grace.core.transport.collectives import Collective
from grace.core.transport.transport import (
    Done,
    Handle,
    HandshakeTransport,
    known_local_size,
)
from grace.torch.tensors import Rows, start_gathering

# Waits for a handle of Horovod, and returns the result.
_Waiter: TypeAlias = Callable[[int], Any]


@dataclass(frozen=True)
class _Pending(Handle):
    """A Horovod handle."""

    handle: int
    waiter: _Waiter

    def wait(self) -> torch.Tensor:
        return self.waiter(self.handle)

    def arrived(self) -> bool:
        return bool(hvd.poll(self.handle))


class _GatherOfTwo(Handle):
    """A gather of two ranks' byte buffers of equal length, by an allreduce of their bits as 32-bit integers.

    Each rank subtracts its own buffer from the sum and gets the other's. Integers wrap around, so the result is exact.
    Gloo's allgather and alltoall of two ranks send in one direction at a time, its allreduce in both, which halves the
    time on a slow link.
    """

    def __init__(self, x: torch.Tensor, rank: int, waiter: _Waiter, options: dict[str, Any]) -> None:
        self._mine, self._rank, self._waiter = x, rank, waiter
        # The view as 32-bit integers needs whole ones, and memory that is aligned to them. pad() copies.
        if x.numel() % 4 or x.data_ptr() % 4:
            x = torch.nn.functional.pad(x, (0, -x.numel() % 4))
        self._words = x.view(torch.int32)
        self._handle = hvd.allreduce_async(self._words, op=hvd.Sum, **options)

    def wait(self) -> list[torch.Tensor]:
        other = self._waiter(self._handle).sub_(self._words).view(torch.uint8)[: self._mine.numel()]
        return [self._mine, other] if self._rank == 0 else [other, self._mine]

    def arrived(self) -> bool:
        return bool(hvd.poll(self._handle))


class HorovodTransport(HandshakeTransport):
    """Named asynchronous collectives of Horovod within one process set. `rank` is -1 outside the set.

    Raises ConfigError for a process set that is not registered with Horovod.
    """

    #: Starts the reduction of a gradient that stays dense, as another rank has, with zeros.
    start_delegated: Callable[[Mapping[str, Any]], Any]

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        if process_set.process_set_id is None or process_set.ranks is None:
            raise ConfigError(
                f"{process_set} is not registered with Horovod; "
                "pass it to hvd.init(process_sets=[...]) or hvd.add_process_set() first."
            )
        self._process_set = process_set
        self.connect()

    def connect(self) -> None:
        """Read rank and size from Horovod, which may have restarted with other ranks."""
        process_set = self._process_set
        self.size = len(process_set.ranks)
        self.rank = process_set.rank() if process_set.included() else -1
        if process_set.process_set_id == 0:
            self.local_size = known_local_size(hvd.rank(), hvd.cross_rank(), hvd.local_rank(), hvd.local_size())
        self.started = Started()
        # The call of `discard` that is under way, and whether it has timed out.
        self._dropping: Dropping | None = None
        self._missed = False

    def _start(self, collective: Collective, name: str) -> Handle:
        kind, (x, *_) = collective.kind, collective.buffers
        if not x.numel() and kind in ("allreduce", "broadcast"):
            return Done(x)
        waiter, options = self._waiter(name), {"name": name, "process_set": self._process_set}
        if kind == "allreduce":
            number = hvd.allreduce_async_(x, op={"sum": hvd.Sum, "max": hvd.Max}[collective.op], **options)
        elif kind == "broadcast":
            # Horovod expects the root as a global rank, even within a process set.
            number = hvd.broadcast_async_(x, self._process_set.ranks[collective.root], **options)
        elif kind == "alltoall":
            splits = torch.tensor([part.numel() for part in collective.buffers], dtype=torch.int32)
            number = hvd.alltoall_async(torch.cat(collective.buffers), splits=splits, **options)
        elif collective.equal and self.size == 2 and x.device.type == "cpu" and x.numel():
            return self.started.note(name, _call(collective), _GatherOfTwo(x, self.rank, waiter, options))
        else:
            number = hvd.allgather_async(x, **options)
        return self.started.note(name, _call(collective), _Pending(number, waiter))

    def _waiter(self, name: str) -> _Waiter:
        """Return the waiter of a collective that is to be started."""
        if self._missed:
            raise StepError(
                f"{self.explain(name)} cannot start, because discard() has timed out waiting for other ranks. Call "
                "discard() on all ranks first, or end the run."
            )

        def wait(handle: int) -> Any:
            wait_until(
                lambda: bool(hvd.poll(handle)),
                lambda: self.explain(name),
                rank=self.rank,
                size=self.size,
                timeout=self.timeout,
            )
            result = hvd.synchronize(handle)
            # After an alltoall, Horovod also returns how much came from each rank.
            return result[0] if isinstance(result, tuple) else result

        return wait

    def take_dense(self, tensor: str, handle: int) -> Handle:
        """Return the handle of a dense gradient that Horovod's optimizer has passed to an allreduce."""
        key = f"the gradient of '{tensor}'"
        return self.started.note(key, {"delegated": tensor}, _Pending(handle, self._waiter(key)))

    def reduce_rows(self, gradient: torch.Tensor, tensor: str, op: int, name: str) -> Handle:
        """Reduce a sparse gradient as Horovod's optimizer does, by two allgathers."""
        # Another key than that of a dense one: `discard` must finish both if the ranks differ.
        key = f"the sparse gradient of '{tensor}'"
        waiter = self._waiter(key)

        def gather(part: torch.Tensor, kind: str) -> Handle:
            return _Pending(hvd.allgather_async(part, name=f"{name}.{kind}", process_set=self._process_set), waiter)

        rows = Rows(gradient, self.size if op == hvd.Average else 1, gather)
        return self.started.note(key, {"delegated": tensor, "sparse_dim": gradient.sparse_dim()}, rows)

    def discard(self, name: str, step: int) -> list[int]:
        """Finish what only some ranks have started, on all ranks, and drop the results. Return the steps of all ranks.

        A rank starts with zeros what it lacks. It waits for twice the limit, because another rank may learn only at the
        end of its own limit that the call cannot complete. After an error, nothing else can be started, and the next
        call goes on where this one has stopped: Horovod cannot take back what it has announced to the others.
        """
        if self._dropping is None:
            gather = functools.partial(start_gathering, self)
            self._dropping = Dropping(self.started, self._start_like, gather, name, step, self.size)
        self._missed = False
        try:
            with self.twice_the_limit(), self.handshake_for("optimizer.grace.discard()"):
                steps = self._dropping.wait()
        except WaitError:
            self._missed = True
            raise
        except Exception:
            self._dropping = None
            raise
        self._dropping = None
        return steps

    def _start_like(self, name: str, call: Mapping[str, Any]) -> None:
        """Start with zeros what another rank has started."""
        if "delegated" in call:
            self.start_delegated(call)
            return
        dtype, lengths = getattr(torch, call["dtype"]), call["lengths"]
        zeros = torch.zeros(sum(lengths), dtype=dtype, device=call["device"]).split(lengths)
        self.start(Collective(call["kind"], zeros, call["op"], call["root"], call["equal"]), name)

    def gather_bytes(self, data: bytes, name: str) -> bytes:
        """Join the bytes of all ranks; see `HandshakeTransport.gather_bytes`."""
        return bytes(start_gathering(self, data, name).wait().tolist())


def _call(collective: Collective) -> dict[str, Any]:
    """Return what another rank needs to start the same collective, with buffers that need not be as long."""
    x = collective.buffers[0]
    return {
        "kind": collective.kind,
        "lengths": [part.numel() for part in collective.buffers],
        "dtype": str(x.dtype).removeprefix("torch."),
        "device": x.device.type,
        "op": collective.op,
        "root": collective.root,
        "equal": collective.equal,
    }
