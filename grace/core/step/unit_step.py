"""One rank's work on one unit in one step: from a gradient to a payload, and from received payloads to a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from grace.core.errors import PayloadError
from grace.core.methods.capabilities import Negotiating, Tuning
from grace.core.methods.memory import Merging, keeps_nothing, wide_norm
from grace.core.methods.site import Proposal, Site
from grace.core.ops.composites import ArrayOps
from grace.core.plan.unit import Unit
from grace.core.spec import NO_STATE, Array, Key, Payload, State
from grace.core.state.states import UnitStates, first_memory
from grace.core.state.stored import narrow, rounding_key, widen
from grace.core.wire.codings import coded
from grace.core.wire.layout import sent_bytes

# With at most this many elements, one operation on the dense result takes less time than one for each payload.
_SMALL = 4096


class Concluded(NamedTuple):
    """Result of a step: an array and a factor whose product is the unit's gradient, the new states, and the tally."""

    x: Array
    factor: float
    states: dict[str, State]
    tally: tuple[Array, Array] | None


class UnitStep:
    """One rank's step of a unit: states and a gradient in; a payload, the merged gradient and new states out.

    It changes nothing but itself, and nothing else changes it. The calls are `begin`, `compress` if the ranks
    negotiate, `remember`, `take_mean_from` if the mean is sent on, and `conclude`. `seed` is that of the run.
    `average=False` leaves sums undivided. With `rollback=False` it lets go of the memory's old state once it has read
    it, and writes over it if it is `owned`. `squares` needs a step that is `measured`. `onward` is the step of the unit
    as which the mean is sent on.
    """

    x: Array
    payload: Payload
    # The learning rate that `begin` got.
    lr: Any = None
    # A 0-d condition: this rank's gradient, or its payload, is not finite.
    bad: Array = False
    # The step whose payload brings the mean of all ranks, if the communicator sends it on.
    mean_from: UnitStep | None = None
    # What the payload decodes to, if `keep_sent` was called.
    decoded: Array | None = None
    # It takes part with zeros; what its memory holds, if that is this rank's alone and stays.
    rests = False
    _held: State | None = None
    # Its payload does not travel.
    sends_nothing = False
    # The new states, once the step is concluded.
    concluded: dict[str, State] | None = None
    proposal: Proposal | None = None
    _coded: Payload | None = None
    _place: Array | None = None
    # `memory` is that of `remember` already.
    _updated = False

    def __init__(
        self,
        unit: Unit,
        states: UnitStates,
        ops: ArrayOps,
        *,
        seed: int,
        step: Any,
        rank: int,
        size: int,
        average: bool = True,
        rollback: bool = True,
        owned: bool = False,
        measured: bool = False,
        onward: UnitStep | None = None,
    ) -> None:
        self.unit, self.states, self.onward = unit, states, onward
        self.site = Site(
            ops=ops,
            spec=unit.spec,
            key=Key(Key.derive(seed, unit.spec.name), step),
            rank=rank,
            size=size,
            state=states["compressor"],
        )
        # The memory's state in progress.
        self.memory: State = states["memory"]
        self._average = average
        self._rollback, self._owned, self._measured = rollback, owned, measured

    def write_to(self, place: Array | None) -> None:
        """Let kernels write the longest field of the payload to an array that has its dtype and length."""
        self._place = place

    def begin(
        self,
        gradient: Array,
        lr: Any = None,
        norm: Array | None = None,
        flags: Sequence[Array] = (),
        reference: Array | None = None,
    ) -> None:
        """Compensate a flat gradient, which is only read; compress it unless the ranks must negotiate first.

        `norm` is that of all gradients, if the memory needs it; without it, this is the only one. `flags` are the
        conditions of the ranks whose mean the gradient is; they count as those of this rank. `reference` is the second
        gradient, flat, if the memory needs it and this is no full round.
        """
        unit, ops, spec = self.unit, self.site.ops, self.unit.spec
        self.lr = lr
        if "lr" in unit.memory.needs:
            self.site = self.site._replace(lr=ops.full(1, lr, "float64")[0])
        if "norm" in unit.memory.needs:
            norm = wide_norm(ops, gradient) if norm is None else ops.cast(norm, "float64")
            self.site = self.site._replace(norm=norm)
        if reference is not None:
            self.site = self.site._replace(reference=ops.cast(reference, spec.work_dtype))
        gradient, memory = ops.cast(gradient, spec.work_dtype), widen(unit, self.states["memory"], ops)
        fused, at = unit.fused, self.site
        if self._owned and fused.overwritten:
            at = at._replace(out=tuple(memory[key] for key in fused.overwritten))
        if not self._compress_fused(gradient, memory, at):
            self._prepare(gradient, memory, at)
        for flag in flags:
            self.bad = ops.bit_or(self.bad, flag)
        if not self._rollback:
            self.states = {**self.states, "memory": NO_STATE}

    def rest(self, lr: Any = None) -> None:
        """Take part with zeros in place of `begin`. Its memory sends nothing and keeps what is a rank's own."""
        unit, ops, held = self.unit, self.site.ops, self.states["memory"]
        self.states = {**self.states, "memory": first_memory(unit, ops, None)}
        self.begin(ops.zeros(unit.spec.numel, unit.spec.dtype), lr)
        self.rests = True
        if unit.memory.across_ranks == "apart":
            self._held = held
        else:
            # It still follows what the others send.
            self.memory, self._updated = held, True
        if self._rollback:
            self.states = {**self.states, "memory": held}

    def compress_zeros(self) -> UnitStep:
        """Return the compressed step of a rank that rests, as this one knows it."""
        if self.rests:
            return self
        unit, site = self.unit, self.site
        states = {"memory": first_memory(unit, site.ops, None), "compressor": self.states["compressor"]}
        other = UnitStep(
            unit, states, site.ops, seed=0, step=site.key.step, rank=site.rank, size=site.size, average=self._average
        )
        other.site = other.site._replace(key=site.key)
        other.rest(self.lr)
        if site.negotiated is not None:
            other.compress(site.negotiated)
        return other

    def _prepare(self, gradient: Array, memory: State, at: Site) -> None:
        """Compensate a gradient by the state of the memory at a site, and propose or compress."""
        unit, ops, spec = self.unit, self.site.ops, self.unit.spec
        x, self.memory, finite = unit.memory.compensate(gradient, memory, at)
        if self.memory:
            self.site = self.site._replace(memory=self.memory)
        if keeps_nothing(unit.memory) and unit.proposed:
            # x may be the caller's own buffer, and it is still needed after this call.
            x = ops.copy(x)
        self.x, check = x, unit.fused.compress_checked
        made = check and check(unit.compressor, x, self._compressing)
        if made is not None:
            self.payload, good = made
            self.bad = ops.bit_not(good)
            self._check_payload()
            return
        if finite is None and unit.guarded and unit.proposal_shows and ops.runs_kernels:
            proposal = self._propose(x)
            self._take_proposal(x, proposal, ops.finite(proposal.array))
            return
        if unit.guarded and not (unit.shows and ops.runs_kernels):
            # Codecs may rely on finite input: zeros replace a bad gradient, and its flag tells the other ranks.
            self.bad = ops.bit_not(ops.finite(x) if finite is None else finite)
            if self.bad is not False:
                good = x
                x = self.x = ops.choose(self.bad, lambda: ops.zeros(spec.numel, spec.work_dtype), lambda: good)
        if unit.proposed:
            self.proposal = self._propose(x)
            self._check_proposal(self.proposal)
        else:
            self.compress()

    def _propose(self, x: Array) -> Proposal:
        assert isinstance(self.unit.compressor, Negotiating)
        return self.unit.compressor.propose(x, self.site)

    def _compress_fused(self, gradient: Array, memory: State, at: Site) -> bool:
        """Compensate and compress or propose in one pass; return False if no fusion of the two methods does."""
        compressor, fused = self.unit.compressor, self.unit.fused
        if fused.propose_sum is not None:
            proposed = fused.propose_sum(compressor, self.unit.memory, gradient, memory, at)
            if proposed is not None:
                self.memory = NO_STATE
                self._take_proposal(*proposed)
                return True
        if fused.compress_feedback is not None and not self._measured:
            fed = fused.compress_feedback(compressor, self.unit.memory, gradient, memory, at)
            if fed is not None:
                self.memory, self._updated = self._take(*fed), True
                return True
        made = fused.compress_sum and fused.compress_sum(compressor, self.unit.memory, gradient, memory, at)
        if made is None:
            return False
        x, payload, finite = made
        # Such a memory has no state in progress.
        self.memory = NO_STATE
        self.x = self._take({"x": x}, payload, finite)["x"]
        return True

    def _take(self, arrays: State, payload: Payload, finite: Array) -> State:
        """Take the payload and return the arrays of its length; if x was not finite, zeros and their payload."""
        unit, ops, compressor = self.unit, self.site.ops, self.unit.compressor
        self.payload, self.bad = payload, ops.bit_not(finite)
        if self.bad is not False:
            keys, names, given = list(arrays), list(payload), [*arrays.values(), *payload.values()]

            def nothing() -> list[Array]:
                zeros = ops.zeros(unit.spec.numel, unit.spec.work_dtype)
                of_zeros = compressor.compress(zeros, self.site)
                return [*(zeros for _ in keys), *(of_zeros[name] for name in names)]

            chosen = ops.choose(self.bad, nothing, lambda: given)
            arrays = dict(zip(keys, chosen[: len(keys)], strict=True))
            self.payload = dict(zip(names, chosen[len(keys) :], strict=True))
        self._check_payload()
        return arrays

    def _take_proposal(self, x: Array, proposal: Proposal, finite: Array) -> None:
        """Take x and its proposal; if x is not finite, zeros and theirs."""
        unit, ops = self.unit, self.site.ops
        self.bad = ops.bit_not(finite)
        if self.bad is not False:

            def nothing() -> list[Array]:
                zeros = ops.zeros(unit.spec.numel, unit.spec.work_dtype)
                return [zeros, self._propose(zeros).array]

            given = [x, proposal.array]
            x, array = ops.choose(self.bad, nothing, lambda: given)
            proposal = proposal._replace(array=array)
        self.x, self.proposal = x, proposal
        self._check_proposal(proposal)

    def compress(self, negotiated: Array | None = None) -> None:
        """Make the payload, with what the ranks negotiated."""
        if negotiated is not None:
            self.site = self.site._replace(negotiated=negotiated)
        self.payload = self.unit.compressor.compress(self.x, self._compressing)
        self._check_payload()

    @property
    def _compressing(self) -> Site:
        """The site of `compress`."""
        return self.site if self._place is None else self.site._replace(out=self._place)

    def _check_payload(self) -> None:
        """Set the flag if the payload is not finite.

        A finite gradient can still overflow in it (float16, a norm); then no state may keep it.
        """
        ops = self.site.ops
        for name in self.unit.overflowing:
            self.bad = ops.bit_or(self.bad, ops.bit_not(ops.finite(self.payload[name])))

    def squares(self) -> tuple[Array, Array]:
        """Return |x|^2 and |x - C(x)|^2 of each piece of the unit, in float64. Call it before `remember`."""
        ops, unit = self.site.ops, self.unit
        # NumPy would warn of a difference of infinite elements.
        error = ops.weighted_sum(self.x, 1, unit.compressor.decompress(self.payload, self.site), -1)
        wide = [ops.cast(x, "float64") for x in (self.x, error)]
        if len(unit.pieces) == 1:
            first, second = (ops.reshape(ops.sum(x * x), (1,)) for x in wide)
        else:
            places = ops.search_sorted(self._ends(), ops.arange(unit.spec.numel, "int64"))
            first, second = (ops.segment_sum(x * x, places, len(unit.pieces)) for x in wide)
        return first, second

    def keep_sent(self) -> None:
        """Decode the payload, before a collective writes over it."""
        ops = self.site.ops
        self.decoded = ops.copy(self.unit.compressor.decompress(self.payload, self.site))

    def contribution(self) -> Array | None:
        """Return what this rank has contributed to the mean, once the step is concluded; None without `keep_sent`."""
        if self.decoded is None or self.concluded is None:
            return None
        pace = self.unit.memory.pace
        if not pace:
            return self.decoded
        # The shift has moved by the pace already.
        return self.site.ops.weighted_sum(self.concluded["memory"]["shift"], 1, self.decoded, 1 - pace)

    def entries(self) -> Array | None:
        """Return how many entries of the payload lie before the end of each piece; None if it does not list them."""
        ops, unit = self.site.ops, self.unit
        if len(unit.pieces) == 1 or not unit.lists_entries:
            return None
        return ops.search_sorted(ops.cast(self.payload["indices"], "int64"), self._ends() - 1)

    def _ends(self) -> Array:
        ends = self.unit.ends
        return self.site.ops.constant(("ends", ends), lambda: self.site.ops.numbers(ends, "int64"))

    @property
    def sent(self) -> Payload:
        """The payload as it travels."""
        return self.divided if self._average and self.site.size > 1 and self.unit.half_sum else self.payload

    @property
    def coded(self) -> Payload:
        """The payload with its coded fields as they travel by gathering; coded once."""
        if self._coded is None:
            self._coded = coded(self.site.ops, self.unit.fields, self.sent)
        return self._coded

    def sent_bytes(self) -> Any:
        """Return the bytes of the payload's fields on the wire: an int, or a 0-d array in a traced graph."""
        if self.sends_nothing:
            return 0
        if self.unit.field_bytes is not None:
            return self.unit.field_bytes
        return sent_bytes(self.site.ops, self.unit.fields, self.payload if self._coded is None else self._coded)

    @property
    def divided(self) -> Payload:
        """The payload whose 16-bit floats will be averaged, with its other floats divided by the number of ranks."""
        wide = [f for f in self.unit.fields if f.wire and f.dtype in ("float32", "float64")]
        cast = self.site.ops.cast
        return {**self.payload, **{f.name: self.payload[f.name] * cast(1.0 / self.site.size, f.dtype) for f in wide}}

    def remember(self, sent: Payload | None = None, x_: Array | None = None) -> None:
        """Update the memory with the payload, or with what was sent of it; the buffer of x becomes the new residual.

        `x_` takes the place of x, if entries of other ranks came back to it.
        """
        unit, site, ops = self.unit, self.site, self.site.ops
        if self._updated:
            memory = self.memory
        else:
            sent = self.payload if sent is None else sent
            memory = unit.memory.update(self.x if x_ is None else x_, sent, unit.compressor, self.memory, site)
            del self.x
        if unit.memory.residual_dtype is not None:
            if self.bad is not False:
                # Integers cannot hold what a payload that is not finite leaves, and the step keeps none of it.
                left = memory["residual"]
                zeros = ops.zeros(unit.spec.numel, unit.spec.work_dtype)
                memory = {**memory, "residual": ops.choose(self.bad, lambda: zeros, lambda: left)}
            memory = narrow(unit, memory, ops, rounding_key(site.key.seed, site.key.step, site.rank))
        self.memory = memory

    def take_mean_from(self, step: UnitStep | None) -> None:
        """Take the mean of all ranks from the payload of another step; call it before `conclude`."""
        self.mean_from = step

    def next_states(self) -> dict[str, State]:
        """Return the states with the memory as `remember` has left it."""
        return self._states_with(self.memory, self.states["compressor"])

    def _states_with(self, memory: State, compressor: State) -> dict[str, State]:
        return {"memory": memory if self._held is None else self._held, "compressor": compressor}

    def merged(self, payloads: Sequence[Payload]) -> Array:
        """Return the mean of the decoded payloads, or for a vote its result; before `conclude`, to send it on."""
        averages = self.unit.compressor.averages and len(payloads) > 1
        gradient, factor = _merge_times(
            self.unit, self._add_known_fields(payloads), 1 / len(payloads) if averages else 1.0, self.site
        )
        return gradient if factor == 1 else self.site.ops.scale_(gradient, factor)

    def conclude(self, payloads: Sequence[Payload], flags: Sequence[Array], out: Array | None = None) -> Concluded:
        """Merge the payloads of all ranks, or their sum, and return the gradient for the optimizer and the new states.

        `flags` are the conditions of all ranks, or one for all of them. The result's array is `out` if it could be
        written to, else in its own memory.
        """
        if self.mean_from is not None:
            return self._conclude_mean(self.mean_from, payloads, flags, out)
        unit, site, ops = self.unit, self.site, self.site.ops
        payloads = self._add_known_fields(payloads)
        merges = isinstance(unit.memory, Merging)
        size = site.size if unit.compressor.averages and unit.communicator.result is None and not merges else 1
        already_mean = size == 1 or (self._average and unit.half_sum)
        # Memories work on means; a sum, if the caller asked for one, is made from their result.
        factor, back = unit.memory.gain / (1 if already_mean else size), 1.0 if self._average else float(size)
        if not (merges or "mean" in unit.memory.needs):
            factor, back = factor * back, 1.0
        there = site if out is None else site._replace(out=out)
        gradient, factor, memory = self._merge(payloads, factor, there)
        learnt = site.state if unit.learning is None else unit.learning.learn(payloads, site)
        states = self._states_with(memory, learnt)
        tally = None if unit.tuning is None else unit.tuning.tally(payloads, site)
        if unit.guarded:
            bad = self._any(flags)
            gradient, states = self._unless(bad, gradient, states)
            if tally is not None:
                tally = ops.where(bad, float("nan"), tally[0]), tally[1]
        self.concluded = states
        return Concluded(gradient, factor * back, states, tally)

    def _add_known_fields(self, payloads: Sequence[Payload]) -> Sequence[Payload]:
        """Return payloads of all ranks with the fields that do not travel, because they are equal on all ranks."""
        home = {name: self.payload[name] for name in self.unit.local_fields}
        return [{**payload, **home} for payload in payloads] if home else payloads

    def _merge(self, payloads: Sequence[Payload], factor: float, there: Site) -> tuple[Array, float, State]:
        """Merge payloads of the unit times a factor; return an array and what is left of the factor, and the memory."""
        unit, memory, ops = self.unit, self.memory, self.site.ops
        if isinstance(unit.memory, Merging):
            gradient, memory = unit.memory.merge(payloads, unit.compressor, memory, self.site)
            return gradient, 1.0, memory
        if unit.fused.merge_finish is not None and unit.communicator.result is None:
            payloads, factor = _scale(unit, payloads, factor, there)
            made = (
                unit.fused.merge_finish(unit.compressor, unit.memory, payloads, memory, there) if factor == 1 else None
            )
            if made is not None:
                return made[0], 1.0, made[1]
        gradient, factor = _merge_times(unit, payloads, factor, there)
        if "mean" in unit.memory.needs:
            mean = gradient if factor == 1 else ops.scale_(gradient, factor)
            gradient, memory = unit.memory.finish(mean, memory, self.site)
            factor = 1.0
        return gradient, factor, memory

    def _conclude_mean(
        self, source: UnitStep, payloads: Sequence[Payload], flags: Sequence[Array], out: Array | None
    ) -> Concluded:
        """Do the same with the one payload in which an owner has sent the mean on."""
        unit, ops, there = self.unit, self.site.ops, source.site._replace(out=out)
        gradient, factor = _merge_times(source.unit, payloads, unit.memory.gain, there)
        averages = all(step.unit.compressor.averages for step in (self, *self.chain))
        back = 1.0 if self._average or not averages else float(self.site.size)
        memory = self.memory
        if "mean" in unit.memory.needs:
            mean = gradient if factor == 1 else ops.scale_(gradient, factor)
            gradient, memory = unit.memory.finish(mean, memory, self.site)
            factor = 1.0
        states = self._states_with(memory, self.states["compressor"])
        if flags:
            gradient, states = self._unless(self._any(flags), gradient, states)
        self.concluded = states
        return Concluded(gradient, factor * back, states, None)

    @property
    def chain(self) -> Iterator[UnitStep]:
        """The steps of the units with which the mean is sent on, one after another."""
        onward = self.onward
        while onward is not None:
            yield onward
            onward = onward.onward

    def step_of_mean(self) -> UnitStep:
        """Return a step that sends the mean of the same unit back, without a memory and with other random numbers."""
        unit, site = self.unit.without_memory(), self.site
        states = {"memory": NO_STATE, "compressor": self.states["compressor"]}
        back = UnitStep(unit, states, site.ops, seed=0, step=site.key.step, rank=0, size=1)
        back.site = back.site._replace(key=Key(Key.derive(site.key.seed, "mean"), site.key.step))
        return back

    def states_unless(self, flags: Sequence[Array]) -> dict[str, State]:
        """Return the new states of a unit whose payload others merge; the old ones if a flag is set."""
        if self.concluded is not None:
            return self.concluded
        states = self.next_states()
        places = [(kind, key) for kind, state in states.items() for key in state]
        if not flags or not places:
            return states
        chosen = self.site.ops.choose(
            self._any(flags),
            lambda: self._old(places),
            lambda: [states[kind][key] for kind, key in places],
        )
        return _states(places, chosen)

    def _any(self, flags: Sequence[Array]) -> Array:
        bad = flags[0]
        for flag in flags[1:]:
            bad = self.site.ops.bit_or(bad, flag)
        return bad

    def _unless(self, bad: Array, gradient: Array, states: UnitStates) -> tuple[Array, dict[str, State]]:
        """Return the gradient and the new states; NaN and the old states if the condition `bad` holds."""
        if bad is False:
            return gradient, dict(states)
        ops, spec = self.site.ops, self.unit.spec
        places = [(kind, key) for kind, state in states.items() for key in state]
        kept = [states[kind][key] for kind, key in places]
        *chosen, gradient = ops.choose(
            bad,
            lambda: [
                *self._old(places),
                ops.full(spec.numel, float("nan"), spec.work_dtype),
            ],
            lambda: [*kept, gradient],
        )
        return gradient, _states(places, chosen)

    def _old(self, places: Sequence[tuple[str, str]]) -> list[Array]:
        """Return the states before the step; without roll-back, those of a memory that starts from zero."""
        old = self.states
        if not self._rollback:
            old = {**old, "memory": first_memory(self.unit, self.site.ops, None)}
        return [old[kind][key] for kind, key in places]

    def _check_proposal(self, proposal: Proposal) -> None:
        """Raise PayloadError if the proposal is not what the compressor announced."""
        ops = self.site.ops
        announced = [(f.dtype, f.length) for f in self.unit.proposed]
        proposed = [(ops.dtype(proposal.array), ops.length(proposal.array))]
        if announced != proposed:
            raise PayloadError(
                f"tensor '{self.unit.spec.name}': proposed() announced {announced}, but propose() returned {proposed}; "
                "make the two agree."
            )


