"""Xu et al., "GRACE", ICDCS 2021, equation 4: phi(m, g) = beta m + gamma g, psi = phi - Q^-1(Q(phi)); and no memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import make, normal, send, simulate, state, step

N, RANKS = 150, 3


@pytest.mark.parametrize(("beta", "gamma"), [(1.0, 1.0), (0.9, 1.0), (1.0, 0.1), (0.5, 2.0), (0.0, 1.0)])
def test_equation_4(beta, gamma):
    compressor = make("topk", compress_ratio=0.1)
    sim = simulate(RANKS, (N,), compressor, {"name": "residual", "beta": beta, "gamma": gamma})
    m = np.zeros((RANKS, N))
    for number in range(6):
        xs = [normal(N, 10 * number + rank) for rank in range(RANKS)]
        phi = beta * m + gamma * np.array(xs, np.float64)
        sent = np.array([send(compressor, row.astype(np.float32)) for row in phi])
        m = phi - sent
        assert np.allclose(step(sim, xs), sent.mean(axis=0), rtol=1e-4, atol=1e-5)
        for rank in range(RANKS):
            assert np.allclose(state(sim, rank), m[rank], rtol=1e-4, atol=1e-5)


def test_a_memory_that_forgets_is_no_memory():
    """beta = 0 is plain compression: equal bits."""
    forgetful = simulate(2, (N,), make("topk", compress_ratio=0.1), {"name": "residual", "beta": 0.0})
    plain = simulate(2, (N,), make("topk", compress_ratio=0.1), "none")
    for number in range(4):
        xs = [normal(N, 2 * number + rank) for rank in range(2)]
        assert np.array_equal(step(forgetful, xs), step(plain, xs))


def test_without_memory_steps_are_independent():
    sim = simulate(2, (N,), make("topk", compress_ratio=0.1), "none")
    x = normal(N)
    first = step(sim, [x, x])
    step(sim, [normal(N, 1)] * 2)
    assert np.array_equal(step(sim, [x, x]), first)


def test_residual_stays_bounded():
    """Stich et al., Lemma 3.1: |m|^2 <= 4 (1 - delta) / delta^2 max|g|^2, with delta = k/d."""
    sim = simulate(1, (N,), make("topk", compress_ratio=0.1), "residual")
    for number in range(100):
        g = normal(N, number)
        step(sim, [g / np.linalg.norm(g)])
        assert np.sum(state(sim, 0) ** 2) <= 4 * 0.9 / 0.1**2


def test_powersgd_memory_has_the_mean_of_plain_error_feedback():
    """The residual against the aggregate differs between ranks only by what their payloads differ."""
    aggregate = simulate(2, (N,), make("topk", compress_ratio=1.0), "powersgd")
    xs = [normal(N, rank) for rank in range(2)]
    step(aggregate, xs)
    left = [state(aggregate, rank) for rank in range(2)]
    assert np.allclose(left[0] + left[1], 0, atol=1e-6)
    assert np.allclose(left[0], (xs[0] - xs[1]) / 2, atol=1e-6)
