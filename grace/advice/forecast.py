"""The step of a running job with another configuration, as the cost model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grace.advice.cost import LAWS, ddp_buckets, rounds_of
from grace.advice.model import Bucket
from grace.core.config.registry import communicators
from grace.core.observe.timeline import tensors_of
from grace.core.plan.plan import Plan


def buckets_of(plan: Plan, ready: Mapping[str, float], codec: Mapping[str, Any], ranks: int) -> list[Bucket]:
    """Return the buckets of a plan on this machine.

    `ready` has the seconds from the first gradient of a step to each. `codec` has the seconds per unit, "fixed", and
    per element, "element"; half of it comes before a collective. Tensors that the library reduces itself are taken in
    the buckets of DDP. The link of a job is one between any two ranks, so a hierarchical exchange counts as two_shot.
    """
    found = []
    for bucket in plan.buckets:
        compressed = [unit for unit in bucket.units if not unit.dense]
        work = sum(codec.get("fixed", 0.0) + codec.get("element", 0.0) * unit.spec.numel for unit in compressed)
        name = communicators.name_of(bucket.units[0].communicator)
        name = name if name in LAWS else "two_shot"
        at = max((ready.get(tensor, 0.0) for tensor in tensors_of(bucket)), default=0.0)
        found.append(Bucket(at, work / 2, work / 2, rounds_of(bucket, name, bucket.nbytes, ranks)))
    left = [item.spec for item in plan.delegated]
    found += ddp_buckets(left, {spec.name: ready.get(spec.name, 0.0) for spec in left})
    return found