def _merge_times(unit: Unit, payloads: Sequence[Payload], factor: float, at: Site) -> tuple[Array, float]:
    """Merge, multiply by the factor if that needs no pass of its own, and return the gradient and the factor left."""
    payloads, factor = _scale(unit, payloads, factor, at)
    if unit.communicator.result is not None:
        return unit.communicator.result(unit.compressor, payloads, at), factor
    if factor != 1 and unit.fused.merge_scaled is not None:
        merged = unit.fused.merge_scaled(unit.compressor, payloads, factor, at)
        if merged is not None:
            return merged, 1.0
    return unit.compressor.merge(payloads, at), factor


def _scale(unit: Unit, payloads: Sequence[Payload], factor: float, at: Site) -> tuple[Sequence[Payload], float]:
    """Multiply payloads by the factor if that gives the same bits as afterwards; return them and the factor left."""
    fields = unit.compressor.linear_in
    # A power of two is exact, and the payload is small compared with the dense result, unless that is small itself.
    few = unit.spec.numel <= _SMALL and len(payloads) * len(fields) > 1
    if factor == 1 or not fields or few or math.frexp(factor)[0] != 0.5:
        return payloads, factor
    return [{**each, **{name: at.ops.scaled(each[name], factor) for name in fields}} for each in payloads], 1.0


def _states(places: Sequence[tuple[str, str]], values: Sequence[Array]) -> dict[str, State]:
    made: dict[str, State] = {"memory": {}, "compressor": {}}
    for (kind, key), value in zip(places, values, strict=True):
        made[kind][key] = value
    return made


def retune(steps: Sequence[UnitStep], tallies: Sequence[tuple[Array, Array]], states: Sequence[State]) -> list[State]:
    """Return the states of equal compressors after they learned from what all their units together sent."""
    # The tensors of a model may lie on several devices.
    ops = steps[0].site.ops
    wide = [[ops.cast(value, "float64") for value in tally] for tally in tallies]
    first, second = (ops.sum(ops.stack([tally[i] for tally in wide], axis=0)) for i in (0, 1))
    new = []
    for step, old in zip(steps, states, strict=True):
        site, compressor = step.site, step.unit.compressor
        assert isinstance(compressor, Tuning)
        first, second = (site.ops.cast(value, "float64") for value in (first, second))
        made = compressor.retune(old, first, second, site)
        # A bad unit makes the sums useless for all.
        good = site.ops.finite(first)
        new.append({key: site.ops.where(good, made[key], old[key]) for key in old})
    return new
