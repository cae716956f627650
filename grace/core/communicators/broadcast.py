"""Broadcasts: every rank's payload comes to every rank, one collective per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grace.core.communicators.allgather import Allgather
from grace.core.config.registry import communicators
from grace.core.methods.compressor import Compressor
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program
from grace.core.wire.layout import GatherLayout, Layout, Received


@communicators.register("broadcast")
@dataclass(frozen=True)
class Broadcast(Allgather):
    r"""Broadcasts: one per rank brings its payload to every rank, for networks without a good allgather.

    Formula: g = \mathrm{merge}(\mathrm{payload}_1, \dots, \mathrm{payload}_n)
    """

    any_length: ClassVar[bool] = False
    carries_codings: ClassVar[bool] = False

    def obstacle(self, compressor: Compressor) -> str | None:
        return None if compressor.fixed_size else "the size of its payloads depends on the data"

    def program(self, at: BucketStep, layout: Layout) -> Program[Received]:
        assert isinstance(layout, GatherLayout)
        buffer = layout.encode(at.ops, at.payloads, at.flags, at.stamp)
        empty = at.ops.length(buffer)
        buffers = yield [
            collectives.broadcast(buffer if root == at.rank else at.ops.zeros(empty, "uint8"), root)
            for root in range(at.size)
        ]
        data = buffers[0] if at.size == 1 else at.ops.concat(buffers)
        return layout.decode(at.ops, data, at.size, at.stamp)
