"""The Transport abstraction: named, non-blocking collectives on flat buffers; nothing else knows Horovod or MPI."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Protocol

from grace.core.spec import Array


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> Array:
        """Block until done; the result."""

    def arrived(self) -> bool:
        """Whether `wait` would return at once; False also where that is not known."""
        return False


class Transport(ABC):
    """Collectives on flat buffers among `size` ranks.

    Every call returns at once. Collectives are matched by name, so ranks may start them in any order.
    """

    rank: int
    size: int

    @abstractmethod
    def allreduce(self, x: Array, *, op: Literal["sum", "max"], name: str) -> Handle:
        """Element-wise reduction over ranks; x may be overwritten."""

    @abstractmethod
    def allgather(self, x: Array, *, name: str) -> Handle:
        """The buffers of all ranks, which may differ in length, one after the other in the order of the ranks."""

    @abstractmethod
    def broadcast(self, x: Array, *, root: int, name: str) -> Handle:
        """The root's buffer on every rank; all ranks pass buffers of equal length, only the root's is read."""
