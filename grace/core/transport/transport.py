"""Base class of transports: named, non-blocking collectives on flat buffers. Only transports know a library."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from grace.core.spec import Array, Ranks
from grace.core.transport.collectives import Collective, Reduction, allgather, allreduce, alltoall, broadcast

# The seconds that a rank waits for others, unless the configuration says something else.
TIMEOUT = 300


class Handle(Protocol):
    """Collective under way."""

    def wait(self) -> Array:
        """Block until the collective is done and return its result, a flat buffer, or what `allgather` says.

        Raises WaitError after the transport's `timeout`, if it can.
        """

    def arrived(self) -> bool:
        """Return whether `wait` would return at once; False also if that is unknown."""
        return False


class Done(Handle):
    """Collective that needed no communication, or whose result is here."""

    def __init__(self, result: Array) -> None:
        self._result = result

    def wait(self) -> Array:
        return self._result

    def arrived(self) -> bool:
        return True


def known_local_size(rank: int, node: int, local_rank: int, local_size: int) -> int:
    """Return the number of ranks on this node if ranks are numbered node by node, else 0."""
    return local_size if rank == node * local_size + local_rank else 0


class Transport(ABC):
    """Base of transports: collectives on flat buffers among `size` ranks.

    Every call returns at once. Collectives are matched by name, so that ranks may start them in any order, or if the
    transport has `lanes`, by the order of the calls within each lane, which must then be the same on all ranks.

    A handle's `wait` ends with WaitError after `timeout` seconds, if the transport can do that;
    `grace.core.guards.waiting.wait_until` helps. The run sets `explain`, which returns in words what a collective of
    a name carries.
    """

    #: The number of lanes, if ranks must start the collectives of a lane in one order; None if names match them.
    lanes: int | None = None
    #: The number of this rank; -1 outside of the ranks that take part.
    rank: int
    #: The number of ranks.
    size: int
    #: Ranks on each node, if they are numbered node by node; 0 if unknown.
    local_size: int = 0
    #: The seconds after which a rank that waits for others gives up.
    timeout: float = TIMEOUT
    explain: Callable[[str], str] = "collective '{}'".format

    @property
    def ranks(self) -> Ranks:
        """The number of ranks, in all and on each node."""
        return Ranks(self.size, self.local_size)

    def announce(self, text: str, name: str) -> None:
        """Note that a step begins, whose collectives a text describes, equal on all ranks; they have a `round`.

        A transport with lanes compares the texts, and need then not compare those collectives.
        """
        return

    def advance(self) -> None:
        """Let collectives that are under way go on, without waiting; most libraries do it by themselves."""
        return

    def start(self, collective: Collective, name: str) -> Handle:
        """Start a collective under a name."""
        # A single rank receives what it sends.
        return Done(collective.buffers[0]) if self.size == 1 else self._start(collective, name)

    @abstractmethod
    def _start(self, collective: Collective, name: str) -> Handle:
        """Start a collective of several ranks under a name; the method of its kind says what it does."""

    def allreduce(self, x: Array, *, op: Reduction, name: str) -> Handle:
        """Reduce x element by element over all ranks; may overwrite x. There are no sums of 16-bit floats."""
        return self.start(allreduce(x, op), name)

    def allgather(self, x: Array, *, name: str, equal: bool = False) -> Handle:
        """Join the buffers of all ranks in rank order; they may differ in length.

        `equal` means that all have the same length. The result may then be a list of the buffers, of which this rank's
        is the one that it passed.
        """
        return self.start(allgather(x, equal=equal), name)

    def alltoall(self, xs: Sequence[Array], *, name: str) -> Handle:
        """Send xs[i] to rank i and join what arrives in rank order; the buffers may differ in length."""
        return self.start(alltoall(xs), name)

    def broadcast(self, x: Array, *, root: int, name: str) -> Handle:
        """Send the root's buffer to every rank; all ranks pass buffers of equal length, and only the root's is read."""
        return self.start(broadcast(x, root), name)


class HandshakeTransport(Transport):
    """Base of transports by which the ranks also exchange Python values, outside of steps."""

    @abstractmethod
    def gather_bytes(self, data: bytes, name: str) -> bytes:
        """Join the bytes of all ranks in rank order; blocks."""

    def gather_objects(self, value: Any, name: str, what: str) -> list[Any]:
        """Return the JSON-able values of all ranks, in rank order; of this rank alone if it is outside of them. Blocks.

        `what` says what the handshake is for. Messages about a long wait contain it.
        """
        if self.rank < 0:
            return [value]
        with self.handshake_for(what):
            return gather_objects(value, self.size, lambda data: self.gather_bytes(data, name))

    @contextmanager
    def twice_the_limit(self) -> Iterator[None]:
        """Wait for twice the `timeout`: another rank may learn only at its end that the call cannot complete."""
        self.timeout *= 2
        try:
            yield
        finally:
            self.timeout /= 2

    @contextmanager
    def handshake_for(self, what: str) -> Iterator[None]:
        """Name the purpose of a handshake in messages about a long wait."""
        explain, self.explain = self.explain, lambda name: f"{what} (collective '{name}')"
        try:
            yield
        finally:
            self.explain = explain


def gather_objects(value: Any, size: int, gather: Callable[[bytes], bytes]) -> list[Any]:
    """Return the JSON-able values of all ranks, in rank order. `gather` joins the bytes of all ranks."""
    return unpack(gather(pack(value)), size)


def pack(value: Any) -> bytes:
    """Return a JSON-able value as bytes, of which `unpack` can tell the end."""
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def unpack(received: bytes, size: int) -> list[Any]:
    """Return the `size` values of which the joined bytes are the packed ones."""
    values, start = [], 0
    for _ in range(size):
        length = int.from_bytes(received[start : start + 8], "little")
        values.append(json.loads(received[start + 8 : start + 8 + length]))
        start += 8 + length
    return values
