"""The transport over MPI's collectives, by mpi4py."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from grace.core.errors import StepError, WaitError
from grace.core.guards.waiting import wait_until
from grace.core.spec import Array
from grace.core.transport.collectives import Reduction
from grace.core.transport.ordered import OrderedTransport, Phases, never_free
from grace.core.transport.transport import TIMEOUT
from grace.mpi.notes import Notes

# A rank that waits looks after this many seconds whether another has said that it will not come: until then, what that
# one has sent before may still arrive.
NOTES_SECONDS = 3.0


class Connection:
    """Duplicates of a communicator, made by all its ranks together, and what the ranks tell each other on the first."""

    def __init__(self, comm: Any, step: int, lanes: int) -> None:
        self.comms: list[Any] = []
        self._lanes = lanes
        self._steps = np.full(comm.Get_size(), step, np.int64)
        self._requests = self._started(comm, np.array([step], np.int64))
        self._request: Any = next(self._requests, None)

    def _started(self, comm: Any, step: Array) -> Iterator[Any]:
        if comm.Get_size() == 1:
            return
        # In each lane one for headers and one for data. Notes and collectives on one do not disturb each other.
        for _ in range(2 * self._lanes):
            duplicate, request = comm.Idup()
            yield request
            self.comms.append(duplicate)
        yield self.comms[0].Iallgather(step, self._steps)

    @property
    def steps(self) -> list[int]:
        """The steps of all ranks, when they are connected."""
        return [int(step) for step in self._steps]

    def advance(self) -> bool:
        """Start what can be started; return whether all ranks are connected."""
        while self._request is not None and self._request.Test():
            self._request = next(self._requests, None)
        return self._request is None


class MPITransport(OrderedTransport):
    """MPI collectives on flat NumPy arrays, within duplicates of `comm`; all its ranks must create one.

    A rank that waits longer than `timeout` seconds raises WaitError, and so does one that waits while another rank has
    failed or ended. Data move only during calls of the transport. A collective may send up to 2 GiB per rank and
    receive as much.
    """

    def __init__(self, comm: Any = MPI.COMM_WORLD, *, timeout: float = TIMEOUT) -> None:
        super().__init__()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.timeout = timeout
        self._parent = comm
        self._notes: Notes | None = None
        # The connection that is under way.
        self._connecting: Connection | None = None
        self._connect(0, "all ranks to make their transport")
        self.local_size = self._local_size()

    def _connect(self, step: int, what: str) -> list[int]:
        """Connect all ranks, and return their steps.

        After an error, the next call waits for what this one has started: MPI matches it with the calls of the others.
        """
        connection = self._connecting = self._connecting or Connection(self._parent, step, self.lanes)
        try:
            self._until(connection.advance, lambda: what)
        except WaitError as error:
            never_free([connection])
            raise self._fail(error, lambda: what) from None
        self._comms, self._failure, self._connecting = connection.comms, None, None
        if self._comms:
            self._notes = Notes(self._comms[0])
        return connection.steps

    def _local_size(self) -> int:
        """Return the number of ranks on each node if all have equally many, numbered node by node, else 0."""
        if self.size == 1:
            return 1
        names = np.zeros((self.size, MPI.MAX_PROCESSOR_NAME), np.uint8)
        mine = np.frombuffer(MPI.Get_processor_name().encode().ljust(names.shape[1], b"\0"), np.uint8)
        # A split by shared memory would block without a limit.
        request = self._comms[0].Iallgather(mine, names)
        self._until(request.Test, lambda: "the names of all nodes")
        nodes = [name.tobytes() for name in names]
        local_size = nodes.count(nodes[0])
        blocks = [set(nodes[i : i + local_size]) for i in range(0, self.size, local_size)]
        known = len(set(nodes)) * local_size == self.size and all(len(block) == 1 for block in blocks)
        return local_size if known else 0

    def gather_bytes(self, data: bytes, name: str) -> bytes:
        """Join the bytes of all ranks; see `HandshakeTransport.gather_bytes`."""
        return bytes(self.allgather(np.frombuffer(data, np.uint8), name=name).wait().tobytes())

    def discard(self, step: int) -> list[int]:
        """Drop all collectives that are under way, and any failure, on all ranks; waits for all of them.

        Returns the steps of all ranks. They continue on new communicators. The old ones are not freed, because some of
        their collectives will never be complete. After an error they can call it again.
        """
        notes, self._notes = self._notes, None
        if notes is not None:
            notes.send("drops the step")
            notes.close()
        never_free(self._pending)
        self._pending = []
        with self.twice_the_limit():
            return self._connect(step, "all ranks to call discard()")

    def close(self) -> None:
        """Free the communicators, on all ranks; no collective can be started afterwards."""
        if self._notes is not None:
            self._notes.close()
        if self._failure is None:
            for comm in self._comms:
                comm.Free()
            self._failure = StepError("the transport is closed and cannot start a collective; create another one.")

    # --- the phases of collectives ----------------------------------------------------------------------------------

    def _exchange(self, lane: int, header: bytes) -> Generator[Callable[[], bool], None, list[bytes]]:
        headers = np.empty((self.size, len(header)), np.uint8)
        yield self._comms[2 * lane].Iallgather(np.frombuffer(header, np.uint8), headers).Test
        return [row.tobytes() for row in headers]

    def _reduce(self, lane: int, x: Array, op: Reduction) -> Phases:
        result, how = np.empty_like(x), MPI.SUM if op == "sum" else MPI.MAX
        yield self._comms[2 * lane + 1].Iallreduce(np.ascontiguousarray(x), result, how).Test
        return result

    def _gather(self, lane: int, x: Array, lengths: Sequence[int], equal: bool) -> Phases:
        x, result = np.ascontiguousarray(x), np.empty(sum(lengths), x.dtype)
        receiving = [result.view(np.uint8), [length * x.itemsize for length in lengths], None, MPI.BYTE]
        yield self._comms[2 * lane + 1].Iallgatherv([x.view(np.uint8), MPI.BYTE], receiving).Test
        return result

    def _trade(self, lane: int, x: Array, lengths: Sequence[Sequence[int]]) -> Phases:
        sent, received = lengths[self.rank], [row[self.rank] for row in lengths]
        result = np.empty(sum(received), x.dtype)
        counts = [[length * x.itemsize for length in lengths] for lengths in (sent, received)]
        sending = [x.view(np.uint8), counts[0], None, MPI.BYTE]
        receiving = [result.view(np.uint8), counts[1], None, MPI.BYTE]
        yield self._comms[2 * lane + 1].Ialltoallv(sending, receiving).Test
        return result

    def _join(self, xs: Sequence[Array]) -> Array:
        return np.concatenate(xs)

    def _spread(self, lane: int, x: Array, root: int) -> Phases:
        result = np.ascontiguousarray(x) if self.rank == root else np.empty_like(x)
        yield self._comms[2 * lane + 1].Ibcast([result.view(np.uint8), MPI.BYTE], root).Test
        return result

    # --- waits --------------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception, what: Callable[[], str]) -> Exception:
        # MPI reads and writes their buffers until its own end, and mpi4py finalizes it after Python has freed all.
        never_free(self._pending)
        return super()._fail(error, what)

    def _until(self, step: Callable[[], bool], what: Callable[[], str]) -> None:
        looked = 0.0

        def pause(waited: float) -> None:
            nonlocal looked
            # Other ranks may share this core.
            os.sched_yield()
            if self._notes is not None and waited >= looked + NOTES_SECONDS:
                looked = waited
                absent = [f"rank {rank} {text}" for rank, text in self._notes.received().items()]
                if absent:
                    raise WaitError(
                        f"rank {self.rank} of {self.size} cannot complete {what()}: {'; '.join(absent)}. Correct it "
                        "on that rank, or let all ranks call the exchange equally often."
                    )

        wait_until(step, what, rank=self.rank, size=self.size, timeout=self.timeout, pause=pause)
