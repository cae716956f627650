"""The Transport abstraction: named, non-blocking collectives on flat buffers; nothing else knows Horovod or MPI."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Protocol, TypeAlias

from grace.core.spec import Array

Reduction: TypeAlias = Literal["sum", "mean", "max"]


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
    def allreduce(self, x: Array, *, op: Reduction, name: str) -> Handle:
        """Element-wise reduction over ranks; x may be overwritten, unless it is of 16-bit floats and added up.

        These are added in float32, in the order of the ranks, and rounded once: see `ArrayOps.half_sum`. Of them alone
        there is a "mean", which need not overflow where the sum does.
        """

    @abstractmethod
    def allgather(self, x: Array, *, name: str, equal: bool = False) -> Handle:
        """The buffers of all ranks, which may differ in length, one after the other in the order of the ranks. `equal`
        says that all are of one length, a multiple of 16 bytes.
        """

    @abstractmethod
    def broadcast(self, x: Array, *, root: int, name: str) -> Handle:
        """The root's buffer on every rank; all ranks pass buffers of equal length, only the root's is read."""
