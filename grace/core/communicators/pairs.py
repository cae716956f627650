"""Pairs of ranks: each rank trades with one other, drawn for each step."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grace.core.methods.communicator import Communicator, Result, Route
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.plan.unit import Unit, layout_of
from grace.core.spec import Array, Payload, Ranks
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program
from grace.core.wire.layout import GatherLayout, Received


def pair_of(rank: int, size: int, seed: int, step: int) -> tuple[int, ...]:
    """Return the ranks of the pair that a rank belongs to in a step; of an odd number of ranks, one is alone."""
    order = sorted(range(size), key=lambda r: hashlib.sha256(f"{seed}/{step}/{r}".encode()).digest())
    first = order.index(rank) // 2 * 2
    return tuple(sorted(order[first : first + 2]))


def partner_of(rank: int, size: int, seed: int, step: int) -> int:
    """Return the other rank of a pair; -1 if the rank is alone."""
    return next((other for other in pair_of(rank, size, seed, step) if other != rank), -1)


def to_partner(ops: ArrayOps, x: Array, partner: Any, size: int) -> list[Array]:
    """Return what a rank sends to each rank: the flat x to its partner, and nothing to the others.

    In a traced graph, `partner` is a 0-d array.
    """
    n = ops.length(x)
    return [x[: n * (1 - ops.min_size(abs(partner - other), 1))] for other in range(size)]


def from_partner(ops: ArrayOps, received: Array, x: Array, partner: Any) -> Array:
    """Return what arrived from the partner, which is as long as x; x itself if the rank is alone."""
    if isinstance(partner, int):
        return x if partner < 0 else received
    n = ops.length(x)
    return ops.reshape(ops.concat([received, x])[:n], (n,))


@dataclass(frozen=True)
class Pairs(Communicator):
    r"""Mean of the payloads of a pair of ranks, which all ranks draw again for each step.

    Formula: g_i = (x_i + x_j) / 2, \quad \{i, j\} \;\text{drawn from seed and step}

    No rank waits for more than one other, and the bytes do not grow with the number of ranks. No configuration can name
    it, because the pairs have different results: outer steps use it if the ranks sync in pairs.
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
    ops, rank, size = bucket.ops, bucket.rank, bucket.size
    partner = ops.computed(functools.partial(partner_of, rank, size, seed), bucket.stamp)
    buffer = layout.encode(ops, bucket.coded, bucket.flags, bucket.stamp, bucket.buffer)
    (received,) = yield [collectives.alltoall(to_partner(ops, buffer, partner, size))]
    # The mean of twice the same is that, to the bit.
    rows = [buffer, from_partner(ops, received, buffer, partner)]
    return layout.decode(ops, rows, len(rows), bucket.stamp)
