"""The cost model: closed forms, limits that no step can beat, and times that follow from the order of events."""

import dataclasses

import pytest

from grace.advice import model
from grace.advice.model import (
    Bucket,
    Link,
    Machine,
    Overhead,
    Round,
    Step,
    bandwidth_for,
    break_even,
    predict,
    remembered,
    taken_in_pass,
)
from grace.core.errors import ConfigError

MB = 1e6
LINK = Link(125 * MB, 1e-3)


def dense(count=1, nbytes=50 * MB, backward=0.2):
    """Return a step with buckets that become ready one after the other."""
    rounds = (Round("allreduce", nbytes),)
    buckets = tuple(Bucket(backward * (i + 1) / count, 0.0, 0.0, rounds) for i in range(count))
    return Step(0.1, backward, 0.05, buckets)


def test_one_bucket_on_two_ranks_takes_the_time_of_a_ring():
    found = predict(dense(), Machine(2, LINK))
    # Two messages of half the bytes, after the backward pass.
    assert found.wire == pytest.approx(2 * 1e-3 + 50 / 125)
    assert found.seconds == pytest.approx(0.35 + found.wire)
    assert found.exposed == pytest.approx(found.wire)
    assert found.sent == 50 * MB


@pytest.mark.parametrize(("ranks", "messages"), [(2, 2), (4, 4), (5, 6), (1024, 20)])
def test_a_tree_has_fewer_messages_than_a_ring_and_as_many_bytes(ranks, messages):
    ring, tree = Machine(ranks, LINK), Machine(ranks, LINK, allreduce="tree")
    fewer = (2 * (ranks - 1) - messages) * LINK.latency
    assert ring.seconds("allreduce", MB) - tree.seconds("allreduce", MB) == pytest.approx(fewer)
    assert tree.seconds("alltoall", MB) == ring.seconds("alltoall", MB)


@pytest.mark.parametrize(
    ("kind", "messages", "copies"), [("allreduce", 6, 1.5), ("allgather", 3, 3.0), ("alltoall", 3, 1.0)]
)
def test_collectives_of_four_ranks_have_their_messages_and_bytes(kind, messages, copies):
    assert Machine(4, LINK).seconds(kind, MB) == pytest.approx(messages * 1e-3 + copies / 125)


def test_within_a_node_the_link_is_not_used():
    inside = Link(1000 * MB, 0)
    assert Machine(4, LINK, 4, inside).seconds("allreduce", MB) == pytest.approx(1.5e-3)
    # One rank of each node sends to the next node, so the ring takes as long as with a rank per node.
    nodes = Machine(8, LINK, 4, Link(1e15, 0)).seconds("allreduce", MB)
    assert nodes == pytest.approx(14 * 1e-3 + 1.75 / 125)
    # In an alltoall, all ranks of a node send to all other nodes.
    traded = Machine(8, LINK, 4, Link(1e15, 0)).seconds("alltoall", MB)
    assert traded == pytest.approx(7e-3 + 4 * 4 / 7 / 125)
    # Without neighbours there are no hops within a node.
    assert Machine(2, Link(1e12), 1, Link(1.0)).seconds("allreduce", MB) == pytest.approx(1e-6)


def test_collectives_of_nodes_run_side_by_side():
    machine = Machine(12, LINK, 4, Link(1000 * MB, 1e-4))
    assert [machine.size(scope) for scope in ("all", "node", "nodes")] == [12, 4, 3]
    assert machine.seconds("allreduce", MB, "node") == pytest.approx(6 * 1e-4 + 1.5e-3)
    # All four ranks of a node send to other nodes, over one link.
    assert machine.seconds("allgather", MB, "nodes") == pytest.approx(2 * 1e-3 + 4 * 2 / 125)
    assert Machine(4, LINK, 4).seconds("allgather", MB, "nodes") == 0
    rounds = (Round("alltoall", 3 * MB, "node"), Round("allgather", MB, "nodes"), Round("allgather", MB, "node"))
    found = predict(Step(0.0, 0.1, 0.0, (Bucket(0.1, 0.0, 0.0, rounds),)), machine)
    assert found.sent == pytest.approx(3 * MB + 2 * MB + 3 * MB)
    assert found.exposed == pytest.approx(sum(machine.seconds(*dataclasses.astuple(each)) for each in rounds))


