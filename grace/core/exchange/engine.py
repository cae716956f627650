"""Engine of a training step: it compresses gradients as they arrive, exchanges, merges, then commits the states.

A step has these phases, each in the order of the plan so that all ranks agree on it:

    ready(name, gradient)   local work; the bucket's first collective starts with its last gradient
    advance()               wait for the proposals of the ranks, compress the rest and send
    finish()                wait, merge, average, commit

Only the last two phases wait for other ranks. Memories are committed as payloads arrive, everything else at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from grace.core.exchange.assembly import Incoming, Outgoing
from grace.core.exchange.entry import Entry, Run, Works, either
from grace.core.exchange.state import (
    STATE_VERSION,
    Held,
    Slots,
    carried,
    check_saved,
    initial,
    prepare,
    put_back,
    taken_out,
)
from grace.core.exchange.transport import Transport
from grace.core.exchange.wire import Received
from grace.core.guards.waiting import explained
from grace.core.methods.communicator import Route
from grace.core.observe.statistics import statistics
from grace.core.observe.timeline import Times
from grace.core.ops.composites import ArrayOps
from grace.core.values.errors import MismatchError, StepError
from grace.core.values.plan import Bucket, Plan
from grace.core.values.registry import memories
from grace.core.values.spec import Array, State
from grace.core.values.unit import Unit


class Snapshot(NamedTuple):
    """The state of an engine between two steps."""

    plan: Plan
    done: Plan
    step: Any
    units: dict[str, dict[str, State]]
    held: dict[str, dict[str, Held]]


class Engine:
    """Driver of a plan over a transport, one step after another.

    `ops(device)` returns the array operations. `average=False` leaves sums undivided. `slots` keeps the states. `later`
    holds the plans of later stages, each with its first step. `times` records moments.
    """

    def __init__(
        self,
        plan: Plan,
        ops: Callable[[str], ArrayOps],
        transport: Transport,
        *,
        seed: int = 0,
        average: bool = True,
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
        self._slots = slots or Slots()
        self._seed = seed
        self._works = Works(
            ops, self._slots, self.times, rank=transport.rank, size=transport.size, seed=seed, average=average
        )
        self._stages = [(0, plan), *later]
        for _, stage in self._stages:
            for item in stage.assignments:
                item.compressor.check_ranks(transport.size)
        # The plan of the last step; the statistics describe it.
        self._done = plan
        # By tensor and unit, what `hold` has set aside.
        self._held: dict[str, dict[str, Held]] = {}
        self._adopt(plan)
        prepare(self._slots, plan, ops, seed)

    @property
    def step(self) -> Any:
        """Number of the step under way: an int, or a 0-d integer array in a traced graph."""
        return self._slots.step

    @property
    def track_norms(self) -> bool:
        """True if a step measures the norms of compressed gradients and of their errors, for `stats`."""
        return self._works.track_norms

    @track_norms.setter
    def track_norms(self, value: bool) -> None:
        self._works.track_norms = value

    # --- plans --------------------------------------------------------------------------------------------------

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self._assignment_of = {item.spec.name: item for item in plan.exchanged}
        self._units = {unit.spec.name: unit for unit in plan.units}
        self._bucket_of = {unit.spec.name: bucket for bucket in plan.buckets for unit in bucket.units}
        self.drop()

    def _stage_at(self, step: int) -> Plan:
        return next(plan for first, plan in reversed(self._stages) if first <= step)

    @property
    def under_way(self) -> bool:
        """True if a step has begun and is not finished."""
        return bool(self._incoming.names)

    def exchanges(self, name: str) -> bool:
        """Return whether the engine exchanges the tensor now, rather than the adapter."""
        return name in self._assignment_of

    def hold(self, tensor: str) -> None:
        """Set aside what memories hold for a tensor that does not train, until `release`; its gradients are zeros.

        Otherwise its residual would be sent. Call it before the tensor's `ready`.
        """
        if tensor in self._held:
            return
        self._held[tensor] = {}
        for name, unit in self._units.items():
            if any(piece.tensor == tensor for piece in unit.pieces):
                states = self._slots.read(name)
                memory, self._held[tensor][name] = taken_out(
                    unit, states["memory"], tensor, self._ops(unit.spec.device)
                )
                self._slots.write(name, {**states, "memory": memory})

    def release(self, tensor: str) -> None:
        """Give a tensor's memories back what `hold` set aside, if it did. Call it before the tensor's `ready`."""
        for name, held in self._held.pop(tensor, {}).items():
            self._slots.write(name, self._whole(name, self._slots.read(name), held))

    def _whole(self, name: str, states: dict[str, State], held: Held) -> dict[str, State]:
        return {**states, "memory": put_back(states["memory"], held, self._ops(self._units[name].spec.device))}

    def change(self, plan: Plan) -> None:
        """Continue with another plan for the same tensors; residuals and other states that fit are carried over.

        Raises StepError in the middle of a step.
        """
        if self.under_way:
            raise StepError("the plan cannot be changed in the middle of a step; change it after step().")
        for item in plan.assignments:
            item.compressor.check_ranks(self.transport.size)
        self._stages = [(0, plan)]
        self._carry_on(plan)

    def _carry_on(self, plan: Plan) -> None:
        for tensor in list(self._held):
            self.release(tensor)
        new = carried(self.plan.units, plan.units, self._slots.read, self._initial, self._ops)
        self._leave()
        self._adopt(plan)
        for name, states in new.items():
            self._slots.write(name, states)

    def _leave(self) -> None:
        for name in self._units:
            self._slots.forget(name)

    def snapshot(self) -> Snapshot:
        """Return plan, step and states as they are now. The arrays are the live ones, which are never changed."""
        units = {name: self._slots.read(name) for name in self._units}
        return Snapshot(self.plan, self._done, self.step, units, dict(self._held))

    def restore(self, before: Snapshot) -> None:
        """Go back to a snapshot, and drop a step under way."""
        self._leave()
        self._adopt(before.plan)
        for name, states in before.units.items():
            self._slots.write(name, states)
        self._held = dict(before.held)
        self._slots.go_to(before.step)
        self._done = before.done

    def undo(self, before: Snapshot) -> None:
        """Go back to the states before the last step, which no optimizer has applied. The step stays counted."""
        plan, done, step = self.plan, self._done, self.step
        self.restore(before)
        if plan is not before.plan:
            self._carry_on(plan)
        self._slots.go_to(step)
        self._done = done

    # --- one step -----------------------------------------------------------------------------------------------

    def ready(self, name: str, gradient: Array, lr: Any = None) -> None:
        """Take a finished gradient, which is only read, and the step's learning rate if memories need it.

        Raises StepError for a wrong name, shape, dtype or order, or if the learning rate is missing.
        """
        if name not in self._assignment_of:
            raise StepError(
                f"no tensor '{name}' in the plan, which was made from the parameters at the start; "
                "create the optimizer after all parameters exist."
            )
        item = self._assignment_of[name]
        if tuple(gradient.shape) != item.spec.shape:
            raise StepError(
                f"tensor '{name}': expected a gradient of shape {item.spec.shape}, "
                f"received {tuple(gradient.shape)}; parameters must keep their shape."
            )
        dtype = self._ops(item.spec.device).dtype(gradient)
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
        if item.memory.needs_lr and lr is None:
            raise StepError(
                f"tensor '{name}': memory '{memories.name_of(item.memory)}' corrects for the learning rate, but "
                "received none. Only optimizers know it: wrap one, or leave lr_correction out."
            )
        self.times.mark("ready", name, (gradient,))
        for unit, flat in self._incoming.add(name, gradient):
            bucket = self._bucket_of[unit.spec.name]
            run = self._runs.setdefault(bucket.name, Run())
            run.entries[unit.spec.name] = self._works.begin(unit, flat, lr)
            if len(run.entries) == len(bucket.units) and not self._propose(bucket, run):
                self._send(bucket, run)
                self._collect()

    def advance(self) -> None:
        """Wait for the proposals, compress with them and send. Raises StepError if a gradient is missing."""
        missing = [name for name in self._assignment_of if name not in self._incoming.names]
        if missing:
            raise StepError(
                f"step {self.step} cannot finish: received no gradient for {', '.join(missing)}. "
                "Pass zeros for unused parameters."
            )
        for bucket in self.plan.buckets:
            run = self._runs[bucket.name]
            if run.sent is None:
                self._negotiate(bucket, run)
                self._send(bucket, run)

    def finish(self, into: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Complete the step and return each tensor's merged gradient, in the shape and dtype of its spec.

        `into` maps tensors to contiguous arrays of that shape and dtype, which must not overlap; if arrays can be
        changed in place, the gradients are written there.
        """
        self.advance()
        outgoing = Outgoing(self.plan, self._ops, into or {})
        entries: list[Entry] = []
        for bucket in self.plan.buckets:
            run = self._runs.pop(bucket.name)
            self._merge(bucket, run, outgoing)
            entries += run.entries.values()
        self._works.retune(entries)
        self.times.finish(self.step, self.plan, lambda bucket: self._slots.noted("bucket", bucket))
        self._done = self.plan
        self.drop()
        self._slots.go_to(self.step + 1)
        if len(self._stages) > 1:
            plan = self._stage_at(self.step)
            if plan is not self.plan:
                self._carry_on(plan)
        return outgoing.merged

    def drop(self) -> None:
        """Discard the gradients of a step that will not be finished.

        States stay as they are, except those of memories whose payloads have already arrived from all ranks.
        """
        self._runs: dict[str, Run] = {}
        self._incoming = Incoming(self.plan, self._ops)

    def _propose(self, bucket: Bucket, run: Run) -> bool:
        """Start one collective for all proposals of one kind; return False if the bucket has none."""
        kinds: dict[tuple[Literal["sum", "max", "leader"], str], list[Array]] = {}
        for unit in bucket.units:
            entry = run.entries[unit.spec.name]
            if entry.proposal is not None:
                kind = (entry.proposal.op, entry.site.ops.dtype(entry.proposal.array))
                kinds.setdefault(kind, []).append(entry.proposal.array)
        ops = self._ops(bucket.units[0].spec.device)
        for (op, dtype), arrays in kinds.items():
            buffer = ops.concat(arrays)
            if op == "leader":
                # A sum with zeros, because a graph that serves every step cannot name the root of a broadcast.
                leads = ops.full(1, self.step % self.transport.size, "int64")[0] == self.transport.rank
                buffer = either(ops, leads, buffer, ops.zeros(ops.length(buffer), dtype))
            run.negotiating[op, dtype] = self.transport.allreduce(
                buffer, op="max" if op == "max" else "sum", name=f"{bucket.name}/negotiate.{op}.{dtype}"
            )
        if kinds:
            self.times.mark("proposed", bucket.name, [array for arrays in kinds.values() for array in arrays])
        return bool(kinds)

    def _negotiate(self, bucket: Bucket, run: Run) -> None:
        """Give every unit the result of its proposal and compress."""
        negotiated: dict[Any, Array] = {kind: handle.wait() for kind, handle in run.negotiating.items()}
        if negotiated:
            self.times.mark("negotiated", bucket.name, negotiated.values())
        places: dict[Any, int] = dict.fromkeys(negotiated, 0)
        for unit in bucket.units:
            entry = run.entries[unit.spec.name]
            if entry.proposal is None:
                continue
            kind = (entry.proposal.op, entry.site.ops.dtype(entry.proposal.array))
            length = entry.site.ops.length(entry.proposal.array)
            self._works.compress(entry, negotiated[kind][places[kind] : places[kind] + length])
            places[kind] += length

    def _send(self, bucket: Bucket, run: Run) -> None:
        entries = [run.entries[unit.spec.name] for unit in bucket.units]
        payloads, flags = [self._works.to_send(e) for e in entries], [e.bad for e in entries]
        run.sent = bucket.communicator.start(payloads, flags, self._route(bucket))
        self.times.mark("handed", bucket.name, [array for payload in payloads for array in payload.values()])
        self._slots.note("bucket", bucket.name, run.sent.nbytes + sum(unit.negotiated_bytes for unit in bucket.units))
        # Update the memories while the payload travels.
        for entry in entries:
            self._works.remember(entry)

    def _route(self, bucket: Bucket) -> Route:
        ops = self._ops(bucket.units[0].spec.device)
        return Route(bucket.layout, self.transport, ops, bucket.name, self.step, self._average)

    def _collect(self) -> None:
        """Take in what has arrived, without waiting, so that memories can drop their last state early.

        On a GPU this would have to wait for the flags, and in a traced graph nothing has arrived yet.
        """
        for bucket in self.plan.buckets:
            run, spec = self._runs.get(bucket.name), bucket.units[0].spec
            if run is None or run.sent is None or run.received is not None:
                continue
            if spec.device != "cpu" or not self._ops(spec.device).in_place:
                continue
            if all(handle.arrived() for handle in run.sent.handles.values()):
                run.received = self._receive(bucket, run)
                if all(run.received.in_step):
                    for unit, flags in zip(bucket.units, run.received.flags, strict=True):
                        self._works.commit_memory(run.entries[unit.spec.name], flags)

    def _receive(self, bucket: Bucket, run: Run) -> Received:
        assert run.sent is not None
        self.times.mark("waiting", bucket.name)
        arrived = run.sent.wait()
        self.times.mark("arrived", bucket.name, arrived.values())
        return bucket.communicator.finish(arrived, run.sent, self._route(bucket))

    def _merge(self, bucket: Bucket, run: Run, outgoing: Outgoing) -> None:
        received = run.received or self._receive(bucket, run)
        for in_step in received.in_step:
            self._ops(bucket.units[0].spec.device).require(
                in_step,
                MismatchError(
                    f"the ranks are not at the same step (seen by rank {self.transport.rank}): "
                    "only some of them loaded a checkpoint, they loaded checkpoints of different steps, or a rank "
                    "called hvd.join(). Let every rank load its own file of the same step, or all ranks the same "
                    "file; instead of hvd.join(), which is not supported, let all ranks take equally many steps."
                ),
            )
        for unit, payloads, bad_flags in zip(bucket.units, received.payloads, received.flags, strict=True):
            entry, target = run.entries[unit.spec.name], outgoing.target(unit)
            x, factor = self._works.conclude(entry, payloads, bad_flags, target)
            outgoing.add(unit, x, factor, target)
            self.times.mark("merged", unit.spec.name, (x,))
            # Free its memory for the next unit.
            del x

    # --- statistics ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what the last step sent; bytes are those that this rank passed to collectives.

        `wire_bytes` counts whole buffers (fields, header, padding, proposals) and delegated tensors, `dense_bytes` the
        same tensors uncompressed, `compressed_*` both without the dense tensors, and `collectives` the bytes by the
        kind of collective that carries them. Each tensor has `wire_bytes` of its fields and proposal (its share of a
        unit by elements), `residual_norm` |e|, and `relative_error` |x - C(x)| / |x| over the units that hold it. The
        last two are None unless `track_norms` was set before the step.

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
        """Return the step and states of this rank; the arrays are the live ones and are never changed in place."""
        tensors = self._slots.save(self._units)
        for units in self._held.values():
            for name, held in units.items():
                tensors[name] = self._whole(name, tensors[name], held)
        return {
            "version": STATE_VERSION,
            "step": int(self.step),
            "rank": self.transport.rank,
            "size": self.transport.size,
            "tensors": tensors,
        }

    def load_state_dict(self, state: dict[str, Any], convert: Callable[[Array, Array], Array]) -> bool:
        """Load step and states; `convert(saved, current)` returns the saved array in the form of the current one.

        States of another rank, or of a run with another number of ranks, cannot be continued exactly. Then only values
        that are equal on all ranks are loaded (step, compressor states), the memories start from zero, and the result
        is False. Raises StateError if the checkpoint belongs to other tensors, methods, shapes or dtypes, or is
        damaged; then nothing was loaded.
        """
        check_saved(state)
        mine = state["rank"] == self.transport.rank and state["size"] == self.transport.size
        before = self.snapshot()
        self._start_at(int(state["step"]))
        try:
            self._slots.load(self._units, state["tensors"], convert, self._initial if not mine else None)
        except Exception:
            # All or nothing, also for a checkpoint of another stage.
            self.restore(before)
            raise
        self._held = {}
        self.drop()
        return bool(mine)

    def reset(self) -> None:
        """Start over at step 0 with initial states."""
        self._held = {}
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
        return initial(unit, self._ops(unit.spec.device), self._seed)
