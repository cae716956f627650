"""Bernstein et al., "signSGD: compressed optimisation for non-convex problems", ICML 2018, Algorithm 2 (Signum)."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.config.registry import memories
from grace.core.errors import ConfigError
from tests.papers.common import bits_per_element, make, normal, send, simulate, state, step

N, RANKS = 301, 3


@pytest.mark.parametrize("beta", [0.9, 0.5, 0.0])
def test_signs_of_momenta_are_voted_on(beta):
    """m_t = beta m_{t-1} + (1 - beta) g_t on every rank; the update is sign(sum_i sign(m_i))."""
    sim = simulate(RANKS, (N,), make("signum"), {"name": "momentum", "momentum": beta})
    m = np.zeros((RANKS, N))
    for number in range(6):
        xs = [normal(N, 10 * number + rank) for rank in range(RANKS)]
        m = beta * m + (1 - beta) * np.array(xs, np.float64)
        assert np.abs(m).min() > 1e-5, "rounding must not decide a sign in this test"
        assert np.array_equal(step(sim, xs), np.sign(np.sign(m).sum(axis=0)))
        for rank in range(RANKS):
            assert np.allclose(state(sim, rank, "momentum"), m[rank], rtol=1e-5, atol=1e-6)


def test_without_momentum_it_is_signsgd():
    signum = simulate(2, (N,), make("signum"), {"name": "momentum", "momentum": 0.0})
    signsgd = simulate(2, (N,), make("signsgd"))
    for number in range(3):
        xs = [normal(N, 2 * number + rank) for rank in range(2)]
        assert np.array_equal(step(signum, xs), step(signsgd, xs))


def test_momentum_outlives_a_single_opposite_gradient():
    sim = simulate(1, (N,), make("signum"), "momentum")
    x = normal(N)
    for _ in range(5):
        assert np.array_equal(step(sim, [x]), np.sign(x))
    # 0.9 m = 0.9 (1 - 0.9^5) x = 0.37 x outweighs 0.1 x.
    assert np.array_equal(step(sim, [-x]), np.sign(x))


def test_the_memory_sends_any_compressor_the_momentum():
    sim = simulate(1, (N,), make("none"), "momentum")
    x = normal(N)
    assert np.allclose(step(sim, [x]), 0.1 * x, rtol=1e-6)
    assert np.allclose(step(sim, [x]), 0.19 * x, rtol=1e-6)


def test_nothing_is_fed_back():
    """The state is the momentum and does not depend on what the compressor dropped."""
    sim = simulate(1, (N,), make("topk", compress_ratio=0.01), "momentum")
    x = normal(N)
    step(sim, [x])
    assert np.array_equal(state(sim, 0, "momentum"), x * np.float32(1 - 0.9))


def test_default_memory_is_the_momentum_and_feeds_nothing_back():
    assert make("signum").default_memory == "momentum"
    memory = memories.make("momentum")
    assert memory.momentum == 0.9
    assert not memory.feeds_back


def test_zeros_of_both_signs_count_as_positive_in_one_of_two_steps():
    x = np.array([0.0, -0.0, -1e-45, 1e-45], np.float32)
    sent = [send(make("signum"), x, step=step).tolist() for step in range(2)]
    assert sorted(sent) == [[-1, -1, -1, 1], [1, 1, -1, 1]]


def test_one_bit_per_element():
    assert bits_per_element(make("signum"), 2**14) == 1


@pytest.mark.parametrize("momentum", [1.0, -0.1])
def test_a_momentum_that_forgets_nothing_or_less_is_refused(momentum):
    with pytest.raises(ConfigError, match="momentum"):
        memories.make({"name": "momentum", "momentum": momentum})
