"""Allgather: every rank's payload comes to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.config.registry import communicators
from grace.core.methods.communicator import Communicator
from grace.core.ops.composites import ArrayOps
from grace.core.plan.unit import Unit
from grace.core.spec import Ranks
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program
from grace.core.wire.layout import Buffer, GatherLayout, Layout, Received


@communicators.register("allgather")
@dataclass(frozen=True)
class Allgather(Communicator):
    r"""Gathering: one collective brings every rank's payload to every rank; payloads may differ in length.

    Formula: g = \mathrm{merge}(\mathrm{payload}_1, \dots, \mathrm{payload}_n)
    """

    any_length: ClassVar[bool] = True
    carries_codings: ClassVar[bool] = True

    def layout(self, units: Sequence[Unit], ranks: Ranks) -> GatherLayout:
        return GatherLayout([u.spec for u in units], [u.fields for u in units], [u.guarded for u in units])

    def buffer(self, layout: Layout, ops: ArrayOps) -> Buffer | None:
        assert isinstance(layout, GatherLayout)
        return layout.buffer(ops)

    def program(self, at: BucketStep, layout: Layout) -> Program[Received]:
        assert isinstance(layout, GatherLayout)
        buffer = layout.encode(at.ops, at.coded, at.flags, at.stamp, at.buffer)
        (data,) = yield [collectives.allgather(buffer, equal=layout.fixed)]
        return layout.decode(at.ops, data, at.size, at.stamp)
