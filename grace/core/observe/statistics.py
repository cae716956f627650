"""Statistics of the last step, from the notes of the step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from grace.core.config.registry import compressors
from grace.core.observe.timeline import Times, spans, tensors_of
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan, share
from grace.core.plan.unit import Assignment, Piece, Unit, offsets
from grace.core.state.states import States
from grace.core.state.stored import widen
from grace.core.transport.collectives import KINDS

#: Numbers about a step, and arrays of at most one dimension, by their kind and the name of a unit or bucket.
Notes: TypeAlias = dict[tuple[str, str], Any]


def statistics(
    plan: Plan,
    notes: Notes,
    now: States,
    times: Times,
    ops: Callable[[str], ArrayOps],
    norms: bool,
) -> dict[str, Any]:
    """Return the statistics that `Run.stats` describes, of a step of `plan`; with `norms`, measure residuals.

    `now` has the states after the step, and perhaps after a change of the plan.
    """

    def read_note(kind: str, name: str) -> int:
        return int(notes.get((kind, name)) or 0)

    @functools.cache
    def numbers(kind: str, name: str) -> list[float]:
        return [float(x) for x in notes.get((kind, name), ())]

    # By unit, where each of its pieces stands in the notes about them.
    order = {u.spec.name: {place: i for i, place in enumerate(offsets(u))} for u in plan.units}

    def wire_bytes(item: Assignment) -> int:
        if item.spec.name not in plan.places:
            # An adapter notes the bytes of a gradient that it sends as rows.
            return int(notes.get(("rows", item.spec.name), item.spec.nbytes))
        return sum(sent_of(*place) for place in plan.places[item.spec.name])

    def sent_of(unit: Unit, offset: int, piece: Piece) -> int:
        name = unit.spec.name
        total, ends = read_note("unit", name), [0, *map(int, numbers("entries", name))]
        if not ends[-1]:
            return share(total, unit, offset, piece)
        i = order[name][piece, offset]
        return total * ends[i + 1] // ends[-1] - total * ends[i] // ends[-1]

    def relative_error(name: str) -> float | None:
        squares = {"size": 0.0, "error": 0.0}
        for unit, offset, piece in plan.places.get(name, ()):
            for kind in squares:
                of_pieces = numbers(kind, unit.spec.name)
                if not of_pieces:
                    return None
                squares[kind] += of_pieces[order[unit.spec.name][piece, offset]]
        if name not in plan.places:
            return None
        return math.sqrt(squares["error"] / squares["size"]) if squares["size"] else 0.0

    def residual_norm(name: str) -> float | None:
        squares = 0.0
        for unit, offset, piece in plan.places.get(name, ()):
            known = norms and unit.spec.name in now.units
            to = ops(unit.spec.device)
            memory = widen(unit, now.units[unit.spec.name]["memory"], to) if known else {}
            if "residual" not in memory:
                return None
            squares += float(to.norm(memory["residual"][offset : offset + piece.numel])) ** 2
        return math.sqrt(squares) if name in plan.places else None

    def volume(item: Assignment) -> float | None:
        for unit, _, _ in plan.places.get(item.spec.name, ()):
            later = now.plan.stateful.get(unit.spec.name)
            # After a change to another compressor, the state is that one's.
            if unit.tuning and later and type(later.tuning) is type(unit.tuning) and later.tuning.keeps_state:
                return unit.tuning.volume(now.units[unit.spec.name]["compressor"])
        return None

    tensors: dict[str, dict[str, Any]] = {}
    for item in plan.assignments:
        name = item.spec.name
        tensors[name] = {
            "compressor": compressors.name_of(item.compressor),
            "dense_bytes": item.spec.nbytes,
            "wire_bytes": wire_bytes(item),
            "relative_error": relative_error(name),
            "residual_norm": residual_norm(name),
            "volume": volume(item),
        }
    sent = {bucket.name: read_note("bucket", bucket.name) for bucket in plan.buckets}
    # Of what travels beside compressed tensors.
    dense_beside = {
        b.name: sum(read_note("unit", unit.spec.name) for unit in b.units if unit.dense)
        for b in plan.buckets
        if not all(unit.dense for unit in b.units)
    }
    phases = spans(plan, times.moments(plan))
    first = min((known["ready"][0] for known in phases.values() if known["ready"]), default=0.0)
    buckets = {
        bucket.name: {
            "tensors": tensors_of(bucket),
            "wire_bytes": sent[bucket.name],
            **{
                phase: None if span is None else [moment - first for moment in span]
                for phase, span in phases[bucket.name].items()
            },
        }
        for bucket in plan.buckets
    }
    collectives = {kind: sum(read_note(kind, bucket.name) for bucket in plan.buckets) for kind in KINDS}
    for item in plan.delegated:
        collectives["allgather" if ("rows", item.spec.name) in notes else "allreduce"] += wire_bytes(item)
    return {
        "step": int(now.step),
        "wire_bytes": sum(sent.values()) + sum(map(wire_bytes, plan.delegated)),
        "collectives": collectives,
        "dense_bytes": sum(item.spec.nbytes for item in plan.assignments),
        "compressed_dense_bytes": sum(item.spec.nbytes for item in plan.assignments if not item.dense),
        "compressed_wire_bytes": sum(sent[name] - beside for name, beside in dense_beside.items()),
        "buckets": buckets,
        "tensors": tensors,
    }


# The phases in which a step keeps the host busy, or waiting. It does other work while buckets fill and travel.
_TIMED = ("compress", "wait", "merge")


def scalars(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers about the whole model in what `Run.stats` has returned, as `Exchange.scalars` describes."""
    wire, dense = float(stats["wire_bytes"]), float(stats["dense_bytes"])
    found = {"wire_bytes": wire, "dense_bytes": dense, "ratio": wire / dense if dense else 1.0}
    for phase in _TIMED:
        spans = [bucket[phase] for bucket in stats["buckets"].values() if bucket[phase] is not None]
        if spans:
            found[f"{phase}_seconds"] = sum(end - begin for begin, end in spans)
    compressed = [tensor for tensor in stats["tensors"].values() if tensor["compressor"] != "none"]
    errors, norms = (
        [tensor[key] for tensor in compressed if tensor[key] is not None] for key in ("relative_error", "residual_norm")
    )
    if errors:
        found["relative_error"] = sum(errors) / len(errors)
    if norms:
        found["residual_norm"] = math.hypot(*norms)
    outer = stats.get("outer", {})
    found |= {key: outer[key] for key in ("distance", "cosine", "loss", "utilisation") if outer.get(key) is not None}
    return {f"grace/{name}": value for name, value in found.items()}
