"""The contract that every transport must fulfil."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.transport import collectives
from grace.core.transport.transport import Transport
from grace.testing.harness import array, host, same


class TransportContract:
    """Tests that every transport must pass. Derive a test class and override the fixture `transports`.

    `transports` are those of the ranks in this process: of all ranks in a simulation, of one where every rank is a
    process. There all processes run the tests in the same order.
    """

    @pytest.fixture
    def transports(self) -> Sequence[Transport]:
        """Return the transports of the ranks in this process."""
        raise pytest.UsageError("override the fixture 'transports' of TransportContract")

    @pytest.fixture
    def ops(self) -> ArrayOps:
        """Return the array operations of the transport's arrays."""
        return get_ops("numpy")

    def _given(self, ops: ArrayOps, rank: int, length: int, dtype: str) -> Any:
        return array(ops, np.random.default_rng((rank, length)).integers(0, 100, length), dtype)

    def test_allreduce(self, transports: Sequence[Transport], ops: ArrayOps) -> None:
        for dtype in ("float32", "float64", "int32"):
            for op in ("sum", "max"):
                for length in (1, 5, 1000):
                    name = f"allreduce_{op}_{dtype}_{length}"
                    handles = [
                        t.allreduce(self._given(ops, t.rank, length, dtype), op=op, name=name) for t in transports
                    ]
                    size = transports[0].size
                    rows = np.stack([host(ops, self._given(ops, rank, length, dtype)) for rank in range(size)])
                    expected = rows.sum(0) if op == "sum" else rows.max(0)
                    for handle in handles:
                        assert (host(ops, handle.wait()) == expected).all(), name

    def test_allgather(self, transports: Sequence[Transport], ops: ArrayOps) -> None:
        """Of buffers of one length, and of others, some of them empty."""
        for name, lengths in _lengths(transports[0].size).items():
            handles = [
                t.allgather(_row(ops, t.rank, lengths[t.rank]), name=name, equal=name.startswith("equal"))
                for t in transports
            ]
            expected = np.concatenate([host(ops, _row(ops, rank, n)) for rank, n in enumerate(lengths)])
            for handle in handles:
                gathered = handle.wait()
                # Buffers of one length may come as a list.
                assert name.startswith("equal") or not isinstance(gathered, list), name
                rows = gathered if isinstance(gathered, list) else [gathered]
                assert same(np.concatenate([host(ops, row) for row in rows]), expected), name

    def test_alltoall(self, transports: Sequence[Transport], ops: ArrayOps) -> None:
        """Rank i sends another number of bytes to each rank."""
        size = transports[0].size
        for name, lengths in _lengths(size).items():
            handles = [
                t.alltoall(
                    [_row(ops, 10 * t.rank + to, lengths[(t.rank + to) % size]) for to in range(size)], name=name
                )
                for t in transports
            ]
            for transport, handle in zip(transports, handles, strict=True):
                to = transport.rank
                rows = [_row(ops, 10 * rank + to, lengths[(rank + to) % size]) for rank in range(size)]
                assert same(host(ops, handle.wait()), np.concatenate([host(ops, row) for row in rows])), name

    def test_broadcast(self, transports: Sequence[Transport], ops: ArrayOps) -> None:
        for root in range(transports[0].size):
            name = f"broadcast_{root}"
            handles = [
                t.broadcast(_row(ops, root, 33) if t.rank == root else ops.zeros(33, "uint8"), root=root, name=name)
                for t in transports
            ]
            for handle in handles:
                assert same(host(ops, handle.wait()), host(ops, _row(ops, root, 33))), name

    def test_announced_step(self, transports: Sequence[Transport], ops: ArrayOps) -> None:
        """Its collectives may be of lengths that all ranks know, of others, and of several rounds."""
        size = transports[0].size
        for length in (7, 1_600_001):
            known = [length] * (size - 1) + [16]
            sent = [[n] * size for n in known]
            for t in transports:
                t.announce(f"plan {length}", f"announced_{length}")
            # What rank j receives from each rank is longer by j.
            traded = [
                [collectives.alltoall([_row(ops, 10 * t.rank + to, length + to) for to in range(size)], equal=True)]
                for t in transports
            ]
            others = [
                [
                    collectives.allgather(_row(ops, t.rank, length), equal=True),
                    collectives.allgather(_row(ops, t.rank, length + t.rank)),
                    collectives.allreduce(self._given(ops, t.rank, length, "float32")),
                    # Known lengths that differ: the last rank has little to say.
                    collectives.allgather(_row(ops, t.rank, known[t.rank]), lengths=[[n] for n in known]),
                    collectives.alltoall(
                        [_row(ops, 10 * t.rank + to, known[t.rank]) for to in range(size)], lengths=sent
                    ),
                ]
                for t in transports
            ]
            handles = [
                [
                    t.start(each._replace(round=number), f"announced_{length}/{number}.{i}")
                    for number, mine in enumerate(rounds)
                    for i, each in enumerate(mine)
                ]
                for t, *rounds in zip(transports, traded, others, strict=True)
            ]
            for t, (trade, equal, other, total, few, traded_few) in zip(transports, handles, strict=True):
                rows = [host(ops, _row(ops, rank, n)) for rank, n in enumerate(known)]
                assert same(host(ops, few.wait()), np.concatenate(rows)), length
                rows = [host(ops, _row(ops, 10 * rank + t.rank, n)) for rank, n in enumerate(known)]
                assert same(host(ops, traded_few.wait()), np.concatenate(rows)), length
                rows = [_row(ops, 10 * rank + t.rank, length + t.rank) for rank in range(size)]
                assert same(host(ops, trade.wait()), np.concatenate([host(ops, row) for row in rows])), length
                gathered = equal.wait()
                parts = gathered if isinstance(gathered, list) else [gathered]
                rows = [host(ops, _row(ops, rank, length)) for rank in range(size)]
                assert same(np.concatenate([host(ops, part) for part in parts]), np.concatenate(rows)), length
                rows = [host(ops, _row(ops, rank, length + rank)) for rank in range(size)]
                assert same(host(ops, other.wait()), np.concatenate(rows)), length
                given = [host(ops, self._given(ops, rank, length, "float32")) for rank in range(size)]
                assert (host(ops, total.wait()) == np.sum(given, 0)).all(), length

    def test_collectives_of_one_name_do_not_mix(self, transports: Sequence[Transport], ops: ArrayOps) -> None:
        """Several are under way at a time, and a name comes again in the next step."""
        for step in range(3):
            handles = [
                [t.allgather(_row(ops, t.rank + 10 * step + 100 * i, 7), name=f"bucket_{i}") for i in range(3)]
                for t in transports
            ]
            for mine in handles:
                for i, handle in reversed(list(enumerate(mine))):
                    ranks = range(transports[0].size)
                    expected = np.concatenate([host(ops, _row(ops, r + 10 * step + 100 * i, 7)) for r in ranks])
                    assert same(host(ops, handle.wait()), expected), (step, i)


def run_transport_contract(transport: Transport, ops: ArrayOps) -> list[str]:
    """Run all tests of the contract where every rank is a process; call it on all ranks. Return their names."""
    names = sorted(name for name in dir(TransportContract) if name.startswith("test_"))
    for name in names:
        getattr(TransportContract(), name)([transport], ops)
    return names


def _lengths(size: int) -> dict[str, list[int]]:
    return {
        "equal_64": [64] * size,
        "equal_7": [7] * size,
        "by_rank": list(range(size)),
        "one": [0] * (size - 1) + [100],
        # A transport may send long buffers in pieces.
        "long": [1_600_001 + rank for rank in range(size)],
        "one_long": [0] * (size - 1) + [1_600_001],
    }


def _row(ops: ArrayOps, seed: int, length: int) -> Any:
    return array(ops, np.random.default_rng(seed).integers(0, 256, length), "uint8")
