"""What the last step sent, from the notes of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grace.core.ops.composites import ArrayOps
from grace.core.plan import Part, Plan
from grace.core.registry import communicators, compressors
from grace.core.state import Slots


def statistics(plan: Plan, slots: Slots, ops: Callable[[str], ArrayOps], norms: bool) -> dict[str, Any]:
    """See `Engine.stats`; with `norms`, those of the residuals are measured now."""
    here = {part.spec.name for bucket in plan.buckets for part in bucket.parts}

    def noted(kind: str, name: str) -> int:
        return int(slots.noted(kind, name) or 0)

    def relative_error(name: str) -> float | None:
        size, error = slots.noted("size", name), slots.noted("error", name)
        if size is None or error is None:
            return None
        return float(error) / float(size) if size > 0 else 0.0

    def residual_norm(part: Part) -> float | None:
        known = part.spec.name in here and part.spec.name in slots
        residual = slots.read(part.spec.name)["memory"].get("residual") if known else None
        return None if residual is None or not norms else float(ops(part.spec.device).norm(residual))

    tensors: dict[str, dict[str, Any]] = {}
    for part in plan.parts:
        name = part.spec.name
        tensors[name] = {
            "compressor": compressors.name_of(part.compressor),
            "dense_bytes": part.spec.nbytes,
            "wire_bytes": noted("tensor", name) if name in here else part.spec.nbytes,
            "relative_error": relative_error(name),
            "residual_norm": residual_norm(part),
        }
    sent = {bucket.name: noted("bucket", bucket.name) for bucket in plan.buckets}
    dense = sum(part.spec.nbytes for part in plan.delegated)
    collectives = {"allreduce": dense}
    for bucket in plan.buckets:
        # Before the first step nothing was settled either.
        settled = min(sent[bucket.name], sum(part.settled_bytes for part in bucket.parts))
        name = communicators.name_of(bucket.communicator)
        for collective, nbytes in (("allreduce", settled), (name, sent[bucket.name] - settled)):
            collectives[collective] = collectives.get(collective, 0) + nbytes
    return {
        "step": int(slots.step),
        "wire_bytes": sum(sent.values()) + dense,
        "collectives": collectives,
        "dense_bytes": sum(part.spec.nbytes for part in plan.parts),
        "compressed_dense_bytes": sum(part.spec.nbytes for part in plan.parts if not part.dense),
        "compressed_wire_bytes": sum(sent[b.name] for b in plan.buckets if not b.parts[0].dense),
        "tensors": tensors,
    }
