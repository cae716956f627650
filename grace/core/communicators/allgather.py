"""Allgather: every rank's payload comes to every rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.config.registry import communicators
from grace.core.methods.communicator import Communicator, Route
from grace.core.plan.unit import Unit, layout_of
from grace.core.spec import Ranks
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program
from grace.core.wire.layout import GatherLayout, Received


@communicators.register("allgather")
@dataclass(frozen=True)
class Allgather(Communicator):
    r"""Gathering: one collective brings every rank's payload to every rank; payloads may differ in length.

    Formula: g = \mathrm{merge}(\mathrm{payload}_1, \dots, \mathrm{payload}_n)
    """

    any_length: ClassVar[bool] = True

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        layout = layout_of(units, checksum)
        return Route(layout.nbytes, layout.fixed, functools.partial(_gather, layout), buffer=layout.buffer)


def _gather(layout: GatherLayout, bucket: BucketStep) -> Program[Received]:
    buffer = layout.encode(bucket.ops, bucket.coded, bucket.flags, bucket.stamp, bucket.buffer)
    (data,) = yield [collectives.allgather(buffer, equal=layout.fixed)]
    return layout.decode(bucket.ops, data, bucket.size, bucket.stamp)
