"""Broadcasts: every rank's payload comes to every rank, one collective per rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.config.registry import communicators
from grace.core.methods.communicator import Communicator, Route
from grace.core.methods.compressor import Compressor, fixed_size
from grace.core.methods.memory import Memory, Merging
from grace.core.plan.unit import Unit, layout_of
from grace.core.spec import Ranks
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program
from grace.core.wire.layout import GatherLayout, Received


@communicators.register("broadcast")
@dataclass(frozen=True)
class Broadcast(Communicator):
    r"""Broadcasts: one per rank brings its payload to every rank, for networks without a good allgather.

    Formula: g = \mathrm{merge}(\mathrm{payload}_1, \dots, \mathrm{payload}_n)
    """

    def obstacle(self, compressor: Compressor) -> str | None:
        return None if fixed_size(compressor) else "the size of its payloads depends on the data"

    def memory_obstacle(self, memory: Memory) -> str | None:
        return None if isinstance(memory, Merging) else super().memory_obstacle(memory)

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        layout = layout_of(units, checksum)
        return Route(layout.nbytes, layout.fixed, functools.partial(_broadcast, layout))


def _broadcast(layout: GatherLayout, bucket: BucketStep) -> Program[Received]:
    ops, lengths = bucket.ops, [layout.nbytes] * bucket.size
    if bucket.absent:
        shorter = layout.nbytes - layout.header.nbytes
        lengths = [layout.nbytes - shorter * ops.size(ops.cast(gone, "int32")) for gone in bucket.absent]
    buffer = bucket.encode(layout)
    buffers = yield [
        collectives.broadcast(buffer if root == bucket.rank else ops.zeros(length, "uint8"), root)
        for root, length in enumerate(lengths)
    ]
    return bucket.decode(layout, buffers[0] if bucket.size == 1 else ops.concat(buffers))
