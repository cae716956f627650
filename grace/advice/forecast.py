"""The step of a running job with another configuration, as the cost model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grace.advice.cost import DDP_BYTES, LAWS
from grace.advice.model import Bucket, Round
from grace.core.config.registry import communicators
from grace.core.observe.timeline import tensors_of
from grace.core.plan.plan import Plan


def buckets_of(plan: Plan, ready: Mapping[str, float], codec: Mapping[str, Any], ranks: int) -> list[Bucket]:
    """Return the buckets of a plan on this machine.

    `ready` has the seconds from the first gradient of a step to each. `codec` has the seconds per unit, "fixed", and
    per element, "element"; half of it comes before a collective. Tensors that the library reduces itself are taken in
    buckets of 25 MiB, as by DDP.
    """
    found = []
    for bucket in plan.buckets:
        compressed = [unit for unit in bucket.units if not unit.dense]
        work = sum(codec.get("fixed", 0.0) + codec.get("element", 0.0) * unit.spec.numel for unit in compressed)
        name = communicators.name_of(bucket.units[0].communicator)
        law = LAWS.get(name, LAWS["two_shot"])
        rounds = law(bucket.nbytes, ranks, sum(unit.spec.nbytes for unit in bucket.units))
        at = max((ready.get(tensor, 0.0) for tensor in tensors_of(bucket)), default=0.0)
        found.append(Bucket(at, work / 2, work / 2, tuple(Round(*each) for each in rounds)))
    at, nbytes = 0.0, 0
    for item in sorted(plan.delegated, key=lambda item: ready.get(item.spec.name, 0.0)):
        if nbytes and nbytes + item.spec.nbytes > DDP_BYTES[1]:
            found.append(Bucket(at, 0.0, 0.0, (Round("allreduce", nbytes),)))
            nbytes = 0
        at, nbytes = max(at, ready.get(item.spec.name, 0.0)), nbytes + item.spec.nbytes
    if nbytes:
        found.append(Bucket(at, 0.0, 0.0, (Round("allreduce", nbytes),)))
    return found
