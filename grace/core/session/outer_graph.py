"""`GraphOuter`: outer steps in traced graphs, which `grace.core.session.outer` takes on values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from grace.core.config.outer import OuterSteps
from grace.core.errors import StateError, StepError
from grace.core.ops.composites import ArrayOps
from grace.core.session.outer_formulas import (
    correct,
    count_agreeing,
    mean_in_part,
    next_variate,
    next_variate_in_part,
    outer_update,
    products,
    weigh,
    with_variate,
)
from grace.core.session.record import Record
from grace.core.spec import Array, TensorSpec


class Variable(Protocol):
    """An array that graphs read and write."""

    def read_value(self) -> Array:
        """Return what it holds when the graph gets here."""

    def assign(self, value: Array) -> Any:
        """Replace what it holds."""

    def assign_add(self, value: Array) -> Any:
        """Add to what it holds."""


#: Makes a variable that is saved, of a name and a first value.
MakeVariable = Callable[[str, Array], Variable]


class GraphExchange(Protocol):
    """The exchange of a framework that traces graphs, as outer steps see it."""

    seed: int
    rank: int
    #: Number of ranks.
    size: int
    track_norms: bool
    #: The buffers of the model that sync.
    buffers: Sequence[Variable]

    def sync(
        self, changes: Mapping[int, Array], inside: Array | None, absent: Sequence[Array]
    ) -> tuple[Sequence[Array], Sequence[Array]]:
        """Return the means of changes over all ranks, and what this rank has sent if outer steps follow that.

        It contributes its changes if it is `inside`; None stands for true. `absent` is as for `Step.leave_out`.
        """

    def means(
        self, tensors: Sequence[Array], label: str, *, of_first: bool = False, pairing: Array | None = None
    ) -> Sequence[Array]:
        """Return uncompressed means over all ranks, the values of the first one, or means of a pair."""

    def paces(self, places: Sequence[int]) -> Array:
        """Return the pace of the memory of each of these tensors in the next step, in float64."""

    def is_foreign(self) -> Array:
        """Return whether another rank has saved what this one has loaded."""

    def traffic(self) -> Sequence[Array]:
        """Return the bytes of all syncs until now: those that this rank has sent, and those on the links."""


class GraphOuter:
    """The outer steps of one rank, in graphs: the weights after the last sync, and what is kept between syncs.

    `weights` are the variables that train, one per spec, and `states` pairs variables of the inner optimizer with the
    number of syncs between two means. `resets` pairs the indices of weights with what lets a state of them begin again
    once they have synced. `noise(n, dtype)` returns normal numbers of this rank, if outer steps add any. An adapter
    calls `before`, `correct` and `after` around each inner step.
    """

    def __init__(
        self,
        outer: OuterSteps,
        specs: Sequence[TensorSpec],
        weights: Sequence[Variable],
        states: Sequence[tuple[Variable, int]],
        ops: Callable[[str], ArrayOps],
        make_variable: MakeVariable,
        *,
        resets: Sequence[tuple[int, Callable[[], object]]] = (),
        noise: Callable[[int, str], Array] | None = None,
    ) -> None:
        self.outer, self._specs, self._weights, self._states = outer, specs, weights, states
        #: What `stats` reports.
        self.record = Record(outer)
        self._resets, self._of, self._noise, self._ops = resets, ops, noise, ops(specs[0].device)
        places = {spec.name: i for i, spec in enumerate(specs)}
        self.fragments = [[places[name] for name in names] for names in outer.divide(specs)]

        def zeros(name: str, wanted: Any) -> list[Variable]:
            made = [self._of(spec.device).zeros(spec.numel, spec.dtype) for spec in specs if wanted]
            return [make_variable(f"{name}_{i}", self._reshape(i, x)) for i, x in enumerate(made)]

        def numbers(names: Collection[str], dtype: str, wanted: Any) -> dict[str, Variable]:
            return {name: make_variable(f"outer_{name}", self._number(0, dtype)) for name in names if wanted}

        self.anchors = [make_variable(f"met_{i}", w.read_value()) for i, w in enumerate(weights)]
        self._kept = [
            {
                key: make_variable(f"outer_{i}_{key}", x)
                for key, x in outer.optimizer.init(self._of(s.device), w).items()
            }
            for i, (s, w) in enumerate(zip(specs, map(self._wide, range(len(specs)), weights), strict=True))
        ]
        # The inner step of the last sync, and the number of syncs, if the next ones depend on them.
        drawn = outer.participation < 1 or outer.pairs or outer.relevance
        counts = outer.adapt or drawn or any(n > 1 for _, n in states)
        self._counts = numbers(("met_at", "rounds"), "int64", counts)
        # The changes on their way.
        self._pending = zeros("outer_sent", outer.delay)
        # The sum and the number of the losses of this rank since the last sync, and the mean of all ranks in the first
        # and in the last period.
        names = ("total", "number", "first", "last")
        losses = numbers([f"loss_{name}" for name in names], "float64", outer.adapt == "loss")
        self.losses = dict(zip(names, losses.values(), strict=False))
        # The losses of this rank since the last sync, for `stats`.
        self._noted: list[float] = []
        # The mean changes of the last sync, which decide on the next one.
        self._last = zeros("outer_last", outer.relevance)
        #: The flat control variates.
        self.variates = [
            make_variable(f"outer_variate_{i}", self._of(spec.device).zeros(spec.numel, spec.work_dtype))
            for i, spec in enumerate(specs)
            if outer.variates
        ]
        # The flat means of what is subtracted from the gradients of all ranks, if a part of them contributes.
        self._servers = [
            make_variable(f"outer_server_{i}", v.read_value())
            for i, v in enumerate(self.variates)
            if outer.participation < 1
        ]
        # By fragment, the sums of the learning rates since the last sync.
        rates = numbers([f"rates_{i}" for i in range(outer.count)], "float64", outer.variates)
        self._rates = list(rates.values())
        # By fragment, the inner steps until the states of the optimizer begin, if they begin again.
        begun = numbers([f"begun_{i}" for i in range(outer.count)], "int64", outer.state == "reset")
        self._begun = list(begun.values())

    def begun(self, i: int) -> Array | None:
        """Return the number of inner steps before the states of a weight began; None if they never begin again."""
        if not self._begun:
            return None
        return self._begun[next(k for k, members in enumerate(self.fragments) if i in members)].read_value()

    def _restart(self, fragment: int, taken: Array) -> None:
        """Let the states of a fragment that has synced begin again after inner step `taken`, if the option says so."""
        for i, reset in self._resets:
            if i in self.fragments[fragment]:
                reset()
        if self._begun:
            self._begun[fragment].assign(taken)

    def note_loss(self, loss: Array) -> None:
        """Note the mean loss of an inner step, as a 0-d float64 array. Raises StepError if it cannot decide."""
        self._tell(self._noted.append, loss)
        if self.losses:
            error = StepError(
                "the periods of outer steps follow the square root of the loss, received none that is positive and "
                "finite; pass such a one to optimizer.scale_loss(loss), or leave adapt = 'loss' out."
            )
            known = self._ops.require((loss > 0) & (loss < math.inf), error, loss)
            self.losses["total"].assign_add(known)
            self.losses["number"].assign_add(self._number(1, "float64"))

    def ranks_changed(self) -> None:
        """Go on with other ranks, over which control variates do not add up to zero."""
        for spec, variate in zip(self._specs, self.variates, strict=False):
            variate.assign(self._of(spec.device).zeros(spec.numel, spec.work_dtype))

    def before(self, steps: Array, exchange: GraphExchange) -> None:
        """Read the weights again where they are those of the last sync; they may have been loaded or broadcast.

        `steps` is the number of inner steps until now.
        """
        outer, taken = self.outer, self._ops.cast(steps, "int64")
        for fragment, members in enumerate(self.fragments):
            fresh = taken == 0
            if not outer.local_error:
                just_synced = taken == self._synced_at if outer.adapt else outer.sends(taken, fragment)
                exact = taken <= outer.warmup if outer.keeps_own or outer.delay else taken >= 0
                fresh = fresh | (just_synced & exact)
            self._if(fresh, functools.partial(self._read, members))
        if self.variates or outer.pairs:
            self._if(exchange.is_foreign(), self._note_foreign_load)

    def _read(self, members: Sequence[int]) -> None:
        for i in members:
            self.anchors[i].assign(self._weights[i].read_value())

    def _note_foreign_load(self) -> None:
        """Go on with what another rank has saved, or one of other ranks."""
        if self.outer.pairs:
            error = StateError(
                "checkpoint: with pairs, each rank goes on from weights of its own, expected what it has saved among "
                "as many ranks, received what another one has; load one checkpoint per rank."
            )
            self._ops.require(self._number(0, "int64") > 0, error)
        self.ranks_changed()

    def correct(self, gradients: Mapping[int, Array], lr: Array) -> dict[int, Array]:
        """Return gradients of an inner step less the control variates, and note its learning rate."""
        for rate in self._rates:
            rate.assign_add(self._ops.cast(lr, "float64"))
        found = {}
        for i, g in gradients.items():
            spec = self._specs[i]
            found[i] = self._reshape(i, correct(self._of(spec.device), spec, g, self.variates[i].read_value()))
        return found

    def after(self, steps: Array, exchange: GraphExchange) -> None:
        """Exchange the changes of the weights and write new ones, if the ranks sync after this inner step.

        `steps` is the number of inner steps until now.
        """
        taken = self._ops.cast(steps, "int64")
        self._tell(lambda _: self.record.occupied.mark(exchanging=False), taken)
        warming, synced, before = taken <= self.outer.warmup, taken < 0, exchange.traffic()
        # In the warm-up all tensors sync at once, one fragment after the other.
        everything, zero = range(len(self._specs)), self._number(0.0, "float64")
        whole = self._ops.choose(warming, lambda: self._norm(everything), lambda: zero) if self.outer.clip else None
        for fragment, members in enumerate(self.fragments):
            sync = functools.partial(self._sync_fragment, fragment, taken, warming, whole, exchange)
            applies = self._applies(taken, fragment)
            self._if(applies, sync)
            synced |= applies
            if self._pending:
                sends = self.outer.sends(taken, fragment) & ~warming
                self._if(sends, functools.partial(self._send, members, warming, whole))
        sent = [now - earlier for now, earlier in zip(exchange.traffic(), before, strict=True)]
        self._tell(self._note_step, synced, taken, *sent)

    def _note_step(self, synced: bool, step: int, sent: float, link_bytes: float) -> None:
        """Note an inner step that is complete, in Python."""
        self.record.note_step()
        if synced:
            self.record.loss = math.fsum(self._noted) / len(self._noted) if self._noted else None
            self._noted.clear()
            self.record.note_sync(step, sent, link_bytes)

    def stats(self, steps: int, syncs: int, exchange: GraphExchange) -> dict[str, Any]:
        """Return what `Record.stats` describes, after as many inner steps, and syncs of single fragments."""
        outer, warm = self.outer, self.outer.warmup * self.outer.count
        rounds = syncs // outer.count if syncs <= warm else outer.warmup + syncs - warm
        every = self._period(int(self._synced_at), rounds, *map(float, self._mean_losses)) if outer.adapt else 0
        # A pending exchange counts as a sync.
        pending = not outer.adapt and any(
            s > outer.warmup and outer.fragments_sent(s) for s in self._unapplied_steps(steps)
        )
        factors = outer.factors(steps + 1, rounds + pending, exchange.size, exchange.seed)
        return self.record.stats(steps, rounds, every=every, participates=factors[exchange.rank] > 0)

    def _unapplied_steps(self, steps: int) -> range:
        """Return the inner steps after which something was sent that is not applied yet, if the ranks synced then."""
        return range(steps - self.outer.delay + 1, steps + 1)

    def _sync_fragment(
        self, fragment: int, taken: Array, warming: Array, whole: Array | None, exchange: GraphExchange
    ) -> None:
        """Sync a fragment, and what accompanies the weights with the last one."""
        outer, members, paces = self.outer, self.fragments[fragment], None
        if self._pending:
            self._if(warming, functools.partial(self._send, members, warming, whole))
            moved = [self._pending[i].read_value() for i in members]
        else:
            moved = self._changes(members, warming, whole)
        if self.variates:
            paces = exchange.paces(members)
            moved = self._with_variates(moved, fragment, paces)
        share = None
        if outer.relevance:
            factors = self._inside_by_relevance(moved, warming, exchange)
            share = sum(factors[1:], factors[0]) / exchange.size
        else:
            factors = self._factors(taken, fragment, exchange)
        part = Part(self, exchange, factors[exchange.rank] if factors else None, share)
        absent = [factor == 0 for factor in factors] if outer.participation < 1 or outer.relevance else []
        sent = self._weigh(moved, part.factor, paces)
        inside = None if part.factor is None else part.factor > 0
        found, own = exchange.sync(dict(zip(members, sent, strict=True)), inside, absent)
        merged = part.rescale(found)
        if self._servers:
            merged = self._vary_in_part(fragment, own, merged, paces, warming, factors, exchange.rank)
        if outer.pairs:
            before = [self.anchors[i].read_value() for i in members]
            moved, merged = ([a - x for a, x in zip(before, each, strict=True)] for each in (moved, merged))
        if exchange.track_norms:
            of = [self._of(self._specs[i].device) for i in members]
            sums = [products(*each) for each in zip(of, moved, merged, strict=True)]
            self._tell(self.record.note_spread, *(sum(each[1:], each[0]) for each in zip(*sums, strict=True)))
        for i, change, mean, known in zip(members, moved, merged, own or moved, strict=True):
            self._update_weight(i, change, mean, known, warming)
            if self._last:
                self._last[i].assign(mean)
        if paces is not None and not self._servers:
            self._vary(fragment, own, merged, paces, warming)
        self._restart(fragment, taken)
        if fragment == outer.count - 1:
            self._beside(taken, part)

    def _beside(self, taken: Array, part: Part) -> None:
        """Sync what accompanies the weights."""
        if self._counts:
            self._counts["met_at"].assign(taken)
            self._counts["rounds"].assign_add(self._number(1, "int64"))
        for every in sorted({every for _, every in self._states}):
            due = [v for v, n in self._states if n == every]
            now = taken > 0 if every == 1 else self._rounds % every == 0
            self._if(now, functools.partial(part.average, due, f"state.{every}", every))
        part.average(part.exchange.buffers, "buffer", 1, of_first=self.outer.buffers == "first")
        if self.losses:
            total, number, first, last = self.losses.values()
            noted, ops = number.read_value(), self._ops
            error = StepError(
                "the periods of outer steps follow the loss, and none was noted since the last sync; call "
                "optimizer.scale_loss(loss) in each step."
            )
            own = ops.require(noted > 0, error, ops.cast(total.read_value() / noted, "float32"))
            (mean,) = part.means([ops.reshape(own, (1,))], "loss")
            last.assign(ops.cast(mean[0], "float64"))
            first.assign(ops.where(first.read_value() == 0, last.read_value(), first.read_value()))
            for v in (total, number):
                v.assign(self._number(0.0, "float64"))

    def shaped_variates(self) -> list[Array]:
        """Return the control variates in the shapes of the tensors; an empty list without them."""
        return [self._reshape(i, v.read_value()) for i, v in enumerate(self.variates)]

    # --- what is sent -----------------------------------------------------------------------------------------------

    def _changes(self, members: Sequence[int], warming: Array, whole: Array | None) -> list[Array]:
        """Return what this rank sends of some tensors; `whole` is the norm of the changes of all."""
        if self.outer.pairs:
            # The two of a pair do not move from the same weights.
            return [self._weights[i].read_value() for i in members]
        moved = [self.anchors[i].read_value() - self._weights[i].read_value() for i in members]
        if whole is None:
            return moved
        made, clip, norm = [], self.outer.clip, self._ops.where(warming, whole, self._norm(members))
        factor = self._ops.where(norm > clip, clip / norm, 1.0)
        for i, x in zip(members, moved, strict=True):
            ops, spec = self._of(self._specs[i].device), self._specs[i]
            limited = ops.cast(x, spec.work_dtype) * ops.cast(factor, spec.work_dtype)
            if self._noise is not None:
                drawn = ops.reshape(self._noise(spec.numel, spec.work_dtype), spec.shape)
                limited = ops.weighted_sum(limited, 1, drawn, self.outer.noise * clip)
            made.append(ops.cast(limited, spec.dtype))
        return made

    def _norm(self, members: Sequence[int]) -> Array:
        squares = []
        for i in members:
            ops = self._of(self._specs[i].device)
            moved = ops.cast(self.anchors[i].read_value() - self._weights[i].read_value(), "float64")
            squares.append(ops.sum(moved * moved))
        return self._ops.sqrt(sum(squares[1:], squares[0]))

    def _send(self, members: Sequence[int], warming: Array, whole: Array | None) -> None:
        for i, change in zip(members, self._changes(members, warming, whole), strict=True):
            self._pending[i].assign(change)

    def _with_variates(self, moved: Sequence[Array], fragment: int, paces: Array) -> list[Array]:
        """Return what this rank sends: where a memory has a pace, what gradients alone would have moved."""
        made, rate = [], self._rates[fragment].read_value()
        for number, (i, x) in enumerate(zip(self.fragments[fragment], moved, strict=True)):
            ops, spec = self._of(self._specs[i].device), self._specs[i]
            flat = ops.reshape(x, (-1,))
            alone = with_variate(ops, spec, flat, self.variates[i].read_value(), rate)
            made.append(self._reshape(i, ops.where(paces[number] > 0, alone, flat)))
        return made

    def _factors(self, taken: Array, fragment: int, exchange: GraphExchange) -> list[Array]:
        """Return the factor on what each rank contributes to a sync; none if all contribute equally."""
        outer, size = self.outer, exchange.size
        if outer.is_plain_mean:
            return []

        def draw(rank: int, step: int, rounds: int) -> float:
            # Of any fragment; they take turns after the warm-up.
            before = outer.warmup + (rounds - outer.warmup) * outer.count + fragment
            return outer.factors(step, before, size, exchange.seed)[rank]

        rounds = self._rounds if self._counts else 0
        return [
            self._ops.computed(functools.partial(draw, rank), taken, rounds, dtype="float64") for rank in range(size)
        ]

    def _inside_by_relevance(self, moved: Sequence[Array], warming: Array, exchange: GraphExchange) -> list[Array]:
        """Return 1 for each rank whose changes have the signs of the last mean change, and 0 for the others."""
        each = zip(self._specs, moved, self._last, strict=True)
        equal = [count_agreeing(self._of(spec.device), x, last.read_value()) for spec, x, last in each]
        share = self._ops.cast(sum(equal[1:], equal[0]), "float64") / sum(spec.numel for spec in self._specs)
        decides = ~(warming | (self._rounds == 0))
        self._tell(self._note_relevance, share, decides)
        sends = self._ops.cast(~decides | (share >= self.outer.relevance), "float32")
        zero = self._ops.zeros(1, "float32")
        own = [self._ops.reshape(sends, (1,)) if rank == exchange.rank else zero for rank in range(exchange.size)]
        (mean,) = exchange.means([self._ops.concat(own)], "senders")
        return [self._ops.cast(mean[rank] > 0, "float64") for rank in range(exchange.size)]

    def _note_relevance(self, share: float, decides: bool) -> None:
        self.record.relevance = share if decides else None

    # --- what a sync makes of it -----------------------------------------------------------------------------------

    def _update_weight(self, i: int, moved: Array, mean: Array, sent: Array, warming: Array) -> None:
        spec, anchor, variable, kept = self._specs[i], self.anchors[i], self._weights[i], self._kept[i]
        ops = self._of(spec.device)
        before, change, now = (ops.reshape(x, (-1,)) for x in (anchor.read_value(), mean, variable.read_value()))
        state = {key: v.read_value() for key, v in kept.items()}
        new, own, after = outer_update(self.outer, ops, spec, before, change, now, state, warming=warming)
        new, own = self._reshape(i, new), self._reshape(i, own)
        anchor.assign(new)
        variable.assign(new - (moved - sent) if self.outer.local_error else own)
        for key, v in kept.items():
            v.assign(after[key])

    def _vary(self, fragment: int, own: Sequence[Array], merged: Sequence[Array], paces: Array, warming: Array) -> None:
        """Move the control variates of a fragment; see `grace.core.session.outer`."""
        rate = self._rates[fragment].read_value()
        steps = self._ops.where(paces > 0, paces, 1.0) / rate
        for number, (i, x, mean) in enumerate(zip(self.fragments[fragment], own, merged, strict=True)):
            spec, h = self._specs[i], self.variates[i].read_value()
            ops, kept = self._of(spec.device), 1 - paces[number]
            new = next_variate(ops, spec, h, x, mean, kept=kept, factor=steps[number])
            self.variates[i].assign(ops.where(warming | (rate == 0), h, new))
        self._rates[fragment].assign(self._number(0.0, "float64"))

    def _weigh(self, moved: Sequence[Array], factor: Array | None, paces: Array | None) -> list[Array]:
        """Return changes times the factor of this rank, but what a memory with a pace learns as it is."""
        if factor is None or paces is None:
            return weigh(self._ops, moved, factor)
        one = self._number(1.0, "float64")
        each = [self._ops.where(paces[number] > 0, one, factor) for number in range(len(moved))]
        return [x for pair in zip(moved, each, strict=True) for x in weigh(self._ops, [pair[0]], pair[1])]

    def _vary_in_part(
        self,
        fragment: int,
        own: Sequence[Array],
        merged: Sequence[Array],
        paces: Array,
        warming: Array,
        factors: Sequence[Array],
        rank: int,
    ) -> list[Array]:
        """Move control variates and their means where a part of the ranks contributes; return the mean changes."""
        rate, one = self._rates[fragment].read_value(), self._number(1.0, "float64")
        known, inside = self._ops.where(rate > 0, rate, one), factors[rank] > 0
        share = sum(self._ops.cast(factor > 0, "float64") for factor in factors) / len(factors)
        changes = []
        for number, (i, x, mean) in enumerate(zip(self.fragments[fragment], own, merged, strict=True)):
            spec, h, before = self._specs[i], self.variates[i].read_value(), self._servers[i].read_value()
            ops, shifts, varies = self._of(spec.device), paces[number] > 0, ~warming & (rate > 0)
            change, after = mean_in_part(ops, spec, before, mean, shifts=shifts, rate=known, share=share)
            changes.append(self._reshape(i, change))
            factor = 1 / (ops.where(shifts | ~inside, one, factors[rank]) * known)
            new = next_variate_in_part(ops, spec, h, x, (before, after), shifts=shifts, inside=inside, factor=factor)
            self._servers[i].assign(ops.where(shifts | varies, after, before))
            self.variates[i].assign(ops.where(varies, new, h))
        self._rates[fragment].assign(self._number(0.0, "float64"))
        return changes

    # --- when -------------------------------------------------------------------------------------------------------

    def _applies(self, taken: Array, fragment: int) -> Array:
        """Return whether what a fragment has sent is applied after this inner step."""
        if not self.outer.adapt:
            return self.outer.applies(taken, fragment)

        synced_at = self._synced_at
        return taken >= synced_at + self._ops.computed(
            self._period, synced_at, self._rounds, *self._mean_losses, dtype="int64"
        )

    def _period(self, synced_at: int, rounds: int, first: float = 0.0, last: float = 0.0) -> int:
        return self.outer.period(synced_at, rounds, last / first if first else 1.0)

    @property
    def _mean_losses(self) -> list[Array]:
        """The mean losses of all ranks in the first and in the last period, if periods follow them."""
        return [self.losses[key].read_value() for key in ("first", "last") if self.losses]

    @property
    def _synced_at(self) -> Array:
        return self._counts["met_at"].read_value()

    @property
    def _rounds(self) -> Array:
        return self._counts["rounds"].read_value()

    # --- arrays -----------------------------------------------------------------------------------------------------

    def _if(self, condition: Array, act: Callable[[], object]) -> None:
        """Act if a condition holds when the graph runs."""

        def acted() -> Array:
            act()
            return self._number(1, "int64")

        self._ops.choose(condition, acted, lambda: self._number(0, "int64"))

    def _tell(self, note: Callable[..., object], *numbers: Array) -> None:
        """Call a function in Python with numbers whenever the graph gets here."""

        def noted(*given: Any) -> int:
            note(*given)
            return 0

        self._ops.computed(noted, *numbers)

    def _number(self, value: float, dtype: str) -> Array:
        return self._ops.reshape(self._ops.numbers([value], dtype), ())

    def _reshape(self, i: int, x: Array) -> Array:
        return self._of(self._specs[i].device).reshape(x, self._specs[i].shape)

    def _wide(self, i: int, weight: Variable) -> Array:
        ops, spec = self._of(self._specs[i].device), self._specs[i]
        return ops.cast(ops.reshape(weight.read_value(), (-1,)), spec.work_dtype)


class Part(NamedTuple):
    """Part of a rank in a sync: the factor on what it contributes, and the share of the ranks that contribute.

    None stands for 1. Both are 0-d and float64.
    """

    run: GraphOuter
    exchange: GraphExchange
    factor: Array | None = None
    senders: Array | None = None

    def means(self, tensors: Sequence[Array], label: str, every: int = 1, *, of_first: bool = False) -> list[Array]:
        """Return uncompressed means over the ranks that contribute, at every `every`-th sync."""
        run = self.run
        pairing = run._rounds // every - 1 if run.outer.pairs else None
        sent = weigh(run._ops, tensors, self.factor)
        return self.rescale(self.exchange.means(sent, label, of_first=of_first, pairing=pairing))

    def average(self, kept: Sequence[Variable], label: str, every: int, *, of_first: bool = False) -> None:
        """Write these means to the variables that they are of."""
        found = self.means([v.read_value() for v in kept], label, every, of_first=of_first)
        for v, new in zip(kept, found, strict=True):
            v.assign(new)

    def rescale(self, merged: Sequence[Array]) -> list[Array]:
        """Return means over the ranks that contribute, from those over all; zeros if there are none."""
        if self.senders is None:
            return list(merged)
        ops = self.run._ops
        return weigh(ops, merged, ops.where(self.senders > 0, 1 / self.senders, 1.0))
