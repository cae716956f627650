"""One rank's work on one bucket in one step: what the program of a communicator works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from grace.core.methods.communicator import Communicator
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload
from grace.core.step.unit_step import UnitStep
from grace.core.transport.collectives import Program, allreduce
from grace.core.wire.layout import Buffer, Layout, Received

ProposalKind = tuple[Literal["sum", "max", "leader"], str]


class BucketStep:
    """The units of a bucket in one step, for the program of its communicator.

    `steps` has the step of each unit, `ops` the array operations, and `stamp` is the number of the step. `mean` says
    that 16-bit floats are averaged while they are added, because their sum may overflow. `buffer` is the wire buffer to
    which the payloads were written, if the communicator has made one.
    """

    def __init__(
        self,
        steps: Sequence[UnitStep],
        ops: ArrayOps,
        *,
        rank: int,
        size: int,
        stamp: int,
        mean: bool,
        buffer: Buffer | None = None,
    ) -> None:
        self.steps, self.ops, self.rank, self.size, self.stamp, self.mean = list(steps), ops, rank, size, stamp, mean
        self.buffer = buffer

    @property
    def payloads(self) -> list[Payload]:
        """The payload of each unit, as it travels."""
        return [step.sent for step in self.steps]

    @property
    def coded(self) -> list[Payload]:
        """The same with the coded fields as they travel by gathering."""
        return [step.coded for step in self.steps]

    @property
    def flags(self) -> list[Array]:
        """Of each unit, whether this rank's gradient is not finite."""
        return [step.bad for step in self.steps]

    @property
    def proposals(self) -> bool:
        """True if units wait for what the ranks negotiate."""
        return any(step.proposal is not None for step in self.steps)

    def run(self, communicator: Communicator, layout: Layout) -> Program[Received]:
        """Negotiate, run the program of the communicator, and update the memories while the payloads travel."""
        if self.proposals:
            yield from self.negotiate()
        program = communicator.program(self, layout)
        arrived: list[Array] | None = None
        while True:
            try:
                collectives = next(program) if arrived is None else program.send(arrived)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if arrived is None and not communicator.remembers:
                for step in self.steps:
                    step.remember()
            arrived = yield collectives

    def negotiate(self) -> Program[list[Array]]:
        """Combine the proposals of all ranks, one collective for those of one kind, and compress with the results.

        Return these results.
        """
        kinds: dict[ProposalKind, list[UnitStep]] = {}
        for step in self.steps:
            if step.proposal is not None:
                kinds.setdefault((step.proposal.op, self.ops.dtype(step.proposal.array)), []).append(step)
        started = []
        for (op, dtype), steps in kinds.items():
            buffer = self.ops.concat([step.proposal.array for step in steps if step.proposal is not None])
            if op == "leader":
                # A sum with zeros, because a graph that serves every step cannot name the root of a broadcast.
                leads = self.ops.full(1, self.stamp % self.size, "int64")[0] == self.rank
                buffer = _either(self.ops, leads, buffer, self.ops.zeros(self.ops.length(buffer), dtype))
            started.append(allreduce(buffer, "max" if op == "max" else "sum"))
        results = yield started
        for result, steps in zip(results, kinds.values(), strict=True):
            start = 0
            for step in steps:
                assert step.proposal is not None
                length = self.ops.length(step.proposal.array)
                step.compress(result[start : start + length])
                start += length
        return results


def _either(ops: ArrayOps, condition: Array, a: Array, b: Array) -> Array:
    """Return a if the 0-d condition holds, else b."""
    return ops.choose(condition, lambda: a, lambda: b)
