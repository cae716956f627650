"""Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError
from grace.core.spec import TensorSpec
from tests.papers.common import make, normal, payload, send, simulate, state, step
from tests.support.covering import rest_slow


@pytest.mark.parametrize("threshold", [0.1, 1.0, 2.5])
def test_absolute_compressor(threshold):
    """|x - C(x)|^2 <= d threshold^2 for every x of any size. An element equal to the threshold is kept."""
    compressor = make("hardthreshold", threshold=threshold)
    for size in (0.01, 1.0, 100.0):
        x = size * normal(1000)
        sent = send(compressor, x)
        assert np.array_equal(sent, np.where(np.abs(x) >= np.float32(threshold), x, 0))
        assert np.sum((x - sent) ** 2) <= 1000 * threshold**2
    edge = np.float32([threshold, -threshold, np.nextafter(np.float32(threshold), np.float32(0)), 0])
    assert np.array_equal(send(compressor, edge), [edge[0], edge[1], 0, 0])


def test_residual_is_bounded_at_every_step():
    """Remark 5 in units of the gradient: |e|^2 <= d threshold^2 on every rank, for any gradients."""
    n, threshold = 200, 0.5
    sim = simulate(3, (n,), make("hardthreshold", threshold=threshold), "residual")
    for number in range(50):
        xs = [normal(n, 3 * number + rank) * (1 + 10 * (number % 7)) for rank in range(3)]
        step(sim, xs)
        for rank in range(3):
            e = state(sim, rank)
            assert np.abs(e).max() < threshold
            assert np.sum(e.astype(np.float64) ** 2) <= n * threshold**2


def test_one_threshold_for_the_whole_run_beats_top_k_of_every_step():
    """Lemma 3: of all ways to keep K elements of a sequence, a threshold leaves the smallest total error."""
    rows = [normal(20, seed) * (1 + seed % 5) for seed in range(50)]
    k_total = 100
    threshold = float(np.sort(np.abs(np.concatenate(rows)))[-k_total])
    hard, top = make("hardthreshold", threshold=threshold), make("topk", compress_ratio=2 / 20)
    sent = [(send(hard, x), send(top, x)) for x in rows]
    kept = [sum(np.count_nonzero(pair[i]) for pair in sent) for i in (0, 1)]
    assert kept == [k_total, k_total]
    errors = [sum(np.sum((x - pair[i]) ** 2) for x, pair in zip(rows, sent, strict=True)) for i in (0, 1)]
    assert errors[0] < 0.75 * errors[1]
    # No other choice of as many elements is better.
    values = np.sort(np.concatenate(rows).astype(np.float64) ** 2)
    assert errors[0] == pytest.approx(values[:-k_total].sum())


def test_rule_of_the_paper_counts_the_whole_model():
    """threshold = 1 / (2 sqrt(k)); Table 1: ResNet-18 with k = 11,174 of 11,173,962 elements gives 4.73e-3."""
    tensors = {"a": (300, 100), "b": (100, 200)}
    sim = grace.Simulation(
        1, tensors, {"compressor": "hardthreshold", "compress_ratio": 0.01, "tune_steps": 0, "default_rules": False}
    )
    threshold = 1 / (2 * math.sqrt(0.01 * 50_000))
    x = {n: normal(math.prod(s)).reshape(s) * 0.05 for n, s in tensors.items()}
    merged = sim.step([x])[0]
    assert all(np.array_equal(merged[n], np.where(np.abs(x[n]) >= threshold, x[n], 0)) for n in tensors)
    resnet = TensorSpec("w", (10,), model_numel=11_173_962)
    assert make("hardthreshold", compress_ratio=0.001).fixed(resnet) == pytest.approx(4.73e-3, rel=1e-3)


def test_nothing_to_send_is_a_normal_step():
    assert len(payload(make("hardthreshold", threshold=10.0), normal(100))["values"]) == 0


@pytest.mark.parametrize("framework", rest_slow(["numpy", "torch"], 1))
@pytest.mark.parametrize(("scale", "controlled"), [(1e-5, False), (1.0, True), (100.0, False)])
def test_tuning_finds_the_density(scale, controlled, framework):
    """Gradients of any size: what is tuned gets within a fifth of the requested volume."""
    shapes, ratio, tune = {"a": (50, 40), "b": (30, 20)}, 0.02, 200
    config = {"compressor": "hardthreshold", "compress_ratio": ratio, "tune_steps": tune, "default_rules": False}
    config["controlled"] = controlled
    sim = grace.Simulation(2, shapes, {**config, "granularity": "layer"}, framework=framework)
    rng = np.random.default_rng(0)
    sent = []
    for _ in range(tune + 100):
        drawn = [{n: rng.standard_normal(s).astype(np.float32) ** 3 * scale for n, s in shapes.items()} for _ in "ab"]
        if framework == "torch":
            torch = pytest.importorskip("torch")
            drawn = [{n: torch.from_numpy(x.astype(np.float32)) for n, x in mine.items()} for mine in drawn]
        sim.step(drawn)
        sent.append(sum(t["wire_bytes"] for e in sim.runs for t in e.stats()["tensors"].values()) / 8 / 2)
        if len(sent) == tune:
            tuned = thresholds(sim)
    assert len(set(thresholds(sim))) == 1, "one threshold for all tensors and ranks"
    assert thresholds(sim) == tuned, "it stays once it is tuned"
    assert 0.8 <= np.mean(sent[tune:]) / (ratio * 2600) <= 1.25


def logistic(rng):
    """Return the gradient of a logistic regression at weights, by rank."""
    a = rng.standard_normal((3000, 2000)) * np.exp(rng.standard_normal(2000))
    a /= np.linalg.norm(a, axis=1, keepdims=True)
    y = np.sign(a @ rng.standard_normal(2000))

    def gradient(weights):
        rows = rng.integers(0, len(a), 16)
        margin = y[rows] * (a[rows] @ weights["w"])
        return {"w": -(a[rows] * (y[rows] / (1 + np.exp(margin)))[:, None]).mean(0)}

    return {"w": np.zeros(2000)}, gradient, 5.0


def perceptron(rng):
    """Return the gradient of a perceptron with one hidden layer at weights, by rank."""
    x = rng.standard_normal((1000, 50))
    y = np.tanh(x @ rng.standard_normal((50, 40))) @ rng.standard_normal((40, 10))
    start = {"a": rng.standard_normal((50, 80)) / 7, "b": rng.standard_normal((80, 10)) / 9}

    def gradient(weights):
        rows = rng.integers(0, len(x), 16)
        hidden = np.maximum(x[rows] @ weights["a"], 0)
        error = (hidden @ weights["b"] - y[rows]) / len(rows)
        return {"a": x[rows].T @ ((error @ weights["b"].T) * (hidden > 0)), "b": hidden.T @ error}

    return start, gradient, 0.01


def run(task, steps, **options):
    """Return the density of every step on four ranks, as a share of what was asked, and the simulation."""
    weights, gradient, rate = task(np.random.default_rng(0))
    shapes = {name: x.shape for name, x in weights.items()}
    sim = grace.Simulation(4, shapes, {"compressor": "hardthreshold", "default_rules": False, **options})
    asked = 4 * options["compress_ratio"] * sum(x.size for x in weights.values())
    densities = []
    for _ in range(steps):
        given = [{n: x.astype(np.float32) for n, x in gradient(weights).items()} for _ in range(4)]
        merged = sim.step(given)[0]
        weights = {n: x - rate * merged[n] for n, x in weights.items()}
        sent = sum(t["wire_bytes"] for run in sim.runs for t in run.stats()["tensors"].values()) / 8
        densities.append(sent / asked)
    return np.array(densities), sim


@pytest.mark.parametrize(
    ("task", "ratio", "steps"),
    rest_slow(
        [
            *((logistic, 0.01, 200), (perceptron, 0.002, 200)),
            *((logistic, 0.002, 200), (perceptron, 0.01, 200)),
            *itertools.product((logistic, perceptron), (0.01, 0.002), (400,)),
        ],
        2,
    ),
)
def test_controlled_volume_of_the_whole_run_is_within_a_tenth(task, ratio, steps):
    densities, sim = run(task, steps, compress_ratio=ratio, controlled=True)
    assert densities.mean() == pytest.approx(1, abs=0.1)
    (volume,) = {t["volume"] for run in sim.runs for t in run.stats()["tensors"].values()}
    # In the first step, every unit sends a whole number of elements.
    assert volume == pytest.approx(densities.mean(), abs=0.01)


@pytest.mark.parametrize("options", [{"compress_ratio": 0.01}, {"compress_ratio": 0.002, "tune_steps": 40}], ids=str)
@pytest.mark.parametrize("task", rest_slow([perceptron, logistic], 1))
def test_a_short_probe_predicts_the_volume_of_the_run(task, options):
    """The threshold is chosen once, and the statistics say how far off the volume is."""
    densities, sim = run(task, 400, **options)
    assert 0.5 < densities.mean() < 1.6
    (volume,) = {t["volume"] for run in sim.runs for t in run.stats()["tensors"].values()}
    assert volume == pytest.approx(densities.mean(), abs=0.02)
    assert densities[300:].std() > 0


def test_density_rises_and_falls_with_the_gradients():
    """Figure 3c: a fixed threshold sends more where gradients are large; top-k and control do not."""
    steps, n = 240, 4000
    size = np.where(np.arange(steps) // 60 == 2, 2.0, 1.0)

    def quarters(**options):
        sim = grace.Simulation(3, {"w": (n,)}, {"compress_ratio": 0.01, "default_rules": False, **options})
        rng, sent = np.random.default_rng(0), []
        for scale in size:
            sim.step([{"w": (scale * rng.standard_normal(n)).astype(np.float32)} for _ in range(3)])
            sent.append(sum(e.stats()["tensors"]["w"]["wire_bytes"] for e in sim.runs) / 8 / 3 / (0.01 * n))
        return np.array(sent).reshape(4, 60).mean(1), sim

    fixed, sim = quarters(compressor="hardthreshold")
    assert fixed[2] > 2 * fixed[1]
    assert fixed[3] < 0.6 * fixed[2]
    (chosen,) = {float(e.state_dict()["tensors"]["w"]["compressor"]["threshold"][0]) for e in sim.runs}
    assert chosen > 0
    controlled, _ = quarters(compressor="hardthreshold", controlled=True)
    assert controlled.max() < 1.5 * controlled.min()


def test_no_volume_is_known_without_tuning():
    sim = grace.Simulation(1, {"w": (50, 40)}, {"compressor": "hardthreshold", "threshold": 1.0})
    sim.step([{"w": normal(2000).reshape(50, 40)}])
    assert sim.stats()["tensors"]["w"]["volume"] is None


def test_gradients_of_zero_leave_the_tuner_where_it_is():
    config = {"compressor": "hardthreshold", "compress_ratio": 0.001, "default_rules": False}
    sim = grace.Simulation(2, {"w": (50, 40)}, config)
    rng, zero = np.random.default_rng(0), np.zeros((50, 40), np.float32)
    sent = []
    for number in range(120):
        sim.step([{"w": zero if number < 3 else rng.standard_normal((50, 40)).astype(np.float32)} for _ in "ab"])
        sent.append(sum(e.stats()["tensors"]["w"]["wire_bytes"] for e in sim.runs) / 8 / 2)
    assert sent[:3] == [0, 0, 0]
    assert 0 < max(sent) <= 40
    assert np.mean(sent[3:]) == pytest.approx(0.001 * 2000, rel=0.2)


@pytest.mark.parametrize(
    "config",
    [
        {"compressor": "topk", "schedule": [{"step": 250, "compressor": "hardthreshold", "compress_ratio": 0.02}]},
        {"compressor": "hardthreshold", "compress_ratio": 0.02, "warmup_steps": 600},
    ],
    ids=["method", "ratio"],
)
def test_what_a_schedule_changes_late_is_tuned_from_there(config):
    tune = {"tune_steps": 200}
    if "schedule" in config:
        config["schedule"][0].update(tune)
    else:
        config = {**config, **tune}
    sim = grace.Simulation(2, {"w": (50, 40)}, {**config, "default_rules": False})
    rng, sent = np.random.default_rng(0), []
    for _ in range(900):
        sim.step([{"w": rng.standard_normal((50, 40)).astype(np.float32) * 1e-3} for _ in "ab"])
        sent.append(sum(e.stats()["tensors"]["w"]["wire_bytes"] for e in sim.runs) / 8 / 2)
    assert 0.8 <= np.mean(sent[800:]) / (0.02 * 2000) <= 1.25


def thresholds(sim):
    states = [run.state_dict()["tensors"][n]["compressor"]["threshold"] for run in sim.runs for n in "ab"]
    return [float(value[0]) for value in states]


def test_a_given_threshold_is_never_tuned():
    assert make("hardthreshold", threshold=1.0).init(None, None, 0) == {}


@pytest.mark.parametrize(
    "options", [{"threshold": 0.0}, {"threshold": -1.0}, {"tune_steps": -1}, {"compress_ratio": 0}]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        make("hardthreshold", **options)
