"""Collectives of an ordered transport: in another thread than the one that trains, and without headers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from grace.core.errors import MismatchError, WaitError
from grace.core.ops import get_ops
from grace.core.transport.collectives import allgather, sum_halves
from grace.core.transport.ordered import OrderedTransport


class Transport(OrderedTransport):
    """Two ranks in one: what this one sends comes back from the other. `done(number)` ends the number-th phase."""

    def __init__(self):
        super().__init__()
        self.rank, self.size, self.timeout = 0, 2, 0.2
        self.tests, self.foreign = [], None

    def _phase(self):
        state = [False]
        self.tests.append(state)
        return lambda: state[0]

    def done(self, number):
        self.tests[number][0] = True

    def _exchange(self, lane, header):
        yield self._phase()
        return [header, header if self.foreign is None else self.foreign]

    def _gather(self, lane, x, lengths, equal):
        yield self._phase()
        return np.concatenate([x, x])

    def _reduce(self, lane, x, op):
        raise NotImplementedError

    _trade = _join = _spread = gather_bytes = _reduce


X = np.arange(3.0)


def test_another_thread_starts_the_data():
    transport = Transport()
    handle = transport.allgather(X, name="a")
    transport.done(0)
    assert len(transport.tests) == 1
    thread = threading.Thread(target=transport.advance)
    thread.start()
    thread.join()
    assert (len(transport.tests), handle.done) == (2, False)
    transport.done(1)
    transport.advance()
    assert handle.done
    assert np.array_equal(handle.wait(), [*X, *X])


def test_nothing_overtakes_what_was_started_before():
    transport = Transport()
    first, second = transport.allgather(X, name="a"), transport.allgather(X, name="b")
    transport.done(1)
    transport.advance()
    assert len(transport.tests) == 2
    transport.done(0)
    transport.advance()
    assert len(transport.tests) == 4
    assert not first.done
    assert not second.done


def test_what_is_done_while_another_thread_advances_is_not_missed():
    transport = Transport()
    first, second = transport.allgather(X, name="a"), transport.allgather(X, name="b")
    transport.done(0)
    transport.done(1)
    reached = []
    plain = second._test

    def test():
        if not reached:
            # The first collective is behind the thread that advances, which holds the lock.
            reached.append(True)
            transport.done(2)
            thread = threading.Thread(target=transport.advance)
            thread.start()
            thread.join()
        return plain()

    second._test = test
    transport.advance()
    assert reached
    assert first.done


def test_an_error_in_another_thread_is_raised_where_the_program_waits():
    transport = Transport()
    handle = transport.allgather(X, name="a")
    transport.foreign = bytes(200)
    transport.done(0)
    transport.advance()
    assert not handle.done
    with pytest.raises(MismatchError, match="rank 0 started allgather float64 'a', but rank 1 started") as caught:
        handle.wait()
    assert "Rank 0 knows them as collective 'a', and as collective ''." in str(caught.value)
    with pytest.raises(MismatchError):
        transport.allgather(X, name="b")


def test_a_wait_ends_in_time():
    transport = Transport()
    with pytest.raises(WaitError):
        transport.allgather(X, name="a").wait()


def test_collectives_of_an_announced_step_need_no_header_of_their_own():
    transport = Transport()
    transport.announce("0123", "bucket")
    first = transport.start(allgather(X, equal=True)._replace(round=0), "bucket/0.0")
    # Its lengths depend on the data.
    second = transport.start(allgather(X)._replace(round=0), "bucket/0.1")
    assert len(transport.tests) == 2
    transport.done(0)
    transport.advance()
    assert len(transport.tests) == 3
    transport.done(2)
    transport.advance()
    assert (first.done, second.done) == (True, False)
    transport.done(1)
    transport.advance()
    transport.done(3)
    assert np.array_equal(second.wait(), [*X, *X])
    # In another lane nothing is before it.
    transport.start(allgather(X, equal=True)._replace(round=1), "bucket/1.0")
    assert len(transport.tests) == 5


def test_ranks_that_announce_other_steps_exchange_no_data():
    transport = Transport()
    transport.announce("0123", "bucket")
    handle = transport.start(allgather(X, equal=True)._replace(round=0), "bucket/0.0")
    transport.foreign = bytes(200)
    transport.done(0)
    with pytest.raises(MismatchError, match="rank 0 started a step from 'bucket' on, with the plan 0123, but rank 1"):
        handle.wait()
    assert len(transport.tests) == 1


@pytest.mark.parametrize(("ranks", "n"), [(3, 10), (4, 8), (4, 3), (5, 1)])
def test_sums_of_16_bits_need_no_lengths_of_other_ranks(ranks, n):
    """All lengths follow from one: a header per collective would cost more than the sum, where ranks share cores."""
    ops = get_ops("numpy")
    given = np.random.default_rng(0).standard_normal((ranks, n)).astype(np.float16)
    programs = [sum_halves(ops, x, rank, ranks, 1 / ranks) for rank, x in enumerate(given)]
    (trade,) = zip(*map(next, programs), strict=True)
    assert all(each.kind == "alltoall" and each.equal for each in trade)
    assert len({tuple(map(len, each.buffers)) for each in trade}) == 1
    arrived = [np.concatenate([each.buffers[rank] for each in trade]) for rank in range(ranks)]
    (gather,) = zip(*(program.send([x]) for program, x in zip(programs, arrived, strict=True)), strict=True)
    assert all(each.kind == "allgather" and each.equal for each in gather)
    assert len({len(each.buffers[0]) for each in gather}) == 1
    mean = given.astype(np.float32).sum(axis=0) / ranks
    for program in programs:
        with pytest.raises(StopIteration) as end:
            program.send([np.concatenate([each.buffers[0] for each in gather])])
        assert end.value.value.dtype == np.float16
        np.testing.assert_allclose(end.value.value, mean, rtol=1e-3, atol=1e-4)
