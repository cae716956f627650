"""The communicator sparse_allreduce: sparse sums by index ranges, with what is dropped returned to the memories."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import grace
from grace.core.communicators.sparse_allreduce import SparseAllreduce
from grace.core.config.config import Method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.errors import IncompatibleError
from grace.core.spec import TensorSpec
from grace.core.wire.codings import Coding
from grace.testing import CommunicatorContract
from grace.testing.communicator_contract import residuals
from grace.testing.harness import FRAMEWORKS
from tests.support.covering import ALL
from tests.support.steps import WithTypical, assert_same, gradient, gradients, in_a_graph, simulate, states, step

REDUCTIONS = ["split", "union", "tree"]
SPECS = [TensorSpec("long", (3, 2000)), TensorSpec("short", (131,)), TensorSpec("empty", (0, 4))]
SPECS += [TensorSpec("half", (30, 60), "float16"), TensorSpec("double", (16, 90), "float64")]
# Large enough for counts of magnitudes.
WIDE = TensorSpec("wide", (300, 200))


def method(compressor, reduction, memory=None):
    compressor = compressors.example(compressor) if isinstance(compressor, str) else compressors.make(compressor)
    memory = memories.make(memory or compressor.default_memory)
    return Method(compressor, memory, SparseAllreduce(reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
class TestSparseAllreduce(WithTypical, CommunicatorContract):
    @pytest.fixture
    def communicator(self, reduction):
        return SparseAllreduce(reduction)


def payload_of_sums(sim, given):
    """Return the sums of what all ranks chose from these gradients alone, as a dense array."""
    total = 0.0
    for mine in given:
        x = mine["wide"].reshape(-1)
        k = int(sim.plan.units[0].compressor.compress_ratio * x.size)
        top = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
        sent = np.zeros(x.size)
        sent[top] = x[top]
        total = total + sent
    return total


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("ratio", [0.05, 0.005])
def test_the_largest_sums_come_back(size, ratio):
    """With 3,000 entries all but those of one magnitude are the largest; with 300, each range returns its largest."""
    sim = simulate(method({"name": "topk", "compress_ratio": ratio}, "split"), size=size, specs=[WIDE])
    given = gradients(sim, 0)
    merged = sim.step(given)[0]["wide"].reshape(-1).astype(np.float64) * size
    total, k = payload_of_sums(sim, given), int(ratio * WIDE.numel)
    kept = np.flatnonzero(merged)
    assert np.allclose(merged[kept], total[kept], rtol=1e-6)
    assert k - size <= kept.size <= k + size * (ratio < 0.01)
    bound = np.sort(np.abs(total))[-k]
    if ratio > 0.01:
        assert np.abs(total[kept]).min() >= bound / 1.25
        left = np.setdiff1d(np.arange(total.size), kept)
        assert np.abs(total[left]).max() <= bound * 1.25
    else:
        assert np.abs(total[kept]).sum() >= 0.9 * np.sort(np.abs(total))[-kept.size :].sum()


@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_words_do_not_grow_with_the_ranks(size, crossed):
    """Li and Hoefler: less than 6 k (N - 1) / N words. The entries of real gradients lie in some tensors only."""
    spec = TensorSpec("wide", (500, 500))
    sim = simulate(method({"name": "topk", "compress_ratio": 0.02}, "split"), size=size, specs=[spec])
    k, steps = int(0.02 * spec.numel), 3
    for number in range(steps):
        given = gradients(sim, number)
        for mine in given:
            mine["wide"][100:] *= np.float32(0.01)
        sim.step(given)
    assert max(crossed.values()) / steps <= 6 * k * (size - 1) / size
    # The ranges hold equally many entries, although these lie in a fifth of the tensor.
    assert max(crossed.values()) <= 1.5 * min(crossed.values())


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("k", [64, 1024, 1100, 2048])
def test_words_of_small_units(k, size, crossed):
    """Ranges and headers count beside few entries, and 2,048 words of counts from 2,048 entries on."""
    spec = TensorSpec("wide", (250, 400))
    sim = simulate(method({"name": "topk", "compress_ratio": k / spec.numel}, "split"), size=size, specs=[spec])
    sim.step(gradients(sim, 0))
    mean, share = sum(crossed.values()) / size, (size - 1) / size
    assert mean <= (4 * k + 2048 * (k >= 2048)) * share + 20 * size
    if k >= 20 * size:
        assert mean <= 6 * k * share


def test_words_of_a_tree_grow_with_the_logarithm(crossed):
    sent = {}
    for size in (2, 4, 16):
        crossed.clear()
        sim = simulate(method({"name": "topk", "compress_ratio": 0.02}, "tree"), size=size, specs=[WIDE])
        sim.step(gradients(sim, 0))
        k = int(0.02 * WIDE.numel)
        # Each rank but the first one sends its entries once.
        assert all(crossed[rank] <= 2 * k + 20 for rank in range(1, size))
        sent[size] = sum(crossed.values()) / size
    assert sent[16] <= 2 * sent[4]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_union_is_what_allgather_gives(size):
    chosen = method({"name": "topk", "compress_ratio": 0.1}, "union")
    plain = dataclasses.replace(chosen, communicator=communicators.make("allgather"))
    a, b = simulate(chosen, size=size, specs=SPECS), simulate(plain, size=size, specs=SPECS)
    for number in range(3):
        assert_same(step(a, number), step(b, number))
    assert_same(states(a), states(b))


def test_a_union_that_fills_travels_without_indices(crossed):
    sent = {}
    for ratio in (0.05, 0.4):
        crossed.clear()
        sim = simulate(method({"name": "topk", "compress_ratio": ratio}, "union"), size=8, specs=[WIDE])
        sim.step(gradients(sim, 0))
        sent[ratio] = max(crossed.values()) - 2 * ratio * WIDE.numel * 7 / 8
    # Eight ranks fill a third of the ranges, or nearly all.
    assert sent[0.05] < 0.75 * WIDE.numel
    assert 0.8 * WIDE.numel < sent[0.4] < 1.1 * WIDE.numel


def reference_tree(given, k):
    """gTop-k: rank 0's result, and what each rank has dropped."""

    def largest(x):
        y = np.zeros_like(x)
        top = np.argsort(-np.abs(x), kind="stable")[:k]
        y[top] = x[top]
        return y

    sums, size = [largest(x) for x in given], len(given)
    dropped = [x - y for x, y in zip(given, sums, strict=True)]
    gap = 1
    while gap < size:
        for rank in range(0, size - gap, 2 * gap):
            both = sums[rank] + sums[rank + gap]
            sums[rank] = largest(both)
            dropped[rank] = dropped[rank] + both - sums[rank]
        gap *= 2
    return sums[0], dropped


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_tree_keeps_the_largest_of_every_pair(size):
    """Shi et al., 2019, algorithm 2; what a rank drops stays with it."""
    sim = simulate(method({"name": "topk", "compress_ratio": 0.02}, "tree"), size=size, specs=[WIDE])
    given = gradients(sim, 0)
    k = int(0.02 * WIDE.numel)
    expected, dropped = reference_tree([x["wide"].reshape(-1) for x in given], k)
    merged = sim.step(given)[0]["wide"].reshape(-1)
    assert np.allclose(merged * size, expected, rtol=1e-6)
    for rank, run in enumerate(sim.runs):
        (unit,) = run.units.values()
        assert np.allclose(unit["memory"]["residual"], dropped[rank], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["split", "tree"])
