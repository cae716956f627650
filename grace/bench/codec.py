"""The local work of one rank for one tensor in one training step, with simulated payloads of the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grace.core.exchange.simulation import reduced
from grace.core.exchange.state import initial
from grace.core.exchange.wire import sent_bytes
from grace.core.ops.composites import ArrayOps
from grace.core.values.config import make_config
from grace.core.values.plan import make_plan
from grace.core.values.spec import HALF_DTYPES, Array, Key, Payload, Proposal, Site, State, TensorSpec
from grace.core.values.unit import Unit

SEED = 0
# The learning rate for memories that need one.
LR = 0.1


def near_square(numel: int) -> tuple[int, int]:
    """Return (rows, columns) with rows * columns = numel, rows <= columns and the smallest difference.

    Example: 25,000,000 elements are a matrix of 5,000 x 5,000.
    """
    rows = next(n for n in range(int(numel**0.5), 0, -1) if numel % n == 0)
    return rows, numel // rows


def make_unit(compressor: str, numel: int, device: str = "cpu") -> Unit:
    """Return a near-square float32 matrix with the default options, memory and communicator of a method.

    If the method cannot compress the matrix, the unit's `reason` says why. Raises ConfigError for an unknown name.
    """
    spec = TensorSpec("tensor", near_square(numel), device=device)
    # The default rules do not compress small tensors, and the default granularity cuts large ones.
    options = {"compressor": compressor, "default_rules": False, "granularity": "layer"}
    (unit,) = make_plan([spec], make_config(options)).units
    return unit


class Begun(NamedTuple):
    """The first half of a rank's step: the array to compress, the memory's new state, and the proposal if any."""

    site: Site
    x: Array
    memory: State
    proposal: Proposal | None


class Arrived(NamedTuple):
    """The data that a rank receives in one step: what was negotiated and the payloads.

    With allgather, `payloads` holds those of the other ranks. With allreduce, it holds one: the sum over all ranks.
    """

    negotiated: Array | None
    payloads: list[Payload]


class Done(NamedTuple):
    """The results of a rank's step."""

    merged: Array
    gradient: Array
    payload: Payload
    proposal: Array | None


@dataclass
class _Other:
    """The state of another rank during a step."""

    site: Site
    memory: State


