"""The step of a running job with another configuration, as the cost model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grace.advice.cost import LAWS, ddp_buckets, rounds_of
from grace.advice.model import Bucket, Round
from grace.core.config.registry import communicators
from grace.core.observe.timeline import tensors_of
from grace.core.plan.plan import Modules, Plan


def buckets_of(
    plan: Plan,
    ready: Mapping[str, float],
    codec: Mapping[str, Any],
    ranks: int,
    modules: Modules | None = None,
    *,
    waits: bool = False,
) -> list[Bucket]:
    """Return the buckets of a plan on this machine.

    `ready` has the seconds from the first gradient of a step to each. `codec` has the seconds per unit, "fixed", and
    per element, "element"; half of it comes before a collective. Tensors that the library reduces itself are taken in
    the buckets of DDP, or by the modules that FSDP reduces. If the backward pass `waits` for each exchange, they form
    one bucket after it. The link of a job is one between any two ranks, so a hierarchical exchange counts as two_shot.
    """
    found = []
    for bucket in plan.buckets:
        compressed = [unit for unit in bucket.units if not unit.dense]
        work = sum(codec.get("fixed", 0.0) + codec.get("element", 0.0) * unit.spec.numel for unit in compressed)
        communicator = bucket.units[0].communicator
        name = communicator.external_name or communicators.name_of(communicator)
        name = name if name in LAWS else "two_shot"
        at = max((ready.get(tensor, 0.0) for tensor in tensors_of(bucket)), default=0.0)
        found.append(Bucket(at, work / 2, work / 2, rounds_of(bucket, name, bucket.nbytes, ranks)))
    left = [item.spec for item in plan.delegated]
    if modules is None:
        found += ddp_buckets(left, {spec.name: ready.get(spec.name, 0.0) for spec in left})
    else:
        # Without replicas it is a reduce-scatter, for which Gloo sends as much as for an allreduce.
        kind = "allreduce" if modules.communicator is None or waits else "reduce_scatter"
        for members in modules.members.values():
            nbytes = float(sum(spec.nbytes for spec in left if spec.name in members))
            if nbytes:
                rounds = tuple(Round(*each) for each in LAWS[kind](nbytes, ranks, nbytes))
                at = max(ready.get(name, 0.0) for name in members)
                found.append(Bucket(at, 0.0, 0.0, rounds))
    if waits and found:
        rounds = tuple(one for bucket in found for one in bucket.rounds)
        before, after = (sum(getattr(bucket, part) for bucket in found) for part in ("before", "after"))
        return [Bucket(max(ready.values(), default=0.0), before, after, rounds)]
    return found
