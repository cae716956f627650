"""`Step`: one step of a plan. It reads states, exchanges one gradient per tensor, and returns new states.

Every bucket runs its route, a generator of rounds of collectives:

    leave_out(...)          before all else: ranks that contribute nothing
    ready(name, gradient)   local work; the bucket's first round starts with its last gradient
    rest(name)              the same for a tensor that does not train: it takes part with zeros, and keeps its memory
    poll()                  start the next round of the buckets whose round has arrived
    complete()              round by round, all buckets in the order of the plan: wait, start the next; merge, average
    finish()                the same, and the new states

Only the last two wait for other ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grace.core.config.registry import memories
from grace.core.errors import StepError
from grace.core.guards.replicas import other_steps_error
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import wide_norm
from grace.core.observe.statistics import Notes
from grace.core.observe.timeline import Times
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Bucket
from grace.core.plan.unit import Assignment, Unit
from grace.core.spec import NO_STATE, Array
from grace.core.state.carry import ranges_of, splice, splice_units
from grace.core.state.states import States, UnitStates, first_memory
from grace.core.step.assembly import Incoming, Outgoing
from grace.core.step.bucket_step import BucketStep
from grace.core.step.unit_step import Concluded, UnitStep, retune
from grace.core.transport.collectives import KINDS
from grace.core.transport.transport import Transport


class Outcome(NamedTuple):
    """Result of a step: each tensor's merged gradient, the states for the next step, and notes for the statistics.

    `own` has what this rank has contributed to the merged gradient of each tensor, if the step keeps it.
    """

    merged: dict[str, Array]
    states: States
    notes: Notes
    own: Mapping[str, Array] = NO_STATE


class Step:
    """One step of the plan of `states` over a transport. It changes nothing but itself.

    `ops(device)` returns the array operations. `average=False` leaves sums undivided. `seed` is that of the run. With
    `rollback=False`, it takes the memory of each unit out of `states` as the unit begins, and writes over its arrays if
    they are `owned`: nobody else has them. With `track_norms` it measures the norms of compressed gradients and of
    their errors, and with `keeps_own` it keeps what this rank has contributed. It is not the `first` if another step
    over the transport is still under way, which will be completed before it. `times` records moments. `full` says
    whether it is a full round; without it, the number of the step does, which a traced graph does not know.
    """

    def __init__(
        self,
        states: States,
        ops: Callable[[str], ArrayOps],
        transport: Transport,
        *,
        seed: int = 0,
        average: bool = True,
        rollback: bool = True,
        owned: bool = False,
        track_norms: bool = False,
        keeps_own: bool = False,
        first: bool = True,
        times: Times | None = None,
        full: bool | None = None,
    ) -> None:
        #: The plan, and the number of the step: an int, or a 0-d integer array in a traced graph.
        self.plan, self.number = states.plan, states.step
        #: True if it is a full round, which takes gradients of all data and no second ones.
        self.full = self.plan.is_full(seed, self.number) if full is None else full
        if self.full and self.plan.full is not None:
            self.plan = self.plan.full
        self._states, self._ops, self._transport = states, ops, transport
        self._seed, self._average, self._rollback, self._owned = seed, average, rollback, owned
        self._track_norms, self._first, self._times = track_norms, first, times or Times()
        self._incoming, self._references = Incoming(self.plan, ops), Incoming(self.plan, ops)
        self._outgoing: Outgoing | None = None
        self._own = Outgoing(self.plan, ops, {}, transport.rank) if keeps_own else None
        self._buckets: dict[str, BucketStep] = {}
        # Units with their gradients and learning rates whose memories wait for the norm of all gradients.
        self._until_norm: list[tuple[Unit, Array, Any]] = []
        # The tensors of `rest`, and by unit the memories before the step of those without a gradient.
        self._resting: set[str] = set()
        # Of each rank, whether all know that it contributes nothing, and whether this one contributes nothing.
        self._absent: Sequence[Any] = ()
        self._out = False
        self._kept: dict[str, UnitStates] = {}
        # Of the buckets that are completed: new states, what compressors learn from, and notes.
        self._new: dict[str, UnitStates] = {}
        self._tallies: dict[str, tuple[UnitStep, tuple[Array, Array]]] = {}
        self._notes: Notes = {}

    @property
    def begun(self) -> bool:
        """True if a gradient has come."""
        return bool(self._incoming.names)

    def ready(
        self, name: str, gradient: Array, lr: Any = None, reference: Array | None = None, *, unused: bool = False
    ) -> None:
        """Take a finished gradient, which is only read, and the step's learning rate if memories need it.

        `reference` is the gradient of the same batch at other weights, if the memory needs it, except in a full round.
        With `unused` it is zeros, since this rank has none; `finish` must then know if no other rank has one either.
        Raises StepError for a wrong name, shape, dtype or order, or if the learning rate or the second gradient is
        missing.
        """
        item = self._item(name)
        if unused:
            self._keep_memories(name)
        if tuple(gradient.shape) != item.spec.shape:
            raise StepError(
                f"tensor '{name}': expected a gradient of shape {item.spec.shape}, "
                f"received {tuple(gradient.shape)}; parameters must keep their shape."
            )
        self._take(item, [gradient], lr, reference)

    def _keep_memories(self, tensor: str) -> None:
        """Keep what the memories hold for a tensor until the end of the step."""
        for unit, _, _ in self.plan.places.get(tensor, ()):
            for each in (unit, *unit.chain):
                name = each.spec.name
                if name in self._kept:
                    continue
                memory = self._states.units[name]["memory"]
                if not self._rollback and not self._owned:
                    # It comes back, and others have its arrays: later steps must not write over them.
                    memory = {key: self._ops(each.spec.device).copy(x) for key, x in memory.items()}
                self._kept[name] = {"memory": memory}

    def ready_in_parts(self, name: str, parts: Sequence[Array], reference: Array | None = None) -> None:
        """Do what `ready` does with a gradient whose elements lie in several flat parts; `reference` is flat."""
        item, numel = self._item(name), sum(len(part) for part in parts)
        if numel != item.spec.numel:
            raise StepError(
                f"tensor '{name}': expected a gradient of {item.spec.numel} elements, received {numel}; parameters "
                "must keep their shape."
            )
        self._take(item, parts, None, reference)

    def leave_out(self, absent: Sequence[Any] = (), *, out: bool) -> None:
        """Let ranks take part with zeros; call it before the first gradient.

        This rank is `out` if it contributes nothing: gradients are not read, and what its memories hold for it alone is
        not sent and stays. `absent` has a condition for each rank if all know who is out, and is then equal on all. Who
        is out sends no more than a header, except over communicators that add or need equal lengths.
        """
        self._absent, self._out = absent, out

    def rest(self, name: str, lr: Any = None) -> None:
        """Let a tensor that trains on no rank take part with zeros; its memories are not sent, and stay as they are.

        Call it in place of `ready`, on all ranks. If only some do, `finish` raises MismatchError.
        """
        item = self._item(name)
        self._keep_memories(name)
        self._resting.add(name)
        zeros = self._ops(item.spec.device).zeros(item.spec.numel, item.spec.dtype)
        self._take(item, [zeros], lr, None if self.full else zeros)

    def _item(self, name: str) -> Assignment:
        if name not in self.plan.assignment_of:
            raise StepError(
                f"no tensor '{name}' in the plan, which was made from the parameters at the start; "
                "create the optimizer after all parameters exist."
            )
        return self.plan.assignment_of[name]

    def _take(self, item: Assignment, gradient: Sequence[Array], lr: Any, reference: Array | None = None) -> None:
        name, dtype = item.spec.name, self._ops(item.spec.device).dtype(gradient[0])
        if dtype != item.spec.dtype:
            raise StepError(
                f"expected a gradient of {item.spec.dtype} for tensor '{name}', received {dtype}; convert it, or name "
                "its dtype in the TensorSpec."
            )
        if name in self._incoming.names:
            raise StepError(
                f"tensor '{name}' got a second gradient before step {self.number} was finished; "
                "expected one gradient per tensor and step."
            )
        check_lr(item, lr)
        others: dict[str, Array] = {}
        self.check_reference(item, reference)
        if "reference" in item.memory.needs and reference is not None:
            others = {unit.spec.name: flat for unit, flat in self._references.add(name, [reference])}
        if not self._incoming.names:
            gone = [rank for rank, absent in enumerate(self._absent) if absent is True]
            without = f" without the ranks {gone}" if gone else ""
            self._transport.announce(self.plan.digest + without, self.plan.buckets[0].name)
        self._times.mark("ready", name, gradient)
        for unit, flat in self._incoming.add(name, gradient):
            if "norm" in unit.memory.needs and not self._out:
                self._until_norm.append((unit, flat, lr))
            else:
                self._begin_unit(unit, flat, lr, reference=others.get(unit.spec.name))
        if self._until_norm and self.plan.needing_norm <= self._incoming.names:
            waiting = list(self._until_norm)
            self._until_norm.clear()
            norm = self._norm([(unit, flat) for unit, flat, _ in waiting])
            for unit, flat, rate in waiting:
                self._begin_unit(unit, flat, rate, norm)

    def check_reference(self, item: Assignment, reference: Array | None) -> None:
        """Raise StepError for a second gradient in a full round, or a missing or unfit one in any other step."""
        name, spec = item.spec.name, item.spec
        if "reference" not in item.memory.needs:
            return
        if (reference is None) != self.full:
            given = "received none" if reference is None else "received one"
            raise StepError(
                f"tensor '{name}', step {self.number}: memory '{memories.name_of(item.memory)}' takes the gradient of "
                "all data and no second one in a full round, and a second one of the same batch in any other step; "
                f"{given} in {'a full round' if self.full else 'a step that is none'}. Ask `full_round` before a step, "
                "or pass a closure to step(), or to evaluate() of a registered model."
            )
        if reference is None:
            return
        found = tuple(reference.shape), self._ops(spec.device).dtype(reference)
        if found[1] != spec.dtype or found[0] not in (spec.shape, (spec.numel,)):
            raise StepError(
                f"tensor '{name}': expected a second gradient of shape {spec.shape} and {spec.dtype}, like the first, "
                f"received {found[0]} and {found[1]}."
            )

    def _begin_unit(
        self, unit: Unit, flat: Array, lr: Any, norm: Array | None = None, reference: Array | None = None
    ) -> None:
        name = unit.spec.name
        bucket = self.plan.bucket_of[name]
        under_way = self._buckets.get(bucket.name)
        if under_way is None:
            under_way = self._buckets[bucket.name] = self._bucket_step(bucket)
        self._times.mark("begun", name, (flat,))
        step = self._step_of(unit)
        under_way.steps.append(step)
        if under_way.buffer is not None:
            step.write_to(under_way.buffer.places.get(name))
        if self._out:
            step.rest(lr)
        else:
            step.begin(flat, lr, norm, reference=reference)
        if len(under_way.steps) == len(bucket.units):
            position = {each.spec.name: i for i, each in enumerate(bucket.units)}
            under_way.steps.sort(key=lambda step: position[step.unit.spec.name])
            under_way.stamp = self._stamp(bucket)
            self._start_rounds(later=False)
            if self._polls(unit.spec.device):
                self.poll()

    def _norm(self, gradients: Sequence[tuple[Unit, Array]]) -> Array:
        """Return the norm of the gradients of all units together, as a 0-d float64 array."""
        # The tensors of a model may lie on several devices.
        ops = self._ops(gradients[0][0].spec.device)
        norms = [wide_norm(self._ops(unit.spec.device), flat) for unit, flat in gradients]
        return ops.norm(ops.stack([ops.cast(norm, "float64") for norm in norms], axis=0))

    def poll(self) -> bool:
        """Advance the buckets whose round has arrived by one round, without waiting; return whether there was one.

        Over a transport with lanes, all ranks must start the rounds of a lane in the same order. So a round waits until
        all buckets before it in the plan have started theirs of this number. Rounds without a lane of their own are
        left to `complete`, and so are all later rounds of a step that is not the first.
        """
        return self._start_rounds(later=True)

    def _start_rounds(self, later: bool) -> bool:
        """Do what `poll` does, without `later` with first rounds only."""
        transport, advanced = self._transport, False
        if later:
            transport.advance()
        if transport.lanes is not None and not self._first:
            later = False
        limit = math.inf if transport.lanes is None else transport.lanes
        for bucket in self.plan.buckets:
            under_way = self._buckets.get(bucket.name)
            if under_way is None or len(under_way.steps) < len(bucket.units):
                if transport.lanes is not None:
                    break
                continue
            if under_way.received is None and under_way.started < (limit if later else 1) and under_way.arrived:
                under_way.advance(transport, bucket.name)
                advanced = True
            if under_way.received is None and transport.lanes is not None:
                limit = min(limit, under_way.started)
        return advanced

    def _check_complete(self) -> None:
        missing = [name for name in self.plan.assignment_of if name not in self._incoming.names]
        if missing:
            raise StepError(
                f"step {self.number} cannot finish: received no gradient for {', '.join(missing)}. "
                "Pass zeros for unused parameters."
            )

    def complete(self, into: Mapping[str, Array] | None = None) -> Iterator[dict[str, Array]]:
        """Complete all buckets, and yield the merged gradients that are whole with each; `finish` must follow.

        All ranks start the next rounds of all buckets, in the order of the plan, before they wait for any of these.
        `into` is as for `finish`; the first call of a step counts. Raises what `finish` raises.
        """
        self._check_complete()
        outgoing = self._open_outgoing(into)
        left = [bucket for bucket in self.plan.buckets if bucket.name in self._buckets]
        while left:
            number, behind = min(self._buckets[bucket.name].started for bucket in left), []
            for bucket in left:
                under_way = self._buckets[bucket.name]
                if under_way.started > number or under_way.advance(self._transport, bucket.name):
                    behind.append(bucket)
                    continue
                before = len(outgoing.merged)
                self._merge(bucket, outgoing)
                yield dict(itertools.islice(outgoing.merged.items(), before, None))
            left = behind

    def _open_outgoing(self, into: Mapping[str, Array] | None) -> Outgoing:
        if self._outgoing is None:
            self._outgoing = Outgoing(self.plan, self._ops, into or {}, self._transport.rank)
        return self._outgoing

    def finish(self, into: Mapping[str, Array] | None = None, unused: Iterable[str] = ()) -> Outcome:
        """Complete the step and return its outcome: merged gradients have the shape and dtype of their specs.

        `unused` names the tensors that `ready` got as unused on every rank: their merged gradients must not be applied,
        and their memories stay as they were. It must be equal on all ranks, and is read once all gradients are merged.

        `into` maps tensors to contiguous arrays of that shape and dtype, which must not overlap; if arrays can be
        changed in place, the gradients are written there. Of a tensor of which this rank gets only some elements
        (`Plan.windows`), both are flat arrays of these; it has no result if it gets none. Raises StepError if a
        gradient is missing, WaitError if other ranks do not come, and MismatchError if they are at another step.
        """
        for _ in self.complete(into):
            pass
        outgoing = self._open_outgoing(into)
        tallies = self._tallies
        self._retune({unit.spec.name: tallies[unit.spec.name] for unit in self.plan.units if unit.spec.name in tallies})
        splice_units(self.plan, self._new, self._kept, self._resting.union(unused), self._ops)
        self._times.finish(self.number, self.plan, lambda bucket: self._notes.get(("bucket", bucket)))
        states = self._states._replace(step=self.number + 1, units=self._new)
        return Outcome(outgoing.merged, states, self._notes, NO_STATE if self._own is None else self._own.merged)

    def _step_of(self, unit: Unit) -> UnitStep:
        rank, size = self._transport.rank, self._transport.size
        if unit.owners is not None:
            rank, size = unit.owners.index(rank) if rank in unit.owners else 0, len(unit.owners)
        name = unit.spec.name
        states = self._states.units[name]
        if not self._rollback:
            self._states.units[name] = {**states, "memory": {}}
        if self._resting and (ranges := ranges_of(unit, self._resting)):
            nothing = first_memory(unit, self._ops(unit.spec.device), self._transport.rank)
            states = {**states, "memory": splice(unit, states["memory"], nothing, ranges, self._ops(unit.spec.device))}
        return UnitStep(
            unit,
            states,
            self._ops(unit.spec.device),
            seed=self._seed,
            step=self.number,
            rank=rank,
            size=size,
            average=self._average or unit.owners is not None,
            rollback=self._rollback,
            owned=self._owned and name not in self._kept,
            measured=self._track_norms,
            onward=None if unit.onward is None else self._step_of(unit.onward),
        )

    def _stamp(self, bucket: Bucket) -> Any:
        """Return a number that must be equal on all ranks: it depends on the step and on the tensors that rest."""
        tensors = {piece.tensor for unit in bucket.units for piece in unit.pieces}
        resting = sorted(tensors & self._resting)
        return self.number ^ zlib.crc32(repr(resting).encode()) if resting else self.number

    def _bucket_step(self, bucket: Bucket) -> BucketStep:
        ops, transport = self._ops(bucket.units[0].spec.device), self._transport
        return BucketStep(
            bucket.route,
            ops,
            rank=transport.rank,
            size=transport.size,
            mean=self._average,
            absent=self._absent,
            buffer=bucket.route.buffer(ops),
            observe=functools.partial(self._observe, bucket.name),
        )

    def _observe(self, bucket: str, moment: str, arrays: Iterable[Array] | None) -> None:
        """Record a moment of a bucket; look at its units once they are compressed."""
        if moment != "compressed":
            self._times.mark(moment, bucket, arrays)
            return
        for step in self._buckets[bucket].steps:
            if self._own is not None:
                step.keep_sent()
            if self._track_norms:
                name = step.unit.spec.name
                self._notes["size", name], self._notes["error", name] = step.squares()

    def _polls(self, device: str) -> bool:
        """Return whether `ready` polls: not on a GPU, where lengths and flags would have to be waited for.

        In a traced graph nothing has arrived yet.
        """
        return device == "cpu" and self._ops(device).eager

    def _merge(self, bucket: Bucket, outgoing: Outgoing) -> None:
        under_way = self._buckets.pop(bucket.name)
        assert under_way.received is not None
        received = under_way.received
        self._notes["bucket", bucket.name] = sum(under_way.nbytes.values())
        for kind in KINDS:
            self._notes[kind, bucket.name] = under_way.nbytes.get(kind, 0)
        for in_step in received.in_step:
            self._ops(bucket.units[0].spec.device).require(in_step, other_steps_error(self._transport.rank))
        for unit, payloads, flags in zip(bucket.units, received.payloads, received.flags, strict=True):
            # Free what each unit holds before the next one: Python looks for garbage among all objects that are left.
            name, step = unit.spec.name, under_way.steps.pop(0)
            if not unit.is_merged_by(self._transport.rank):
                self._new[name] = step.states_unless(flags)
                self._note_sent(name, step, step.sent_bytes())
                self._times.mark("merged", name)
                continue
            target = outgoing.target(unit)
            done: Concluded = step.conclude(payloads, flags, target)
            self._new[name] = done.states
            sent = step
            for onward in step.chain:
                self._new[onward.unit.spec.name] = onward.states_unless(flags)
                if onward.unit.is_kept_by(self._transport.rank):
                    sent = onward
            # The owner of a unit that it alone merges sends nothing of it.
            own = unit.merged_by is not None and self._transport.size > 1
            fields = 0 if own else sent.sent_bytes()
            self._note_sent(name, sent, fields + unit.negotiated_bytes)
            if done.tally is not None:
                self._tallies[name] = step, done.tally
            outgoing.add(unit, done.x, done.factor, target)
            if self._own is not None and (contribution := step.contribution()) is not None:
                self._own.add(unit, contribution, 1.0, None)
            self._times.mark("merged", name, (done.x,))
            # Free its memory for the next unit.
            del done

    def _note_sent(self, name: str, sent: UnitStep, nbytes: Any) -> None:
        self._notes["unit", name] = nbytes
        entries = sent.entries()
        if entries is not None:
            self._notes["entries", name] = entries

    def _retune(self, tallies: Mapping[str, tuple[UnitStep, tuple[Array, Array]]]) -> None:
        """Let compressors learn from what all their units together sent."""
        groups: dict[Compressor, list[str]] = {}
        for name, (step, _) in tallies.items():
            groups.setdefault(step.unit.compressor, []).append(name)
        for names in groups.values():
            states = [self._new[name] for name in names]
            new = retune(
                [tallies[name][0] for name in names],
                [tallies[name][1] for name in names],
                [of_unit["compressor"] for of_unit in states],
            )
            for name, of_unit, compressor in zip(names, states, new, strict=True):
                self._new[name] = {**of_unit, "compressor": compressor}


def check_lr(item: Assignment, lr: Any) -> None:
    """Raise StepError if the memory of a tensor needs the learning rate and there is none."""
    if "lr" in item.memory.needs and lr is None:
        raise StepError(
            f"tensor '{item.spec.name}': memory '{memories.name_of(item.memory)}' corrects for the learning rate, but "
            "received none. Wrap an optimizer, pass lr to MPIExchange or Simulation.step, or leave lr_correction out."
        )
