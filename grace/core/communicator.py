"""The Communicator abstraction: how the payloads of one bucket travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.compressor import Compressor
from grace.core.errors import IncompatibleError
from grace.core.ops.base import ArrayOps
from grace.core.registry import communicators
from grace.core.spec import Array, Field, Payload, TensorSpec
from grace.core.transport import Handle, Transport
from grace.core.wire import GatherLayout, Layout, Received, SumLayout


@dataclass(frozen=True)
class Sent:
    """A bucket on its way: the collectives to wait for, and the bytes this rank handed to them."""

    handles: dict[str, Handle]
    nbytes: int


@dataclass(frozen=True)
class Communicator(ABC):
    """How the payloads of one bucket travel: summed on the way, or all brought to every rank."""

    sums: ClassVar[bool] = False

    @abstractmethod
    def check(self, compressor: Compressor) -> None:
        """Raise IncompatibleError if this compressor's payloads cannot travel this way."""

    @abstractmethod
    def layout(self, specs: Sequence[TensorSpec], fields: Sequence[Sequence[Field]], guarded: Sequence[bool]) -> Layout:
        """Where the fields of a bucket lie on the wire."""

    @abstractmethod
    def start(
        self,
        payloads: Sequence[Payload],
        flags: Sequence[Array],
        layout: Layout,
        transport: Transport,
        ops: ArrayOps,
        name: str,
        stamp: int,
    ) -> Sent:
        """Write the wire buffer of the step `stamp` and hand it to the transport; returns at once."""

    @abstractmethod
    def finish(self, sent: Sent, layout: Layout, transport: Transport, ops: ArrayOps, stamp: int) -> Received:
        """Wait; what arrived."""


@communicators.register("allreduce")
@dataclass(frozen=True)
class Allreduce(Communicator):
    """Sum the payloads on the way: g = decompress(sum_i payload_i); bytes do not grow with the number of ranks."""

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

    def start(
        self,
        payloads: Sequence[Payload],
        flags: Sequence[Array],
        layout: Layout,
        transport: Transport,
        ops: ArrayOps,
        name: str,
        stamp: int,
    ) -> Sent:
        assert isinstance(layout, SumLayout)
        buffers = layout.encode(ops, payloads, flags, stamp, transport.size)
        handles = {
            dtype: transport.allreduce(buffer, op="sum", name=f"{name}.{dtype}") for dtype, buffer in buffers.items()
        }
        return Sent(handles, layout.nbytes)

    def finish(self, sent: Sent, layout: Layout, transport: Transport, ops: ArrayOps, stamp: int) -> Received:
        assert isinstance(layout, SumLayout)
        return layout.decode(ops, {dtype: h.wait() for dtype, h in sent.handles.items()}, transport.size)


class _Gathering(Communicator):
    """What allgather and broadcast share: every rank's byte buffer arrives on every rank."""

    def layout(
        self, specs: Sequence[TensorSpec], fields: Sequence[Sequence[Field]], guarded: Sequence[bool]
    ) -> GatherLayout:
        return GatherLayout(specs, fields, guarded)

    def finish(self, sent: Sent, layout: Layout, transport: Transport, ops: ArrayOps, stamp: int) -> Received:
        assert isinstance(layout, GatherLayout)
        buffers = [handle.wait() for handle in sent.handles.values()]
        data = buffers[0] if len(buffers) == 1 else ops.concat(buffers)
        return layout.decode(ops, data, transport.size, stamp)


@communicators.register("allgather")
@dataclass(frozen=True)
class Allgather(_Gathering):
    """Bring every rank's payload to every rank in one collective; payloads may differ in length."""

    def check(self, compressor: Compressor) -> None:
        return None

    def start(
        self,
        payloads: Sequence[Payload],
        flags: Sequence[Array],
        layout: Layout,
        transport: Transport,
        ops: ArrayOps,
        name: str,
        stamp: int,
    ) -> Sent:
        assert isinstance(layout, GatherLayout)
        buffer = layout.encode(ops, payloads, flags, stamp)
        return Sent({"all": transport.allgather(buffer, name=name)}, ops.length(buffer))


@communicators.register("broadcast")
@dataclass(frozen=True)
class Broadcast(_Gathering):
    """Bring every rank's payload to every rank by one broadcast per rank; for networks without a good allgather."""

    def check(self, compressor: Compressor) -> None:
        if not compressor.fixed_size:
            raise IncompatibleError(
                f"communicator 'broadcast' needs payloads of one size, but those of {compressor} depend on the data. "
                "Valid communicators: allgather."
            )

    def start(
        self,
        payloads: Sequence[Payload],
        flags: Sequence[Array],
        layout: Layout,
        transport: Transport,
        ops: ArrayOps,
        name: str,
        stamp: int,
    ) -> Sent:
        assert isinstance(layout, GatherLayout)
        buffer = layout.encode(ops, payloads, flags, stamp)
        handles = {}
        for root in range(transport.size):
            data = buffer if root == transport.rank else ops.zeros(ops.length(buffer), "uint8")
            handles[str(root)] = transport.broadcast(data, root=root, name=f"{name}.{root}")
        return Sent(handles, ops.length(buffer))