@pytest.mark.parametrize("size", [2, 5])
def test_nothing_is_lost(reduction, size):
    sim = simulate(method({"name": "topk", "compress_ratio": 0.03}, reduction), size=size, specs=[WIDE, SPECS[0]])
    total = {spec.name: np.zeros(spec.shape) for spec in (WIDE, SPECS[0])}
    for number in range(5):
        applied = step(sim, number)[0]
        for name in total:
            spec = WIDE if name == "wide" else SPECS[0]
            total[name] += sum(gradient(spec, number, rank).astype(np.float64) for rank in range(size)) / size
            total[name] -= applied[name]
    for name, held in residuals(sim).items():
        assert np.abs(held - total[name]).max() <= 1e-5 * np.abs(held).max()


@pytest.mark.parametrize("reduction", ["split", "tree"])
def test_momentum_of_what_is_dropped_goes_on(reduction):
    """DGC masks the momentum of what was sent. What comes back to the rank was not sent."""
    sim = simulate(method({"name": "topk", "compress_ratio": 0.02}, reduction, "dgc"), size=4, specs=[WIDE])
    given = gradients(sim, 0)
    merged = sim.step(given)[0]["wide"].reshape(-1)
    for rank, run in enumerate(sim.runs):
        (unit,) = run.units.values()
        mine = given[rank]["wide"].reshape(-1)
        chosen = np.argsort(-np.abs(mine), kind="stable")[: int(0.02 * WIDE.numel)]
        back = np.setdiff1d(chosen, np.flatnonzero(merged))
        assert back.size
        if reduction == "split":
            assert (unit["memory"]["momentum"][back] == mine[back]).all()
            assert (unit["memory"]["momentum"][np.intersect1d(chosen, np.flatnonzero(merged))] == 0).all()
    total = sum(run.units[sim.plan.units[0].spec.name]["memory"]["residual"] for run in sim.runs)
    assert np.allclose(total + 4 * merged, sum(x["wide"].reshape(-1) for x in given), atol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["topk", "threshold"])
