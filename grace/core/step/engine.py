"""Engine of a training step: it compresses gradients as they arrive, exchanges, merges, then commits the states.

Every bucket runs its route, a generator of rounds of collectives:

    ready(name, gradient)   local work; the bucket's first round starts with its last gradient
    rest(name)              the same for a tensor that does not train: it takes part with zeros, and keeps its memory
    poll()                  start the next round of the buckets whose round has arrived
    complete(bucket)        all rounds of one bucket: wait, start the next; merge, average, commit
    finish()                the same for all other buckets, round by round in the order of the plan

Only the last two wait for other ranks.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from grace.core.config.registry import memories
from grace.core.errors import StepError
from grace.core.guards.replicas import at_other_steps
from grace.core.guards.waiting import explained
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import wide_norm
from grace.core.observe.statistics import statistics
from grace.core.observe.timeline import Times
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Bucket, Plan
from grace.core.plan.unit import Assignment, Unit
from grace.core.spec import Array, State
from grace.core.state.merge import Merge
from grace.core.state.state import (
    STATE_VERSION,
    Slots,
    carried,
    carrying,
    check_saved,
    first_memory,
    initial,
    moved,
    prepare,
    ranges_of,
    saved_carrying,
    spliced,
)
from grace.core.step.assembly import Incoming, Outgoing
from grace.core.step.bucket_step import BucketStep
from grace.core.step.unit_step import Concluded, UnitStep, retuned
from grace.core.transport.collectives import KINDS
from grace.core.transport.transport import Transport

# The plans of a run, each with its first step, in which some tensors carry a residual of an earlier method.
Plans: TypeAlias = Callable[[frozenset[str]], Sequence[tuple[int, Plan]]]


class Snapshot(NamedTuple):
    """The state of an engine between two steps; units may be without their memories, which then start from zero."""

    plan: Plan
    done: Plan
    step: Any
    units: dict[str, dict[str, State]]
    stages: Sequence[tuple[int, Plan]]


class Engine:
    """Driver of a plan over a transport, one step after another.

    `ops(device)` returns the array operations. `average=False` leaves sums undivided. `rollback=False` drops the states
    of memories as soon as a step has read them. `slots` keeps the states. `later` holds the plans of later stages, each
    with its first step. `times` records moments.
    """

    def __init__(
        self,
        plan: Plan,
        ops: Callable[[str], ArrayOps],
        transport: Transport,
        *,
        seed: int = 0,
        average: bool = True,
        rollback: bool = True,
        slots: Slots | None = None,
        later: Sequence[tuple[int, Plan]] = (),
        times: Times | None = None,
    ) -> None:
        self.transport = transport
        transport.explain = lambda name: explained(self.plan, self.step, name)
        self.times = times or Times()
        # It is called several times per unit and step, and looks at the environment each time.
        ops = functools.cache(ops)
        self._ops = ops
        self._average = average
        self._rollback = rollback
        self._slots = slots or Slots()
        self._seed = seed
        #: True if a step measures the norms of compressed gradients and of their errors, for `stats`.
        self.track_norms = False
        #: The plans, each with its first step.
        self.stages: Sequence[tuple[int, Plan]] = [(0, plan), *later]
        for _, stage in self.stages:
            for item in stage.assignments:
                item.compressor.check_ranks(transport.size)
        # The plan of the last step; the statistics describe it.
        self._done = plan
        #: Steps that were completed in this process since `count_anew`. Unlike `step`, this number is equal on all
        #: ranks if only some have loaded a checkpoint.
        self.completed = 0
        self._outgoing: Outgoing | None = None
        # The units whose memories' states only this engine has. A step without roll-back may write over them.
        self._owned: set[str] = set()
        self._adopt(plan)
        prepare(self._slots, plan, ops, seed, transport.rank)
        if not rollback:
            self._owned.update(self._units)

    @property
    def step(self) -> Any:
        """Number of the step under way: an int, or a 0-d integer array in a traced graph."""
        return self._slots.step

    # --- plans --------------------------------------------------------------------------------------------------

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self._owned.clear()
        self._assignment_of = {item.spec.name: item for item in plan.exchanged}
        self._units = plan.stateful
        self._names_of_norm = {item.spec.name for item in plan.exchanged if item.memory.needs_norm}
        self._windows = plan.windows(self.transport.rank)
        self._bucket_of = {unit.spec.name: bucket for bucket in plan.buckets for unit in bucket.units}
        self.drop()

    def _stage_at(self, step: int) -> Plan:
        return next(plan for first, plan in reversed(self.stages) if first <= step)

    def check_idle(self, call: str) -> None:
        """Raise StepError if a step is under way, when the call is not possible."""
        if self._incoming.names:
            raise StepError(f"{call}() was called while gradients are being exchanged; call it after step().")

    def exchanges(self, name: str) -> bool:
        """Return whether the engine exchanges the tensor now, rather than the adapter."""
        return name in self._assignment_of

    @property
    def shared_states(self) -> dict[str, Array]:
        """The states that are equal on all ranks, by a name that says what they are."""
        found: dict[str, Array] = {}
        for unit in self.plan.units:
            for kind, state in self._slots.read(unit.spec.name).items():
                if kind == "compressor" or unit.memory.shared:
                    found |= {f"{key} of the {kind} of {unit.spec.name}": value for key, value in state.items()}
        return found

    def change(self, plan: Plan) -> None:
        """Continue with another plan for the same tensors; residuals and other states that fit are carried over.

        Raises StepError in the middle of a step.
        """
        self.check_idle("change")
        for item in plan.assignments:
            item.compressor.check_ranks(self.transport.size)
        self.stages = [(0, plan)]
        self._carry_on(plan)

    def _carry_on(self, plan: Plan, before: int | None = None) -> None:
        """Continue with another plan; `before` is the number of ranks before if they are others now."""
        size = self.transport.size
        states = self.plan, plan, self._slots.read, self._initial, self._ops
        new = carried(*states, size) if before is None else moved(*states, (before, size), average=self._average)
        self._leave()
        self._adopt(plan)
        for name, of_unit in new.items():
            self._slots.write(name, of_unit)

    def move(self, plans: Sequence[tuple[int, Plan]], before: int) -> None:
        """Continue with the ranks that the transport has now, with plans for them, after `before` other ranks.

        `grace.core.state.state.moved` says what this rank keeps. Drops a step under way.
        """
        self.drop()
        self.count_anew()
        self.stages = list(plans)
        plan = self._stage_at(int(self.step))
        for item in plan.assignments:
            item.compressor.check_ranks(self.transport.size)
        self._carry_on(plan, before)
        self._done = plan

    def count_anew(self) -> None:
        """Count completed steps from 0. All ranks must do so together; some may not have completed the last step."""
        self.completed = 0

    def memories(self) -> dict[str, State]:
        """Return the states of the memories that may differ between ranks, by unit."""
        self._owned.clear()
        return {name: self._slots.read(name)["memory"] for name, unit in self._units.items() if not unit.memory.shared}

    def put_memories(self, memories_of: Mapping[str, State]) -> None:
        """Write the result of `memories`."""
        self._owned.clear()
        for name, memory in memories_of.items():
            self._slots.write(name, {**self._slots.read(name), "memory": memory})

    def _leave(self) -> None:
        for name in self._units:
            self._slots.forget(name)

    def snapshot(self) -> Snapshot:
        """Return plan, step and states as they are now, for `restore`; the arrays are live, and never changed."""
        self._owned.clear()
        units = {name: self._slots.read(name) for name in self._units}
        return Snapshot(self.plan, self._done, self.step, units, self.stages)

    def before_step(self) -> Snapshot:
        """Return a snapshot to drop the next step by `restore` or `undo`; without roll-back, it has no memories."""
        if self._rollback:
            return self.snapshot()
        units = {name: {"compressor": self._slots.read(name)["compressor"]} for name in self._units}
        return Snapshot(self.plan, self._done, self.step, units, self.stages)

    def restore(self, before: Snapshot) -> None:
        """Go back to a snapshot, and drop a step under way."""
        self._leave()
        self._adopt(before.plan)
        for name, states in before.units.items():
            unit = self._units[name]
            if "memory" not in states:
                memory = first_memory(unit, self._ops(unit.spec.device), self.transport.rank)
                states = {"memory": memory, **states}
            self._slots.write(name, states)
        self.stages = before.stages
        self._slots.go_to(before.step)
        self._done = before.done

    def undo(self, before: Snapshot) -> None:
        """Go back to the states before the last step, which no optimizer has applied. The step stays counted."""
        plan, done, step, stages = self.plan, self._done, self.step, self.stages
        self.restore(before)
        self.stages = stages
        if plan is not before.plan:
            self._carry_on(plan)
        self._slots.go_to(step)
        self._done = done

    def put_back(self, before: Snapshot, tensors: Collection[str]) -> None:
        """Give the memories of some tensors the states of a snapshot, as if these had taken no part in steps since.

        Needs roll-back. If the plan has changed since, states are carried over to the new one. Raises StepError in the
        middle of a step.
        """
        self.check_idle("put_back")
        old = before.units
        if before.plan is not self.plan:
            read = before.units.__getitem__
            old = carried(before.plan, self.plan, read, self._initial, self._ops, self.transport.size)
        self._splice({name: states["memory"] for name, states in old.items() if "memory" in states}, set(tensors))

    def _splice(self, memory_of: Mapping[str, State], tensors: Collection[str]) -> None:
        """Write what other states of memories, by unit, hold for some tensors into those of now."""
        for name, memory in memory_of.items():
            unit = self._units[name]
            ranges = ranges_of(unit, tensors)
            if ranges:
                states = self._slots.read(name)
                new = spliced(unit, states["memory"], memory, ranges, self._ops(unit.spec.device))
                self._slots.write(name, {**states, "memory": new})
                # It may be the old state itself, which somebody else may have.
                self._owned.discard(name)

    # --- one step -----------------------------------------------------------------------------------------------

    def ready(self, name: str, gradient: Array, lr: Any = None, *, unused: bool = False) -> None:
        """Take a finished gradient, which is only read, and the step's learning rate if memories need it.

        With `unused` it is zeros, since this rank has none; `finish` must then be told if no other rank has one either.
        Raises StepError for a wrong name, shape, dtype or order, or if the learning rate is missing.
        """
        item = self._item(name)
        if unused:
            self._keep_memories(name)
        if tuple(gradient.shape) != item.spec.shape:
            raise StepError(
                f"tensor '{name}': expected a gradient of shape {item.spec.shape}, "
                f"received {tuple(gradient.shape)}; parameters must keep their shape."
            )
        self._take(item, [gradient], lr)

    def _keep_memories(self, tensor: str) -> None:
        """Keep what the memories hold for a tensor until the end of the step."""
        for unit, _, _ in self.plan.places.get(tensor, ()):
            for each in (unit, *unit.chain):
                # With roll-back, nothing writes over it.
                self._owned.discard(each.spec.name)
                self._kept.setdefault(each.spec.name, self._slots.read(each.spec.name)["memory"])

    def ready_in_parts(self, name: str, parts: Sequence[Array]) -> None:
        """Do what `ready` does with a gradient whose elements lie in several flat parts."""
        item, numel = self._item(name), sum(len(part) for part in parts)
        if numel != item.spec.numel:
            raise StepError(
                f"tensor '{name}': expected a gradient of {item.spec.numel} elements, received {numel}; parameters "
                "must keep their shape."
            )
        self._take(item, parts, None)

    def rest(self, name: str, lr: Any = None) -> None:
        """Let a tensor that trains on no rank take part with zeros; its memories are not sent, and stay as they are.

        Call it in place of `ready`, on all ranks. If only some do, `finish` raises MismatchError.
        """
        item = self._item(name)
        self._keep_memories(name)
        self._resting.add(name)
        self._take(item, [self._ops(item.spec.device).zeros(item.spec.numel, item.spec.dtype)], lr)

    def _item(self, name: str) -> Assignment:
        if name not in self._assignment_of:
            raise StepError(
                f"no tensor '{name}' in the plan, which was made from the parameters at the start; "
                "create the optimizer after all parameters exist."
            )
        return self._assignment_of[name]

    def _take(self, item: Assignment, gradient: Sequence[Array], lr: Any) -> None:
        name, dtype = item.spec.name, self._ops(item.spec.device).dtype(gradient[0])
        if dtype != item.spec.dtype:
            raise StepError(
                f"expected a gradient of {item.spec.dtype} for tensor '{name}', received {dtype}; convert it, or name "
                "its dtype in the TensorSpec."
            )
        if name in self._incoming.names:
            raise StepError(
                f"tensor '{name}' got a second gradient before step {self.step} was finished; "
                "expected one gradient per tensor and step."
            )
        check_lr(item, lr)
        self.times.mark("ready", name, gradient)
        for unit, flat in self._incoming.add(name, gradient):
            if unit.memory.needs_norm:
                self._until_norm.append((unit, flat, lr))
            else:
                self._begin_unit(unit, flat, lr)
        if self._until_norm and self._names_of_norm <= self._incoming.names:
            waiting = list(self._until_norm)
            self._until_norm.clear()
            norm = self._norm([(unit, flat) for unit, flat, _ in waiting])
            for unit, flat, rate in waiting:
                self._begin_unit(unit, flat, rate, norm)

    def _begin_unit(self, unit: Unit, flat: Array, lr: Any, norm: Array | None = None) -> None:
        name = unit.spec.name
        bucket = self._bucket_of[name]
        run = self._runs.get(bucket.name)
        if run is None:
            run = self._runs[bucket.name] = self._bucket_step(bucket)
        self.times.mark("begun", name, (flat,))
        step = self._step_of(unit)
        run.steps.append(step)
        if run.buffer is not None:
            step.write_to(run.buffer.places.get(name))
        step.begin(flat, lr, norm)
        if not self._rollback:
            self._slots.let_go(name)
        if len(run.steps) == len(bucket.units):
            position = {each.spec.name: i for i, each in enumerate(bucket.units)}
            run.steps.sort(key=lambda step: position[step.unit.spec.name])
            run.stamp = self._stamp(bucket)
            self._begin(bucket)
            if self._polls(unit.spec.device):
                self.poll()

    def _norm(self, gradients: Sequence[tuple[Unit, Array]]) -> Array:
        """Return the norm of the gradients of all units together, as a 0-d float64 array."""
        # The tensors of a model may lie on several devices.
        ops = self._ops(gradients[0][0].spec.device)
        norms = [wide_norm(self._ops(unit.spec.device), flat) for unit, flat in gradients]
        return ops.norm(ops.stack([ops.cast(norm, "float64") for norm in norms], axis=0))

    def _begin(self, bucket: Bucket) -> None:
        """Start the first round of a bucket; over an ordered transport only after those of all buckets before it."""
        for each in self.plan.buckets if self.transport.ordered else [bucket]:
            if each.name in self._begun:
                continue
            run = self._runs.get(each.name)
            if run is None or len(run.steps) < len(each.units):
                return
            self._begun.add(each.name)
            run.advance(self.transport, each.name)

    def poll(self) -> bool:
        """Advance the buckets whose round has arrived by one round, without waiting; return whether there was one."""
        advanced = False
        for bucket in self.plan.buckets:
            run = self._runs.get(bucket.name)
            if run is None or bucket.name not in self._begun or run.received is not None:
                continue
            if run.arrived:
                run.advance(self.transport, bucket.name)
                advanced = True
        return advanced

    def _check_complete(self) -> None:
        missing = [name for name in self._assignment_of if name not in self._incoming.names]
        if missing:
            raise StepError(
                f"step {self.step} cannot finish: received no gradient for {', '.join(missing)}. "
                "Pass zeros for unused parameters."
            )

    def complete(self, bucket: str, into: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Complete one bucket, and return the merged gradients that are whole with it; `finish` must follow.

        All ranks of an ordered transport must complete the same buckets in the same order. `into` is as for `finish`;
        the first call of a step counts. Raises StepError if the bucket is unknown or completed, or lacks gradients.
        """
        chosen = next((b for b in self.plan.buckets if b.name == bucket), None)
        run = self._runs.get(bucket)
        if chosen is None or run is None or bucket not in self._begun:
            raise StepError(
                f"bucket '{bucket}' cannot be completed: expected a bucket whose gradients have all been passed to "
                f"ready() in this step, of {', '.join(b.name for b in self.plan.buckets)}; wait for its gradients, and "
                "complete each bucket once."
            )
        outgoing = self._outgoing_into(into)
        before = set(outgoing.merged)
        while run.advance(self.transport, bucket):
            pass
        self._merge(chosen, outgoing)
        return {name: x for name, x in outgoing.merged.items() if name not in before}

    def _outgoing_into(self, into: Mapping[str, Array] | None) -> Outgoing:
        if self._outgoing is None:
            self._outgoing = Outgoing(self.plan, self._ops, into or {}, self.transport.rank, self._windows)
        return self._outgoing

    def finish(
        self, into: Mapping[str, Array] | None = None, unused: Collection[str] = frozenset()
    ) -> dict[str, Array]:
        """Complete the step and return each tensor's merged gradient, in the shape and dtype of its spec.

        `unused` names the tensors that `ready` got as unused on every rank: their merged gradients must not be applied,
        and their memories stay as they were. It must be equal on all ranks.

        `into` maps tensors to contiguous arrays of that shape and dtype, which must not overlap; if arrays can be
        changed in place, the gradients are written there. Of a tensor of which this rank gets only some elements
        (`Plan.windows`), both are flat arrays of these; it has no result if it gets none. Raises StepError if a
        gradient is missing, WaitError if other ranks do not come, and MismatchError if they are at another step.
        """
        self._check_complete()
        outgoing = self._outgoing_into(into)
        left = [bucket for bucket in self.plan.buckets if bucket.name in self._runs]
        while left:
            under_way = []
            for bucket in left:
                if self._runs[bucket.name].advance(self.transport, bucket.name):
                    under_way.append(bucket)
                    continue
                self._merge(bucket, outgoing)
            left = under_way
        tallies = self._tallies
        self._retune({unit.spec.name: tallies[unit.spec.name] for unit in self.plan.units if unit.spec.name in tallies})
        self._splice(self._kept, self._resting.union(unused))
        self.times.finish(self.step, self.plan, lambda bucket: self._slots.noted("bucket", bucket))
        self._done = self.plan
        self.drop()
        self._slots.go_to(self.step + 1)
        self.completed += 1
        if len(self.stages) > 1:
            plan = self._stage_at(self.step)
            if plan is not self.plan:
                self._carry_on(plan)
        return outgoing.merged

    def drop(self) -> None:
        """Discard the gradients of a step that will not be finished.

        States stay as they are, except those of completed buckets. Without roll-back, memories of units that have begun
        are lost until `restore`.
        """
        self._runs: dict[str, BucketStep] = {}
        # Units with their gradients and learning rates whose memories wait for the norm of all gradients.
        self._until_norm: list[tuple[Unit, Array, Any]] = []
        # The buckets whose first round has started.
        self._begun: set[str] = set()
        # Of the buckets that are completed.
        self._outgoing = None
        self._tallies: dict[str, tuple[UnitStep, tuple[Array, Array]]] = {}
        # The tensors of `rest`, and by unit the memories before the step of those without a gradient.
        self._resting: set[str] = set()
        self._kept: dict[str, State] = {}
        self._incoming = Incoming(self.plan, self._ops)

    def _step_of(self, unit: Unit) -> UnitStep:
        rank, size = self.transport.rank, self.transport.size
        if unit.owners is not None:
            rank, size = unit.owners.index(rank) if rank in unit.owners else 0, len(unit.owners)
        states = self._slots.read(unit.spec.name)
        if self._resting and (ranges := ranges_of(unit, self._resting)):
            nothing = first_memory(unit, self._ops(unit.spec.device), self.transport.rank)
            states = {**states, "memory": spliced(unit, states["memory"], nothing, ranges, self._ops(unit.spec.device))}
        return UnitStep(
            unit,
            states,
            self._ops(unit.spec.device),
            seed=self._seed,
            step=self._slots.step,
            rank=rank,
            size=size,
            average=self._average or unit.owners is not None,
            rollback=self._rollback,
            owned=unit.spec.name in self._owned,
            onward=None if unit.onward is None else self._step_of(unit.onward),
        )

    def _stamp(self, bucket: Bucket) -> Any:
        """Return a number that must be equal on all ranks: it depends on the step and on the tensors that rest."""
        resting = sorted({piece.tensor for unit in bucket.units for piece in unit.pieces} & self._resting)
        return self.step ^ zlib.crc32(repr(resting).encode()) if resting else self.step

    def _bucket_step(self, bucket: Bucket) -> BucketStep:
        ops, transport = self._ops(bucket.units[0].spec.device), self.transport
        return BucketStep(
            bucket.route,
            ops,
            rank=transport.rank,
            size=transport.size,
            mean=self._average,
            buffer=bucket.route.buffer(ops),
            observe=functools.partial(self._observe, bucket.name),
        )

    def _observe(self, bucket: str, moment: str, arrays: Iterable[Array] | None) -> None:
        """Record a moment of a bucket, and the norms of its units once these are compressed."""
        if moment != "compressed":
            self.times.mark(moment, bucket, arrays)
            return
        for step in self._runs[bucket].steps:
            squares = step.squares() if self.track_norms else (None, None)
            for kind, square in zip(("size", "error"), squares, strict=True):
                self._slots.note(kind, step.unit.spec.name, square)

    def _polls(self, device: str) -> bool:
        """Return whether `ready` polls: not on a GPU, where lengths and flags would have to be waited for.

        In a traced graph nothing has arrived yet. An ordered transport starts later rounds in the order of the plan.
        """
        return device == "cpu" and self._ops(device).eager and not self.transport.ordered

    def _commit(self, unit: Unit, states: dict[str, State]) -> None:
        self._slots.write(unit.spec.name, states)
        if not self._rollback:
            self._owned.add(unit.spec.name)

    def _merge(self, bucket: Bucket, outgoing: Outgoing) -> None:
        run = self._runs.pop(bucket.name)
        assert run.received is not None
        received = run.received
        self._slots.note("bucket", bucket.name, sum(run.nbytes.values()))
        for kind in KINDS:
            self._slots.note(kind, bucket.name, run.nbytes.get(kind, 0))
        for in_step in received.in_step:
            self._ops(bucket.units[0].spec.device).require(in_step, at_other_steps(self.transport.rank))
        for unit, payloads, flags in zip(bucket.units, received.payloads, received.flags, strict=True):
            # Free what each unit holds before the next one: Python looks for garbage among all objects that are left.
            name, step = unit.spec.name, run.steps.pop(0)
            if not unit.is_merged_by(self.transport.rank):
                self._commit(unit, step.states_unless(flags))
                self._note_sent(name, step, step.sent_bytes())
                self.times.mark("merged", name)
                continue
            target = outgoing.target(unit)
            done: Concluded = step.conclude(payloads, flags, target)
            self._commit(unit, done.states)
            sent = step
            for onward in step.chain:
                self._commit(onward.unit, onward.states_unless(flags))
                if onward.unit.kept_by(self.transport.rank):
                    sent = onward
            # The owner of a unit that it alone merges sends nothing of it.
            own = unit.merged_by is not None and self.transport.size > 1
            fields = 0 if own else sent.sent_bytes()
            self._note_sent(name, sent, fields + unit.negotiated_bytes)
            if done.tally is not None:
                self._tallies[name] = step, done.tally
            outgoing.add(unit, done.x, done.factor, target)
            self.times.mark("merged", name, (done.x,))
            # Free its memory for the next unit.
            del done

    def _note_sent(self, name: str, sent: UnitStep, nbytes: Any) -> None:
        self._slots.note("unit", name, nbytes)
        entries = sent.entries()
        if entries is not None:
            self._slots.note("entries", name, entries)

    def _retune(self, tallies: Mapping[str, tuple[UnitStep, tuple[Array, Array]]]) -> None:
        """Let compressors learn from what all their units together sent."""
        groups: dict[Compressor, list[str]] = {}
        for name, (step, _) in tallies.items():
            groups.setdefault(step.unit.compressor, []).append(name)
        for names in groups.values():
            states = [self._slots.read(name) for name in names]
            new = retuned(
                [tallies[name][0] for name in names],
                [tallies[name][1] for name in names],
                [of_unit["compressor"] for of_unit in states],
            )
            for name, of_unit, compressor in zip(names, states, new, strict=True):
                self._slots.write(name, {**of_unit, "compressor": compressor})

    # --- statistics ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what the last step sent; bytes are those that this rank passed to collectives.

        `wire_bytes` counts whole buffers (fields, header, padding, proposals) and delegated tensors, `dense_bytes` the
        same tensors uncompressed, `compressed_*` both without the dense tensors, and `collectives` the bytes by the
        kind of collective that carries them. Each tensor has `wire_bytes` of fields and proposals: its share of each
        unit that holds it, by the entries that a sparsifier sends of it, with other methods by its elements. It also
        has `residual_norm` |e| and `relative_error` |x - C(x)| / |x|, both over its own elements, which are None unless
        `track_norms` was set before the step. `volume` is what all tensors of a method that tunes its volume have sent,
        over what was asked of them until now; None for other methods.

        Each bucket has its `tensors`, `wire_bytes`, and its phases as [begin, end] in seconds since the first gradient
        of the step. A phase is None if it is unknown, as before the first step and in a graph that does not track
        times. `ready`: from its first gradient to its last. `compress`: from the start of its first unit, error
        feedback included, until the payloads are passed to the transport (in a graph: until they exist). `negotiate`, a
        part of `compress`: from sending proposals to their result; None if the method has none. `send`: until this rank
        waits for what it sent; it does other work meanwhile. `wait`: until arrival. (A graph never blocks; its wait
        starts when the payloads of all buckets exist.) `merge`: until the last gradient is in place. These are host
        times: work of a GPU counts when it is enqueued.
        """
        return statistics(self._done, self._slots, self.times, self._ops, self.track_norms)

    # --- checkpoint ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the step and states of this rank; the arrays are the live ones and are never changed in place.

        Raises StepError in the middle of a step if there is no roll-back.
        """
        if not self._rollback:
            self.check_idle("state_dict")
            self._owned.clear()
        return {
            "version": STATE_VERSION,
            "step": int(self.step),
            "rank": self.transport.rank,
            "size": self.transport.size,
            "tensors": self._slots.save(self._units),
        }

    def load_state_dict(
        self, state: dict[str, Any], convert: Callable[[Array, Array], Array], plans: Plans | None = None
    ) -> bool:
        """Load step and states; `convert(saved, current)` returns the saved array in the form of the current one.

        If other tensors than in the engine's own plans carry a residual of an earlier method, it continues with the
        plans that `plans` returns for these tensors: their residual may not have been sent yet.

        States of another rank, or of a run with another number of ranks, cannot be continued exactly. Then only values
        that are equal on all ranks are loaded (step, compressor states), the memories start from zero, and the result
        is False. Raises StateError if the checkpoint belongs to other tensors, methods, shapes or dtypes, or is
        damaged; then nothing was loaded.
        """
        check_saved(state)
        mine = state["rank"] == self.transport.rank and state["size"] == self.transport.size
        before = self.snapshot()
        self._follow(state, plans)
        self._start_at(int(state["step"]))
        try:
            resized = state["size"] != self.transport.size
            self._slots.load(
                self._units, state["tensors"], convert, self._ops, self._initial if not mine else None, resized
            )
        except Exception:
            # All or nothing, also for a checkpoint of another stage.
            self.restore(before)
            raise
        self.drop()
        return bool(mine)

    def _follow(self, state: Mapping[str, Any], plans: Plans | None) -> None:
        """Take the plans of this run in which those tensors carry a residual of an earlier method that do so here."""
        found = saved_carrying(state["tensors"])
        if plans is not None and found != carrying(self._stage_at(int(state["step"])).stateful):
            self.stages = plans(found)

    def merge_state_dicts(
        self,
        states: Sequence[Mapping[str, Any]],
        before: Plan,
        convert: Callable[[Array, Array], Array],
        plans: Plans | None = None,
    ) -> list[str]:
        """Load the states of all ranks of a run with another number of ranks, which had the plan `before`.

        Return what could not be continued. Raises the errors of `load_state_dict`; then nothing was loaded.
        """
        snapshot = self.snapshot()
        self._follow(states[0], plans)
        self._start_at(int(states[0]["step"]))
        rank, size = self.transport.rank, self.transport.size
        try:
            merge = Merge(
                before,
                self.plan,
                states,
                convert,
                self._ops,
                seed=self._seed,
                rank=rank,
                size=size,
                average=self._average,
            )
            new = merge.states()
        except Exception:
            self.restore(snapshot)
            raise
        for name, of_unit in new.items():
            self._slots.write(name, of_unit)
        self.drop()
        return list(merge.lost)

    def reset(self) -> None:
        """Start over at step 0 with initial states."""
        self.drop()
        self._start_at(0, anew=True)

    def _start_at(self, step: int, anew: bool = False) -> None:
        """Go to the stage of a step; use initial states if it is another stage, or with `anew`."""
        plan = self._stage_at(step)
        if anew or plan is not self.plan:
            self._done = plan
            self._leave()
            self._adopt(plan)
            for name, unit in self._units.items():
                self._slots.write(name, self._initial(unit))
        self._slots.go_to(step)

    def _initial(self, unit: Unit) -> dict[str, State]:
        return initial(unit, self._ops(unit.spec.device), self._seed, self.transport.rank)


def check_lr(item: Assignment, lr: Any) -> None:
    """Raise StepError if the memory of a tensor needs the learning rate and there is none."""
    if item.memory.needs_lr and lr is None:
        raise StepError(
            f"tensor '{item.spec.name}': memory '{memories.name_of(item.memory)}' corrects for the learning rate, but "
            "received none. Wrap an optimizer, pass lr to MPIExchange or Simulation.step, or leave lr_correction out."
        )
