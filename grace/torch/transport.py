"""Transport over Horovod's PyTorch collectives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import horovod.torch as hvd
import torch

from grace.core.errors import ConfigError
from grace.core.transport import Handle, Transport


@dataclass(frozen=True)
class _Done(Handle):
    """A collective that needed no communication."""

    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.result

    def arrived(self) -> bool:
        return True


@dataclass(frozen=True)
class _Pending(Handle):
    """A Horovod handle."""

    handle: int

    def wait(self) -> torch.Tensor:
        return hvd.synchronize(self.handle)

    def arrived(self) -> bool:
        return bool(hvd.poll(self.handle))


class _BFloat16Sum(Handle):
    """Sum of bfloat16 tensors, which Horovod cannot add: exchange slices, add them in float32, gather the sums.

    The bytes per rank are those of a ring allreduce. The second collective starts in wait(); ranks wait for their
    buckets in the order of the plan, so it cannot deadlock.
    """

    def __init__(self, x: torch.Tensor, name: str, process_set: Any, size: int) -> None:
        self._n, self._name, self._process_set, self._size = x.numel(), name, process_set, size
        self._slice = -(-x.numel() // size)
        padded = torch.nn.functional.pad(x, (0, self._slice * size - x.numel()))
        splits = torch.full((size,), 2 * self._slice, dtype=torch.int32)
        data = padded.view(torch.uint8)
        self._handle = hvd.alltoall_async(data, splits=splits, name=f"{name}.slices", process_set=process_set)

    def wait(self) -> torch.Tensor:
        slices, _ = hvd.synchronize(self._handle)
        rows = slices.view(torch.bfloat16).view(self._size, self._slice)
        total = rows.float().sum(dim=0).to(torch.bfloat16)
        gathered = hvd.allgather_async(
            total.view(torch.uint8), name=f"{self._name}.sums", process_set=self._process_set
        )
        return hvd.synchronize(gathered).view(torch.bfloat16)[: self._n]


class HorovodTransport(Transport):
    """Named asynchronous collectives of Horovod within one process set; `rank` is -1 outside of it.

    Raises ConfigError for a process set that Horovod does not know.
    """

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        if process_set.process_set_id is None or process_set.ranks is None:
            raise ConfigError(
                f"{process_set} is unknown to Horovod; "
                "pass it to hvd.init(process_sets=[...]) or hvd.add_process_set() first."
            )
        self.size = len(process_set.ranks)
        self.rank = process_set.rank() if process_set.included() else -1
        self._process_set = process_set

    def allreduce(self, x: torch.Tensor, *, op: Literal["sum", "max"], name: str) -> Handle:
        if x.numel() == 0 or self.size == 1:
            return _Done(x)
        if x.dtype == torch.bfloat16 and op == "sum":
            return _BFloat16Sum(x, name, self._process_set, self.size)
        reduction = {"sum": hvd.Sum, "max": hvd.Max}[op]
        return _Pending(hvd.allreduce_async_(x, name=name, op=reduction, process_set=self._process_set))

    def allgather(self, x: torch.Tensor, *, name: str) -> Handle:
        if self.size == 1:
            return _Done(x)
        return _Pending(hvd.allgather_async(x, name=name, process_set=self._process_set))

    def broadcast(self, x: torch.Tensor, *, root: int, name: str) -> Handle:
        if x.numel() == 0 or self.size == 1:
            return _Done(x)
        # Horovod counts roots in global ranks, also within a process set.
        global_root = self._process_set.ranks[root]
        return _Pending(hvd.broadcast_async_(x, global_root, name=name, process_set=self._process_set))

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """The JSON-able values of all ranks, in the order of the ranks; blocks."""
        text = json.dumps(value).encode()
        data = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        received = bytes(self.allgather(data, name=name).wait().tolist())
        values, start = [], 0
        for _ in range(self.size):
            length = int.from_bytes(received[start : start + 8], "little")
            values.append(json.loads(received[start + 8 : start + 8 + length]))
            start += 8 + length
        return values
