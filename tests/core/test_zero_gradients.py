"""Weights without a gradient stay where they are: rows of an embedding that nobody looked up, and dead units."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.config.registry import compressors
from grace.core.methods.fusions import compress_checked
from grace.core.methods.site import Site
from grace.core.ops import get_ops
from grace.core.spec import Key, TensorSpec
from grace.testing.harness import FRAMEWORKS, array, host, same

SPEC = TensorSpec("w", (40, 50))
# The first rows have no gradient on any rank, the others a small one on rank 0 only.
DEAD, LONELY = 250, 500


def moved(name, size, steps=50):
    """Return how far each weight is after each step with learning rate 1."""
    sim = grace.Simulation(size, [SPEC], {"compressor": name, "default_rules": False})
    weights, history = np.zeros(SPEC.numel), []
    for number in range(steps):
        given = []
        for rank in range(size):
            x = np.random.default_rng([number, rank]).standard_normal(SPEC.numel).astype(np.float32)
            x[:LONELY] = 0
            x[DEAD:LONELY] = 1e-3 if rank == 0 else 0
            given.append({"w": x.reshape(SPEC.shape)})
        weights = weights + sim.step(given, lr=0.1)[0]["w"].reshape(-1)
        history.append(weights)
    return np.array(history)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["signsgd", "signum"])
def test_votes_on_zeros_cancel(name, size):
    history = moved(name, size)
    dead = np.abs(history[:, :DEAD])
    assert dead.max() <= (size % 2), "an even number of ranks is at a tie, an odd one moves once and back"
    assert not dead[-1].any()
    # The only rank that has a gradient is still heard: with an even number of ranks in every second step.
    assert (history[-1, DEAD:LONELY] == len(history) / (2 - size % 2)).all()


@pytest.mark.parametrize("every", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 3])
def test_votes_on_zeros_that_come_in_some_steps_only_do_not_add_up(size, every):
    """Two tasks take turns, and one of them never uses the weight."""
    sim = grace.Simulation(size, [SPEC], {"compressor": "signsgd", "default_rules": False})
    weight, steps = 0.0, 200
    for number in range(steps * every):
        x = np.full(SPEC.shape, number % every, np.float32)
        weight += sim.step([{"w": x}] * size)[0]["w"][0, 0]
    # Four standard deviations of as many random signs.
    assert abs(weight - steps * (every - 1)) <= 4 * steps**0.5


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["efsignsgd", "onebit"])
def test_error_feedback_takes_back_what_zeros_were_sent_as(name, size):
    history = np.abs(moved(name, size)[:, :DEAD])
    # One scale, the mean magnitude of a normal gradient, is about 0.8.
    assert history[: len(history) // 2].max() <= 1
    assert history.max() <= 1


@pytest.mark.skipif("tensorflow" not in FRAMEWORKS, reason="needs TensorFlow")
@pytest.mark.parametrize("native", [False, True])
def test_a_graph_that_serves_every_step_alternates_too(native):
    import tensorflow as tf

    ops, reference, compressor = get_ops("tensorflow", native=native), get_ops("numpy"), compressors.make("signsgd")
    x = np.where(np.arange(100) % 3, np.random.default_rng(0).standard_normal(100), 0).astype(np.float32)

    def compress(ops, x, step):
        at = Site(ops, TensorSpec("w", (100,)), Key(1, step), rank=1, size=2)
        return compressor.compress(x, at)["signs"], compress_checked.find(compressor)(compressor, x, at)[0]["signs"]

    graph = tf.function(lambda step: compress(ops, array(ops, x, "float32"), step), autograph=False)
    of_zeros = {"negative": np.packbits(x > 0, bitorder="little"), "positive": np.packbits(x >= 0, bitorder="little")}
    for pair in range(8):
        signs = [compress(reference, x, step)[0] for step in (2 * pair, 2 * pair + 1)]
        assert {kind for kind, bits in of_zeros.items() if any(same(sign, bits) for sign in signs)} == set(of_zeros)
        for step, expected in zip((2 * pair, 2 * pair + 1), signs, strict=True):
            of_graph, eager = graph(tf.constant(step, tf.int64)), compress(ops, array(ops, x, "float32"), step)
            assert all(same(host(ops, found), expected) for found in (*of_graph, *eager)), step
            assert same(compress(reference, x, step)[1], expected), step
