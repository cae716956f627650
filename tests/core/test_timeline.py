"""The times of a step: every phase of every bucket, in order, in `stats()` and in the Chrome trace."""

from __future__ import annotations

import json
import logging
import os
import resource
import time

import pytest

from grace.core.config.registry import compressors
from grace.core.errors import ConfigError
from grace.core.observe.timeline import PHASES, Timeline, Times
from grace.testing.harness import FRAMEWORKS
from tests.support import registered
from tests.support.steps import each, gradients, simulate, step
from tests.support.trace_checks import check_phases, check_trace, phases_in, steps_in

# One method per path through a step: gathered, summed, with a proposal, of run-time length.
METHODS = ["topk", "randomk", "powersgd", "sketchedsgd", "threshold", "none"]
# Small sizes, so that there are several buckets.
OPTIONS = {"bucket_bytes": 4096, "split_bytes": 4096}


def chosen(name):
    return registered.default_method(compressors.example(name))


def check(run):
    """Check and return the buckets of the last step of one rank."""
    stats = run.stats()
    buckets = stats["buckets"]
    check_phases(stats)
    assert list(buckets) == [bucket.name for bucket in run.plan.buckets]
    assert {name for bucket in buckets.values() for name in bucket["tensors"]} == {
        item.spec.name for item in run.plan.exchanged
    }
    for planned in run.plan.buckets:
        assert (buckets[planned.name]["negotiate"] is not None) == any(unit.proposed for unit in planned.units)
    assert stats["wire_bytes"] == sum(bucket["wire_bytes"] for bucket in buckets.values())
    return buckets


def read(path):
    return json.loads(path.read_text())


# The traces below include TensorFlow's.
@each(chosen={name: chosen(name) for name in METHODS}, framework=[f for f in FRAMEWORKS if f != "tensorflow"])
def test_moments_of_every_bucket_are_in_order(chosen, framework):
    sim = simulate(chosen, framework, size=2, **OPTIONS)
    for run in sim.runs:
        assert all(bucket[phase] is None for bucket in run.stats()["buckets"].values() for phase in PHASES)
    for number in range(2):
        began = time.perf_counter()
        step(sim, number)
        took = time.perf_counter() - began
        for run in sim.runs:
            buckets = check(run)
            assert len(buckets) > 1
            # No simulated rank begins before the step or ends after it.
            assert max(bucket["merge"][1] for bucket in buckets.values()) <= took + 1e-5


def test_moments_are_those_of_what_happens():
    """The times of a rank show that it got its gradients late, or waited for others."""
    sim = simulate(chosen("topk"), size=2, **OPTIONS)
    (first, *rest) = sim.plan.exchanged
    for run, mine in zip(sim.runs, gradients(sim, 0), strict=True):
        run.current.ready(first.spec.name, mine[first.spec.name])
        time.sleep(0.02)
        for item in rest:
            run.current.ready(item.spec.name, mine[item.spec.name])
    handle = sim.run.current._buckets[sim.plan.buckets[0].name]._handles[0]
    waited = type(handle).wait

    def slow(self):
        time.sleep(0.03)
        return waited(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(handle), "wait", slow)
        for run in sim.runs:
            run.finish()
    for run in sim.runs:
        buckets = check(run)
        assert max(bucket["ready"][1] for bucket in buckets.values()) >= 0.02
    # The payloads had already arrived when the other rank sent its own.
    buckets = check(sim.runs[0])
    assert all(bucket["wait"][1] - bucket["wait"][0] >= 0.03 for bucket in buckets.values())


def test_statistics_are_of_the_last_step_while_the_next_one_is_under_way():
    sim = simulate(chosen("topk"), size=1, **OPTIONS)
    step(sim, 0)
    before = sim.runs[0].stats()["buckets"]
    name = sim.plan.exchanged[0].spec.name
    sim.runs[0].current.ready(name, gradients(sim, 1)[0][name])
    assert sim.runs[0].stats()["buckets"] == before


def test_a_change_of_the_plan_has_buckets_of_its_own():
    sim = simulate(chosen("topk"), size=1, **OPTIONS)
    step(sim, 0)
    sim.change(compressor="qsgd")
    check_names = set(sim.runs[0].stats()["buckets"])
    step(sim, 1)
    assert check_names.isdisjoint(check(sim.runs[0]))


def test_a_note_is_cheap():
    times, arrays = Times(), (object(),)
    best = min(_seconds_of_notes(times, arrays) for _ in range(20))
    assert best / 1000 < 5e-6


def _seconds_of_notes(times, arrays):
    began = time.perf_counter()
    for _ in range(1000):
        times.mark("ready", "layer.weight", arrays)
    return time.perf_counter() - began


# --- the trace ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_trace_is_whole_after_every_step(tmp_path, framework):
    sim = simulate(chosen("powersgd"), framework, size=2, **OPTIONS)
    for rank, run in enumerate(sim.runs):
        run.times.start(tmp_path / "trace.json", rank, 2)
    for number in range(2):
        before = time.time()
        step(sim, number)
        after = time.time()
        assert sorted(os.listdir(tmp_path)) == ["trace.rank0.json", "trace.rank1.json"]
        for rank, run in enumerate(sim.runs):
            check(run)
            check_trace(read(tmp_path / f"trace.rank{rank}.json"), run.stats(), rank, number)
            latest = [e for e in phases_in(read(tmp_path / f"trace.rank{rank}.json")) if e["args"]["step"] == number]
            # Times count from the epoch, so that traces of several ranks can be combined. The system may correct its
            # clock meanwhile, but not by a minute.
            assert all(before - 60 <= e["ts"] / 1e6 <= after + 60 for e in latest)


