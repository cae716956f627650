"""Base class of communicators, and the route that they make for each bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Memory, Merging
from grace.core.methods.site import Site
from grace.core.spec import Array, Payload, Ranks

if TYPE_CHECKING:
    from grace.core.ops.composites import ArrayOps
    from grace.core.plan.unit import Assignment, Unit
    from grace.core.step.bucket_step import BucketStep
    from grace.core.transport.collectives import Program
    from grace.core.wire.layout import Buffer, Received


def _no_buffer(ops: ArrayOps) -> None:
    """Return no buffer."""


# Makes the result of the payloads of all ranks.
Result: TypeAlias = Callable[[Compressor, Sequence[Payload], Site], Array]


@dataclass(frozen=True)
class Route:
    """The way of the payloads of one bucket: made with the plan, and run once per step.

    `nbytes` are the bytes that a rank sends per step, on average, with every run-time length taken as zero. `fixed`
    says that they do not depend on the data.

    `run(bucket)` carries the payloads of a bucket's units, and returns what each unit merges on this rank. It is a
    generator that yields the collectives of a round and gets their results. All ranks must yield the same kinds in the
    same order. `remembers` says that it updates the memories itself, because it may drop entries on the way.

    `buffer(ops)` returns a wire buffer to which kernels can write payloads, for `BucketStep.buffer`; None if there is
    none.
    """

    nbytes: int
    fixed: bool
    run: Callable[[BucketStep], Program[Received]]
    remembers: bool = False
    buffer: Callable[[ArrayOps], Buffer | None] = _no_buffer


@dataclass(frozen=True)
class Communicator:
    """Base of communicators, which sum payloads on the way or bring them to other ranks.

    The errors about obstacles are raised where the registered communicators are known, because they list those without
    an obstacle.
    """

    #: Payloads are added on the way.
    adds: ClassVar[bool] = False
    #: Payloads may differ in length between ranks, so that fields may travel coded.
    any_length: ClassVar[bool] = False
    #: The name in reports of a communicator that an adapter brings, and no configuration can name.
    external_name: ClassVar[str] = ""

    @property
    def result(self) -> Result | None:
        """Function that makes the result of the payloads of all ranks; None if it is their mean."""
        return None

    def obstacle(self, compressor: Compressor) -> str | None:
        """Return the reason why it cannot carry the compressor's payloads; None if it can (default: it can)."""
        return None

    def memory_obstacle(self, memory: Memory) -> str | None:
        """Return what the memory does that keeps this communicator from serving it; None if it can serve it.

        By default every rank merges, so a memory that follows the mean must do so in `finish`.
        """
        if memory.across_ranks == "joint" and "mean" not in memory.needs:
            return "needs one rank that owns each mean; here every rank merges"
        return merging_obstacle(memory)

    def resolve(self, item: Assignment, ranks: Ranks) -> tuple[Communicator, str]:
        """Return the communicator for a tensor whose method names this one, and the reason for the report.

        By default it is this one, and the reason is empty.
        """
        return self, ""

    def divide(self, units: Sequence[Unit], ranks: Ranks, earlier: Sequence[Unit] = ()) -> Sequence[Unit]:
        """Return the units as which the ranks exchange these units of a bucket (default: as they are).

        `earlier` has those of the buckets before it, as they are exchanged.
        """
        return units

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        """Return the route of a bucket with these units; with `checksum`, every buffer that can have one has one.

        One that always resolves to others has none. Raises ConfigError if it is asked for one all the same.
        """
        raise ConfigError(
            f"communicator {self} has no route: define route(units, ranks, checksum), or let resolve(item, ranks) "
            "return a communicator that has one."
        )


def merging_obstacle(memory: Memory) -> str | None:
    """Return the obstacle of a memory that merges payloads itself, where they do not all come to every rank."""
    if isinstance(memory, Merging):
        return "merges the payloads of all ranks itself, and here they are merged before"
    return None