def test_buckets_overlap_with_the_backward_pass_and_queue_on_the_link():
    step, machine = dense(4, 10 * MB, backward=0.4), Machine(2, Link(200 * MB))
    # Each takes 0.05 s and is over before the next one is ready, but for the last.
    assert predict(step, machine).exposed == pytest.approx(0.05)
    slow = Machine(2, Link(50 * MB))
    # The first is ready after 0.1 s, and the link then works for 4 * 0.2 s.
    assert predict(step, slow).seconds == pytest.approx(0.1 + 0.1 + 0.8 + 0.05)


def test_a_codec_delays_the_pass_and_its_second_round_waits_for_the_rank():
    rounds = (Round("alltoall", MB), Round("allgather", MB))
    machine = Machine(2, Link(100 * MB))
    buckets = (Bucket(0.05, 0.02, 0.04, rounds), Bucket(0.1, 0.02, 0.04, rounds))
    step = Step(0.0, 0.1, 0.0, buckets, lanes=None)
    found = predict(step, machine)
    assert found.codec == pytest.approx(0.12)
    # Compute and codecs, and at the end the two rounds of the second bucket, which nothing but the first one's last
    # merge hides.
    assert 0.1 + 0.12 < found.seconds < 0.1 + 0.12 + 4 * 0.01 + 1e-9


def test_rounds_without_a_lane_follow_after_the_pass_round_by_round():
    rounds = (Round("alltoall", MB), Round("allgather", MB))
    machine = Machine(2, Link(10 * MB))
    step = Step(0.0, 1.0, 0.0, (Bucket(0.1, 0.0, 0.04, rounds), Bucket(0.3, 0.0, 0.04, rounds)))
    # The second rounds of both buckets follow each other on the link, and hide all but the first and the last work.
    assert predict(step, machine).seconds == pytest.approx(1.0 + 0.02 + 2 * 0.1 + 0.02)
    # With a lane, the first bucket's second round starts when the second bucket is ready, and its last work hides
    # behind the second bucket's second round.
    for lanes in (2, 3, None):
        assert predict(dataclasses.replace(step, lanes=lanes), machine).seconds == pytest.approx(1.0 + 3 * 0.02 + 0.1)


def test_no_step_is_shorter_than_its_work_or_its_link():
    for count in (1, 3, 7):
        for bandwidth in (10 * MB, 100 * MB, 1e12):
            found = predict(dense(count), Machine(4, Link(bandwidth, 1e-5)))
            assert found.seconds >= max(found.compute, found.wire) - 1e-12
            assert 0 < found.utilisation <= 1


def test_shared_cores_accumulation_and_rare_exchanges():
    step, machine = dense(), Machine(2, LINK)
    assert predict(step, dataclasses.replace(machine, sharing=2.0)).compute == pytest.approx(0.7)
    twice = dataclasses.replace(step, backwards=2)
    assert predict(twice, machine).seconds == pytest.approx(predict(step, machine).seconds + 0.3)
    rare = dataclasses.replace(step, every=10)
    assert predict(rare, machine).exposed == pytest.approx(predict(step, machine).exposed / 10)
    assert predict(rare, machine).sent == pytest.approx(5 * MB)


def test_the_transport_takes_processor_time_only_where_the_rank_computes():
    step, machine = dense(), Machine(2, LINK)
    overhead = Overhead(handling=1e-9)
    handled = dataclasses.replace(step, overhead=overhead)
    # The only bucket is sent while the rank waits.
    assert predict(handled, machine).seconds == pytest.approx(predict(step, machine).seconds)
    # A link that is faster than the transport waits for it, and longer on a core that two ranks share.
    fast = Machine(2, Link(1e12))
    assert predict(handled, fast).seconds == pytest.approx(step.compute + 0.05)
    shared = dataclasses.replace(fast, sharing=2.0)
    assert predict(handled, shared).seconds == pytest.approx(2 * (step.compute + 0.05))
    # The first of two buckets is handled while the second is computed.
    pair = Step(0.0, 2.0, 0.0, dense(2, 50 * MB, backward=2.0).buckets, overhead)
    assert predict(pair, machine).seconds == pytest.approx(2.05 + predict(dense(), machine).wire)


