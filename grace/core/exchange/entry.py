"""One rank's work on one unit in a step: compensate, compress, and merge once the payloads are here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grace.core.exchange.state import Slots
from grace.core.exchange.transport import Handle
from grace.core.exchange.wire import Received, sent_bytes
from grace.core.methods.communicator import Sent
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import FINITE, Memory
from grace.core.observe.timeline import Times
from grace.core.ops.composites import ArrayOps
from grace.core.values.errors import PayloadError
from grace.core.values.spec import Array, Key, Payload, Proposal, Site, State
from grace.core.values.unit import Unit


@dataclass
class Entry:
    """One unit under way in a step."""

    unit: Unit
    site: Site
    x: Array
    memory_state: State
    bad: Array
    proposal: Proposal | None
    payload: Payload = field(default_factory=dict)
    tally: tuple[Array, Array] | None = None


@dataclass
class Run:
    """One bucket under way in a step."""

    entries: dict[str, Entry] = field(default_factory=dict)
    negotiating: dict[tuple[str, str], Handle] = field(default_factory=dict)
    sent: Sent | None = None
    received: Received | None = None


class Works:
    """Work of one rank of `size` on units whose states lie in `slots`; `times` records its moments.

    `ops(device)` returns the array operations. `average=False` leaves sums undivided.
    """

    def __init__(
        self,
        ops: Callable[[str], ArrayOps],
        slots: Slots,
        times: Times,
        *,
        rank: int,
        size: int,
        seed: int,
        average: bool,
    ) -> None:
        self.track_norms = False
        self._ops, self._slots, self._times, self._rank, self._size = ops, slots, times, rank, size
        self._seed, self._average = seed, average

    def begin(self, unit: Unit, gradient: Array, lr: Any) -> Entry:
        """Compensate a unit's flat gradient, which is only read; compress it unless the ranks must negotiate first."""
        self._times.mark("begun", unit.spec.name, (gradient,))
        spec, ops, states = unit.spec, self._ops(unit.spec.device), self._slots.read(unit.spec.name)
        site = Site(
            ops=ops,
            spec=spec,
            key=Key(Key.derive(self._seed, spec.name), self._slots.step),
            rank=self._rank,
            size=self._size,
            state=states["compressor"],
            lr=ops.full(1, lr, "float64")[0] if unit.memory.needs_lr else None,
        )
        x, memory_state = unit.memory.compensate(ops.cast(gradient, spec.work_dtype), states["memory"], site)
        finite = memory_state.get(FINITE)
        memory_state = {key: value for key, value in memory_state.items() if key != FINITE}
        if unit.memory.stateless and unit.proposed:
            # x may be the caller's own buffer, and it is still needed after this call.
            x = ops.copy(x)
        bad = False
        if unit.guarded and not unit.checks:
            # Codecs may rely on finite input: zeros replace a bad gradient, and its flag tells the other ranks.
            bad = ~(ops.finite(x) if finite is None else finite)
            good = x
            x = ops.choose(bad, lambda: ops.zeros(spec.numel, spec.work_dtype), lambda: good)
        site = site._replace(memory=memory_state)
        proposal = unit.compressor.propose(x, site)
        _check_proposal(unit, proposal, ops)
        entry = Entry(unit, site, x, memory_state, bad, proposal)
        if proposal is None:
            self.compress(entry)
        return entry

    def compress(self, entry: Entry, negotiated: Array | None = None) -> None:
        """Make the payload, with what the ranks negotiated."""
        unit, ops = entry.unit, entry.site.ops
        entry.site = entry.site._replace(negotiated=negotiated)
        if unit.checks:
            entry.payload, finite = unit.compressor.compress_checked(entry.x, entry.site)
            entry.bad = ~finite
        else:
            entry.payload = unit.compressor.compress(entry.x, entry.site)
        if unit.guarded:
            # A finite gradient can still overflow in the payload (float16, a norm); then no state may keep it.
            for f in unit.fields:
                if f.dtype.startswith(("float", "bfloat")):
                    entry.bad = ops.bit_or(entry.bad, ~ops.finite(entry.payload[f.name]))
        size = error = None
        if self.track_norms:
            size = ops.norm(entry.x)
            error = ops.norm(entry.x - unit.compressor.decompress(entry.payload, entry.site))
        self._slots.note("size", unit.spec.name, size)
        self._slots.note("error", unit.spec.name, error)

    def to_send(self, entry: Entry) -> Payload:
        """Return the payload as it travels."""
        halves = self._average and self._size > 1 and entry.unit.half_sum
        return divided(entry.payload, entry.unit, self._size, entry.site.ops) if halves else entry.payload

    def remember(self, entry: Entry) -> None:
        """Update the memory with the payload under way; the buffer of x becomes the new residual."""
        unit = entry.unit
        entry.memory_state = unit.memory.update(entry.x, entry.payload, unit.compressor, entry.memory_state, entry.site)

    def commit_memory(self, entry: Entry, flags: list[Array]) -> None:
        """Commit the memory early if no rank saw NaN or infinity, so that its last state can be freed."""
        unit = entry.unit
        if not (_finishes(unit) or any(flag > 0 for flag in flags)):
            states = self._slots.read(unit.spec.name)
            self._slots.write(unit.spec.name, {**states, "memory": entry.memory_state})

    def conclude(
        self, entry: Entry, payloads: list[Payload], flags: list[Array], out: Array | None
    ) -> tuple[Array, float]:
        """Merge and commit the states; return an array and a factor whose product is the unit's gradient.

        The array is `out` if it could be written to, else in its own memory.
        """
        unit, site, ops, spec = entry.unit, entry.site, entry.site.ops, entry.unit.spec
        home = {f.name: entry.payload[f.name] for f in unit.fields if not f.wire}
        payloads = [{**payload, **home} for payload in payloads]
        size = self._size if unit.compressor.averages else 1
        already_mean = size == 1 or (self._average and unit.half_sum)
        finishes = _finishes(unit)
        # Memories work on means; a sum, if the caller asked for one, is made from their result.
        factor, back = unit.memory.gain / (1 if already_mean else size), 1.0 if self._average else float(size)
        if not finishes:
            factor, back = factor * back, 1.0
        # A site of its own for this merge: no other engine, and no later call, may write to `out`.
        there = site if finishes or out is None else site._replace(ops=ops.writing_to(out))
        if unit.compressor.linear_in and factor != 1 and math.frexp(factor)[0] == 0.5:
            # A power of two is exact, and the payload is small compared with the dense result.
            gradient = unit.compressor.merge([_scaled(payload, factor, unit, ops) for payload in payloads], there)
            factor = 1.0
        else:
            gradient = unit.compressor.merge(payloads, there)
        memory_state = entry.memory_state
        if finishes:
            mean = gradient if factor == 1 else ops.scale_(gradient, factor)
            gradient, memory_state = unit.memory.finish(mean, entry.memory_state, site)
            factor = 1.0
        states = {"memory": memory_state, "compressor": unit.compressor.learn(payloads, site)}
        bad: Any = False
        if unit.guarded:
            bad = flags[0] > 0
            for flag in flags[1:]:
                bad = ops.bit_or(bad, flag > 0)
            gradient, states = self._unless(bad, gradient, states, entry)
        self._slots.write(spec.name, states)
        tally = unit.compressor.tally(payloads, site)
        if tally is not None:
            first, second = tally
            entry.tally = (ops.where(bad, float("nan"), first), second) if unit.guarded else tally
        sent = sent_bytes(ops, unit.fields, entry.payload)
        self._slots.note("unit", spec.name, sent + unit.negotiated_bytes)
        return gradient, factor * back

    def _unless(
        self, bad: Array, gradient: Array, states: dict[str, State], entry: Entry
    ) -> tuple[Array, dict[str, State]]:
        """Return the gradient and the new states; NaN and the old states if the condition `bad` holds."""
        ops, spec = entry.site.ops, entry.unit.spec
        old = self._slots.read(spec.name)
        places = [(kind, key) for kind, state in states.items() for key in state]
        kept = [states[kind][key] for kind, key in places]
        *chosen, gradient = ops.choose(
            bad,
            lambda: [
                *(old[kind][key] for kind, key in places),
                ops.full(spec.numel, float("nan"), spec.work_dtype),
            ],
            lambda: [*kept, gradient],
        )
        made: dict[str, State] = {"memory": {}, "compressor": {}}
        for (kind, key), value in zip(places, chosen, strict=True):
            made[kind][key] = value
        return gradient, made

    def retune(self, entries: Sequence[Entry]) -> None:
        """Let compressors learn from what all their units together sent."""
        groups: dict[Compressor, list[tuple[Site, tuple[Array, Array]]]] = {}
        for entry in entries:
            if entry.tally is not None:
                groups.setdefault(entry.unit.compressor, []).append((entry.site, entry.tally))
        for compressor, group in groups.items():
            # The tensors of a model may lie on several devices.
            ops = group[0][0].ops
            tallies = [[ops.cast(value, "float64") for value in tally] for _, tally in group]
            first, second = (ops.sum(ops.stack([tally[i] for tally in tallies], axis=0)) for i in (0, 1))
            for site, _ in group:
                first, second = (site.ops.cast(value, "float64") for value in (first, second))
                states = self._slots.read(site.spec.name)
                old = states["compressor"]
                new = compressor.retune(old, first, second, site)
                # A bad unit makes the sums useless for all.
                good = site.ops.finite(first)
                kept = {key: site.ops.where(good, new[key], old[key]) for key in old}
                self._slots.write(site.spec.name, {**states, "compressor": kept})


