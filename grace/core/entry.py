"""What the engine holds of a step: one entry per tensor, one run per bucket; and what it does with them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from grace.core.communicator import Sent
from grace.core.compressor import Compressor
from grace.core.errors import PayloadError
from grace.core.ops.composites import ArrayOps
from grace.core.plan import Part
from grace.core.spec import Array, Payload, Proposal, Site, State
from grace.core.state import Slots
from grace.core.transport import Handle


@dataclass
class Entry:
    """One tensor on its way through a step."""

    part: Part
    site: Site
    x: Array
    memory_state: State
    bad: Array
    proposal: Proposal | None
    payload: Payload = field(default_factory=dict)
    tally: tuple[Array, Array] | None = None


@dataclass
class Run:
    """One bucket on its way through a step."""

    entries: dict[str, Entry] = field(default_factory=dict)
    agreeing: dict[tuple[str, str], Handle] = field(default_factory=dict)
    sent: Sent | None = None


def retune(entries: Sequence[Entry], slots: Slots) -> None:
    """Let compressors learn from what all tensors that they serve have sent together."""
    groups: dict[Compressor, list[tuple[Site, tuple[Array, Array]]]] = {}
    for entry in entries:
        if entry.tally is not None:
            groups.setdefault(entry.part.compressor, []).append((entry.site, entry.tally))
    for compressor, group in groups.items():
        # The tensors of a model may lie on several devices.
        ops = group[0][0].ops
        tallies = [[ops.cast(value, "float64") for value in tally] for _, tally in group]
        first, second = (ops.sum(ops.stack([tally[i] for tally in tallies], axis=0)) for i in (0, 1))
        for site, _ in group:
            first, second = (site.ops.cast(value, "float64") for value in (first, second))
            states = slots.read(site.spec.name)
            old = states["compressor"]
            new = compressor.retune(old, first, second, site)
            # One bad tensor says nothing about all of them.
            good = site.ops.finite(first)
            kept = {key: site.ops.where(good, new[key], old[key]) for key in old}
            slots.write(site.spec.name, {**states, "compressor": kept})


def either(ops: ArrayOps, condition: Array, a: Array, b: Array) -> Array:
    """a if the 0-d condition holds, else b."""
    return ops.choose(condition, lambda: a, lambda: b)


def divided(payload: Payload, part: Part, size: int, ops: ArrayOps) -> Payload:
    """A payload whose 16-bit floats are going to be averaged: what else is summed of it, by the number of ranks."""
    wide = [f for f in part.fields if f.wire and f.dtype in ("float32", "float64")]
    return {**payload, **{f.name: payload[f.name] * ops.cast(1.0 / size, f.dtype) for f in wide}}


def check_proposal(part: Part, proposal: Proposal | None, ops: ArrayOps) -> None:
    """Raise PayloadError where a proposal is not what the compressor announced."""
    announced = [(f.dtype, f.length) for f in part.agreement]
    proposed = [] if proposal is None else [(ops.dtype(proposal.array), ops.length(proposal.array))]
    if announced != proposed:
        raise PayloadError(
            f"tensor '{part.spec.name}': agreement announced {announced} and agree proposed {proposed}; "
            "make the two agree."
        )