def test_frameworks_agree(framework, reduction, name):
    chosen = method({"name": name, "threshold": 1.5} if name == "threshold" else name, reduction)
    specs = [WIDE, SPECS[1]]
    numpy, other = (simulate(chosen, which, size=3, specs=specs) for which in ("numpy", framework))
    for number in range(2):
        assert_same(step(numpy, number), step(other, number))
    assert_same(states(numpy), states(other))


# Tracing takes seconds, and ranks with TensorFlow run it in a graph.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["topk", "threshold"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_graph_gives_the_same(reduction, name):
    chosen = method(
        {"name": name, "threshold": 1.5} if name == "threshold" else {"name": name, "compress_ratio": 0.05}, reduction
    )
    size, specs = (3, [WIDE, SPECS[1]]) if ALL else (2, [WIDE])
    assert_same(in_a_graph(chosen, size, specs), step(simulate(chosen, size=size, specs=specs), 0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ranks_that_choose_nothing_take_part(reduction):
    sim = simulate(method({"name": "threshold", "threshold": 50.0}, reduction), size=3, specs=[WIDE])
    given = gradients(sim, 0)
    assert (sim.step(given)[2]["wide"] == 0).all()
    given[1]["wide"][7, 5] = 300.0
    merged = sim.step(given)[2]["wide"]
    assert np.isclose(merged[7, 5], 100, atol=2)
    assert np.count_nonzero(merged) == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [("randomk", "the values can be added"), ("qsgd", "not a list of exact values"), ("wangni", "not a list of exact")],
)
def test_what_is_not_sparse_is_refused(name, told):
    with pytest.raises(IncompatibleError, match=told):
        grace.make_config(compressor=name, **compressors.required(name), communicator="sparse_allreduce")


@pytest.mark.parametrize("key", ["index_coding", "coding"])
def test_indices_can_be_coded(key):
    chosen = method({"name": "topk", "compress_ratio": 0.05}, "split")
    coding = Coding("smallest")
    other = chosen if key == "index_coding" else dataclasses.replace(chosen, coding=coding)
    options = {key: coding.every} if key == "index_coding" else {}
    plain, coded = simulate(chosen, size=4, specs=[WIDE]), simulate(other, size=4, specs=[WIDE], **options)
    for number in range(2):
        assert_same(step(plain, number), step(coded, number))
    assert coded.runs[0].stats()["wire_bytes"] < 0.8 * plain.runs[0].stats()["wire_bytes"]