class LocalStep:
    """Training steps of one tensor on `ranks` ranks. Only the work of rank 0 is timed.

    Each step has three calls. `receive` computes the payloads of the other ranks. `run` does all work of rank 0:
    compensate, propose, compress, update, merge, finish and learn. `conclude` ends the step on the other ranks. States
    carry over from step to step, as in training.

    The engine's own work is not included: the check for NaN, the wire buffer, the division by the number of ranks and
    the memory's gain. (Summed floats are divided beforehand, because memories that read the merged gradient expect a
    mean.)
    """

    def __init__(self, unit: Unit, ops: ArrayOps, ranks: int) -> None:
        unit.compressor.check_ranks(ranks)
        self.unit, self.ops, self.ranks = unit, ops, ranks
        self._states = [initial(unit, ops, SEED) for _ in range(ranks)]
        self._others: list[_Other] = []
        self._seed = Key.derive(SEED, unit.spec.name)

    def receive(self, gradients: Sequence[Array], step: int) -> Arrived:
        """Return the data that rank 0 receives in a step. `gradients` holds one gradient per rank."""
        unit, ops = self.unit, self.ops
        sums = unit.communicator.sums
        ranks = range(0 if sums or unit.proposed else 1, self.ranks)
        begun = {rank: self.begin(gradients[rank], self.states(rank), rank, step) for rank in ranks}
        negotiated = None
        if unit.proposed:
            proposals = [b.proposal for b in begun.values() if b.proposal is not None]
            arrays, op = [p.array for p in proposals], proposals[0].op
            negotiated = arrays[step % self.ranks] if op == "leader" else reduced(ops, arrays, op)
        payloads, self._others = [], []
        for rank in range(0 if sums else 1, self.ranks):
            site = begun[rank].site._replace(negotiated=negotiated)
            payload = unit.compressor.compress(begun[rank].x, site)
            if rank > 0:
                memory = unit.memory.update(begun[rank].x, payload, unit.compressor, begun[rank].memory, site)
                self._others.append(_Other(site, memory))
            payloads.append({f.name: payload[f.name] for f in unit.fields if f.wire})
        return Arrived(negotiated, [self._summed(payloads)] if sums else payloads)

    def _summed(self, payloads: Sequence[Payload]) -> Payload:
        total: Payload = {}
        for f in self.unit.fields:
            if f.wire:
                arrays = [payload[f.name] for payload in payloads]
                if f.dtype in HALF_DTYPES:
                    total[f.name] = self.ops.half_sum(self.ops.concat(arrays), self.ranks, 1 / self.ranks)
                    continue
                if f.dtype in ("float32", "float64"):
                    arrays = [array * self.ops.cast(1.0 / self.ranks, f.dtype) for array in arrays]
                total[f.name] = reduced(self.ops, arrays, "sum")
        return total

    def run(self, gradient: Array, step: int, arrived: Arrived) -> Done:
        """Run the step of rank 0. This part is timed."""
        done, self._states[0] = self.whole(gradient, self._states[0], step, arrived)
        return done

    def conclude(self, done: Done) -> None:
        """End the step on the other ranks."""
        compressor = self.states(0)["compressor"]
        for rank, other in enumerate(self._others, 1):
            _, memory = self.unit.memory.finish(done.merged, other.memory, other.site)
            # The compressor's state depends on the payloads of all ranks; so it is equal on all ranks.
            self._states[rank] = {"memory": memory, "compressor": compressor}
        self._others = []

    def states(self, rank: int) -> dict[str, State]:
        """Return the states of a rank between two steps."""
        return self._states[rank]

    def wire_bytes(self, done: Done) -> int:
        """Return the bytes that rank 0 sent in a step: payload and proposal."""
        return int(sent_bytes(self.ops, self.unit.fields, done.payload)) + self.unit.negotiated_bytes

    # --- one rank's step ----------------------------------------------------------------------------------------

    def begin(self, gradient: Array, states: dict[str, State], rank: int, step: int) -> Begun:
        """Compensate the gradient and make the proposal."""
        unit, ops = self.unit, self.ops
        site = Site(
            ops=ops,
            spec=unit.spec,
            key=Key(self._seed, step),
            rank=rank,
            size=self.ranks,
            state=states["compressor"],
            lr=ops.full(1, LR, "float64")[0] if unit.memory.needs_lr else None,
        )
        x, memory, _ = unit.memory.compensate(gradient, states["memory"], site)
        if memory:
            site = site._replace(memory=memory)
        return Begun(site, x, memory, unit.compressor.propose(x, site))

    def whole(
        self, gradient: Array, states: dict[str, State], step: int, arrived: Arrived
    ) -> tuple[Done, dict[str, State]]:
        """Run the step of rank 0 from the given states. Return its results and its new states."""
        unit, c = self.unit, self.unit.compressor
        site, x, memory, proposal = self.begin(gradient, states, 0, step)
        if proposal is not None:
            site = site._replace(negotiated=arrived.negotiated)
        payload = c.compress(x, site)
        memory = unit.memory.update(x, payload, c, memory, site)
        home = {f.name: payload[f.name] for f in unit.fields if not f.wire}
        payloads = [{**other, **home} for other in arrived.payloads]
        if not unit.communicator.sums:
            payloads = [payload, *payloads]
        merged = c.merge(payloads, site)
        result, memory = unit.memory.finish(merged, memory, site)
        learnt, tally = c.learn(payloads, site), c.tally(payloads, site)
        if tally is not None:
            learnt = c.retune(learnt, *tally, site)
        array = None if proposal is None else proposal.array
        return Done(merged, result, payload, array), {"memory": memory, "compressor": learnt}
