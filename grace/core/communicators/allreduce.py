"""Allreduce: payloads are added on the way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.config.registry import communicators
from grace.core.methods.communicator import Communicator, Route
from grace.core.methods.compressor import Compressor
from grace.core.plan.unit import Unit
from grace.core.spec import HALF_DTYPES, Array, Ranks
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program, sum_halves, together
from grace.core.wire.layout import Received, SumLayout


@communicators.register("allreduce")
@dataclass(frozen=True)
class Allreduce(Communicator):
    r"""Sum on the way: allreduce adds the payloads, and the bytes do not grow with the number of ranks.

    Formula: g = \mathrm{decompress}\bigl(\textstyle\sum_i \mathrm{payload}_i\bigr)
    """

    adds: ClassVar[bool] = True

    def obstacle(self, compressor: Compressor) -> str | None:
        return None if compressor.summable else "its payloads cannot be added"

    def divide(self, units: Sequence[Unit], ranks: Ranks, earlier: Sequence[Unit] = ()) -> list[Unit]:
        return [dataclasses.replace(unit, addends=ranks.size) for unit in units]

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        # The sum is made under way, so that no checksum of one rank can be checked.
        layout = SumLayout([u.spec for u in units], [u.fields for u in units], [u.guarded for u in units])
        return Route(layout.nbytes, layout.fixed, functools.partial(_add, layout))


def _add(layout: SumLayout, bucket: BucketStep) -> Program[Received]:
    buffers, lengths = layout.encode(bucket.ops, bucket.payloads, bucket.flags, bucket.stamp, bucket.size)
    sums = yield from together([_sum(bucket, dtype, buffer) for dtype, buffer in buffers.items()])
    return layout.decode(bucket.ops, dict(zip(buffers, sums, strict=True)), bucket.size, lengths)


def _sum(bucket: BucketStep, dtype: str, x: Array) -> Program[Array]:
    if dtype in HALF_DTYPES:
        factor = 1 / bucket.size if bucket.mean else 1.0
        return (yield from sum_halves(bucket.ops, x, bucket.rank, bucket.size, factor))
    (total,) = yield [collectives.allreduce(x)]
    return total
