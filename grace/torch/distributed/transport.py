"""The transport over process groups of torch.distributed."""

from __future__ import annotations

import collections
import itertools
import os
import socket
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# There is no public way to the rendezvous store.
from torch.distributed.distributed_c10d import _get_default_store

from grace.core.errors import ConfigError, GraceError, StepError, WaitError
from grace.core.guards.waiting import WARN_SECONDS, wait_until
from grace.core.transport.collectives import Reduction
from grace.core.transport.helper import Helper
from grace.core.transport.ordered import OrderedTransport, Phases, never_free
from grace.core.transport.transport import TIMEOUT, Handle, known_local_size
from grace.torch.distributed.waits import Waits
from grace.torch.tensors import start_gathering

# The bytes of the host name and the port of a store, as rank 0 tells them.
_HOST_BYTES, _PORT_BYTES = 256, 4
# The number of transports of each process group, which names the next one on all ranks.
_transports: collections.Counter[str] = collections.Counter()
# If a rank sends another one more, the ranks trade by a collective for each direction.
_SHORT_BYTES = 64 * 1024


class ProcessGroupTransport(OrderedTransport):
    """Collectives of torch.distributed on flat tensors among the ranks of `group`; all its ranks must create one.

    It has connections of its own, so it does not interfere with what the program exchanges at the same time. Headers
    and data on the CPU travel by Gloo. Data on a GPU travel by NCCL if the group uses NCCL for GPUs. A rank that waits
    longer than `timeout` seconds raises WaitError, whose message says what the other ranks wait for, and so does one
    whose partner has ended. Data on the CPU start when their headers have arrived, even while the program computes.
    `name` must differ between transports, and be equal on all ranks; without it, the transports of a group are
    numbered. `what` says what the handshake is for. The rendezvous is at `store`, or else at that of torch.distributed.
    Raises ConfigError outside of the group.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        timeout: float = TIMEOUT,
        name: str | None = None,
        store: Any = None,
        lanes: int = 2,
        what: str = "all ranks to make their transport, as grace.torch.DistributedOptimizer() does",
    ) -> None:
        super().__init__()
        self.timeout = timeout
        group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError("this process is not in the process group; call it only on the ranks of the group.")
        self.group = group.group_name
        self._on_gpu = "cuda:nccl" in dist.get_backend_config(group).split(",")
        # Collectives of NCCL that run at the same time may lock each other.
        self.lanes = 1 if self._on_gpu else lanes
        self.local_size = _local_size() if self.size == dist.get_world_size() else 0
        self.name = name or f"grace/{self.group}/{_transports[self.group]}"
        # By use and lane.
        self._groups: dict[tuple[str, int], Any] = {}
        #: How often the ranks have connected, or have failed to; equal on all of them when they are connected.
        self.connections = 0
        self._helper: Helper | None = None
        self.store = store
        if self.size > 1 and store is None:
            self.store = _get_default_store() or self._open_store(group, what)
        self._waits = Waits(self.store, self.group, self.rank, self.size)
        self._connect(what)
        if self.size > 1:
            # A callback of Gloo's own threads would need no polling, but aborts the process if it runs at its end.
            self._helper = Helper(self)
            # At the end of the transport or of the process, whichever comes first.
            weakref.finalize(self, self._helper.end)
        if name is None:
            _transports[self.group] += 1

    def _open_store(self, group: Any, what: str) -> Any:
        """Let rank 0 open a store, because the backend MPI has none, and tell the others its address."""
        limit = timedelta(seconds=self.timeout)
        root, store = dist.get_global_rank(group, 0), None
        address = torch.zeros(_HOST_BYTES + _PORT_BYTES, dtype=torch.uint8)
        try:
            if self.rank == 0:
                store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False, timeout=limit)
                packed = store.host.encode().ljust(_HOST_BYTES, b"\0") + store.port.to_bytes(_PORT_BYTES, "little")
                address = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            work = dist.broadcast(address, root, group=group, async_op=True)
            wait_until(work.is_completed, lambda: what, rank=self.rank, size=self.size, timeout=self.timeout)
            work.wait()
            if store is None:
                packed = bytes(address.tolist())
                host, port = packed[:_HOST_BYTES].rstrip(b"\0").decode(), packed[_HOST_BYTES:]
                store = dist.TCPStore(host, int.from_bytes(port, "little"), is_master=False, timeout=limit)
        except Exception as error:
            raise self._fail(error, lambda: what) from None
        return store

    def _connect(self, what: str) -> None:
        if self.size == 1:
            return
        try:
            # Connecting blocks until all ranks are there.
            store = self._rendezvous(what)
            # Own limits end waits. These connections need only a longer one.
            limit = timedelta(seconds=2 * self.timeout + 60)
            for use, lane in itertools.product(("headers", "cpu", "back"), range(self.lanes)):
                place = dist.PrefixStore(f"{use}/{lane}", store)
                self._groups[use, lane] = dist.ProcessGroupGloo(place, self.rank, self.size, limit)
            if self._on_gpu:
                place = dist.PrefixStore("cuda", store)
                self._groups["cuda", 0] = dist.ProcessGroupNCCL(place, self.rank, self.size, limit)
        except Exception as error:
            self._groups = {}
            raise self._fail(error, lambda: what) from None
        # What Gloo has not finished, with the end of the transport or of the process.
        self._works: list[Any] = []
        self._end = weakref.finalize(self, _free, self._groups, self._works)

    def _rendezvous(self, what: str) -> Any:
        """Wait until all ranks are here, and return a store that only they use, and only this time.

        A rank that gives up closes the place, so the others move on to the next one, where it comes if it tries again.
        """

        def arrive() -> Any:
            place = dist.PrefixStore(f"{self.name}/{self.connections}", self.store)
            self.connections += 1
            place.set(here[self.rank], "")
            return place

        here = [f"rank {rank}" for rank in range(self.size)]
        place = arrive()

        def end(how: str) -> bool:
            # The first rank decides.
            return bool(place.compare_set("end", "", how).decode() == "connected")

        def connected() -> bool:
            nonlocal place
            if not place.check(["end"]):
                return bool(place.check(here)) and end("connected")
            if end("connected"):
                return True
            place = arrive()
            return False

        try:
            self._until(connected, lambda: what)
        except WaitError:
            if not end("missed"):
                raise
        return place

    def gather_bytes(self, data: bytes, name: str) -> bytes:
        """Join the bytes of all ranks; see `HandshakeTransport.gather_bytes`."""
        return bytes(start_gathering(self, data, name).wait().tolist())

    def discard(self) -> None:
        """Drop all collectives that are under way, and any failure, on all ranks; waits for all of them.

        The ranks continue with new connections. After an error they can call it again.
        """
        # Another rank may still pass gradients to the old connections, which must not fail before it gets here.
        end = self._end if self._groups else None
        self._pending, self._failure, self._groups = [], None, {}
        # Ranks that are through close what they used beside it, and connect it anew.
        self._leave_others()
        with self.twice_the_limit():
            self._connect("all ranks to call discard()")
        if end is not None:
            end()

    def close(self) -> None:
        """Close the connections to other ranks; no collective can be started afterwards."""
        self._leave_others()
        self._disconnect()
        self._failure = StepError("the transport is closed and cannot start a collective; create another one.")

    def _disconnect(self) -> None:
        self._pending = []
        if self._groups:
            self._groups = {}
            self._end()

    # --- the phases of collectives ----------------------------------------------------------------------------------

    def _exchange(self, lane: int, header: bytes) -> Generator[Callable[[], bool], None, list[bytes]]:
        # Gloo's allgather is a ring, in which a header would wait for all ranks before it.
        mine = torch.frombuffer(bytearray(header * self.size), dtype=torch.uint8)
        headers = torch.empty_like(mine)
        yield self._done(self._groups["headers", lane].alltoall_base(headers, mine, [], []))
        joined = headers.numpy().tobytes()
        return [joined[i : i + len(header)] for i in range(0, len(joined), len(header))]

    def _of_data(self, x: torch.Tensor, lane: int) -> Any:
        return self._groups["cuda" if self._on_gpu and x.is_cuda else "cpu", lane]

    def _reduce(self, lane: int, x: torch.Tensor, op: Reduction) -> Phases:
        if len(x):
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
            yield self._done(self._of_data(x, lane).allreduce([x], options))
        return x

    def _gather(self, lane: int, x: torch.Tensor, lengths: Sequence[int], equal: bool) -> Phases:
        most = max(lengths)
        if self.size == 2 and x.device.type == "cpu":
            # Gloo's allgather needs equal lengths, and copies what it has received.
            other = 1 - self.rank
            sent, received, theirs = [0, 0], [0, 0], x.new_empty(lengths[other])
            sent[other], received[other] = len(x), len(theirs)
            yield from self._move(lane, x, theirs, sent, received, most)
            both = [x, theirs] if self.rank == 0 else [theirs, x]
            return both if equal else torch.cat(both)
        if not most:
            return x
        if 2 * min(lengths) < most:
            # Padding would send more than all that a rank with little to say has.
            result = x.new_empty(sum(lengths))
            yield from self._move(lane, x.repeat(self.size), result, [len(x)] * self.size, lengths, most)
            return result
        # All ranks must send equally much. Padding by nothing would copy.
        padded = x if len(x) == most else torch.nn.functional.pad(x, (0, most - len(x)))
        result = x.new_empty(self.size * most)
        yield self._done(self._of_data(x, lane).allgather([list(result.split(most))], [padded]))
        if min(lengths) == most:
            return result
        return torch.cat([row[:n] for row, n in zip(result.split(most), lengths, strict=True)])

    def _trade(self, lane: int, x: torch.Tensor, lengths: Sequence[Sequence[int]]) -> Phases:
        sent, received = lengths[self.rank], [row[self.rank] for row in lengths]
        result = x.new_empty(sum(received))
        yield from self._move(lane, x, result, sent, received, max(map(max, lengths)))
        return result

    def _move(
        self, lane: int, x: torch.Tensor, result: torch.Tensor, sent: Sequence[int], received: Sequence[int], most: int
    ) -> Generator[Callable[[], bool], None, None]:
        """Send the pieces of x to their ranks, and write what arrives to `result`, in rank order.

        `most` is the longest piece of all ranks. Before Gloo sends to a rank, that rank tells it that it is ready. If
        both send in one collective, this may wait behind the data of the other direction. So long pieces travel in a
        collective and over connections for each direction: from lower to higher ranks, and back.
        """
        if not most:
            return
        if x.device.type != "cpu" or most * x.element_size() <= _SHORT_BYTES:
            yield self._done(self._of_data(x, lane).alltoall_base(result, x, list(received), list(sent)))
            return
        rank, none = self.rank, [0] * self.size
        to_lower, own, to_higher = x.split([sum(sent[:rank]), sent[rank], sum(sent[rank + 1 :])])
        from_lower, kept, from_higher = result.split([sum(received[:rank]), received[rank], sum(received[rank + 1 :])])
        up = [*received[:rank], *none[rank:]], [*none[: rank + 1], *sent[rank + 1 :]]
        back = [*none[: rank + 1], *received[rank + 1 :]], [*sent[:rank], *none[rank:]]
        works = [
            self._groups["cpu", lane].alltoall_base(from_lower, to_higher, *up),
            self._groups["back", lane].alltoall_base(from_higher, to_lower, *back),
        ]
        kept.copy_(own)
        yield self._done(*works)

    def _join(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(xs))

    def _spread(self, lane: int, x: torch.Tensor, root: int) -> Phases:
        result = x if self.rank == root else torch.empty_like(x)
        if len(x):
            options = dist.BroadcastOptions()
            options.rootRank = root
            yield self._done(self._of_data(x, lane).broadcast([result], options))
        return result

    def _done(self, *works: Any) -> Callable[[], bool]:
        """Return a function that tells whether all works are done. It raises the error of a work."""
        self._works[:] = [*(other for other in self._works if not other.is_completed()), *works]

        def done() -> bool:
            if not all(work.is_completed() for work in works):
                return False
            for work in works:
                work.wait()
            return True

        return done

    def _follow(self, what: Callable[[], str], phases: Phases, lane: int) -> Handle:
        handle = super()._follow(what, phases, lane)
        # Data of a GPU belong to the stream of the thread that trains.
        if self._helper is not None and not self._on_gpu:
            self._helper.wake()
        return handle

    # --- waits --------------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception, what: Callable[[], str]) -> Exception:
        if not isinstance(error, GraceError):
            reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
            error = WaitError(
                f"rank {self.rank} of {self.size} cannot complete {what()}: {reason}. Another rank has failed or "
                "ended: correct it there, or let all ranks make the same calls."
            )
        self._disconnect()
        return super()._fail(error, what)

    def _until(self, step: Callable[[], bool], what: Callable[[], str]) -> None:
        # Long before the first warning, which then knows of ranks that came a little later.
        report_at, reported = time.monotonic() + min(WARN_SECONDS, self.timeout / 2) / 5, False

        def look() -> bool:
            nonlocal reported
            if not reported and time.monotonic() >= report_at:
                reported = True
                self._waits.report(what())
            return step()

        others = self._waits.of_others
        try:
            wait_until(look, what, rank=self.rank, size=self.size, timeout=self.timeout, others=others)
        except WaitError as error:
            # The others see it until this rank connects again.
            raise self._fail(error, what) from None
        self._waits.clear()


def _local_size() -> int:
    """Return the number of ranks on each node, as torchrun tells it; 0 if it does not."""
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = [int(os.environ[name]) for name in names if name in os.environ]
    return known_local_size(*found) if len(found) == len(names) else 0


def _free(groups: dict[tuple[str, int], Any], works: list[Any]) -> None:
    """Free groups, and so end their threads: one that drops a tensor while Python exits would abort the process.

    Groups with work that may not complete are never freed: freeing one waits for it, and Gloo cannot abort it.
    """
    if not all(work.is_completed() for work in works):
        never_free([*groups.values(), *works])
    works.clear()
    groups.clear()
