"""Promises of a whole step, for every valid combination of methods, with real steps over simulated ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import grace
from grace.core.config.config import Method, make_config
from grace.core.config.registry import communicators, compressors, memories
from grace.core.methods.compressor import sparsifies, usual_communicator
from grace.core.session.simulation import poll_all
from grace.core.spec import TensorSpec
from grace.core.step.bucket_step import BucketStep
from grace.testing import PoisonOps
from grace.testing.harness import EPS, FRAMEWORKS, draw, same
from tests.core.test_contracts import reordered
from tests.support import registered
from tests.support.registered import every_framework
from tests.support.steps import (
    METHODS,
    RANKS,
    SPECS,
    TYPICAL,
    assert_same,
    config,
    each,
    each_combination,
    gradient,
    gradients,
    on_host,
    simulate,
    specs_in,
    states,
    step,
    wire_eps,
)

# --- agreement between ranks, and with the formula --------------------------------------------------------------


@each(chosen=TYPICAL, framework=FRAMEWORKS[1:])
def test_frameworks_agree(chosen, framework):
    """Bit for bit wherever the payloads are the same bytes, which the contract of the compressor settles."""
    specs = specs_in(framework, chosen)
    a, b = (simulate(chosen, name, specs=specs) for name in ("numpy", framework))
    for number in range(3):
        (x, *_), (y, *others) = step(a, number), step(b, number)
        for other in others:
            assert_same([y], [other])
        for spec in specs:
            assert (y[spec.name].shape, str(y[spec.name].dtype)) == (spec.shape, spec.dtype)
            one, two = x[spec.name].astype(np.float64), y[spec.name].astype(np.float64)
            exact = reordered(chosen.compressor, spec.dtype) is None
            # If sums have another order, error feedback carries the difference over the steps.
            bound = 0.0 if exact else 1e3 * EPS[spec.dtype] * np.abs(one).max(initial=0.0)
            assert np.abs(one - two).max(initial=0.0) <= bound, spec


@each(chosen=TYPICAL)
def test_sum_is_the_size_times_the_average(chosen):
    mean, total = simulate(chosen), simulate(chosen, average=False)
    times = RANKS if chosen.compressor.averages else 1
    for number in range(3):
        a, b = step(mean, number)[0], step(total, number)[0]
        for spec in SPECS:
            expected, got = times * a[spec.name].astype(np.float64), b[spec.name].astype(np.float64)
            scale = np.abs(expected).max(initial=0.0)
            assert np.abs(got - expected).max(initial=0.0) <= wire_eps(chosen, spec) * scale, spec


@pytest.mark.parametrize("compressor", ["none", "fp16", "bf16"])
@pytest.mark.parametrize(
    "communicator", sorted(set(communicators) - registered.OF_SHARDS - {"auto", "sparse_allreduce"})
)
def test_no_compression_is_the_mean(communicator, compressor):
    chosen = Method(compressors.example(compressor), memories.make("none"), communicators.make(communicator))
    sim = simulate(chosen)
    merged = step(sim, 0)[2]
    for spec in SPECS:
        expected = sum(gradient(spec, 0, rank).astype(np.float64) for rank in range(RANKS)) / RANKS
        error = np.abs(merged[spec.name].astype(np.float64) - expected).max(initial=0.0)
        # Without a compressor the payload rounds nothing.
        eps = wire_eps(chosen, spec) if compressor != "none" else 16 * max(EPS[spec.dtype], EPS[spec.work_dtype])
        assert error <= eps * np.abs(expected).max(initial=0.0), spec


@pytest.mark.parametrize("name", [name for name in compressors if compressors.example(name).summable])
def test_gathered_payloads_give_what_summed_ones_give(name):
    summed, gathered = (
        Method(compressors.example(name), memories.make("none"), communicators.make(communicator))
        for communicator in ("allreduce", "allgather")
    )
    expected, got = (step(simulate(chosen), 0)[0] for chosen in (summed, gathered))
    for spec in SPECS:
        a, b = (merged[spec.name].astype(np.float64) for merged in (expected, got))
        assert np.abs(a - b).max(initial=0.0) <= wire_eps(summed, spec) * np.abs(a).max(initial=0.0), spec


@each(chosen=TYPICAL)
def test_one_rank_works(chosen):
    sim = simulate(chosen, size=1)
    merged = step(sim, 0)[0]
    for item in sim.plan.assignments:
        assert np.isfinite(merged[item.spec.name].astype(np.float64)).all()
        if item.dense:
            expected = gradient(item.spec, 0, 0).astype(merged[item.spec.name].dtype)
            assert same(merged[item.spec.name], np.asarray(expected))


# --- error feedback ---------------------------------------------------------------------------------------------


FEEDBACK = ["residual", "powersgd", "efsignsgd", "lowpass"]
AVERAGED = {name: parts for name, parts in TYPICAL.items() if parts.compressor.averages}


@each(chosen=AVERAGED, memory=FEEDBACK)
def test_error_feedback_loses_nothing(chosen, memory):
    """Applied gradients plus residuals equal the given gradients, in the mean over ranks.

    Votes are scale-free and do not have this property. Their declaration excludes them.
    """
    compressor = chosen.compressor
    # The residuals of these two have another unit. With 0.5, this is exact in binary.
    options = {"efsignsgd": {"lr": 0.5}, "lowpass": {"beta": 0.5}}
    feedback = memories.make({"name": memory, **options.get(memory, {})})
    chosen = Method(compressor, feedback, communicators.make(usual_communicator(compressor)))
    sim = simulate(chosen)
    applied = {spec.name: np.zeros(spec.shape) for spec in SPECS}
    given = {spec.name: np.zeros(spec.shape) for spec in SPECS}
    for number in range(4):
        merged = step(sim, number)[0]
        for spec in SPECS:
            applied[spec.name] += merged[spec.name].astype(np.float64)
            given[spec.name] += sum(gradient(spec, number, r).astype(np.float64) for r in range(RANKS)) / RANKS
    left = states(sim)
    for spec in SPECS:
        key = (spec.name, "memory", "residual")
        residual = 0.0
        if key in left[0]:
            residual = sum(state[key].astype(np.float64) for state in left) / RANKS / feedback.residual_scale
        residual = np.reshape(residual, spec.shape if key in left[0] else ())
        error = np.abs(applied[spec.name] + residual - given[spec.name])
        scale = np.abs(applied[spec.name]).max(initial=0.0) + np.abs(given[spec.name]).max(initial=0.0)
        # Each of 4 steps rounds the payload, the sum over ranks and the returned gradient.
        assert error.max(initial=0.0) <= 4 * wire_eps(chosen, spec) * (scale + 1e-30), spec


@each(
    chosen={name: parts for name, parts in TYPICAL.items() if sparsifies(parts.compressor)},
    framework=FRAMEWORKS,
)
def test_a_sparsifier_moves_values_without_rounding(chosen, framework):
    """With one rank, old residual + gradient == applied gradient + new residual, exactly."""
    compressor = chosen.compressor
    chosen = Method(compressor, memories.make("residual"), communicators.make(usual_communicator(compressor)))
    specs = [s for s in SPECS if s.dtype in ("float32", "float64") and compressor.unfit(s) is None]
    assert specs
    sim = simulate(chosen, framework, size=1, specs=specs)
    old = states(sim)[0]
    for number in range(4):
        merged, new = step(sim, number)[0], states(sim)[0]
        for spec in specs:
            key = (spec.name, "memory", "residual")
            given = old[key] + draw(spec, 1000 * number)
            sent = np.reshape(merged[spec.name], -1)
            assert np.array_equal(given, sent + new[key])
            assert not np.any((sent != 0) & (new[key] != 0)), "a coordinate was sent and kept"
        old = new


# --- nothing depends on scheduling ------------------------------------------------------------------------------


@each_combination()
def test_results_do_not_depend_on_the_buckets(chosen):
    alone, small, together = (simulate(chosen, bucket_bytes=size) for size in (0, 4096, 4 * 2**20))
    assert len(alone.plan.buckets) > len(together.plan.buckets)
    for number in range(3):
        first = step(alone, number)
        assert_same(first, step(small, number))
        assert_same(first, step(together, number))
    assert_same(states(alone), states(together))


@pytest.mark.parametrize("name", ["eden", "natural", "powersgd", "qsgd", "randomk", "terngrad"])
def test_random_numbers_follow_from_the_seed(name):
    one, two = simulate(METHODS[name]), simulate(METHODS[name])
    assert_same(step(one, 0), step(two, 0))
    other = grace.Simulation(RANKS, SPECS, dataclasses.replace(config(METHODS[name]), seed=6))
    assert not same(step(one, 1)[0]["matrix"], step(other, 1)[0]["matrix"])


# --- state ------------------------------------------------------------------------------------------------------


@each(chosen=TYPICAL, framework=FRAMEWORKS)
def test_a_checkpoint_continues_bit_for_bit(chosen, framework):
    sim, fresh = (simulate(chosen, framework, specs=specs_in(framework, chosen)) for _ in "ab")
    for number in range(2):
        step(sim, number)
    for run, new in zip(sim.runs, fresh.runs, strict=True):
        ops = run._ops("cpu")
        exact = new.load_state_dict(
            run.state_dict(),
            lambda saved, current, ops=ops: ops.reshape(ops.concat([saved]), tuple(current.shape)),
        )
        assert exact
    for number in range(2, 4):
        assert_same(step(sim, number), step(fresh, number))
    assert_same(states(sim), states(fresh))


@each_combination()
def test_the_state_of_the_last_step_is_never_changed(chosen):
    sim = simulate(chosen)
    for number in range(3):
        live = [run.state_dict() for run in sim.runs]
        before = states(sim)
        step(sim, number)
        after = [
            {
                (name, kind, field): np.array(value)
                for name, tensor in state["tensors"].items()
                for kind in ("memory", "compressor")
                for field, value in tensor[kind].items()
            }
            for state in live
        ]
        assert_same(before, after)


@each_combination()
def test_nothing_is_used_after_it_was_consumed(chosen, monkeypatch):
    # PoisonOps uses the reference implementation, whose float64 sums have another order than the kernels.
    monkeypatch.setenv("GRACE_NATIVE", "0")
    plain = simulate(chosen)
    expected = [step(plain, number) for number in range(3)], states(plain)
    # Patch it only now, because the simulation gets its operations at every call.
    monkeypatch.setattr("grace.core.session.simulation.get_ops", lambda framework, device: PoisonOps())
    poisoned = simulate(chosen)
    assert type(poisoned.runs[0]._ops("cpu")) is PoisonOps
    for number in range(3):
        assert_same(expected[0][number], step(poisoned, number))
    assert_same(expected[1], states(poisoned))


@each(chosen=TYPICAL, framework=[f for f in FRAMEWORKS if f != "tensorflow"])
def test_gradients_are_only_read(chosen, framework):
    """The gradients belong to the framework, and its backward pass may still need them."""
    sim = simulate(chosen, framework)
    for number in range(2):
        given = gradients(sim, number)
        before = on_host(sim, given)
        merged = sim.step(given)
        assert_same(before, on_host(sim, given))
        kept = on_host(sim, merged)
        sim.step(gradients(sim, number + 10))
        assert_same(kept, on_host(sim, merged))


@pytest.mark.parametrize("compressor", ["powersgd", "sketchedsgd", {"name": "terngrad", "shared_scale": True}])
def test_gradients_may_be_overwritten_once_they_were_taken(compressor):
    """These methods exchange proposals first, and compress after the ranks agree."""
    sims = [
        grace.Simulation(2, {"a": (64, 48)}, {"compressor": compressor, "memory": "none", "granularity": "layer"})
        for _ in range(2)
    ]
    results = []
    for sim, overwrites in zip(sims, (False, True), strict=True):
        for rank, run in enumerate(sim.runs):
            given = np.random.default_rng(rank).standard_normal((64, 48), np.float32)
            run.current.ready("a", given)
            if overwrites:
                given[:] = 7.0
        poll_all(sim.runs)
        results.append([run.finish() for run in sim.runs])
    assert_same(*results)


# --- bytes ------------------------------------------------------------------------------------------------------


def test_stats_tell_compressed_from_dense():
    sim = grace.Simulation(2, {"w": (64, 64), "bias": (64,)}, {"compressor": "topk", "compress_ratio": 0.01})
    for run in sim.runs:
        run.track_norms = True
    g = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    sim.step([{"w": g.copy(), "bias": np.ones(64, np.float32)} for _ in range(2)])
    stats = sim.runs[0].stats()
    assert stats["step"] == 1
    assert stats["dense_bytes"] == 4 * (64 * 64 + 64)
    assert stats["compressed_dense_bytes"] == 4 * 64 * 64
    # 40 values and indices of 4 bytes, one flag, padding to 16.
    assert stats["compressed_wire_bytes"] == 336
    assert stats["wire_bytes"] == 336 + 4 * 64
    w = stats["tensors"]["w"]
    assert (w["compressor"], w["dense_bytes"], w["wire_bytes"]) == ("topk", 4 * 64 * 64, 320)
    kept = np.sort(np.abs(g).ravel())[-40:].astype(np.float64)
    total = np.linalg.norm(g.astype(np.float64))
    left = np.sqrt(total**2 - np.sum(kept**2))
    assert w["residual_norm"] == pytest.approx(left, rel=1e-5)
    assert w["relative_error"] == pytest.approx(left / total, rel=1e-5)
    assert stats["tensors"]["bias"]["relative_error"] == 0
    assert stats["tensors"]["bias"]["residual_norm"] is None


@every_framework
def test_scalars_are_the_sums_and_means_of_the_statistics(framework):
    rules = [{"match": "v", "compressor": "qsgd"}]
    sim = grace.Simulation(
        3,
        {"u": (40, 30), "v": (50, 40), "w": (30, 60), "bias": (64,)},
        {"compressor": "topk", "compress_ratio": 0.1, "rules": rules, "bucket_bytes": 0},
        framework=framework,
    )
    sim.track_norms = True
    for number in range(2):
        step(sim, number)
        for rank in range(3):
            stats, found = sim.stats(rank), sim.scalars(rank)
            tensors = stats["tensors"]
            errors = [tensors[name]["relative_error"] for name in "uvw"]
            expected = {
                "grace/wire_bytes": stats["wire_bytes"],
                "grace/dense_bytes": 4 * (1200 + 2000 + 1800 + 64),
                "grace/ratio": stats["wire_bytes"] / (4 * (1200 + 2000 + 1800 + 64)),
                "grace/relative_error": np.mean(errors),
                "grace/residual_norm": np.hypot(tensors["u"]["residual_norm"], tensors["w"]["residual_norm"]),
            }
            assert len(stats["buckets"]) > 2
            for phase in ("compress", "wait", "merge"):
                spans = [bucket[phase] for bucket in stats["buckets"].values()]
                expected[f"grace/{phase}_seconds"] = sum(end - begin for begin, end in spans)
            assert found == pytest.approx(expected)
            assert {type(value) for value in found.values()} == {float}


def test_scalars_leave_out_what_is_not_known():
    sim = grace.Simulation(2, {"w": (64, 64)}, {"compressor": "topk"})
    assert set(sim.scalars()) == {"grace/wire_bytes", "grace/dense_bytes", "grace/ratio"}
    step(sim, 0)
    times = {f"grace/{phase}_seconds" for phase in ("compress", "wait", "merge")}
    assert set(sim.scalars()) == {"grace/wire_bytes", "grace/dense_bytes", "grace/ratio", *times}
    assert grace.Simulation(1, {}, {"compressor": "topk"}).scalars()["grace/ratio"] == 1


# --- payloads of run-time length --------------------------------------------------------------------------------


@every_framework
def test_ranks_that_select_nothing_take_part(framework):
    """In the first step only rank 1 has an element above the threshold, in the second step no rank has one."""
    chosen = registered.default_method(compressors.make({"name": "threshold", "threshold": 100.0}))
    sim = simulate(chosen, framework, specs=SPECS[:2])

    def loud(name, rank, x):
        x = x * 0
        if rank == 1:
            x[..., 2] = 300.0
        return x

    merged = step(sim, 0, change=loud)
    assert all(np.array_equal(mine["vector"], np.where(np.arange(131) == 2, np.float32(100), 0)) for mine in merged)
    bytes_of = [run.stats()["wire_bytes"] for run in sim.runs]
    assert bytes_of[0] == bytes_of[2] < bytes_of[1]
    quiet = step(sim, 1, change=lambda name, rank, x: x * 0)
    assert not any(x.any() for mine in quiet for x in mine.values())


def test_dense_and_compressed_tensors_of_several_methods_share_a_step():
    sim = grace.Simulation(
        RANKS,
        SPECS,
        make_config(
            compressor="topk",
            compress_ratio=0.1,
            default_rules=False,
            rules=[
                {"match": "matrix", "compressor": "powersgd"},
                {"match": "vec*", "compressor": "threshold", "threshold": 0.5},
                {"dtype": "float16", "compressor": "fp16"},
                {"max_numel": 1, "compressor": "none"},
            ],
        ),
    )
    used = {item.spec.name: compressors.name_of(item.compressor) for item in sim.plan.assignments}
    assert used == {
        "matrix": "powersgd",
        "vector": "threshold",
        "scalar": "none",
        "empty": "none",
        "half": "fp16",
        "brain": "topk",
        "double": "topk",
    }
    for number in range(3):
        first, *others = step(sim, number)
        for other in others:
            assert_same([first], [other])


def test_every_combination_has_a_memory_and_a_way_to_travel():
    reached = {compressors.name_of(chosen.compressor) for chosen in registered.valid_methods()}
    assert reached == set(compressors)
    served = {memories.name_of(chosen.memory) for chosen in registered.valid_methods()}
    assert served == set(memories) - registered.MEMORIES_OF_SHARDS - registered.MEMORIES_OF_PAPERS
    assert {communicators.name_of(chosen.communicator) for chosen in registered.valid_methods()} == set(
        communicators
    ) - registered.OF_SHARDS - {"auto"}


@pytest.mark.parametrize("communicator", ["allgather", "two_shot", "sparse_allreduce"])
def test_gradients_come_bucket_by_bucket(communicator):
    """They are those of a whole step, also of a tensor that is cut into several buckets."""
    config = {"compressor": "topk", "communicator": communicator, "default_rules": False}
    config |= {"bucket_bytes": 8192, "split_bytes": 16384}
    specs = [TensorSpec("long", (40, 300)), TensorSpec("a", (50, 30)), TensorSpec("b", (20, 60))]
    whole, early = (grace.Simulation(3, specs, config) for _ in "ab")
    for number in range(2):
        expected, given = step(whole, number), gradients(early, number)
        for run, mine in zip(early.runs, given, strict=True):
            for name, x in mine.items():
                run.current.ready(name, x, 0.1)
        poll_all(early.runs)
        merged = [list(run.current.complete()) for run in early.runs]
        for run, found, all_of_it in zip(early.runs, merged, expected, strict=True):
            assert len(found) == len(early.plan.buckets) > 3
            assert sorted(name for each in found for name in each) == ["a", "b", "long"]
            rest = run.finish()
            assert rest.keys() == all_of_it.keys()
            assert all(same(rest[name], x) for each in (all_of_it, *found) for name, x in each.items())
    assert_same(states(whole), states(early))


def test_all_buckets_start_their_next_round_before_one_is_awaited_again(monkeypatch):
    """So the second rounds of the first buckets travel while a rank waits for the first rounds of the last ones."""
    sim = grace.Simulation(2, {"a": (50, 30), "b": (20, 60), "c": (40, 30)}, {"compressor": "topk", "bucket_bytes": 1})
    for run, mine in zip(sim.runs, gradients(sim, 0), strict=True):
        for name, x in mine.items():
            run.current.ready(name, x, 0.1)
    poll_all(sim.runs)
    plain, calls = BucketStep.advance, []

    def with_another_round(bucket, transport, name):
        calls.append(name)
        return calls.count(name) == 1 or plain(bucket, transport, name)

    monkeypatch.setattr(BucketStep, "advance", with_another_round)
    names = [bucket.name for bucket in sim.plan.buckets]
    assert len(list(sim.runs[0].current.complete())) == len(names) == 3
    assert calls == [*names, *names]
