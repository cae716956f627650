"""Waits end at their limit, and say before what they wait for."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError, WaitError
from grace.core.guards import waiting
from grace.core.guards.waiting import explain, wait_until


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that only pauses move."""
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    return now


def wait(clock, done, *, timeout=300, size=2):
    def pause(waited):
        clock[0] += 1

    wait_until(done, lambda: "step 3, the gradient of 'w'", rank=1, size=size, timeout=timeout, pause=pause)


def test_a_long_wait_is_told_within_30_seconds_and_ends_at_the_limit(clock, caplog):
    with caplog.at_level(logging.WARNING, "grace"), pytest.raises(WaitError) as raised:
        wait(clock, lambda: False)
    assert clock[0] == 300
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" for rank 0")[0] for text in told] == [
        f"rank 1 of 2 has waited {seconds} s" for seconds in (25, 50, 100, 200)
    ]
    for text in (*told, str(raised.value)):
        assert "step 3, the gradient of 'w'" in text
        assert "'timeout' = 300 s" in text
    assert isinstance(raised.value, TimeoutError)


def test_a_short_limit_is_told_at_its_half(clock, caplog):
    with caplog.at_level(logging.WARNING, "grace"), pytest.raises(WaitError, match="one or more of the other 3 ranks"):
        wait(clock, lambda: False, timeout=10, size=4)
    assert [record.getMessage()[:28] for record in caplog.records] == ["rank 1 of 4 has waited 5 s f"]


def test_a_wait_that_succeeds_says_nothing(clock, caplog):
    wait(clock, lambda: clock[0] >= 20)
    assert clock[0] == 20
    assert not caplog.records


def test_the_time_in_which_a_process_is_stopped_does_not_count(clock, caplog):
    def pause(waited):
        clock[0] += 1000 if clock[0] == 3 else 1

    wait_until(lambda: clock[0] > 1010, lambda: "", rank=0, size=2, timeout=60, pause=pause)
    assert not caplog.records


def test_what_a_collective_carries_is_told_in_words():
    plan = grace.Simulation(1, {f"w{i}": (64, 64) for i in range(3)}, {"compressor": "powersgd"}).plan
    (bucket,) = plan.buckets
    for name in (bucket.name, f"{bucket.name}/negotiate.sum.float32", f"{bucket.name}.float32"):
        assert explain(plan, 5, name) == f"step 5, the gradient of 'w2' and 2 other tensors (collective '{name}')"
    assert explain(plan, 5, f"{bucket.name}1") == f"step 5, {bucket.name}1"


def test_the_engine_explains_its_collectives():
    simulation = grace.Simulation(1, {"w": (64, 64)}, {"compressor": "topk"})
    run = simulation.runs[0]
    run.current.ready("w", np.zeros((64, 64), np.float32))
    run.finish()
    assert run.transport.explain(simulation.plan.buckets[0].name).startswith("step 1, the gradient of 'w'")


@pytest.mark.parametrize("value", [0, -1, 2.5, "60"])
def test_the_limit_is_a_number_of_seconds(value):
    with pytest.raises(ConfigError, match="timeout"):
        grace.make_config(compressor="topk", timeout=value)
