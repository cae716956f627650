"""Pairs of ranks: each rank trades with one other, drawn for each step."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.methods.communicator import Communicator, Result, Route
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.plan.unit import Unit, layout_of
from grace.core.spec import Array, Payload, Ranks
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program, among
from grace.core.wire.layout import GatherLayout, Received


def pair_of(rank: int, size: int, seed: int, step: int) -> tuple[int, ...]:
    """Return the ranks of the pair that a rank belongs to in a step; of an odd number of ranks, one is alone."""
    order = sorted(range(size), key=lambda r: hashlib.sha256(f"{seed}/{step}/{r}".encode()).digest())
    first = order.index(rank) // 2 * 2
    return tuple(sorted(order[first : first + 2]))


@dataclass(frozen=True)
class Pairs(Communicator):
    r"""Mean of the payloads of a pair of ranks, which all ranks draw anew for each step.

    Formula: g_i = (x_i + x_j) / 2, \quad \{i, j\} \;\text{drawn from seed and step}

    No rank waits for more than one other, and the bytes do not grow with the number of ranks. No configuration can name
    it, because the pairs have different results: outer steps use it if the ranks meet in pairs.
    """

    any_length: ClassVar[bool] = True
    external_name: ClassVar[str] = "pairs"

    seed: int = 0

    @property
    def result(self) -> Result:
        return _mean

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        layout = layout_of(units, checksum)
        trade = functools.partial(_trade, layout, self.seed)
        return Route(layout.nbytes, layout.fixed, trade, buffer=layout.buffer)


def _mean(compressor: Compressor, payloads: Sequence[Payload], at: Site) -> Array:
    return at.ops.scale_(compressor.merge(payloads, at), 1 / len(payloads))


def _trade(layout: GatherLayout, seed: int, bucket: BucketStep) -> Program[Received]:
    ops, pair = bucket.ops, pair_of(bucket.rank, bucket.size, seed, bucket.stamp)
    buffer = layout.encode(ops, bucket.coded, bucket.flags, bucket.stamp, bucket.buffer)

    def gather() -> Program[Received]:
        (data,) = yield [collectives.allgather(buffer)]
        return layout.decode(ops, data, len(pair), bucket.stamp)

    return (yield from among(pair, gather(), ops, bucket.rank, bucket.size))
