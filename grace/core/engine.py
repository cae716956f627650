"""One step of every bucket: compress as gradients arrive, exchange, merge, and only then commit the states.

The phases of a step, each in the order of the plan so that all ranks agree on it:

    ready(name, gradient)   local work; the bucket's first collective starts with its last gradient
    advance()               what the ranks had to settle first has arrived; compress the rest and send
    finish()                wait, merge, average, commit

No phase but the last two waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from grace.core.communicator import Route
from grace.core.entry import Entry, Run, check_proposal, divided, either, retune
from grace.core.errors import MismatchError, StepError
from grace.core.ops.composites import ArrayOps
from grace.core.plan import Bucket, Part, Plan
from grace.core.registry import memories
from grace.core.spec import Array, Key, Payload, Site, State
from grace.core.state import STATE_VERSION, Slots, carried, check_saved, initial, prepare
from grace.core.statistics import statistics
from grace.core.transport import Transport
from grace.core.wire import sent_bytes


class Engine:
    """Drives a plan over a transport, one step after another.

    `ops(device)` gives the array operations. `average=False` leaves sums undivided. States are kept in `slots`.
    `later` holds plans of later stages, each with the step from which it counts.
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
    ) -> None:
        self.transport = transport
        self.track_norms = False
        self._average = average
        self._ops = ops
        self._slots = slots or Slots()
        self._seed = seed
        self._runs: dict[str, Run] = {}
        self._stages = [(0, plan), *later]
        for _, stage in self._stages:
            for part in stage.parts:
                part.compressor.check_ranks(transport.size)
        # The plan of the last step, which statistics are about.
        self._done = plan
        self._adopt(plan)
        prepare(self._slots, plan, ops, seed)

    @property
    def step(self) -> Any:
        """The number of the step under way: an int, or a 0-d integer array in a traced graph."""
        return self._slots.step

    # --- plans --------------------------------------------------------------------------------------------------

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self._bucket_of = {part.spec.name: bucket for bucket in plan.buckets for part in bucket.parts}
        self._part_of = {part.spec.name: part for bucket in plan.buckets for part in bucket.parts}
        self._seeds = {name: Key.derive(self._seed, name) for name in self._part_of}

    def _stage_at(self, step: int) -> Plan:
        return next(plan for first, plan in reversed(self._stages) if first <= step)

    @property
    def under_way(self) -> bool:
        """Whether a step has begun and is not finished."""
        return bool(self._runs)

    def exchanges(self, name: str) -> bool:
        """Whether the engine exchanges the tensor now, and has not left it to the adapter."""
        return name in self._part_of

    def change(self, plan: Plan) -> None:
        """Go on with another plan for the same tensors; residuals and what else fits are carried over.

        Raises StepError in the middle of a step.
        """
        if self._runs:
            raise StepError("the plan was changed in the middle of a step; change it after step().")
        for part in plan.parts:
            part.compressor.check_ranks(self.transport.size)
        self._stages = [(0, plan)]
        self._carry_on(plan)

    def _carry_on(self, plan: Plan) -> None:
        before = self._part_of
        self._adopt(plan)
        for name, part in self._part_of.items():
            fresh = self._initial(part)
            if name in before:
                states = self._slots.read(name)
                fresh = carried(before[name], part, states, fresh, self._ops(part.spec.device))
            self._slots.write(name, fresh)

    # --- one step -----------------------------------------------------------------------------------------------

    def ready(self, name: str, gradient: Array, lr: Any = None) -> None:
        """Take a finished gradient, which is only read, and the learning rate of its step if memories need it.

        Raises StepError for a wrong name, shape or order, or a learning rate that is missing.
        """
        if name not in self._part_of:
            raise StepError(f"no tensor '{name}' in the plan; the plan is made once, from the parameters at that time.")
        part, bucket = self._part_of[name], self._bucket_of[name]
        if tuple(gradient.shape) != part.spec.shape:
            raise StepError(
                f"tensor '{name}': expected a gradient of shape {part.spec.shape}, "
                f"received {tuple(gradient.shape)}; parameters must keep their shape."
            )
        run = self._runs.setdefault(bucket.name, Run())
        if name in run.entries:
            raise StepError(f"tensor '{name}' got a second gradient before step {self.step} was finished.")
        if part.memory.needs_lr and lr is None:
            raise StepError(
                f"tensor '{name}': memory '{memories.name_of(part.memory)}' corrects for the learning rate, and none "
                "was given; only optimizers know it: wrap one, or leave lr_correction out."
            )
        entry = run.entries[name] = self._compensate(part, gradient, lr)
        if entry.proposal is None:
            self._compress(entry)
        if len(run.entries) == len(bucket.parts) and not self._propose(bucket, run):
            self._send(bucket, run)

    def advance(self) -> None:
        """Wait for what the ranks settle, compress with it and send. Raises StepError if a gradient is missing."""
        for bucket in self.plan.buckets:
            run = self._runs.get(bucket.name)
            missing = [p.spec.name for p in bucket.parts if run is None or p.spec.name not in run.entries]
            if run is None or missing:
                raise StepError(
                    f"step {self.step} cannot finish: no gradient for {', '.join(missing)}. "
                    "Pass zeros for parameters that took no part."
                )
            if run.sent is None:
                self._settle(bucket, run)
                self._send(bucket, run)

    def finish(self) -> dict[str, Array]:
        """Complete the step: per tensor the merged gradient, in the shape and dtype of its spec."""
        self.advance()
        merged: dict[str, Array] = {}
        entries: list[Entry] = []
        for bucket in self.plan.buckets:
            run = self._runs.pop(bucket.name)
            merged.update(self._merge(bucket, run))
            entries += run.entries.values()
        retune(entries, self._slots)
        self._done = self.plan
        self._slots.go_to(self.step + 1)
        if len(self._stages) > 1:
            plan = self._stage_at(self.step)
            if plan is not self.plan:
                self._carry_on(plan)
        return merged

    def drop(self) -> None:
        """Forget the gradients of a step that is not going to be finished; states stay as they are."""
        self._runs.clear()

    def _compensate(self, part: Part, gradient: Array, lr: Any) -> Entry:
        spec, ops, states = part.spec, self._ops(part.spec.device), self._slots.read(part.spec.name)
        site = Site(
            ops=ops,
            spec=spec,
            key=Key(self._seeds[spec.name], self.step),
            rank=self.transport.rank,
            size=self.transport.size,
            state=states["compressor"],
            lr=ops.full(1, lr, "float64")[0] if part.memory.needs_lr else None,
        )
        x = ops.cast(ops.reshape(gradient, (spec.numel,)), spec.work_dtype)
        x, memory_state = part.memory.compensate(x, states["memory"], site)
        if part.memory.stateless and part.agreement:
            # x may be the caller's own buffer, and it is needed again after this call.
            x = ops.copy(x)
        bad = False
        if part.guarded:
            # Codecs may count on finite input: a bad gradient is replaced here and announced by its flag.
            bad = ~ops.finite(x)
            finite = x
            x = ops.choose(bad, lambda: ops.zeros(spec.numel, spec.work_dtype), lambda: finite)
        site = site._replace(memory=memory_state)
        proposal = part.compressor.agree(x, site)
        check_proposal(part, proposal, ops)
        return Entry(part, site, x, memory_state, bad, proposal)

    def _propose(self, bucket: Bucket, run: Run) -> bool:
        """Start one collective for all proposals of one kind; False if the bucket has none."""
        kinds: dict[tuple[Literal["sum", "max", "leader"], str], list[Array]] = {}
        for part in bucket.parts:
            entry = run.entries[part.spec.name]
            if entry.proposal is not None:
                kind = (entry.proposal.op, entry.site.ops.dtype(entry.proposal.array))
                kinds.setdefault(kind, []).append(entry.proposal.array)
        ops = self._ops(bucket.parts[0].spec.device)
        for (op, dtype), arrays in kinds.items():
            buffer = ops.concat(arrays)
            if op == "leader":
                # A sum with zeros, because a graph that serves every step cannot name the root of a broadcast.
                leads = ops.full(1, self.step % self.transport.size, "int64")[0] == self.transport.rank
                buffer = either(ops, leads, buffer, ops.zeros(ops.length(buffer), dtype))
            run.agreeing[op, dtype] = self.transport.allreduce(
                buffer, op="max" if op == "max" else "sum", name=f"{bucket.name}/agree.{op}.{dtype}"
            )
        return bool(kinds)

    def _settle(self, bucket: Bucket, run: Run) -> None:
        """Hand every proposal its settled form and compress."""
        settled: dict[Any, Array] = {kind: handle.wait() for kind, handle in run.agreeing.items()}
        offsets: dict[Any, int] = dict.fromkeys(settled, 0)
        for part in bucket.parts:
            entry = run.entries[part.spec.name]
            if entry.proposal is None:
                continue
            ops = entry.site.ops
            kind = (entry.proposal.op, ops.dtype(entry.proposal.array))
            length = ops.length(entry.proposal.array)
            agreed = settled[kind][offsets[kind] : offsets[kind] + length]
            offsets[kind] += length
            entry.site = entry.site._replace(agreed=agreed)
            self._compress(entry)

    def _compress(self, entry: Entry) -> None:
        part, ops = entry.part, entry.site.ops
        entry.payload = part.compressor.compress(entry.x, entry.site)
        if part.guarded:
            # A finite gradient can still overflow in the payload (float16, a norm); then it must not be remembered.
            for f in part.fields:
                if f.dtype.startswith(("float", "bfloat")):
                    entry.bad = ops.bit_or(entry.bad, ~ops.finite(entry.payload[f.name]))
        size = error = None
        if self.track_norms:
            size = ops.norm(entry.x)
            error = ops.norm(entry.x - part.compressor.decompress(entry.payload, entry.site))
        self._slots.note("size", part.spec.name, size)
        self._slots.note("error", part.spec.name, error)

    def _send(self, bucket: Bucket, run: Run) -> None:
        entries = [run.entries[part.spec.name] for part in bucket.parts]
        ops = entries[0].site.ops
        payloads = [e.payload for e in entries]
        if self._average and self.transport.size > 1:
            payloads = [
                divided(p, e.part, self.transport.size, ops) if e.part.half_sum else p
                for e, p in zip(entries, payloads, strict=True)
            ]
        flags = [e.bad for e in entries]
        run.sent = bucket.communicator.start(payloads, flags, self._route(bucket))
        self._slots.note("bucket", bucket.name, run.sent.nbytes + sum(part.settled_bytes for part in bucket.parts))
        for e in entries:
            # While the payload travels; the buffer that was x becomes the new residual.
            e.memory_state = e.part.memory.update(e.x, e.payload, e.part.compressor, e.memory_state, e.site)

    def _route(self, bucket: Bucket) -> Route:
        ops = self._ops(bucket.parts[0].spec.device)
        return Route(bucket.layout, self.transport, ops, bucket.name, self.step, self._average)

    def _merge(self, bucket: Bucket, run: Run) -> dict[str, Array]:
        assert run.sent is not None
        received = bucket.communicator.finish(run.sent, self._route(bucket))
        for in_step in received.in_step:
            self._ops(bucket.parts[0].spec.device).require(
                in_step,
                MismatchError(
                    f"the ranks are not at the same step (seen by rank {self.transport.rank}): "
                    "a checkpoint was loaded on some of them only, or checkpoints of different steps. "
                    "Let every rank load its own file of one moment, or all of them the same file."
                ),
            )
        merged = {}
        for part, payloads, bad_flags in zip(bucket.parts, received.payloads, received.flags, strict=True):
            entry = run.entries[part.spec.name]
            merged[part.spec.name] = self._conclude(entry, payloads, bad_flags)
        return merged

    def _conclude(self, entry: Entry, payloads: list[Payload], flags: list[Array]) -> Array:
        part, site, ops, spec = entry.part, entry.site, entry.site.ops, entry.part.spec
        home = {f.name: entry.payload[f.name] for f in part.fields if not f.wire}
        payloads = [{**payload, **home} for payload in payloads]
        total = part.compressor.merge(payloads, site)
        size = self.transport.size if part.compressor.averages else 1
        already_mean = size == 1 or (self._average and part.half_sum)
        # Memories think in means; a sum that the caller asked for is made of what they return.
        factor = part.memory.gain / (1 if already_mean else size)
        mean = total if factor == 1 else ops.scale_(total, factor)
        gradient, memory_state = part.memory.finish(mean, entry.memory_state, site)
        if not self._average and size > 1:
            gradient = gradient * ops.cast(float(size), spec.work_dtype)
        states = {"memory": memory_state, "compressor": part.compressor.learn(payloads, site)}
        if part.guarded:
            bad = flags[0] > 0
            for flag in flags[1:]:
                bad = ops.bit_or(bad, flag > 0)
            old = self._slots.read(spec.name)
            places = [(kind, key) for kind, state in states.items() for key in state]
            kept, finite = [states[kind][key] for kind, key in places], gradient
            *chosen, gradient = ops.choose(
                bad,
                lambda: [
                    *(old[kind][key] for kind, key in places),
                    ops.full(spec.numel, float("nan"), spec.work_dtype),
                ],
                lambda: [*kept, finite],
            )
            states = {"memory": {}, "compressor": {}}
            for (kind, key), value in zip(places, chosen, strict=True):
                states[kind][key] = value
        self._slots.write(spec.name, states)
        tally = part.compressor.tally(payloads, site)
        if tally is not None:
            first, second = tally
            entry.tally = (ops.where(bad, float("nan"), first), second) if part.guarded else tally
        sent = sent_bytes(ops, part.fields, entry.payload)
        self._slots.note("tensor", spec.name, sent + part.settled_bytes)
        return ops.reshape(ops.cast(gradient, spec.dtype), spec.shape)

    # --- statistics ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What the last step sent. Bytes are what this rank handed to collectives.

        `wire_bytes` counts whole buffers (fields, header, padding, proposals) and delegated tensors, `dense_bytes`
        what they would be uncompressed, `compressed_*` the same without the dense tensors, `collectives` the bytes by
        the kind of collective that carries them. Per tensor: `wire_bytes`
        of its fields and proposal, `residual_norm` |e| and `relative_error` |x - C(x)| / |x|, which are None unless
        `track_norms` was set before the step.
        """
        return statistics(self._done, self._slots, self._ops, self.track_norms)

    # --- checkpoint ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Step and states of this rank; arrays are the live ones and are never changed in place."""
        return {
            "version": STATE_VERSION,
            "step": int(self.step),
            "rank": self.transport.rank,
            "size": self.transport.size,
            "tensors": self._slots.save(self._part_of),
        }

    def load_state_dict(self, state: dict[str, Any], convert: Callable[[Array, Array], Array]) -> bool:
        """Take over step and states; `convert(saved, current)` gives the saved array in the current one's place.

        States of another rank, or of a run with another number of ranks, cannot be continued exactly: then only what
        is equal on all ranks (step, compressor states) is taken over, the memories start from zero, and the result
        is False. Raises StateError if the checkpoint is of other tensors, parts or shapes.
        """
        check_saved(state)
        mine = state["rank"] == self.transport.rank and state["size"] == self.transport.size
        plan, done, step = self.plan, self._done, self.step
        before = {name: self._slots.read(name) for name in self._part_of}
        self._start_at(int(state["step"]))
        try:
            self._slots.load(self._part_of, state["tensors"], convert, self._initial if not mine else None)
        except Exception:
            # All or nothing, also of a checkpoint of another stage.
            self._adopt(plan)
            for name, states in before.items():
                self._slots.write(name, states)
            self._slots.go_to(step)
            self._done = done
            raise
        self._runs.clear()
        return bool(mine)

    def reset(self) -> None:
        """Start over: step 0, every state as at the beginning."""
        self._runs.clear()
        self._start_at(0, anew=True)

    def _start_at(self, step: int, anew: bool = False) -> None:
        """Be in the stage of a step, with initial states if it is another one, or `anew`."""
        plan = self._stage_at(step)
        if anew or plan is not self.plan:
            self._done = plan
            self._adopt(plan)
            for name, part in self._part_of.items():
                self._slots.write(name, self._initial(part))
        self._slots.go_to(step)

    def _initial(self, part: Part) -> dict[str, State]:
        return initial(part, self._ops(part.spec.device), self._seed)
