"""Base of transports whose library matches collectives by the order of the calls, as MPI and torch.distributed do."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any

from grace.core.errors import MismatchError
from grace.core.guards.waiting import wait_until
from grace.core.spec import Array
from grace.core.transport.collectives import Collective, Lengths, Reduction
from grace.core.transport.transport import Handle, HandshakeTransport

# Header of a collective: a length per rank, a digest of its description, and the beginning of the description.
_DIGEST_BYTES, _TEXT_BYTES = 16, 104

#: The phases of a collective: each yields a function that tells whether it is done; the result comes at the end.
Phases = Generator[Callable[[], bool], None, Array]


class _Collective(Handle):
    """Collective under way through its phases."""

    def __init__(
        self,
        what: Callable[[], str],
        phases: Phases,
        lane: int,
        until: Callable[[Callable[[], bool], Callable[[], str]], None],
    ) -> None:
        self.what, self.lane, self._phases, self._until = what, lane, phases, until
        self._test = next(phases)
        self.phase = 0
        self.done = False
        # What has ended it; the thread that trains raises it.
        self.error: Exception | None = None
        self._result: Array = None

    def advance(self, limit: float) -> None:
        """Advance through the phases that are done, up to the phase `limit`."""
        try:
            while not self.done and self.error is None and self.phase < limit and self._test():
                self._test = next(self._phases)
                self.phase += 1
        except StopIteration as end:
            self._result, self.done = end.value, True
        except Exception as error:
            self.error = error

    def wait(self) -> Array:
        self._until(lambda: self.done, self.what)
        return self._result

    def arrived(self) -> bool:
        return self.done


def _nothing(_: list[tuple[int, ...]]) -> Phases:
    yield from ()
    return None


def never_free(kept: Sequence[Any]) -> None:
    """Keep objects beyond the end of Python: a library uses their memory, or would wait if they were freed."""
    for each in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


class OrderedTransport(HandshakeTransport):
    """Base of transports whose ranks must start all collectives of a lane in the same order.

    Before each collective the ranks exchange headers that describe it; if they differ, every rank raises MismatchError
    and no data move. One header stands for all collectives of a step whose lengths follow from the plan: it is sent
    when the step is announced, with its first gradient, and data need not wait for others. Headers and data of each
    lane need channels of their own, such as communicators: within each, all ranks follow the order of starting, and a
    rank that is behind may still exchange headers. A collective advances during calls of the transport, and in between
    if the library calls `advance` from a thread of its own. `join_waits` is for ranks that use several transports in a
    step.
    """

    lanes: int = 2

    def __init__(self) -> None:
        self._pending: list[_Collective] = []
        self._failure: Exception | None = None
        # Held while collectives advance. `_missed` says that a phase was done meanwhile.
        self._advancing = threading.Lock()
        self._missed = False
        self._beside: weakref.WeakSet[OrderedTransport] = weakref.WeakSet()

    def join_waits(self, other: OrderedTransport) -> None:
        """Let a failure of either transport end waits at both, until one is closed.

        A rank whose step has failed at one transport starts nothing more at the other.
        """
        self._beside.add(other)
        other._beside.add(self)

    # --- what the library does --------------------------------------------------------------------------------------

    @abstractmethod
    def _exchange(self, lane: int, header: bytes) -> Generator[Callable[[], bool], None, list[bytes]]:
        """Return the headers of all ranks, which are equally long, in rank order."""

    @abstractmethod
    def _reduce(self, lane: int, x: Array, op: Reduction) -> Phases:
        """Reduce x element by element over all ranks."""

    @abstractmethod
    def _gather(self, lane: int, x: Array, lengths: Sequence[int], equal: bool) -> Phases:
        """Join the buffers of all ranks in rank order; `lengths` are theirs, in elements.

        With `equal` the result may be a list of the buffers.
        """

    @abstractmethod
    def _trade(self, lane: int, x: Array, lengths: Sequence[Sequence[int]]) -> Phases:
        """Send the pieces of x to their ranks and join what arrives; rank i sends lengths[i][j] elements to rank j."""

    @abstractmethod
    def _join(self, xs: Sequence[Array]) -> Array:
        """Return a new buffer with all of xs, one after another."""

    @abstractmethod
    def _spread(self, lane: int, x: Array, root: int) -> Phases:
        """Send the root's buffer to every rank; the buffers of all ranks have one length."""

    # --- collectives ------------------------------------------------------------------------------------------------

    def announce(self, text: str, name: str) -> None:
        if self.size > 1:
            text = f"a step from '{name}' on, with the plan {text}"
            self._follow(lambda: self.explain(name), self._run_checked(0, text, (), _nothing), 0)

    def _start(self, collective: Collective, name: str) -> Handle:
        kind, lane = collective.kind, min(collective.round or 0, self.lanes - 1)
        lengths = [len(x) for x in collective.buffers]
        x = self._join(collective.buffers) if kind == "alltoall" else collective.buffers[0]
        described, alike = f"{kind} {x.dtype}", ""
        if kind == "allreduce":
            described, alike = f"{kind} {collective.op} {x.dtype}", f" of {len(x)} elements"
        elif kind == "broadcast":
            described, alike = f"{kind} {x.dtype} from rank {collective.root}", f" of {len(x)} elements"

        def body(rows: list[tuple[int, ...]]) -> Phases:
            """Continue with the lengths of all ranks, which travel ahead."""
            if kind == "allreduce":
                return self._reduce(lane, x, collective.op)
            if kind == "broadcast":
                return self._spread(lane, x, collective.root)
            if kind == "alltoall":
                return self._trade(lane, x, rows)
            return self._gather(lane, x, [row[0] for row in rows], collective.equal)

        def what() -> str:
            return f"{self.explain(name)} ({described})"

        rows = collective.lengths
        if rows is None and (collective.equal or kind in ("allreduce", "broadcast")):
            rows = [lengths] * self.size
        if collective.round is not None and rows is not None:
            return self._follow(what, self._run_known(rows, body), lane)
        return self._follow(what, self._run_checked(lane, f"{described} '{name}'{alike}", lengths, body), lane)

    def _follow(self, what: Callable[[], str], phases: Phases, lane: int) -> Handle:
        """Start a collective, and take it through its phases from now on."""
        if self._failure is not None:
            raise self._failure
        handle = _Collective(what, phases, lane, self._until_done)
        self._pending.append(handle)
        self._progress()
        return handle

    def _run_known(self, rows: Lengths, body: Callable[[list[tuple[int, ...]]], Phases]) -> Phases:
        """Run the body of a collective whose lengths are known on all ranks, without another header."""
        yield lambda: True
        return (yield from body([tuple(row) for row in rows]))

    def _run_checked(
        self, lane: int, text: str, lengths: Sequence[int], body: Callable[[list[tuple[int, ...]]], Phases]
    ) -> Phases:
        """Check that all ranks start the same collective, then run its body."""
        words = text.encode()
        padded = struct.pack(f"<{self.size}q", *lengths, *[0] * (self.size - len(lengths)))
        start = len(padded)
        mine = (
            padded
            + hashlib.blake2b(words, digest_size=_DIGEST_BYTES).digest()
            + words[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        )
        headers = yield from self._exchange(lane, mine)
        for rank, header in enumerate(headers):
            if header[start:] != mine[start:]:
                theirs = header[start + _DIGEST_BYTES :].rstrip(b"\0").decode(errors="replace")
                raise MismatchError(
                    f"rank {self.rank} started {text}, but rank {rank} started {theirs}; "
                    "all ranks must start the same collectives in the same order. "
                    f"Rank {self.rank} knows them as {self._explain_other(text)}, and as {self._explain_other(theirs)}."
                )
        return (yield from body([struct.unpack(f"<{self.size}q", header[:start]) for header in headers]))

    def _explain_other(self, text: str) -> str:
        """Return in words what a described collective carries. The description of another rank may be cut short."""
        return self.explain(text.partition("'")[2].partition("'")[0])

    # --- progress ---------------------------------------------------------------------------------------------------

    def _progress(self) -> None:
        """Advance every collective as far as possible; raise what has ended one."""
        if self._failure is not None:
            raise self._failure
        with self._advancing:
            self._advance_all()
        for handle in self._pending:
            if handle.error is not None:
                raise self._fail(handle.error, handle.what) from None
        self._pending = [handle for handle in self._pending if not handle.done]

    def advance(self) -> None:
        """Advance every collective as far as possible, in any thread, unless another one does so; never wait."""
        self._missed = True
        if self._advancing.acquire(blocking=False):
            try:
                self._advance_all()
            finally:
                self._advancing.release()

    @property
    def header_under_way(self) -> bool:
        """True while the header of a collective is on its way."""
        return any(handle.phase == 0 and not handle.done and handle.error is None for handle in self._pending)

    def _advance_all(self) -> None:
        """Advance every collective, none beyond those of its lane that were started before it."""
        self._missed = True
        while self._missed:
            self._missed = False
            limits = [float("inf")] * self.lanes
            for handle in self._pending:
                handle.advance(limits[handle.lane])
                if not handle.done:
                    limits[handle.lane] = min(limits[handle.lane], handle.phase)

    def _leave_others(self) -> None:
        """End what `join_waits` began."""
        for other in tuple(self._beside):
            other._beside.discard(self)
        self._beside.clear()

    def _fail(self, error: Exception, what: Callable[[], str]) -> Exception:
        """Note that no collective can go on, and return the error that says why."""
        self._failure = error
        return error

    def _until_done(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        def step() -> bool:
            self._progress()
            for other in tuple(self._beside):
                other._progress()
            return done()

        if not done():
            self._until(step, what)

    def _until(self, step: Callable[[], bool], what: Callable[[], str]) -> None:
        """Call `step` until it returns True."""
        wait_until(step, what, rank=self.rank, size=self.size, timeout=self.timeout)
