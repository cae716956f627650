"""The transport over MPI's collectives, by mpi4py."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from grace.core.exchange.collectives import Reduction
from grace.core.exchange.transport import TIMEOUT, Handle, MeetingTransport
from grace.core.guards.waiting import wait_until
from grace.core.values.errors import MismatchError, StepError, WaitError
from grace.core.values.spec import Array
from grace.mpi.notes import Notes

logger = logging.getLogger("grace")

# A rank that waits looks after this many seconds whether another has said that it will not come: until then, what that
# one has sent before may still arrive.
NOTES_SECONDS = 3.0

# Header of every collective: its length, a digest of its description, and the beginning of the description.
_HEADER_BYTES, _TEXT_BYTES = 128, 104


def _abandon(handles: Sequence[Any]) -> None:
    """Keep the buffers of collectives that cannot complete: MPI reads and writes them until its own end.

    mpi4py finalizes MPI after Python has freed all objects. So nothing may ever free these.
    """
    for handle in handles:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


# Rank and size among all processes; they give the files of several communicators different names.
_WORLD = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()

_Phases = Generator[MPI.Request, None, Array]


class _Collective(Handle):
    """Collective under way through its phases, each of which is an MPI request."""

    def __init__(
        self,
        what: Callable[[], str],
        phases: _Phases,
        progress: Callable[[Callable[[], bool], Callable[[], str]], None],
    ) -> None:
        self._what, self._phases, self._progress = what, phases, progress
        self._request = next(phases)
        self.phase = 0
        self.done = False
        self._result: Array = None

    def advance(self, limit: float) -> None:
        """Advance through the phases that are done, up to the phase `limit`."""
        while not self.done and self.phase < limit and self._request.Test():
            try:
                self._request = next(self._phases)
                self.phase += 1
            except StopIteration as end:
                self._result, self.done = end.value, True

    def wait(self) -> Array:
        self._progress(lambda: self.done, self._what)
        return self._result


class _Done(Handle):
    """Finished collective of a single rank."""

    def __init__(self, result: Array) -> None:
        self._result = result

    def wait(self) -> Array:
        return self._result


class MPITransport(MeetingTransport):
    """MPI collectives on flat NumPy arrays, within duplicates of `comm`; all its ranks must create one.

    MPI matches collectives by the order of the calls, so all ranks must start them in the same order. Before each
    collective the ranks exchange 128 bytes that describe it; if they differ, every rank raises MismatchError and no
    data move. A rank that waits longer than `timeout` seconds raises WaitError, and so does one that waits while
    another rank has failed or ended. Data move only during calls of the transport. A collective may send up to 2 GiB
    per rank and receive as much.
    """

    ordered = True

    def __init__(self, comm: Any = MPI.COMM_WORLD, *, timeout: float = TIMEOUT) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.timeout = timeout
        self._parent = comm
        self._pending: list[_Collective] = []
        self._failure: Exception | None = None
        self._notes: Notes | None = None
        self._connect("all ranks to make their transport")
        self.local_size = self._local_size()

    def _connect(self, what: str) -> None:
        # One communicator per phase: within each, all ranks follow the order of starting, and a rank that is behind may
        # still be in another phase. Notes and collectives on one communicator do not disturb each other.
        self._comms: list[Any] = []
        for _ in range(3 if self.size > 1 else 0):
            duplicate, request = self._parent.Idup()
            self._until(request.Test, lambda: what)
            self._comms.append(duplicate)
        if self._comms:
            self._notes = Notes(self._comms[0])

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

    def allreduce(self, x: Array, *, op: Reduction, name: str) -> Handle:
        """Reduce x over all ranks; see `Transport.allreduce`."""
        if self.size == 1:
            return _Done(x)
        return self._start(f"allreduce {op} {x.dtype}", name, x, lambda x, lengths: self._reduce(x, op), equal=True)

    def allgather(self, x: Array, *, name: str, equal: bool = False) -> Handle:
        """Join the buffers of all ranks; see `Transport.allgather`. The lengths travel ahead."""
        if self.size == 1:
            return _Done(x)
        return self._start(f"allgather {x.dtype}", name, x, self._gather, equal=False)

    def alltoall(self, xs: Sequence[Array], *, name: str) -> Handle:
        """Send a buffer to each rank; see `Transport.alltoall`. The lengths travel ahead."""
        if self.size == 1:
            return _Done(xs[0])
        lengths = [x.size for x in xs]
        return self._start(
            f"alltoall {xs[0].dtype}", name, np.concatenate(xs), lambda x, _: self._trade(x, lengths), equal=False
        )

    def broadcast(self, x: Array, *, root: int, name: str) -> Handle:
        """Send the root's buffer to every rank; see `Transport.broadcast`."""
        if self.size == 1:
            return _Done(x)
        what = f"broadcast {x.dtype} from rank {root}"
        return self._start(what, name, x, lambda x, lengths: self._spread(x, root), equal=True)

    def gather_bytes(self, data: bytes, name: str) -> bytes:
        """Join the bytes of all ranks; see `MeetingTransport.gather_bytes`."""
        return bytes(self.allgather(np.frombuffer(data, np.uint8), name=name).wait().tobytes())

    def discard(self) -> None:
        """Drop all collectives that are under way, and any failure, on all ranks; waits for all of them.

        The ranks continue on new communicators. The old ones are not freed, because some of their collectives will
        never be complete.
        """
        notes, self._notes = self._notes, None
        if notes is not None:
            notes.send("drops the step")
            notes.close()
        _abandon(self._pending)
        self._pending, self._failure = [], None
        # Another rank may learn only at the end of its own limit that it waits in vain.
        self.timeout *= 2
        try:
            self._connect("all ranks to call discard()")
        finally:
            self.timeout /= 2

    def close(self) -> None:
        """Free the communicators, on all ranks; no collective can be started afterwards."""
        if self._notes is not None:
            self._notes.close()
        if self._failure is None:
            for comm in self._comms:
                comm.Free()
            self._failure = StepError("the transport is closed and cannot start a collective; create another one.")

    # --- the phases of a collective ---------------------------------------------------------------------------------

    def _start(
        self, kind: str, name: str, x: Array, body: Callable[[Array, Sequence[int]], _Phases], *, equal: bool
    ) -> Handle:
        if self._failure is not None:
            raise self._failure

        def what() -> str:
            return f"{self.explain(name)} ({kind})"

        handle = _Collective(what, self._checked(kind, name, x, body, equal), self._until_done)
        self._pending.append(handle)
        self._progress()
        return handle

    def _checked(
        self, kind: str, name: str, x: Array, body: Callable[[Array, Sequence[int]], _Phases], equal: bool
    ) -> _Phases:
        """Check in phase 0 that all ranks start the same collective, then run its body."""
        text = f"{kind} '{name}'" + (f" of {x.size} elements" if equal else "")
        headers = np.zeros((self.size, _HEADER_BYTES), np.uint8)
        mine = np.frombuffer(_header(text, x.size), np.uint8)
        yield self._comms[0].Iallgather(mine, headers)
        for rank, header in enumerate(headers):
            if (header[8:] != mine[8:]).any():
                theirs = header[24:].tobytes().rstrip(b"\0").decode(errors="replace")
                raise MismatchError(
                    f"rank {self.rank} started {text}, but rank {rank} started {theirs}; "
                    "all ranks must start the same collectives in the same order."
                )
        lengths = [int.from_bytes(header[:8].tobytes(), "little") for header in headers]
        return (yield from body(np.ascontiguousarray(x), lengths))

    def _reduce(self, x: Array, op: str) -> _Phases:
        result = np.empty_like(x)
        yield self._comms[1].Iallreduce(x, result, MPI.SUM if op == "sum" else MPI.MAX)
        return result

    def _gather(self, x: Array, lengths: Sequence[int]) -> _Phases:
        result = np.empty(sum(lengths), x.dtype)
        counts = [length * x.itemsize for length in lengths]
        yield self._comms[1].Iallgatherv([x.view(np.uint8), MPI.BYTE], [result.view(np.uint8), counts, None, MPI.BYTE])
        return result

    def _trade(self, x: Array, lengths: Sequence[int]) -> _Phases:
        sending, receiving = np.array(lengths, np.int64), np.empty(self.size, np.int64)
        yield self._comms[1].Ialltoall(sending, receiving)
        result = np.empty(int(receiving.sum()), x.dtype)
        yield self._comms[2].Ialltoallv(
            [x.view(np.uint8), (sending * x.itemsize).tolist(), None, MPI.BYTE],
            [result.view(np.uint8), (receiving * x.itemsize).tolist(), None, MPI.BYTE],
        )
        return result

    def _spread(self, x: Array, root: int) -> _Phases:
        result = x if self.rank == root else np.empty_like(x)
        yield self._comms[1].Ibcast([result.view(np.uint8), MPI.BYTE], root)
        return result

    # --- progress -----------------------------------------------------------------------------------------------------

    def _progress(self) -> None:
        """Advance every collective as far as possible, none beyond those that were started before it."""
        if self._failure is not None:
            raise self._failure
        limit = float("inf")
        try:
            for handle in self._pending:
                handle.advance(limit)
                limit = limit if handle.done else min(limit, handle.phase)
        except Exception as error:
            self._failure = error
            _abandon(self._pending)
            raise
        self._pending = [handle for handle in self._pending if not handle.done]

    def _until_done(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        def step() -> bool:
            self._progress()
            return done()

        if not done():
            self._until(step, what)

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
                        f"rank {self.rank} of {self.size} waits in vain for {what()}: {'; '.join(absent)}. Correct it "
                        "on that rank, or let all ranks call the exchange equally often."
                    )

        wait_until(step, what, rank=self.rank, size=self.size, timeout=self.timeout, pause=pause)


def _header(text: str, length: int) -> bytes:
    words = text.encode()
    digest = hashlib.blake2b(words, digest_size=16).digest()
    return length.to_bytes(8, "little") + digest + words[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
