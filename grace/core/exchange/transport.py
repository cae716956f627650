"""Base class of transports: named, non-blocking collectives on flat buffers. Only transports know Horovod or MPI."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from grace.core.values.spec import Array

Reduction: TypeAlias = Literal["sum", "mean", "max"]

# The seconds that a rank waits for others, unless the configuration says something else.
TIMEOUT = 300


class Handle(Protocol):
    """Collective under way."""

    def wait(self) -> Array:
        """Block until the collective is done and return its result."""

    def arrived(self) -> bool:
        """Return whether `wait` would return at once; False also if that is unknown."""
        return False


class Transport(ABC):
    """Base of transports: collectives on flat buffers among `size` ranks.

    Every call returns at once. Collectives are matched by name, so ranks may start them in any order.

    A handle's `wait` ends with WaitError after `timeout` seconds, if the transport can do that; `wait_until` in
    `grace.core.guards.waiting` helps. The engine sets `explain`, which returns in words what a collective of a name
    carries.
    """

    rank: int
    size: int
    timeout: float = TIMEOUT
    explain: Callable[[str], str] = "collective '{}'".format

    @abstractmethod
    def allreduce(self, x: Array, *, op: Reduction, name: str) -> Handle:
        """Reduce x element by element over all ranks; may overwrite x, except for sums of 16-bit floats.

        16-bit floats are added in float32, in rank order, and rounded once: see `ArrayOps.half_sum`. Only they have the
        reduction "mean", which cannot overflow where the sum does.
        """

    @abstractmethod
    def allgather(self, x: Array, *, name: str, equal: bool = False) -> Handle:
        """Join the buffers of all ranks in rank order; they may differ in length.

        `equal` means that all have the same length, a multiple of 16 bytes.
        """

    @abstractmethod
    def broadcast(self, x: Array, *, root: int, name: str) -> Handle:
        """Send the root's buffer to every rank; all ranks pass buffers of equal length, and only the root's is read."""