def test_exchanges_of_a_process_share_a_file(tmp_path):
    path, sims = tmp_path / "trace.json", [simulate(chosen(name), size=1, **OPTIONS) for name in ("topk", "qsgd")]
    for sim in sims:
        sim.runs[0].times.start(path, 0, 1)
        step(sim, 0)
    sims[1].runs[0].times.stop()
    step(sims[1], 1)
    sims[1].change(compressor="none")
    sims[1].runs[0].times.start(str(path), 0, 1)
    step(sims[1], 2)
    events = read(path)
    steps = [e["args"]["step"] for e in phases_in(events) if e["name"] == "ready"]
    # The trace contains both exchanges, whose bucket numbers are equal here, but not the step without a timeline.
    assert {number: steps.count(number) for number in steps} == {
        0: len(sims[0].plan.buckets) * 2,
        2: len(sims[1].plan.buckets),
    }
    assert len([e for e in events if e["name"] == "process_name"]) == 1


def test_a_file_that_was_taken_away_is_made_again(tmp_path):
    path = tmp_path / "trace.json"
    for _ in range(2):
        sim = simulate(chosen("topk"), size=1)
        sim.runs[0].times.start(path, 0, 1)
        step(sim, 0)
        check_trace(read(path), sim.runs[0].stats(), 0, 0)
        path.unlink()


def test_a_step_that_cannot_be_written_ends_the_trace_and_not_the_training(tmp_path, caplog):
    path, sim = tmp_path / "trace.json", simulate(chosen("topk"), size=1)
    sim.runs[0].times.start(path, 0, 1)
    path.unlink()
    with caplog.at_level(logging.WARNING, logger="grace"):
        step(sim, 0)
        step(sim, 1)
    assert len(caplog.records) == 1
    assert "ends at the last step" in caplog.text
    check(sim.runs[0])


@pytest.mark.parametrize("spare", [0, 1, 100])
def test_a_full_disk_leaves_the_steps_that_it_could_hold(tmp_path, caplog, spare):
    """A limit on the size of files stands in for the disk."""
    path, sim = tmp_path / "trace.json", simulate(chosen("topk"), size=1)
    sim.runs[0].times.start(path, 0, 1)
    step(sim, 0)
    before, limits = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + spare, limits[1]))
    try:
        step(sim, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "ends at the last step" in caplog.text
    step(sim, 2)
    assert path.read_text() == before
    assert steps_in(read(path)) == {0}


@pytest.mark.parametrize("path", ["nowhere/trace.json", ".", ""])
def test_paths_that_cannot_be_written_are_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for size in (1, 2):
        with pytest.raises(ConfigError, match="cannot be written"):
            Timeline.at(path, 0, size)
    monkeypatch.setenv("GRACE_TIMELINE", path)
    if path:
        with pytest.raises(ConfigError, match="GRACE_TIMELINE"):
            Times().start_from_environment(0, 1)
    else:
        Times().start_from_environment(0, 1)


def test_the_environment_names_a_file(tmp_path, monkeypatch):
    sim = simulate(chosen("topk"), size=1)
    monkeypatch.setenv("GRACE_TIMELINE", str(tmp_path / "told.json"))
    sim.runs[0].times.start_from_environment(0, 1)
    step(sim, 0)
    check_trace(read(tmp_path / "told.json"), sim.runs[0].stats(), 0, 0)
    # A timeline that was started by a call goes on.
    sim.runs[0].times.start(tmp_path / "by hand.json", 0, 1)
    sim.runs[0].times.start_from_environment(0, 1)
    step(sim, 1)
    assert steps_in(read(tmp_path / "by hand.json")) == {1}


# --- graphs ---------------------------------------------------------------------------------------------------------

graphs = pytest.mark.skipif("tensorflow" not in FRAMEWORKS, reason="TensorFlow is not installed")


@graphs
@pytest.mark.slow
@pytest.mark.parametrize("name", ["threshold", "powersgd"])
def test_a_graph_notes_the_same_moments_if_asked(tmp_path, name):
    from tests.adapters.tensorflow.test_graphs import Graph

    graph = Graph(chosen(name), 2, track_times=True, **OPTIONS)
    for rank, run in enumerate(graph.runs):
        assert all(bucket[phase] is None for bucket in run.stats()["buckets"].values() for phase in PHASES)
        if rank == 0:
            run.times.start(tmp_path / "trace.json", rank, 1)
    seen = []
    for number in range(3):
        graph.step(gradients(graph, number))
        for run in graph.runs:
            check(run)
        check_trace(read(tmp_path / "trace.json"), graph.runs[0].stats(), 0, number)
        seen.append(graph.runs[1].times.moments(graph.plan)["arrived", graph.plan.buckets[0].name])
    assert seen == sorted(set(seen))
    assert graph.traces == 1


@graphs
def test_a_graph_that_is_not_asked_notes_nothing():
    from tests.adapters.tensorflow.test_graphs import Graph

    graph = Graph(chosen("none"), 2, **OPTIONS)
    graph.step(gradients(graph, 0))
    for run in graph.runs:
        assert all(bucket[phase] is None for bucket in run.stats()["buckets"].values() for phase in PHASES)
    operations = {op.type for op in graph._run.get_concrete_function(gradients(graph, 0)).graph.get_operations()}
    assert not operations & {"Timestamp", "PyFunc", "EagerPyFunc"}