def either(ops: ArrayOps, condition: Array, a: Array, b: Array) -> Array:
    """Return a if the 0-d condition holds, else b."""
    return ops.choose(condition, lambda: a, lambda: b)


def _finishes(unit: Unit) -> bool:
    """Return whether the memory changes the mean (it overrides `finish`)."""
    return type(unit.memory).finish is not Memory.finish


def _scaled(payload: Payload, factor: float, unit: Unit, ops: ArrayOps) -> Payload:
    """Return a payload that carries its gradient times a factor."""
    fields = unit.compressor.linear_in
    return {name: v * ops.cast(factor, ops.dtype(v)) if name in fields else v for name, v in payload.items()}


def divided(payload: Payload, unit: Unit, size: int, ops: ArrayOps) -> Payload:
    """Return a payload whose 16-bit floats will be averaged, with its other floats divided by the number of ranks."""
    wide = [f for f in unit.fields if f.wire and f.dtype in ("float32", "float64")]
    return {**payload, **{f.name: payload[f.name] * ops.cast(1.0 / size, f.dtype) for f in wide}}


def _check_proposal(unit: Unit, proposal: Proposal | None, ops: ArrayOps) -> None:
    """Raise PayloadError if a proposal is not what the compressor announced."""
    announced = [(f.dtype, f.length) for f in unit.proposed]
    proposed = [] if proposal is None else [(ops.dtype(proposal.array), ops.length(proposal.array))]
    if announced != proposed:
        raise PayloadError(
            f"tensor '{unit.spec.name}': proposed() announced {announced}, but propose() returned {proposed}; "
            "make the two agree."
        )
