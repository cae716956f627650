"""The times of a step and their trace, with every adapter, in two real processes."""

from __future__ import annotations

import pytest

from tests.support.launch import MPI, TENSORFLOW, TORCH, Launch
from tests.support.ranks import on, scenario
from tests.support.trace_checks import check_phases, check_trace, phases_in, steps_in

pytestmark = pytest.mark.distributed

# The delay with which a graph on a busy machine may read the clock. Wrong clocks would differ by far more.
SLACK_US = 50_000
# The number of steps in each part of the scenario.
STEPS = {TORCH: 1, TENSORFLOW: 3, MPI: 1}


@on(
    *(Launch(TORCH, launcher, 2) for launcher in ("horovodrun-gloo", "torchrun")),
    Launch(TENSORFLOW, "horovodrun-gloo", 2),
    Launch(MPI, "mpirun", 2),
)
def test_every_rank_traces_its_steps_and_a_bad_path_is_told_to_all(launch):
    worker, steps = launch.worker, STEPS[launch.worker]
    results = scenario("timeline", launch)
    for rank, result in enumerate(results):
        check_phases(result["stats"])
        check_trace(result["told"], result["stats"], rank, steps - 1)
        assert steps_in(result["told"]) == set(range(steps))
        assert steps_in(result["by hand"]) == set(range(steps, 2 * steps))
        assert any(event["name"] == "negotiate" for event in phases_in(result["told"]))
    # The ranks share one clock: a rank cannot receive payloads before the others have sent them.
    bucket = next(iter(results[0]["stats"]["buckets"]))
    begun = [_begun(result["told"], bucket, steps - 1) for result in results]
    assert max(rank["send"] for rank in begun) <= min(rank["merge"] for rank in begun) + SLACK_US
    assert results[0]["refused"].startswith("MismatchError")
    assert "rank 1: ConfigError: the timeline" in results[0]["refused"]
    assert results[1]["refused"].startswith("ConfigError: the timeline")
    if worker == TENSORFLOW:
        for result in results:
            assert result["late"].startswith("StepError: the timeline was set after the first step was traced")
            assert steps_in(result["tape"]) == {0}
        assert [result["refused tape"].split(":")[0] for result in results] == ["MismatchError", "ConfigError"]


def _begun(events, bucket, step):
    """Return the start times of a bucket's phases in microseconds."""
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    return {e["name"]: e["ts"] for e in phases_in(events) if e["tid"] == rows[bucket] and e["args"]["step"] == step}