def test_the_transport_takes_of_a_pass_what_it_handles_meanwhile():
    (bucket,) = dense(backward=0.5).buckets
    step = Step(0.0, 1.0, 0.0, (dataclasses.replace(bucket, before=0.1),), Overhead(handling=4e-9))
    # 0.2 s of processor time, while the round is on the link for 0.4 s, or for 4 s.
    for bandwidth, handled in ((125 * MB, 0.2), (12.5 * MB, 0.5 * 0.05)):
        ((ready, taken),) = taken_in_pass(step, Machine(2, Link(bandwidth)))
        assert (ready, taken) == pytest.approx((0.5, 0.1 + handled))
    # Where the round ends before the pass, all of it is there.
    assert predict(step, Machine(2, Link(1250 * MB))).seconds == pytest.approx(1.0 + 0.1 + 0.2)


def test_collectives_that_start_together_take_messages_and_processor_time_each():
    assert Machine(4, LINK).seconds("allreduce", MB, count=5) == pytest.approx(5 * 6e-3 + 1.5 / 125)
    many = Step(0.0, 1.0, 0.0, (Bucket(0.5, 0.0, 0.0, (Round("allreduce", MB, count=5),)),), Overhead(serving=1e-3))
    # Of four ranks, while the rank computes.
    assert predict(many, Machine(4, LINK)).seconds == pytest.approx(1.0 + 5 * 4 * 1e-3)


def test_gradients_are_copied_by_the_rank():
    (bucket,) = dense().buckets
    step = Step(0.1, 0.2, 0.05, (dataclasses.replace(bucket, nbytes=50 * MB),), Overhead(copying=1e-9))
    assert predict(step, Machine(2, LINK)).seconds == pytest.approx(predict(dense(), Machine(2, LINK)).seconds + 0.05)


def test_ranks_wake_where_the_link_is_idle():
    rounds = (Round("alltoall", MB), Round("allgather", MB))
    step, machine = Step(0.0, 0.1, 0.0, (Bucket(0.1, 0.0, 0.0, rounds),)), Machine(2, LINK)
    waking = dataclasses.replace(step, overhead=Overhead(waking=0.01))
    # Two rounds of two ranks.
    assert predict(waking, machine).seconds == pytest.approx(predict(step, machine).seconds + 0.04)
    assert predict(waking, machine).wire == predict(step, machine).wire
    # In rounds that follow each other on the link, only the first one waits for ranks.
    batch = dataclasses.replace(waking, buckets=(Bucket(0.1, 0.0, 0.0, rounds[:1]),) * 3)
    plain = dataclasses.replace(batch, overhead=Overhead())
    assert predict(batch, machine).seconds == pytest.approx(predict(plain, machine).seconds + 0.02)


def test_bandwidths_are_where_the_condition_begins():
    step, machine = dense(4), Machine(4, LINK)
    fewer = dataclasses.replace(
        step, buckets=tuple(Bucket(b.ready, 0.01, 0.01, (Round("allreduce", 5 * MB),)) for b in step.buckets)
    )
    for share in (0.5, 0.9):
        bandwidth = bandwidth_for(step, machine, share)
        there = dataclasses.replace(machine, link=Link(bandwidth, LINK.latency))
        assert predict(step, there).utilisation == pytest.approx(share, rel=2e-3)
    even = break_even(fewer, remembered(step), machine)
    for factor, wins in ((0.99, True), (1.02, False)):
        there = dataclasses.replace(machine, link=Link(even * factor, LINK.latency))
        assert (predict(fewer, there).seconds < predict(step, there).seconds) is wins
    # No bandwidth makes up for messages that take longer than the step.
    assert bandwidth_for(step, Machine(4, Link(MB, 10.0)), 0.5) is None


def test_thousands_of_ranks_take_no_more_events(monkeypatch):
    events, plain = [], model._Run.start
    monkeypatch.setattr(model._Run, "start", lambda *args: events.append(ranks) or plain(*args))
    for ranks in (8, 16_384):
        predict(dense(120), Machine(ranks, LINK, 8))
    assert events.count(16_384) == events.count(8) == 120


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(0),
        lambda: Link(1, -1),
        lambda: Machine(0, LINK),
        lambda: Machine(6, LINK, 4),
        lambda: bandwidth_for(dense(), Machine(2, LINK), 1.0),
    ],
)
def test_wrong_numbers_are_refused(make):
    with pytest.raises(ConfigError):
        make()
