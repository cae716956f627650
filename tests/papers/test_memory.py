"""Xu et al., "GRACE", ICDCS 2021, equation 4: phi(m, g) = beta m + gamma g, psi = phi - Q^-1(Q(phi)); and no memory."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import StepError
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
    """beta = 0 is plain compression, with equal bits."""
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
    """The residuals against the aggregate differ between ranks only as their payloads differ."""
    aggregate = simulate(2, (N,), make("topk", compress_ratio=1.0), "powersgd")
    xs = [normal(N, rank) for rank in range(2)]
    step(aggregate, xs)
    left = [state(aggregate, rank) for rank in range(2)]
    assert np.allclose(left[0] + left[1], 0, atol=1e-6)
    assert np.allclose(left[0], (xs[0] - xs[1]) / 2, atol=1e-6)


def test_corrected_residual_counts_in_units_of_the_weights():
    """A gradient is applied with the learning rate of its own step: sum lr C + lr e = sum lr g, for any schedule."""
    sim = simulate(2, (N,), make("topk", compress_ratio=0.05), {"name": "residual", "lr_correction": True})
    moved, meant = np.zeros(N), np.zeros(N)
    for number, lr in enumerate([0.1, 0.1, 0.5, 0.05, 1e-4, 0.3]):
        xs = [normal(N, 2 * number + rank) for rank in range(2)]
        merged = sim.step([{"w": x} for x in xs], lr=lr)[0]["w"]
        moved += lr * merged.astype(np.float64)
        meant += lr * (xs[0].astype(np.float64) + xs[1]) / 2
        held = (state(sim, 0).astype(np.float64) + state(sim, 1)) / 2
        assert np.allclose(moved + lr * held, meant, atol=1e-5), number


def test_a_learning_rate_of_zero_leaves_the_units_of_the_residual():
    """Nothing was applied at that rate: the residual still counts at the rate before, and is rescaled from there."""
    memory = {"name": "residual", "lr_correction": True}
    sim = simulate(1, (N,), make("threshold", threshold=1e9), memory)
    for lr, x in ((0.2, normal(N)), (0.0, np.zeros(N, np.float32)), (0.1, np.zeros(N, np.float32))):
        sim.step([{"w": x}], lr=lr)
    assert np.allclose(state(sim, 0), 2 * normal(N), rtol=1e-6)


def test_clipping_limits_what_joins_the_residual():
    memory = {"name": "residual", "gradient_clipping": 1.0}
    sim = simulate(4, (N,), make("threshold", threshold=1e9), memory)
    step(sim, [100 * normal(N, rank) for rank in range(4)])
    assert np.linalg.norm(state(sim, 2).astype(np.float64)) == pytest.approx(1 / 2, rel=1e-6)
    assert np.allclose(state(sim, 2) / np.linalg.norm(state(sim, 2)), normal(N, 2) / np.linalg.norm(normal(N, 2)))


def test_a_learning_rate_that_is_missing_is_told():
    memory = {"name": "residual", "lr_correction": True}
    sim = simulate(1, (N,), make("topk", compress_ratio=0.05), memory)
    with pytest.raises(StepError, match="learning rate"):
        sim.step([{"w": normal(N)}])
