"""Base class of communicators, which carry the payloads of one bucket, and the built-in ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from grace.core.exchange.transport import Handle, Transport
from grace.core.exchange.wire import GatherLayout, Layout, Lengths, Received, SumLayout
from grace.core.methods.compressor import Compressor
from grace.core.ops.composites import ArrayOps
from grace.core.values.errors import IncompatibleError
from grace.core.values.registry import communicators
from grace.core.values.spec import HALF_DTYPES, ITEMSIZE, Array, Field, Payload, TensorSpec


@dataclass(frozen=True)
class Sent:
    """Bucket under way: the collectives to wait for, the bytes that this rank sent, and the run-time lengths."""

    handles: dict[str, Handle]
    nbytes: int
    lengths: Lengths = field(default_factory=dict)

    def wait(self) -> dict[str, Array]:
        """Wait and return the results of the collectives."""
        return {name: handle.wait() for name, handle in self.handles.items()}


@dataclass(frozen=True)
class Route:
    """Description of one bucket's exchange in one step: layout, transport, names of its collectives, and step.

    `mean` means that 16-bit floats are averaged while they are added, because their sum may overflow.
    """

    layout: Layout
    transport: Transport
    ops: ArrayOps
    name: str
    stamp: int
    mean: bool


@dataclass(frozen=True)
class Communicator(ABC):
    """Base of communicators, which sum payloads on the way or bring all of them to every rank."""

    sums: ClassVar[bool] = False
    any_length: ClassVar[bool] = False

    @abstractmethod
    def check(self, compressor: Compressor) -> None:
        """Raise IncompatibleError if this communicator cannot carry the compressor's payloads."""

    @abstractmethod
    def layout(self, specs: Sequence[TensorSpec], fields: Sequence[Sequence[Field]], guarded: Sequence[bool]) -> Layout:
        """Return the layout of a bucket's fields on the wire."""

    @abstractmethod
    def start(self, payloads: Sequence[Payload], flags: Sequence[Array], route: Route) -> Sent:
        """Write the wire buffer, hand it to the transport and return at once."""

    @abstractmethod
    def finish(self, arrived: Mapping[str, Array], sent: Sent, route: Route) -> Received:
        """Return the payloads that the results of the collectives hold."""


@communicators.register("allreduce")
@dataclass(frozen=True)
class Allreduce(Communicator):
    r"""Sum on the way: allreduce adds the payloads, and the bytes do not grow with the number of ranks.

    Formula: g = \mathrm{decompress}\bigl(\textstyle\sum_i \mathrm{payload}_i\bigr)
    """

    sums: ClassVar[bool] = True

    def check(self, compressor: Compressor) -> None:
        if not compressor.summable:
            raise IncompatibleError(
                f"communicator 'allreduce' adds payloads, but those of {compressor} cannot be added. "
                f"Valid communicators: allgather{', broadcast' if compressor.fixed_size else ''}."
            )

    def layout(
        self, specs: Sequence[TensorSpec], fields: Sequence[Sequence[Field]], guarded: Sequence[bool]
    ) -> SumLayout:
        return SumLayout(specs, fields, guarded)

    def start(self, payloads: Sequence[Payload], flags: Sequence[Array], route: Route) -> Sent:
        assert isinstance(route.layout, SumLayout)
        buffers, lengths = route.layout.encode(route.ops, payloads, flags, route.stamp, route.transport.size)
        handles = {
            dtype: route.transport.allreduce(
                buffer, op="mean" if route.mean and dtype in HALF_DTYPES else "sum", name=f"{route.name}.{dtype}"
            )
            for dtype, buffer in buffers.items()
        }
        nbytes = sum(route.ops.length(buffer) * ITEMSIZE[dtype] for dtype, buffer in buffers.items())
        return Sent(handles, nbytes, lengths)

    def finish(self, arrived: Mapping[str, Array], sent: Sent, route: Route) -> Received:
        assert isinstance(route.layout, SumLayout)
        return route.layout.decode(route.ops, arrived, route.transport.size, sent.lengths)


class _Gathering(Communicator):
    """Shared part of allgather and broadcast: every rank's byte buffer arrives on every rank."""

    def layout(
        self, specs: Sequence[TensorSpec], fields: Sequence[Sequence[Field]], guarded: Sequence[bool]
    ) -> GatherLayout:
        return GatherLayout(specs, fields, guarded)

    def finish(self, arrived: Mapping[str, Array], sent: Sent, route: Route) -> Received:
        assert isinstance(route.layout, GatherLayout)
        buffers = list(arrived.values())
        data = buffers[0] if len(buffers) == 1 else route.ops.concat(buffers)
        return route.layout.decode(route.ops, data, route.transport.size, route.stamp)


@communicators.register("allgather")
@dataclass(frozen=True)
class Allgather(_Gathering):
    r"""Gathering: one collective brings every rank's payload to every rank; payloads may differ in length.

    Formula: g = \mathrm{merge}(\mathrm{payload}_1, \dots, \mathrm{payload}_n)
    """

    any_length: ClassVar[bool] = True

    def check(self, compressor: Compressor) -> None:
        return None

    def start(self, payloads: Sequence[Payload], flags: Sequence[Array], route: Route) -> Sent:
        assert isinstance(route.layout, GatherLayout)
        buffer = route.layout.encode(route.ops, payloads, flags, route.stamp)
        return Sent(
            {"all": route.transport.allgather(buffer, name=route.name, equal=route.layout.fixed)},
            route.ops.length(buffer),
        )


@communicators.register("broadcast")
@dataclass(frozen=True)
class Broadcast(_Gathering):
    r"""Broadcasts: one per rank brings its payload to every rank, for networks without a good allgather.

    Formula: g = \mathrm{merge}(\mathrm{payload}_1, \dots, \mathrm{payload}_n)
    """

    def check(self, compressor: Compressor) -> None:
        if not compressor.fixed_size:
            raise IncompatibleError(
                f"communicator 'broadcast' needs payloads of one size, but those of {compressor} depend on the data. "
                "Valid communicators: allgather."
            )

    def start(self, payloads: Sequence[Payload], flags: Sequence[Array], route: Route) -> Sent:
        assert isinstance(route.layout, GatherLayout)
        buffer = route.layout.encode(route.ops, payloads, flags, route.stamp)
        length, handles = route.ops.length(buffer), {}
        for root in range(route.transport.size):
            data = buffer if root == route.transport.rank else route.ops.zeros(length, "uint8")
            handles[str(root)] = route.transport.broadcast(data, root=root, name=f"{route.name}.{root}")
        return Sent(handles, length)
