"""The law of the time of a step, and the comparison at equal time."""

from __future__ import annotations

import pytest

from grace.core.transport.collectives import KINDS, copies
from grace.report.comparison import cases
from grace.report.speed import FASTER, LATENCY, LINKS, Parts, parts, qualities_at_equal_time
from tests.report.made import dense, error, run
from tests.support.launch import ROOT


def test_bytes_leave_a_rank_as_in_a_ring():
    assert {kind: float(copies(kind, 4)) for kind in KINDS} == {
        "allreduce": 1.5, "allgather": 3, "alltoall": 1, "broadcast": 3
    }  # fmt: skip


@pytest.mark.parametrize(
    ("collectives", "sends", "messages", "on_link"),
    [
        ({"allreduce": 1e6}, {"allreduce": 1}, 6, 1.5e6),
        ({"allreduce": 1e6}, {"allreduce": 2}, 12, 1.5e6),
        ({"allgather": 1e6}, {"allgather": 0.5}, 1.5, 3e6),
        ({"alltoall": 3e6, "allgather": 1e6}, {"alltoall": 1, "allgather": 1}, 6, 6e6),
        ({"allreduce": 0, "broadcast": 1e6}, {"allreduce": 0, "broadcast": 1}, 3, 3e6),
        ({}, {}, 0, 0),
    ],
)
def test_a_step_is_work_messages_and_bytes(collectives, sends, messages, on_link):
    step = Parts(4, 0.25, 0.125, collectives, sends)
    assert step.link_bytes == on_link
    for gbit in (1, 10):
        waits = messages * LATENCY + 8 * on_link / (gbit * 1e9)
        assert step.seconds(gbit) == pytest.approx(0.375 + waits)
        # A faster device changes nothing about the link.
        assert step.seconds(gbit, 100) == pytest.approx(0.00375 + waits)
        assert step.link_share(gbit) == pytest.approx(waits / (0.375 + waits))


def test_the_parts_are_the_smallest_times_and_mean_bytes():
    results = [
        *dense(compute=4e-3),
        run("topk", 0.1, seed=0, share=0.1, exchange=3e-3, compute=9e-3),
        run("topk", 0.1, seed=1, share=0.2, exchange=2e-3, compute=8e-3),
        run("topk", 0.1, ranks=8),
        error(),
    ]
    found = parts(results)
    assert found.keys() == {("mf", 4), ("mf", 8)}
    topk = found["mf", 4]["topk"]
    assert (topk.ranks, topk.compute, topk.exchange) == (4, 4e-3, 2e-3)
    assert topk.collectives["allgather"] == pytest.approx(150)
    assert topk.sends == {"allreduce": 0, "allgather": 1, "alltoall": 0, "broadcast": 0}
    assert found["mf", 4]["none"].exchange == 0


def test_at_equal_time_the_slower_run_has_come_less_far():
    fast, slow = run("topk", 0.2), run("none", 0.1)
    # Of a curve, the last number is the quality.
    fast["curve"], slow["curve"] = [[0, 9.0, 1.0], [100, 3.0, 0.2]], [[0, 9.0, 1.0], [100, 3.0, 0.1]]
    # Steps of uncompressed training take twice as long: it has done half of them.
    assert qualities_at_equal_time(fast, 1.0, slow, 2.0) == pytest.approx((0.2, 0.55))
    assert qualities_at_equal_time(fast, 2.0, slow, 1.0) == pytest.approx((0.6, 0.1))
    assert qualities_at_equal_time(fast, 1.0, slow, 1.0) == pytest.approx((0.2, 0.1))


def test_a_run_that_diverged_has_no_quality_at_a_time():
    assert qualities_at_equal_time(run("topk", None), 1.0, run("none", 0.1), 1.0) is None
    # It may have diverged with finite losses.
    ended = run("topk", 0.5)
    assert cases([*dense(), ended])[-1].qualities_at_equal_time(1) is not None
    assert cases([*dense(), {**ended, "diverged": True}])[-1].qualities_at_equal_time(1) is None


def test_the_documents_state_the_constants():
    text = " ".join((ROOT / "docs/report.md").read_text(encoding="utf-8").split())
    assert f"The latency is {1e6 * LATENCY:.0f} µs." in text
    assert "{}, {} and {} Gbit/s".format(*LINKS) in text
    assert FASTER[0] == 1
    assert f"The page also has f = {FASTER[1]}" in text
