"""Checks of the phases of a step and of the events of a trace, for all adapters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from grace.core.observe.timeline import PHASES


def check_phases(stats: dict[str, Any]) -> None:
    """Assert that every bucket has its phases in order, one after the other, since the first gradient of the step."""
    buckets = stats["buckets"].values()
    assert min(bucket["ready"][0] for bucket in buckets) == 0.0
    for bucket in buckets:
        assert set(bucket) == {"tensors", "wire_bytes", *PHASES}
        ready, compress, send, wait, merge = (bucket[phase] for phase in PHASES if phase != "negotiate")
        assert ready[0] <= ready[1]
        chain = [*compress, *send, *wait, *merge]
        assert chain == sorted(chain)
        assert (compress[1], send[1], wait[1]) == (send[0], wait[0], merge[0])
        if bucket["negotiate"]:
            assert compress[0] <= bucket["negotiate"][0] <= bucket["negotiate"][1] <= compress[1]


def check_trace(events: list[dict[str, Any]], stats: dict[str, Any], rank: int, number: int) -> None:
    """Assert that the trace of a rank shows the step with this number, and that `stats` agree with it."""
    buckets = stats["buckets"]
    metadata = [event for event in events if event["ph"] == "M"]
    names = {event["tid"]: event["args"]["name"] for event in metadata if event["name"] == "thread_name"}
    assert [e["args"]["name"] for e in metadata if e["name"] == "process_name"] == [f"rank {rank}"]
    assert {event["pid"] for event in events} == {rank}
    assert [names[row] for row in range(len(buckets))] == list(buckets)
    found = [event for event in phases_in(events) if event["args"]["step"] == number]
    for bucket, told in buckets.items():
        mine = [event for event in found if names[event["tid"]].removesuffix(" gradients") == bucket]
        assert [event["name"] for event in mine] == [phase for phase in PHASES if told[phase] is not None]
        assert {event["args"]["bytes"] for event in mine} == {told["wire_bytes"]}
        assert all(told["tensors"][0] in event["args"]["tensors"] for event in mine)
        assert len({event["args"]["dense_bytes"] for event in mine}) == 1
        for event in mine:
            begin, end = told[event["name"]]
            assert event["dur"] == pytest.approx((end - begin) * 1e6, abs=2)
    for row in names:
        assert nests([(e["ts"], e["ts"] + e["dur"]) for e in phases_in(events) if e["tid"] == row])


def phases_in(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def steps_in(events: list[dict[str, Any]]) -> set[int]:
    """Return the numbers of the steps in a trace."""
    return {event["args"]["step"] for event in phases_in(events)}


def nests(spans: list[tuple[int, int]]) -> bool:
    """Return whether no two spans overlap partially, which viewers cannot show."""
    return not any(a < c < b < d or c < a < d < b for (a, b), (c, d) in itertools.combinations(spans, 2))
