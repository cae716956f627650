"""`OuterRun`: the syncs of a run whose ranks step on their own, and the weights at the last of them.

Between two syncs, every rank trains on its own. At a sync, it sends d = (weights after the last sync - weights now) by
an ordinary step of its run, so that every method and its states apply: the residual is in units of the weights. The
outer optimizer makes the new weights of the mean of all d. Momentum of the inner optimizer stays local. With the mean
of the weights and a compressor, this is Basu et al., "Qsparse-local-SGD", NeurIPS 2019, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from grace.core.config.outer import OuterSteps
from grace.core.errors import StateError, StepError
from grace.core.methods.memory import Memory, keeps_nothing
from grace.core.ops.composites import ArrayOps
from grace.core.session.outer_formulas import (
    correct,
    count_agreeing,
    mean_in_part,
    next_variate,
    next_variate_in_part,
    outer_update,
    products,
    with_variate,
)
from grace.core.session.outer_setup import LOSS, module_beside, modules_of
from grace.core.session.record import Record
from grace.core.spec import NO_STATE, Array, State, TensorSpec
from grace.core.state.checks import check_mapping, check_number, convert_state, show, unreadable
from grace.core.state.merge import shares
from grace.core.state.run import Run
from grace.core.step.step import Outcome
from grace.core.transport.collectives import KINDS, allreduce, copies
from grace.core.transport.transport import Handle

#: Makes a saved array one of the form of the current one.
Convert: TypeAlias = Callable[[Array, Array], Array]
#: The memories of tensors.
Memories: TypeAlias = Mapping[str, Memory]

NO_RATES: Mapping[str, float] = {}


class PendingSync(NamedTuple):
    """Exchange whose result is not applied yet: the inner step after which d was sent, and d by tensor, if not frozen.

    Who takes part follows from the number of the sync, which is that of the next one to be applied. `settled` says
    that the ranks of an earlier run have drawn it: now all take part, with what those had contributed. Where relevance
    decides, `takes_part` says whether this rank does; such an exchange is applied in the same step.
    """

    sent: int
    changes: Mapping[str, Array]
    settled: bool = False
    takes_part: bool | None = None


class Losses(NamedTuple):
    """Losses of this rank since the last sync: their sum and number. `first` and `last` are means of all ranks."""

    total: float = 0.0
    number: float = 0
    first: float = 0.0
    last: float = 0.0


class OuterState(NamedTuple):
    """Everything that outer steps keep, as one value; no array in it is ever changed.

    `steps` counts the inner steps, and `synced_at` is their number at the last sync. `anchors` has the flat weights
    after the last sync of each tensor, in their own dtype, and `kept` the states of the outer optimizer. `losses` are
    of the first and the last period before a sync, if periods follow them, and of this one. `variates` has the flat
    control variates, and `rates` the sums of learning rates since the last sync of each tensor. `server` has the flat
    means of what is subtracted from the gradients of all ranks, if only a part of them contributes. `last` has the flat
    mean changes of the last sync, if they decide who contributes to the next one.
    """

    steps: int
    synced_at: int
    rounds: int
    anchors: Mapping[str, Array]
    kept: Mapping[str, State]
    pending: PendingSync | None = None
    losses: Losses = Losses()
    variates: Mapping[str, Array] = NO_STATE
    rates: Mapping[str, float] = NO_RATES
    server: Mapping[str, Array] = NO_STATE
    last: Mapping[str, Array] = NO_STATE


class OuterOutcome(NamedTuple):
    """Result of a sync, before it is committed: flat weights by tensor, the new state, the outcomes by module."""

    weights: dict[str, Array]
    state: OuterState
    by_module: Mapping[str, Outcome]


class OuterRun:
    """The outer steps of one rank over its run, whose modules are the fragments.

    A front end calls `begin(weights)` once, `before(weights)` before each inner step if it can, and `send(weights)`
    after it; what `receive(weights)` returns are weights to write. `weights` has all tensors by name.
    """

    def __init__(self, outer: OuterSteps, run: Run, specs: Sequence[TensorSpec], seed: int) -> None:
        self.outer, self._run, self._seed = outer, run, seed
        self._specs = {spec.name: spec for spec in specs}
        #: The tensors that outer steps move, and not only average.
        self._weights = [spec.name for spec in specs if not spec.rounds]
        self._members = modules_of(outer, specs)
        self._rounds = sorted({spec.rounds for spec in specs} - {0})
        # A secret of this rank: what all ranks know could be subtracted again.
        self._secret = secrets.SystemRandom().getrandbits(128) if outer.noise else 0
        self._drawn = 0
        run.keeps_own = outer.follows_sent
        self._state: OuterState | None = None
        # True if the pending exchange has started in this process: not right after a checkpoint was loaded.
        self._started = False
        # If each rank decides itself whether it takes part in the pending exchange: the collective by which all learn
        # of it, and then the share of those that do.
        self._asked: Handle | None = None
        self._share = 1.0
        #: What `stats` reports.
        self.record = Record(outer)

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> OuterState:
        """Everything that it keeps. Raises StepError before `begin`."""
        if self._state is None:
            raise StepError(
                "outer steps exchange changes of weights, and the weights at the start are not known; call "
                "begin(weights) before the first step."
            )
        return self._state

    @property
    def now(self) -> OuterState | None:
        """Everything that it keeps; None before `begin`."""
        return self._state

    @property
    def syncs_next(self) -> bool:
        """True if tensors sync after the next inner step."""
        return bool(self._fragments_sent(self.state.steps + 1))

    def begin(self, weights: Mapping[str, Array]) -> None:
        """Start with these weights, equal on all ranks; earlier steps are forgotten.

        Raises StepError if weights are missing or unknown, or have another shape or dtype.
        """
        self._check(weights)
        flat = {name: self._flat(name, weights) for name in self._weights}
        kept = {name: self._first_state(name, x) for name, x in flat.items()}
        anchors = {name: self._ops(name).copy(x) for name, x in flat.items()}
        server = self._no_variates() if self.outer.participation < 1 else {}
        self.restore(OuterState(0, 0, 0, anchors, kept, variates=self._no_variates(), server=server))

    def restore(self, state: OuterState | None) -> None:
        """Go on with an earlier state of this object, or of a checkpoint; a pending exchange is started again."""
        self._state, self._started, self._asked = state, False, None

    def before(self, weights: Mapping[str, Array]) -> None:
        """Read the weights again where they are those of the last sync, before an inner step.

        They may have been loaded or broadcast since.
        """
        state = self.state
        fresh = self._fresh(state)
        if fresh:
            read = {name: self._ops(name).copy(self._flat(name, weights)) for name in fresh}
            self._state = state._replace(anchors={**state.anchors, **read})
        self.poll()

    def send(
        self,
        weights: Mapping[str, Array],
        resting: Collection[str] = (),
        lr: float | Mapping[str, float] | None = None,
    ) -> None:
        """Count an inner step, and start the exchange of the tensors that sync after it.

        `resting` names tensors that train on no rank: they keep their weights and states. `lr` is the learning rate of
        the step, or that of each tensor, which control variates need.
        """
        self._check(weights)
        rates = self._rates(lr)
        self.record.occupied.mark(exchanging=False)
        state = self.state
        step = state.steps + 1
        self.poll()
        pending = state.pending
        if self._fragments_sent(step):
            changes = {
                name: self._change_of(name, weights, self._memory(module, name), rates.get(name, 0.0))
                for module in self._modules(step)
                for name in self._members[module]
                if name not in resting and name != LOSS
            }
            if self.outer.clip:
                changes |= self._private({name: x for name, x in changes.items() if name in state.anchors})
            takes_part = self._takes_part(step, changes)
            pending, self._started = PendingSync(step, changes | self._loss(), takes_part=takes_part), False
        self._state = state._replace(steps=step, pending=pending, rates=rates)
        self.poll()
        self.record.note_step()

    def note_loss(self, loss: float) -> None:
        """Note the loss of an inner step of this rank; see `Exchange.note_loss`."""
        if self.outer.adapt == "loss" and not (loss > 0 and math.isfinite(loss)):
            raise StepError(
                f"outer steps: the periods follow the square root of the loss, received {loss!r}; note a positive one, "
                "or leave adapt = 'loss' out."
            )
        losses = self.state.losses
        new = losses._replace(total=losses.total + loss, number=losses.number + 1)
        self._state = self.state._replace(losses=new)

    def _private(self, changes: Mapping[str, Array]) -> dict[str, Array]:
        """Return changes with their common norm limited, and with noise of this rank."""
        squares = [self._ops(n).sum(self._ops(n).cast(x, "float64") ** 2) for n, x in changes.items()]
        norm = math.sqrt(sum(map(float, squares)))
        factor = self.outer.clip / norm if norm > self.outer.clip else 1.0
        made = {}
        for name, x in changes.items():
            ops, spec = self._ops(name), self._specs[name]
            limited = ops.cast(x, spec.work_dtype) * ops.cast(factor, spec.work_dtype)
            if self.outer.noise:
                self._drawn += 1
                noise = normal(ops, spec.numel, spec.work_dtype, (self._secret, self._drawn))
                limited = ops.weighted_sum(limited, 1, noise, self.outer.noise * self.outer.clip)
            made[name] = ops.cast(limited, spec.dtype)
        return made

    def _takes_part(self, step: int, changes: Mapping[str, Array]) -> bool | None:
        """Return whether this rank contributes to a sync; None if its relevance does not decide."""
        if not self.outer.relevance:
            return None
        relevance = self.record.relevance = self._relevance_of(changes) if step > self.outer.warmup else None
        return relevance is None or relevance >= self.outer.relevance

    def _relevance_of(self, changes: Mapping[str, Array]) -> float | None:
        """Return the share of the elements whose change has the sign of the last mean change; None before that."""
        equal = number = 0
        for name, last in self.state.last.items():
            if name in changes:
                ops = self._ops(name)
                equal += int(count_agreeing(ops, changes[name], last))
                number += self._specs[name].numel
        return equal / number if number else None

    def _no_variates(self) -> State:
        """Return the first control variates."""
        if not self.outer.variates:
            return {}
        return {n: self._ops(n).zeros(self._specs[n].numel, self._specs[n].work_dtype) for n in self._weights}

    def _rates(self, lr: float | Mapping[str, float] | None) -> Mapping[str, float]:
        """Return the sums of learning rates with that of a step, if control variates need them."""
        if not self.outer.variates:
            return NO_RATES
        if lr is None:
            raise StepError(
                "outer steps: control variates are in units of gradients and need the learning rate of each inner "
                "step, received none; pass lr with the weights."
            )
        before = self.state.rates
        return {n: before.get(n, 0.0) + (lr[n] if isinstance(lr, Mapping) else lr) for n in self._weights}

    def _next_variates(
        self, moved: Mapping[str, Array], sent: Mapping[str, Array], mean: Mapping[str, Array], memories: Memories
    ) -> dict[str, Array]:
        """Return new control variates from what this rank has moved and has sent of it, and from the mean of all ranks.

        h is what the mean gradient of this rank exceeds that of all by: h + (d - mean d) / (sum of learning rates).
        Where nothing feeds back, d is what was sent, so that all h add up to zero. A memory with a shift knows what
        gradients alone would have moved. Then h goes towards (d - mean d) / (sum of learning rates) by its pace.
        """
        found = {}
        for name, before in self.state.variates.items():
            rate = self.state.rates[name] if name in moved else 0.0
            if rate:
                ops, spec, memory = self._ops(name), self._specs[name], memories[name]
                own = (sent if keeps_nothing(memory) or memory.pace else moved)[name]
                kept, factor = 1 - memory.pace, (memory.pace or 1) / rate
                found[name] = next_variate(ops, spec, before, own, mean[name], kept=kept, factor=factor)
        return found

    def _next_variates_in_part(
        self,
        pending: PendingSync,
        sent: Mapping[str, Array],
        merged: Mapping[str, Array],
        memories: Memories,
    ) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """Return the mean changes, and new control variates and means of them, if a part of the ranks contributes."""
        state, transport = self.state, self._run.transport
        factors = self._factors(pending.sent, state.rounds)
        inside, warming = factors[transport.rank] > 0, pending.sent <= self.outer.warmup
        share = sum(factor > 0 for factor in factors) / transport.size
        changes, variates, server = dict(merged), dict(state.variates), dict(state.server)
        for name in state.variates.keys() & pending.changes.keys():
            ops, spec, memory, rate = self._ops(name), self._specs[name], memories[name], state.rates[name]
            shifts, varies = memory.pace > 0, rate > 0 and not warming
            before, factor = server[name], self._factor_of(memory, factors[transport.rank])
            changes[name], after = mean_in_part(
                ops, spec, before, merged[name], shifts=shifts, rate=rate or 1.0, share=share
            )
            if shifts or varies:
                server[name] = after
            if varies:
                own = sent[name]
                if not (shifts or keeps_nothing(memory)):
                    own = self._weigh(name, pending.changes[name], factor)
                scale, h = 1 / ((factor or 1.0) * rate), variates[name]
                variates[name] = next_variate_in_part(
                    ops, spec, h, own, (before, after), shifts=shifts, inside=inside, factor=scale
                )
        return changes, variates, server

    def _factor_of(self, memory: Memory, factor: float) -> float:
        """Return the factor on what is sent of a tensor: a shift is learnt of what has moved, not of a multiple."""
        return float(factor > 0) if memory.pace and self.outer.variates else factor

    def _weigh(self, name: str, x: Array, factor: float) -> Array:
        """Return a change times a factor, rounded to its dtype."""
        return x if factor in (0, 1) else x * self._ops(name).cast(factor, self._specs[name].dtype)

    def variates(self) -> dict[str, Array]:
        """Return copies of the control variates in the shapes of the tensors."""
        return self.reshape(self.state.variates)

    def correct(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Return flat gradients of an inner step less the control variates."""
        h = self.state.variates
        return {n: correct(self._ops(n), self._specs[n], g, h[n]) for n, g in gradients.items() if n in h}

    def _loss(self) -> dict[str, Array]:
        """Return the mean loss of this rank since the last sync as a tensor, if the periods follow it."""
        if LOSS not in self._specs:
            return {}
        losses, ops = self.state.losses, self._ops(LOSS)
        if not losses.number:
            raise StepError(
                "outer steps: the periods follow the loss, and none was noted since the last sync; call "
                "note_loss(loss) of the exchange before each inner step."
            )
        return {LOSS: ops.zeros(1, "float32") + ops.cast(losses.total / losses.number, "float32")}

    def _fragments_sent(self, step: int) -> Sequence[int]:
        """Return the fragments that sync after an inner step: the next, this one, or that of the pending exchange."""
        if not self.outer.adapt:
            return self.outer.fragments_sent(step)
        state = self.state
        return (0,) if step == state.synced_at or step >= state.synced_at + self._period() else ()

    def _period(self) -> int:
        """Return the number of inner steps from the last sync to the next one, where all tensors sync at once."""
        state = self.state
        ratio = state.losses.last / state.losses.first if state.losses.first else 1.0
        return self.outer.period(state.synced_at, state.rounds, ratio)

    @property
    def is_due(self) -> bool:
        """True if tensors sync now, after the inner step that was sent."""
        steps, pending = self.state.steps, self.state.pending
        return pending is not None and steps >= pending.sent + self.outer.delay_after(pending.sent)

    def receive(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Complete the sync that is due, if any, and return the flat weights of the tensors that synced.

        Waits for the other ranks.
        """
        outcome = self.finish(weights)
        return {} if outcome is None else self.commit(outcome)

    def finish(self, weights: Mapping[str, Array]) -> OuterOutcome | None:
        """Return the outcome of the sync that is due, to be committed; None if none is."""
        state = self.state
        pending = state.pending
        if pending is None or not self.is_due:
            return None
        self.poll()
        if self._asked is not None:
            self.poll()
        modules = self._modules(pending.sent)
        memories = {name: self._memory(module, name) for module in modules for name in self._members[module]}
        outcomes = {module: self._run.current_of(module).finish() for module in modules}
        merged = {name: x for outcome in outcomes.values() for name, x in outcome.merged.items()}
        sent = {name: x for outcome in outcomes.values() for name, x in outcome.own.items()}
        merged, moved = self._mean_of_senders(pending, merged), pending.changes
        if self.outer.pairs:
            merged, moved = ({**x, **self._minus_anchors(x)} for x in (merged, moved))
        variates, server = state.variates, state.server
        if server:
            merged, variates, server = self._next_variates_in_part(pending, sent, merged, memories)
        elif variates and pending.sent > self.outer.warmup:
            variates = {**variates, **self._next_variates(pending.changes, sent, merged, memories)}
        if self._run.track_norms:
            self._note_spread(moved, merged)
        anchors, kept, written = dict(state.anchors), dict(state.kept), dict[str, Array]()
        for name in pending.changes:
            if name not in merged:
                continue
            change = self._ops(name).reshape(merged[name], (-1,))
            if name not in anchors:
                written[name] = change
                continue
            ops, spec, own = self._ops(name), self._specs[name], self._flat(name, weights)
            warming = pending.sent <= self.outer.warmup
            anchors[name], own, kept[name] = outer_update(
                self.outer, ops, spec, anchors[name], change, own, kept[name], warming=warming
            )
            if self.outer.local_error:
                own = anchors[name] - (pending.changes[name] - self._ops(name).reshape(sent[name], (-1,)))
            written[name] = own
        losses = state.losses._replace(total=0.0, number=0)
        if LOSS in written:
            loss = float(self._ops(LOSS).sum(written.pop(LOSS)))
            losses = Losses(first=losses.first or loss, last=loss)
        rates = {name: 0.0 if name in pending.changes else rate for name, rate in state.rates.items()}
        last = NO_STATE
        if self.outer.relevance:
            names = [name for name in anchors if name in pending.changes]
            last = {n: self._ops(n).copy(self._ops(n).reshape(merged[n], (-1,))) for n in names}
        new = OuterState(
            steps=state.steps,
            synced_at=state.steps,
            rounds=state.rounds + 1,
            anchors=anchors,
            kept=kept,
            losses=losses,
            variates=variates,
            rates=rates,
            server=server,
            last=last,
        )
        return OuterOutcome(written, new, outcomes)

    def _mean_of_senders(self, pending: PendingSync, merged: dict[str, Array]) -> dict[str, Array]:
        """Return means over the ranks that have contributed, from those over all ranks; zeros if there are none."""
        if pending.takes_part is None or self._share in (0.0, 1.0):
            return merged
        return {name: x * self._ops(name).cast(1 / self._share, self._specs[name].dtype) for name, x in merged.items()}

    def commit(self, outcome: OuterOutcome) -> dict[str, Array]:
        """Go on with the result of a sync, and return the flat weights of the tensors that synced."""
        sent, on_links, size = 0.0, 0.0, self._run.transport.size
        for module, part in outcome.by_module.items():
            self._run.commit(part, module)
            sent += sum(x for (kind, _), x in part.notes.items() if kind == "bucket")
            on_links += sum(x * float(copies(kind, size)) for (kind, _), x in part.notes.items() if kind in KINDS)
        losses, pending = self.state.losses, self.state.pending
        if pending is not None and pending.takes_part is not None:
            sent += 4 * size
            on_links += 4 * size * float(copies("allreduce", size))
        self.record.loss = losses.total / losses.number if losses.number else None
        self.restore(outcome.state)
        self.record.note_sync(self.state.steps, sent, on_links)
        return outcome.weights

    def reshape(self, flat: Mapping[str, Array]) -> dict[str, Array]:
        """Return new arrays of flat weights in their shapes, which the caller may change."""
        return {name: self._reshape(name, self._ops(name).copy(x)) for name, x in flat.items()}

    def drop(self) -> dict[str, Array]:
        """Forget all steps since the last sync, and what is on its way; return the weights to go on with.

        The run must have dropped its steps.
        """
        state = self.state
        losses = state.losses._replace(total=0.0, number=0)
        # Rates count what weights have moved since, and all weights return.
        self.restore(state._replace(steps=state.synced_at, pending=None, losses=losses, rates=NO_RATES))
        return dict(state.anchors)

    def ranks_changed(self) -> None:
        """Go on with other ranks, over which control variates do not add up to zero; what is on its way is sent again.

        The run must have dropped its steps.
        """
        self.restore(self.state._replace(variates=self._no_variates()))

    def drain(self) -> None:
        """Let what is on its way arrive, and forget the result: the states of the run can then be replaced.

        It is sent again after the next inner step, with the same result unless the states have changed.
        """
        if self._started and self.state.pending is not None:
            for module in self._modules(self.state.pending.sent):
                self._run.current_of(module).finish()
            self._run.discard()
        self._started = False

    def _memory(self, module: str, name: str) -> Memory:
        """Return the memory that a tensor has at the next sync of a module."""
        return self._run.current_of(module).plan.assignment_of[name].memory

    def _change_of(self, name: str, weights: Mapping[str, Array], memory: Memory, rate: float) -> Array:
        """Return what this rank sends of a tensor: what its weights have moved, or the tensor itself.

        A memory with a shift learns what gradients alone would have moved; `rate` is the sum of the learning rates.
        """
        now, state, ops = self._flat(name, weights), self.state, self._ops(name)
        if name not in state.anchors:
            return ops.copy(now)
        if self.outer.pairs:
            # The two of a pair do not move from the same weights.
            return ops.copy(now)
        change = state.anchors[name] - now
        if not (memory.pace and name in state.variates):
            return change
        return with_variate(ops, self._specs[name], change, state.variates[name], rate)

    def _minus_anchors(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Return how far weights are from those after the last sync of this rank."""
        anchors = self.state.anchors
        return {n: anchors[n] - self._ops(n).reshape(x, (-1,)) for n, x in weights.items() if n in anchors}

    def _factors(self, step: int, rounds: int, *, settled: bool = False) -> list[float]:
        """Return the factor on each rank's contribution to a sync after an inner step, with as many before it."""
        outer = dataclasses.replace(self.outer, participation=1.0) if settled else self.outer
        return outer.factors(step, rounds, self._run.transport.size, self._seed)

    def poll(self) -> None:
        """Start the pending exchange, and go on with its rounds that have arrived.

        Where each rank decides itself whether it takes part, all first tell each other; the next call waits for that.
        """
        pending = self.state.pending
        if pending is None:
            return
        if self._started:
            self._run.poll()
            return
        transport = self._run.transport
        if pending.takes_part is None:
            factors = self._factors(pending.sent, self.state.rounds, settled=pending.settled)
        elif self._asked is None:
            own = [float(pending.takes_part and rank == transport.rank) for rank in range(transport.size)]
            own_factor = self._ops(self._weights[0]).numbers(own, "float32")
            self._asked = transport.start(allreduce(own_factor), "who contributes to a sync")
            return
        else:
            factors = [float(x) for x in self._asked.wait()]
            self._asked, self._share = None, sum(factors) / len(factors)
        self._started = True
        absent = [] if all(factors) else [not factor for factor in factors]
        for module in self._modules(pending.sent):
            step, names = self._run.current_of(module), self._members[module]
            step.leave_out(absent, out=not factors[transport.rank])
            for name in names:
                if name not in pending.changes:
                    step.rest(name)
                    continue
                x, factor = pending.changes[name], self._factor_of(self._memory(module, name), factors[transport.rank])
                step.ready(name, self._weigh(name, self._reshape(name, x), factor))

    def _note_spread(self, own: Mapping[str, Array], mean: Mapping[str, Array]) -> None:
        each = [products(self._ops(name), x, mean[name]) for name, x in own.items() if name in self.state.anchors]
        self.record.note_spread(*(math.fsum(float(sums[i]) for sums in each) for i in range(3)))

    def stats(self) -> dict[str, Any]:
        """Return what `Record.stats` describes."""
        state, every = self.state, self._period() if self.outer.adapt else 0
        # A pending exchange counts as a sync.
        factors = self._factors(state.steps + 1, state.rounds + (state.pending is not None))
        participates = factors[self._run.transport.rank] > 0
        return self.record.stats(state.steps, state.rounds, every=every, participates=participates)

    # --- what belongs where -----------------------------------------------------------------------------------------

    def _ops(self, name: str) -> ArrayOps:
        return self._run.ops(self._specs[name].device)

    def _check(self, weights: Mapping[str, Array]) -> None:
        """Raise StepError unless there are weights of all tensors as they were; nothing has been sent yet."""
        given = self._specs.keys() - {LOSS}
        if weights.keys() != given:
            names = ", ".join(sorted(map(repr, weights.keys() ^ given))[:5])
            raise StepError(f"outer steps: expected the weights of all tensors, and {names} only on one side.")
        for name in given:
            spec, x, dtype = self._specs[name], weights[name], self._ops(name).dtype(weights[name])
            if tuple(x.shape) != spec.shape or dtype != spec.dtype:
                raise StepError(
                    f"outer steps: expected weights of {spec.dtype} and shape {spec.shape} for tensor '{name}', "
                    f"received {dtype} {tuple(x.shape)}; pass the weights as they were when the exchange was made."
                )

    def zeros(self, name: str) -> Array:
        """Return zeros in the place of a tensor."""
        return self._reshape(name, self._ops(name).zeros(self._specs[name].numel, self._specs[name].dtype))

    def _flat(self, name: str, weights: Mapping[str, Array]) -> Array:
        return self._ops(name).reshape(weights[name], (-1,))

    def _reshape(self, name: str, flat: Array) -> Array:
        return self._ops(name).reshape(flat, self._specs[name].shape)

    def _first_state(self, name: str, flat: Array) -> State:
        ops = self._ops(name)
        return self.outer.optimizer.init(ops, ops.cast(flat, self._specs[name].work_dtype))

    def _fragment_modules(self, step: int) -> list[str]:
        """Return the modules of the fragments that sync after an inner step."""
        modules = list(self._members)
        return [modules[i] for i in self._fragments_sent(step)]

    def _modules(self, step: int, rounds: int | None = None) -> list[str]:
        """Return all modules that sync after an inner step, which follows as many syncs, or those until now.

        What accompanies the weights syncs with the last fragment.
        """
        fragments, sent = self._fragment_modules(step), self._fragments_sent(step)
        if not sent or sent[-1] != self.outer.count - 1:
            return fragments
        number = self.outer.number(step, self.state.rounds if rounds is None else rounds)
        return fragments + [module_beside(every) for every in self._rounds if not number % every]

    def _fresh(self, state: OuterState) -> list[str]:
        """Return the tensors whose weights are their anchors: no inner step was taken since they synced."""
        if not state.steps:
            return self._weights
        if not self.outer.is_exact(state.steps):
            return []
        return [name for module in self._fragment_modules(state.steps) for name in self._members[module]]

    @property
    def equal_weights(self) -> Mapping[str, Array]:
        """The weights that are equal on all ranks: those after the last sync, or with pairs at the start."""
        return {} if self.outer.pairs and self.state.steps else self.state.anchors

    @property
    def equal_arrays(self) -> dict[str, Array]:
        """The arrays that are equal on all ranks: the weights after the last sync, and the outer states."""
        state = self.state
        if self.outer.pairs:
            return dict(self.equal_weights)
        kept = {f"{key} of the outer optimizer of {n}": x for n, own in state.kept.items() for key, x in own.items()}
        server = {f"mean of the control variates of {n}": x for n, x in state.server.items()}
        return {**state.anchors, **kept, **server}

    # --- checkpoint ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what it keeps; with a change on its way, the change itself, which is then sent again."""
        state = self.state
        saved: dict[str, Any] = {
            "steps": state.steps,
            "met": state.synced_at,
            "rounds": state.rounds,
            "anchors": state.anchors,
            "kept": state.kept,
        }
        if state.pending is not None:
            saved["flight"] = {"sent": state.pending.sent, "changes": dict(state.pending.changes)}
            if state.pending.settled:
                saved["flight"]["settled"] = True
        if self.outer.adapt == "loss":
            saved["losses"] = state.losses._asdict()
        if self.outer.relevance:
            saved["last"] = state.last
        if self.outer.variates:
            saved |= {"variates": state.variates, "rates": dict(state.rates)}
            if state.server:
                saved["server"] = state.server
        return saved

    def load(self, saved: Any, convert: Convert) -> OuterState:
        """Return a saved state in the form of this rank's; `convert` is as for `Run.load_state_dict`.

        Raises StateError if it belongs to other tensors or another outer optimizer, or is damaged.
        """
        if saved is None:
            raise StateError(
                "checkpoint: expected the state of a run with outer steps or local_steps, received one without the key "
                "'outer'; load a checkpoint that was saved with the same outer steps."
            )
        state = check_mapping(saved, "outer")
        counts = {key: state.get(key) for key in ("steps", "met", "rounds")}
        for key, count in counts.items():
            check_number(count, f"outer, {key}")
        zeros = {name: self._ops(name).zeros(spec.numel, spec.dtype) for name, spec in self._specs.items()}
        moved = {name: zeros[name] for name in self._weights}
        anchors = self._read_arrays("anchors", state.get("anchors"), moved, convert)
        tables = check_mapping(state.get("kept"), "outer, kept")
        _check_names("kept", tables, moved)
        kept = dict[str, State]()
        for name, zero in moved.items():
            what, first = f"outer optimizer of '{name}'", self._first_state(name, zero)
            _check_arrays(what, check_mapping(tables[name], what), first)
            kept[name] = convert_state(what, tables[name], first, convert, self._ops(name))
        pending = None
        if state.get("flight") is not None:
            given = check_mapping(state["flight"], "outer, flight")
            sent, changes = given.get("sent"), given.get("changes")
            check_number(sent, "outer, flight, sent", 1)
            sending = check_mapping(changes, "outer, changes")
            modules = self._modules(int(str(sent)), int(str(counts["rounds"])))
            names = [name for module in modules for name in self._members[module]]
            expected = {name: zeros[name] for name in names if name in sending}
            loaded = self._read_arrays("changes", sending, expected, convert)
            pending = PendingSync(int(str(sent)), loaded, given.get("settled") is True)
        steps, synced_at, rounds = (int(str(count)) for count in counts.values())
        made = OuterState(steps, synced_at, rounds, anchors, kept, pending)
        if self.outer.adapt == "loss":
            losses = _numbers(state.get("losses"), "outer, losses", Losses._fields)
            made = made._replace(losses=Losses(**losses))
        if self.outer.relevance:
            last = self._read_arrays("last", state.get("last"), moved if state.get("last") else {}, convert)
            made = made._replace(last=last)
        if self.outer.variates:
            variates = self._read_arrays("variates", state.get("variates"), self._no_variates(), convert)
            # Before the first step there are none.
            rates = _numbers(state.get("rates"), "outer, rates", self._weights if state.get("rates") else ())
            made = made._replace(variates=variates, rates=rates)
            if self.outer.participation < 1:
                server = self._read_arrays("server", state.get("server"), self._no_variates(), convert)
                made = made._replace(server=server)
        return made

    def _read_arrays(self, key: str, saved: Any, expected: State, convert: Convert) -> State:
        """Return one saved array per tensor in the form of those that are expected."""
        given = check_mapping(saved, f"outer, {key}")
        _check_names(key, given, expected)
        _check_arrays(f"outer, {key}", given, expected)
        return {
            name: convert_state(name, {name: given[name]}, {name: x}, convert, self._ops(name))[name]
            for name, x in expected.items()
        }

    def merge_states(self, states: Sequence[Any], convert: Convert) -> OuterState:
        """Return the state of this rank from those of all ranks of a run with another number of ranks.

        What is on its way becomes the mean over the ranks that this one continues, as residuals do, of what these have
        contributed.
        """
        if self.outer.pairs:
            raise StateError(
                f"checkpoint: with pairs, each rank goes on from weights of its own, expected those of "
                f"{self._run.transport.size} ranks, received {len(states)}; start as many ranks as have saved it."
            )
        parts = shares(self._run.transport.rank, self._run.transport.size, len(states))
        each = [(self.load(states[rank], convert), weight) for rank, weight in parts]
        # Control variates add up to zero over the earlier ranks only.
        first = each[0][0]._replace(variates=self._no_variates())
        if first.pending is None:
            return first
        settled, drawn = first.pending.settled, dataclasses.replace(self.outer, weight=())
        if settled:
            drawn = dataclasses.replace(drawn, participation=1.0)
        # Weights are those of the ranks that there are now.
        factors = drawn.factors(first.pending.sent, first.rounds, len(states), self._seed)
        each = [(state, weight * factors[rank]) for (state, weight), (rank, _) in zip(each, parts, strict=True)]
        changes = {}
        for name, x in first.pending.changes.items():
            total = x * self._ops(name).cast(each[0][1], self._specs[name].dtype)
            for state, weight in each[1:]:
                if state.pending is None or name not in state.pending.changes:
                    raise unreadable(
                        "outer, flight", "the same tensors of all ranks", f"none of '{name}' from one of them"
                    )
                total = self._ops(name).weighted_sum(total, 1, state.pending.changes[name], weight)
            changes[name] = total
        settled = settled or drawn.participation < 1
        return first._replace(pending=first.pending._replace(changes=changes, settled=settled))


def normal(ops: ArrayOps, n: int, dtype: str, seed: tuple[int, int]) -> Array:
    """Return n standard normal numbers."""
    # Not at the top: a process that only names components needs no array library.
    import numpy as np

    drawn = np.random.default_rng(seed).standard_normal(n).astype(dtype)
    return ops.from_bytes(ops.cast(drawn.view(np.uint8), "uint8"), dtype)


def _numbers(saved: Any, what: str, keys: Collection[str]) -> dict[str, Any]:
    """Return the saved numbers of these keys. Raises StateError unless they are finite and at least 0."""
    given = check_mapping(saved, what)
    for key in keys:
        x = given.get(key)
        if isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x < math.inf:
            raise unreadable(f"{what}, {key}", "a number from 0 on", show(x))
    return {key: given[key] for key in keys}


def _check_names(key: str, saved: Mapping[Any, Any], expected: Collection[str]) -> None:
    if set(saved) != set(expected):
        names = ", ".join(sorted(map(repr, set(saved) ^ set(expected)))[:5])
        raise StateError(
            f"checkpoint, outer, {key}: {names} only on one side; use the tensors and the outer steps that it was "
            "saved with."
        )


def _check_arrays(what: str, saved: Mapping[Any, Any], expected: State) -> None:
    found, wanted = ({key: show(x) for key, x in arrays.items()} for arrays in (saved, expected))
    for key in [*wanted, *found]:
        if found.get(key) != wanted.get(key):
            raise StateError(
                f"checkpoint, {what}: expected {wanted.get(key, 'nothing')} as '{key}', received "
                f"{found.get(key, 'nothing')}; use the tensors and the outer steps it was saved with."
            )
