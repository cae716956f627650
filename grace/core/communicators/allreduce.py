"""Allreduce: payloads are added on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.config.registry import communicators
from grace.core.methods.communicator import Communicator
from grace.core.methods.compressor import Compressor
from grace.core.plan.unit import Unit
from grace.core.spec import HALF_DTYPES, Array, Ranks
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program, sum_halves, together
from grace.core.wire.layout import Layout, Received, SumLayout


@communicators.register("allreduce")
@dataclass(frozen=True)
class Allreduce(Communicator):
    r"""Sum on the way: allreduce adds the payloads, and the bytes do not grow with the number of ranks.

    Formula: g = \mathrm{decompress}\bigl(\textstyle\sum_i \mathrm{payload}_i\bigr)
    """

    sums: ClassVar[bool] = True

    def obstacle(self, compressor: Compressor) -> str | None:
        return None if compressor.summable else "its payloads cannot be added"

    def divide(self, units: Sequence[Unit], ranks: Ranks) -> list[Unit]:
        return [dataclasses.replace(unit, summed=ranks.size) for unit in units]

    def layout(self, units: Sequence[Unit], ranks: Ranks) -> SumLayout:
        return SumLayout([u.spec for u in units], [u.fields for u in units], [u.guarded for u in units])

    def program(self, at: BucketStep, layout: Layout) -> Program[Received]:
        assert isinstance(layout, SumLayout)
        buffers, lengths = layout.encode(at.ops, at.payloads, at.flags, at.stamp, at.size)
        sums = yield from together([_sum(at, dtype, buffer) for dtype, buffer in buffers.items()])
        return layout.decode(at.ops, dict(zip(buffers, sums, strict=True)), at.size, lengths)


def _sum(at: BucketStep, dtype: str, x: Array) -> Program[Array]:
    if dtype in HALF_DTYPES:
        return (yield from sum_halves(at.ops, x, at.rank, at.size, 1 / at.size if at.mean else 1.0))
    (total,) = yield [collectives.allreduce(x)]
    return total
