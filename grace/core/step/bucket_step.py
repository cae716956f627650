"""One rank's work on one bucket in one step: the units, and the rounds of collectives that exchange them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from grace.core.methods.communicator import Route
from grace.core.ops.composites import ArrayOps
from grace.core.spec import ITEMSIZE, Array, Payload
from grace.core.step.unit_step import UnitStep
from grace.core.transport.collectives import Program, allreduce
from grace.core.transport.transport import Handle, Transport
from grace.core.wire.layout import Buffer, GatherLayout, Received

ProposalKind = tuple[Literal["sum", "max", "leader"], str]
# Called with a moment of a step, and the arrays that exist then.
Observer: TypeAlias = Callable[[str, Iterable[Array] | None], None]


def _ignore(moment: str, arrays: Iterable[Array] | None) -> None:
    pass


class BucketStep:
    """The units of a bucket in one step, and the rounds that exchange them.

    A route works with `steps`, the step of each unit, with the array operations `ops`, and with `stamp`, the number of
    the step. `mean` says that 16-bit floats are averaged while they are added, because their sum may overflow. `buffer`
    is the wire buffer to which the payloads were written, if the route has made one.

    `absent` has a condition for each rank, or nothing: where it holds, all ranks know that this one contributes
    nothing, and it sends no more than a header over routes that call `encode` and `decode`.

    `advance` runs the rounds over a transport, until they are `received`. A route that has another one inside runs the
    rounds of that one by `run`. `observe` receives the moments "proposed" and "negotiated", "compressed" and "handed"
    (to the transport), and for each further round "waiting" and "arrived".
    """

    def __init__(
        self,
        route: Route,
        ops: ArrayOps,
        *,
        rank: int,
        size: int,
        mean: bool,
        stamp: Any = 0,
        steps: Sequence[UnitStep] = (),
        absent: Sequence[Any] = (),
        buffer: Buffer | None = None,
        observe: Observer = _ignore,
    ) -> None:
        self.route, self.ops, self.rank, self.size, self.mean = route, ops, rank, size, mean
        self.stamp, self.steps, self.absent, self.buffer = stamp, list(steps), absent, buffer
        self.received: Received | None = None
        #: The bytes that this rank has passed to collectives, by their kind.
        self.nbytes: dict[str, int] = {}
        self._observe = observe
        self._rounds: Program[Received] | None = None
        self._handles: list[Handle] = []
        #: The number of rounds that were started.
        self.started = 0
        self._sends = self._remembered = False

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

    def encode(self, layout: GatherLayout, units: Sequence[int] | None = None) -> Array:
        """Return the buffer with the payloads of some units, or of all; a header if this rank contributes nothing."""
        steps = self._steps(units)
        if self.absent and all(step.rests for step in steps):
            for step in steps:
                step.sends_nothing = True
            return layout.header.encode(self.ops, [], [], self.stamp)
        return layout.encode(
            self.ops, [step.coded for step in steps], [step.bad for step in steps], self.stamp, self.buffer
        )

    def decode(
        self,
        layout: GatherLayout,
        data: Array,
        units: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Received:
        """Return the contents of the buffers that some ranks, or all, have made by `encode`."""
        ranks = range(self.size) if ranks is None else ranks
        absent = [self.absent[rank] for rank in ranks] if self.absent else []
        if all(gone is False for gone in absent):
            return layout.decode(self.ops, data, len(ranks), self.stamp)
        steps = [step.compress_zeros() for step in self._steps(units)]
        nothing = layout.encode(self.ops, [step.coded for step in steps], [step.bad for step in steps], self.stamp)
        return layout.decode(self.ops, data, len(ranks), self.stamp, absent, nothing)

    def lengths(self, layouts: Sequence[GatherLayout]) -> list[list[int]] | None:
        """Return the lengths of what each rank sends by layouts of fixed length; None if they are not known now."""
        known = self.absent and all(isinstance(gone, bool) for gone in self.absent)
        if not known or not all(layout.fixed for layout in layouts):
            return None
        return [[layout.header.nbytes if gone else layout.nbytes for layout in layouts] for gone in self.absent]

    def _steps(self, units: Sequence[int] | None) -> list[UnitStep]:
        return self.steps if units is None else [self.steps[i] for i in units]

    @property
    def arrived(self) -> bool:
        """True if the round under way has arrived, so that `advance` does not wait."""
        return all(handle.arrived() for handle in self._handles)

    def advance(self, transport: Transport, name: str) -> bool:
        """Wait for the round under way, and start the next one under a name; return False if there is none left."""
        if self.received is not None:
            return False
        try:
            if self._rounds is None:
                self._rounds = self.run()
                collectives = next(self._rounds)
            else:
                collectives = self._rounds.send(self._wait())
        except StopIteration as end:
            self.received = end.value
            return False
        number = self.started
        self._handles = [
            transport.start(c._replace(round=number), f"{name}/{number}.{i}") for i, c in enumerate(collectives)
        ]
        self.started += 1
        for c in collectives:
            sent = sum(self.ops.length(x) * ITEMSIZE[self.ops.dtype(x)] for x in c.sent_by(self.rank))
            self.nbytes[c.kind] = self.nbytes.get(c.kind, 0) + sent
        if self._sends and not self._remembered:
            self._observe("handed", [array for step in self.steps for array in step.payload.values()])
            self._remember()
        return True

    def _wait(self) -> list[Array]:
        """Return the results of the round under way."""
        if not self._sends:
            return [handle.wait() for handle in self._handles]
        self._observe("waiting", None)
        results = [handle.wait() for handle in self._handles]
        buffers = (each if isinstance(each, list) else [each] for each in results)
        self._observe("arrived", itertools.chain.from_iterable(buffers))
        return results

    def run(self) -> Program[Received]:
        """Negotiate, run the route, and update the memories while the payloads travel."""
        proposals = [step.proposal.array for step in self.steps if step.proposal is not None]
        if proposals:
            self._observe("proposed", proposals)
            self._observe("negotiated", (yield from self.negotiate()))
        self._observe("compressed", None)
        self._sends = True
        rounds = self.route.run(self)
        try:
            collectives = next(rounds)
            while True:
                results = yield collectives
                self._remember()
                collectives = rounds.send(results)
                # Nobody needs them while the next round travels.
                del results
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _remember(self) -> None:
        """Update the memories once: when the payloads are on their way, or at the latest when they have arrived."""
        if not self._remembered and not self.route.remembers:
            for step in self.steps:
                step.remember()
        self._remembered = True

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
