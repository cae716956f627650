"""Outer steps that clip what a rank sends and add noise: SoteriaFL."""

import copy

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError
from grace.core.spec import TensorSpec
from grace.testing.harness import host
from tests.core.test_outer_steps import NONE, Training, assert_close, draw

SHAPES = {"a": (40, 30), "b": (700,)}
LOCAL = {"buffers": "local"}


def noisy(outer, config=NONE, ranks=3, framework="numpy"):
    """Return a training, and a list that fills with what each rank sends of each tensor, by sync and rank."""
    training, sent = Training({**LOCAL, **outer}, config, ranks, framework, SHAPES), []
    for run in training.sim.outers:
        run._private = _recorded(run._private, sent, training)
    return training, sent


def _recorded(private, sent, training):
    def record(changes):
        made = private(changes)
        given, x = ({n: host(training.ops, v).astype(np.float64) for n, v in each.items()} for each in (changes, made))
        sent.append((given, x))
        return made

    return record


def limited(change, bound):
    norm = np.sqrt(sum((x**2).sum() for x in change.values()))
    return {name: x * min(1, bound / norm) for name, x in change.items()}


@pytest.mark.parametrize(("framework", "ranks"), [("numpy", 2), ("numpy", 3), ("numpy", 4), ("torch", 3)])
def test_changes_are_clipped_by_their_norm_over_all_tensors(framework, ranks):
    pytest.importorskip(framework)
    # A bound that some changes keep and others do not.
    training = Training({"every": 2, "clip": 8.0}, NONE, ranks, framework, SHAPES, rate=0.1)
    common = {name: x.astype(np.float64) for name, x in training.start.items()}
    weights, limits = [dict(common) for _ in range(ranks)], set()
    for step in range(1, 13):
        training.step()
        for rank, own in enumerate(weights):
            for name, x in own.items():
                own[name] = x - training.rate * (x - draw(SHAPES[name], rank, step - 1))
        if step % 2 == 0:
            moved = [{name: common[name] - own[name] for name in SHAPES} for own in weights]
            sent = [limited(change, 8.0) for change in moved]
            limits |= {change == own for change, own in zip(map(str, moved), map(str, sent), strict=True)}
            common = {name: x - sum(own[name] for own in sent) / ranks for name, x in common.items()}
            weights = [dict(common) for _ in range(ranks)]
            assert_close(training.values(), common, 1e-5)
    assert limits == {True, False}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_noise_is_normal_and_a_secret_of_each_rank(framework):
    pytest.importorskip(framework)
    noise = []
    for _ in range(2):
        training, sent = noisy({"every": 1, "clip": 2.0, "noise": 0.25}, framework=framework)
        training.step(6)
        for given, x in sent:
            clipped = limited(given, 2.0)
            noise.append(np.concatenate([(x[name] - clipped[name]).ravel() for name in SHAPES]))
    drawn = np.array(noise) / 0.5
    assert drawn.shape == (36, 1900)
    # Moments of 68,400 normal numbers, within five standard deviations.
    bound = 5 / np.sqrt(drawn.size)
    assert abs(drawn.mean()) < bound
    assert abs((drawn**2).mean() - 1) < np.sqrt(2) * bound
    assert abs((drawn**4).mean() - 3) < np.sqrt(96) * bound
    # No draw tells another one: not of other ranks, syncs, or runs with the same seed.
    correlations = drawn @ drawn.T / drawn.shape[1] - np.eye(len(drawn))
    assert np.abs(correlations).max() < 6 / np.sqrt(drawn.shape[1]) + np.sqrt(2) * 5 / np.sqrt(drawn.shape[1])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_noisy_changes_from_shifts_are_soteriafl(ranks):
    """The recursion of the paper in weights, with the coordinates that randomk draws from the shared seed."""
    config = {"compressor": "randomk", "compress_ratio": 0.5, "scaled": True, "default_rules": False}
    config |= {"memory": {"name": "diana", "alpha": 0.25}, "granularity": "layer"}
    training, sent = noisy({"every": 1, "clip": 2.0, "noise": 0.1}, config, ranks)
    ones = [{name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}] * ranks
    draws = grace.Simulation(ranks, SHAPES, {**config, "memory": "none"})
    shifts = [{name: np.zeros(np.prod(shape)) for name, shape in SHAPES.items()} for _ in range(ranks)]
    mean_shift = {name: np.zeros(np.prod(shape)) for name, shape in SHAPES.items()}
    common = {name: x.astype(np.float64).ravel() for name, x in training.start.items()}
    for sync in range(6):
        training.step()
        changes = [x for _, x in sent[sync * ranks :]]
        drawn = {name: x.ravel() != 0 for name, x in draws.step(ones)[0].items()}
        for name, x in common.items():
            now = training.values()[name].astype(np.float64).ravel()
            assert drawn[name].mean() == 0.5
            parts = [2 * (own[name] - h[name]) * drawn[name] for own, h in zip(changes, shifts, strict=True)]
            common[name] = x - mean_shift[name] - sum(parts) / ranks
            np.testing.assert_allclose(now, common[name], rtol=1e-4, atol=1e-5)
            mean_shift[name] = mean_shift[name] + 0.25 * sum(parts) / ranks
            for h, part in zip(shifts, parts, strict=True):
                h[name] = h[name] + 0.25 * part


def test_a_change_on_its_way_is_saved_with_its_noise_and_the_next_one_is_not():
    outer = {**LOCAL, "every": 3, "delay": 1, "clip": 2.0, "noise": 0.1}
    training, resumed = (Training(outer, NONE, 2, shapes=SHAPES) for _ in "ab")
    training.step(3)
    saved = copy.deepcopy(training.sim.state_dict())
    assert "secret" not in str(saved)
    assert resumed.sim.load_state_dict(saved)
    resumed.weights, resumed.steps = list(training.weights), 3
    for step in range(3, 7):
        training.step()
        resumed.step()
        same = all((training.values()[name] == resumed.values()[name]).all() for name in SHAPES)
        assert same == (step < 6)


def test_what_would_travel_without_noise_is_refused():
    with pytest.raises(ConfigError, match="noise needs clip"):
        grace.make_config(NONE, outer={"every": 2, "noise": 1.0})
    with pytest.raises(ConfigError, match="'noise_multiplier' is 'noise' here"):
        grace.make_config(NONE, outer={"every": 2, "clip": 1.0, "noise_multiplier": 1.0})
    with pytest.raises(ConfigError, match="pairs exchange the weights"):
        grace.make_config(NONE, outer={"every": 2, "clip": 1.0, "pairs": True})
    for beside in ({}, {**LOCAL, "state": "average"}, {**LOCAL, "adapt": "loss"}):
        with pytest.raises(ConfigError, match="what a rank sends beside would not be hidden"):
            grace.make_config(NONE, outer={"every": 2, "clip": 1.0, "noise": 1.0, **beside})
    specs = [TensorSpec("w", (4,)), TensorSpec("v", (4,), rounds=1)]
    with pytest.raises(ConfigError, match="tensor 'v': with noise in outer, what accompanies the weights"):
        grace.Simulation(2, specs, NONE, outer={**LOCAL, "every": 2, "clip": 1.0, "noise": 1.0})
    text = str(grace.make_config(NONE, outer={**LOCAL, "every": 2, "clip": 2.0, "noise": 0.5}).outer)
    assert "norms up to 2; noise of 1 per element" in text
