"""The mean over the ranks that have sent a coordinate, as in SparseLoCo's code: allgather with `reduce = "senders"`."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError, IncompatibleError
from grace.testing.harness import array, host
from tests.support.registered import every_framework

SENDERS = {"compressor": "topk", "default_rules": False, "communicator": "allgather", "reduce": "senders"}


def rows(ranks, n=200):
    return [np.random.default_rng(rank).standard_normal(n).astype(np.float32) * (rank + 1) for rank in range(ranks)]


def stepped(config, given, framework="numpy", **options):
    sim = grace.Simulation(len(given), {"w": given[0].shape}, config, framework=framework, **options)
    ops = sim.run.ops("cpu")
    merged = sim.step([{"w": array(ops, x, "float32")} for x in given])
    found = [host(ops, m["w"]) for m in merged]
    assert all(x.tobytes() == found[0].tobytes() for x in found)
    return found[0]


def kept(x, k):
    """Return x with its k largest magnitudes only."""
    sent = np.zeros_like(x)
    largest = np.argsort(-abs(x), kind="stable")[:k]
    sent[largest] = x[largest]
    return sent


@every_framework
def test_a_coordinate_that_one_rank_sends_moves_by_its_full_value(framework):
    given = [np.zeros(100, np.float32) for _ in range(3)]
    given[0][5], given[1][7], given[2][7] = 6.0, 2.0, 4.0
    merged = stepped({**SENDERS, "compress_ratio": 0.01}, given, framework)
    assert merged[5] == 6.0
    assert merged[7] == 3.0
    assert np.count_nonzero(merged) == 2


@every_framework
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_norms_are_limited_to_their_median(framework, ranks):
    given = rows(ranks)
    merged = stepped({**SENDERS, "compress_ratio": 0.1, "clip": "median_norm"}, given, framework)
    sent = np.stack([kept(x, 20) for x in given]).astype(np.float64)
    norms = np.linalg.norm(sent, axis=1)
    limits = np.minimum(1, np.sort(norms)[(ranks - 1) // 2] / norms)
    count = (sent != 0).sum(axis=0)
    np.testing.assert_allclose(merged, (limits @ sent) / np.maximum(count, 1), rtol=1e-5, atol=1e-7)
    assert ranks == 1 or count.max() > 1


def test_if_all_is_sent_it_is_the_mean():
    given = rows(4)
    merged = stepped({**SENDERS, "compress_ratio": 1.0}, given)
    np.testing.assert_allclose(merged, sum(given) / 4, rtol=1e-6, atol=1e-6)


def test_residuals_hold_back_what_was_not_sent():
    """A rank drops what it has sent from its residual, whatever others make of it."""
    config = {**SENDERS, "compress_ratio": 0.1, "clip": "median_norm"}
    sim, given = grace.Simulation(3, {"w": (200,)}, config), rows(3)
    sim.step([{"w": x} for x in given])
    for run, x in zip(sim.runs, given, strict=True):
        (unit,) = run.plan.units
        np.testing.assert_array_equal(run.units[unit.spec.name]["memory"]["residual"], x - kept(x, 20))


def test_a_quantized_sparsifier_has_senders_too():
    config = {
        "compressor": {"name": "chain", "sparsifier": {"name": "topk", "compress_ratio": 0.1}, "quantizer": "fp16"},
        "communicator": {"name": "allgather", "reduce": "senders"},
        "default_rules": False,
    }
    given = rows(2)
    sent = np.stack([kept(x, 20) for x in given])
    expected = sent.sum(axis=0) / np.maximum((sent != 0).sum(axis=0), 1)
    np.testing.assert_allclose(stepped(config, given), expected, rtol=1e-3)


def test_outer_steps_of_sparse_changes_move_by_what_was_sent():
    outer = {"every": 1, "preset": "sparseloco"}
    sim = grace.Simulation(2, {"w": (100,)}, {**SENDERS, "compress_ratio": 0.01, "clip": "median_norm"}, outer=outer)
    sim.begin({"w": np.zeros(100, np.float32)})
    own = np.zeros((2, 100), np.float32)
    own[0, 3], own[1, 8] = 2.0, 2.0
    merged = sim.step([{"w": x} for x in own])
    assert {i: float(x) for i, x in enumerate(merged[0]["w"]) if x} == {3: 2.0, 8: 2.0}


def test_what_has_no_senders_is_refused():
    with pytest.raises(IncompatibleError, match="all ranks send all coordinates"):
        stepped({**SENDERS, "compressor": "qsgd"}, rows(2))
    with pytest.raises(IncompatibleError, match="follows the mean over all ranks"):
        stepped({**SENDERS, "memory": "diana"}, rows(2))
    with pytest.raises(ConfigError, match="clip = 'median_norm' limits what senders contribute"):
        stepped({**SENDERS, "reduce": "mean", "clip": "median_norm"}, rows(2))
