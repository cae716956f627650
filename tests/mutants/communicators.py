"""Deliberately wrong communicators and transports. Each breaks one promise, and its contract must reject it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from grace.core.communicators.allgather import Allgather
from grace.core.communicators.two_shot import TwoShot
from grace.core.methods.communicator import Route
from grace.core.ops import get_ops
from grace.core.plan.unit import layout_of
from grace.core.session.simulation import SimulatedTransport, _Network
from grace.core.transport import collectives

COMMUNICATORS: list[tuple[str, Any]] = []
TRANSPORTS: list[tuple[str, Any]] = []


def breaks(contract_test: str):
    """Register a wrong communicator or transport with the contract test that must reject it."""

    def decorate(cls):
        if issubclass(cls, SimulatedTransport):
            TRANSPORTS.append((contract_test, cls))
        else:
            COMMUNICATORS.append((contract_test, cls()))
        return cls

    return decorate


def changed(route, change):
    """Return a route after which `change(received, rank)` takes the place of what has been received."""

    def run(bucket):
        return change((yield from route.run(bucket)), bucket.rank)

    return dataclasses.replace(route, run=run)


@breaks("test_all_ranks_get_the_same_bits")
@dataclass(frozen=True)
class MergesItsOwnFirst(Allgather):
    """Adds the payloads in an order of its own, so that sums are rounded otherwise on each rank."""

    def route(self, units, ranks, checksum=False):
        def turn(received, rank):
            return received._replace(payloads=[[*theirs[rank:], *theirs[:rank]] for theirs in received.payloads])

        return changed(super().route(units, ranks, checksum), turn)


@breaks("test_what_is_sent_exactly_is_averaged")
@breaks("test_the_majority_wins_a_vote")
@dataclass(frozen=True)
class ForgetsTheLastRank(Allgather):
    def route(self, units, ranks, checksum=False):
        def forget(received, rank):
            return received._replace(payloads=[[*theirs[:-1], theirs[0]] for theirs in received.payloads])

        return changed(super().route(units, ranks, checksum), forget)


@breaks("test_what_is_applied_and_what_is_held_is_what_was_given")
@dataclass(frozen=True)
class OwnersForget(TwoShot):
    """Drops what the second compression leaves out."""

    def divide(self, units, ranks, earlier=()):
        divided = super().divide(units, ranks, earlier)
        return [
            dataclasses.replace(
                unit,
                onward=dataclasses.replace(unit.onward, method=dataclasses.replace(unit.onward.method, memory=_none())),
            )
            for unit in divided
        ]


@breaks("test_bytes_are_as_predicted")
@dataclass(frozen=True)
class SendsTwice(Allgather):
    def route(self, units, ranks, checksum=False):
        layout = layout_of(units, checksum)

        def run(bucket):
            buffer = layout.encode(bucket.ops, bucket.payloads, bucket.flags, bucket.stamp)
            data, _ = yield [collectives.allgather(buffer), collectives.allgather(bucket.ops.copy(buffer))]
            return layout.decode(bucket.ops, data, bucket.size, bucket.stamp)

        return Route(layout.nbytes, layout.fixed, run)


@breaks("test_a_bad_gradient_reaches_all_ranks_and_no_state")
@dataclass(frozen=True)
class KeepsFlagsToItself(Allgather):
    """Every rank looks at its own flag only."""

    def route(self, units, ranks, checksum=False):
        def keep(received, rank):
            return received._replace(flags=[theirs[rank : rank + 1] for theirs in received.flags])

        return changed(super().route(units, ranks, checksum), keep)


class _Deviating(SimulatedTransport):
    """Results of one kind of collective are `deviant` of the buffers that all ranks have handed in."""

    kind: str

    def deviant(self, rows):
        raise NotImplementedError

    def _start(self, collective, name):
        handle = super()._start(collective, name)
        return dataclasses.replace(handle, result=self.deviant) if collective.kind == self.kind else handle


@breaks("test_allreduce")
class AddsWhereItShouldCompare(SimulatedTransport):
    def _start(self, collective, name):
        return super()._start(collective._replace(op="sum"), name)


@breaks("test_announced_step")
class SendsAsMuchAsTheFirst(SimulatedTransport):
    """Takes known lengths as if all were those of the first rank."""

    def _start(self, collective, name):
        handle = super()._start(collective, name)
        if collective.lengths is None:
            return handle
        length = collective.lengths[0][0]

        def result(rows):
            pad = self._ops.zeros(length, "uint8")
            return self._ops.concat([self._ops.concat([row[0], pad])[:length] for row in rows])

        return dataclasses.replace(handle, result=result)


@breaks("test_allgather")
class GathersBackwards(_Deviating):
    kind = "allgather"

    def deviant(self, rows):
        return self._ops.concat([x for (x,) in rows[::-1]])


@breaks("test_alltoall")
class SendsAllToTheSame(_Deviating):
    kind = "alltoall"

    def deviant(self, rows):
        return self._ops.concat([row[0] for row in rows])


@breaks("test_announced_step")
class TakesItsOwnLengthsForThoseOfAll(_Deviating):
    kind = "allgather"

    def deviant(self, rows):
        length = len(rows[self.rank][0])
        return self._ops.concat([np.resize(x, length) for (x,) in rows])


@breaks("test_broadcast")
class BroadcastsItsOwn(_Deviating):
    kind = "broadcast"

    def deviant(self, rows):
        return rows[self.rank][0]


@breaks("test_collectives_of_one_name_do_not_mix")
class IgnoresNames(SimulatedTransport):
    """Matches all collectives that are under way at a time, whatever their names."""

    def _start(self, collective, name):
        if collective.kind != "allgather":
            return super()._start(collective, name)
        number = self.__dict__.setdefault("number", 0)
        self.number = (number + 1 + self.rank) % 3
        return super()._start(collective, f"any {self.number}")


def ranks_of(cls: type[SimulatedTransport], size: int = 3) -> list[SimulatedTransport]:
    """Return the transports of all ranks of a simulation."""
    network = _Network(size)
    return [cls(rank, network, get_ops("numpy")) for rank in range(size)]


def _none():
    from grace.core.config.registry import memories

    return memories.make("none")
