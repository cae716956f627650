"""Compressed reduce-scatter: every rank gets the mean of its own part of each tensor, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.communicators.two_shot import keeps_state
from grace.core.methods.communicator import Communicator, Route
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Memory, Merging
from grace.core.plan.unit import Unit, scatter
from grace.core.spec import Ranks
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program
from grace.core.wire.layout import GatherLayout, Received


@dataclass(frozen=True)
class ReduceScatter(Communicator):
    r"""Compressed reduce-scatter, the first half of `two_shot`.

    Formula: m_j = \mathrm{mean}_i\, C(x_{ij}) \;\text{on rank } j \text{ only}

    `chunks` holds the number of elements of each tensor that belong to one rank. Every unit is cut into these parts.
    The ranks trade their compressed parts; the owner of part j averages what it gets. A rank sends (N - 1) / N
    payloads. The buffer to each owner has the flags of all units, so that all ranks drop the same states.

    No configuration can name it, because optimizers need the mean of all parts. An adapter uses it if the framework has
    sharded the parameters.
    """

    any_length: ClassVar[bool] = True
    external_name: ClassVar[str] = "reduce_scatter"

    chunks: tuple[tuple[str, int], ...] = ()

    def obstacle(self, compressor: Compressor) -> str | None:
        if not compressor.flat:
            return "it needs a whole tensor, and a rank gets parts of tensors"
        if keeps_state(compressor):
            return "it learns from the payloads of all ranks, and a rank gets only those of its own parts"
        return None

    def memory_obstacle(self, memory: Memory) -> str | None:
        if memory.across_ranks == "joint" or "mean" in memory.needs or isinstance(memory, Merging):
            return "follows the mean of what all ranks have sent, and a rank gets only its own parts of the mean"
        if "tensor" in memory.needs:
            return "needs the norm of a whole tensor, and shards are compressed one by one"
        if "lr" in memory.needs:
            return "corrects for the learning rate, which a model does not know"
        return None

    def divide(self, units: Sequence[Unit], ranks: Ranks, earlier: Sequence[Unit] = ()) -> list[Unit]:
        chunks = dict(self.chunks)
        return [part for unit in units for part in scatter(unit, chunks, ranks.size)]

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        specs, guarded, size = [unit.spec for unit in units], [unit.guarded for unit in units], ranks.size
        to_owners = [
            GatherLayout(specs, [unit.fields if unit.merged_by == owner else () for unit in units], guarded, checksum)
            for owner in range(size)
        ]
        nbytes = (size - 1) * sum(layout.nbytes for layout in to_owners) // size
        return Route(nbytes, all(layout.fixed for layout in to_owners), functools.partial(_scatter, to_owners))


def _scatter(to_owners: Sequence[GatherLayout], bucket: BucketStep) -> Program[Received]:
    payloads, flags = bucket.coded, bucket.flags
    owners = [step.unit.merged_by for step in bucket.steps]
    buffers = [
        layout.encode(
            bucket.ops,
            [payload if owner == mine else {} for payload, mine in zip(payloads, owners, strict=True)],
            flags,
            bucket.stamp,
        )
        for owner, layout in enumerate(to_owners)
    ]
    fixed = all(layout.fixed for layout in to_owners)
    (data,) = yield [collectives.alltoall(buffers, equal=fixed)]
    return to_owners[bucket.rank].decode(bucket.ops, data, bucket.size, bucket.stamp)
