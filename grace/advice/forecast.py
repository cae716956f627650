"""The step of a running job with another configuration, as the cost model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grace.advice.cost import LAWS, bytes_within, dense_buckets, exchanged_units, law_of, rounds_of, share
from grace.advice.model import Bucket, Round
from grace.core.communicators.two_shot import TwoShot
from grace.core.observe.timeline import tensors_of
from grace.core.plan.plan import Modules, Plan
from grace.core.spec import Ranks


def buckets_of(
    plan: Plan,
    ready: Mapping[str, float],
    codec: Mapping[str, Any],
    ranks: Ranks,
    modules: Modules | None = None,
    *,
    waits: bool = False,
) -> list[Bucket]:
    """Return the buckets of a plan on this machine.

    `ready` has the seconds from the first gradient of a step to each. `codec` has the seconds per unit, "fixed", and
    per element, "element"; half of it comes before a collective. Tensors that the library reduces itself are taken in
    the buckets of DDP, or by the modules that FSDP reduces. If the backward pass `waits` for each exchange, they form
    one bucket after it. A communicator without a law counts as two_shot.
    """
    found = []
    for bucket in plan.buckets:
        communicator = plan.assignment_of[bucket.units[0].pieces[0].tensor].communicator
        communicator = communicator if law_of(communicator) in LAWS else TwoShot()
        work = sum(
            (codec.get("fixed", 0.0) + codec.get("element", 0.0) * unit.spec.numel) * share(unit, ranks)
            for unit in exchanged_units(bucket, communicator)
            if not unit.dense
        )
        at = max((ready.get(tensor, 0.0) for tensor in tensors_of(bucket)), default=0.0)
        sent = bucket.nbytes - bytes_within(bucket, communicator)
        found.append(Bucket(at, work / 2, work / 2, rounds_of(bucket, communicator, sent, ranks)))
    left = [item.spec for item in plan.delegated]
    if modules is None:
        specs = [item.spec for item in plan.assignments]
        found += dense_buckets(specs, {spec.name for spec in left}, {s.name: ready.get(s.name, 0.0) for s in specs})
    else:
        # Without replicas it is a reduce-scatter, half of an allreduce in a ring. Gloo sends as much as for all of it.
        whole = modules.communicator is None or waits
        for members in modules.members.values():
            nbytes = float(sum(spec.nbytes for spec in left if spec.name in members))
            if nbytes:
                one = Round("allreduce", nbytes) if whole else Round("allgather", nbytes / ranks.size)
                at = max(ready.get(name, 0.0) for name in members)
                found.append(Bucket(at, 0.0, 0.0, (one,)))
    if waits and found:
        rounds = tuple(one for bucket in found for one in bucket.rounds)
        before, after = (sum(getattr(bucket, part) for bucket in found) for part in ("before", "after"))
        return [Bucket(max(ready.values(), default=0.0), before, after, rounds)]
    return found
