"""Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import bits_per_element, make, normal, send, simulate, state, step


def test_the_scale_is_the_mean_magnitude():
    x = normal(1001)
    decoded = send(make("efsignsgd"), x)
    assert np.allclose(decoded, np.mean(np.abs(x.astype(np.float64))) * np.where(x < 0, -1, 1), rtol=1e-6)


@pytest.mark.parametrize("power", [1, 3, 9])
def test_contraction_is_the_density(power):
    """Lemma 8: |C(x) - x|^2 = (1 - |x|_1^2 / (d |x|^2)) |x|^2, with equality."""
    x = (normal(500) ** power).astype(np.float32)
    wide = x.astype(np.float64)
    density = np.abs(wide).sum() ** 2 / (500 * np.sum(wide**2))
    error = np.sum((send(make("efsignsgd"), x) - wide) ** 2)
    assert error == pytest.approx((1 - density) * np.sum(wide**2), rel=1e-5)


def test_contraction_is_at_worst_one_in_d():
    x = np.zeros(500, np.float32)
    x[7] = 3.0
    # C(x) has the value 3/500 everywhere.
    error = np.sum((send(make("efsignsgd"), x) - x) ** 2)
    assert error <= (1 - 1 / 500) * 9 + 1e-6


def test_algorithm_1():
    """p = lr g + e; Delta = |p|_1 / d sign(p); x -= mean(Delta); e = p - Delta, with plain NumPy."""
    lr, n, ranks = 0.1, 300, 3
    sim = simulate(ranks, (n,), make("efsignsgd"), {"name": "efsignsgd", "lr": lr})
    e = np.zeros((ranks, n))
    for number in range(6):
        xs = [normal(n, 10 * number + rank) for rank in range(ranks)]
        p = lr * np.array(xs, np.float64) + e
        delta = np.abs(p).mean(axis=1, keepdims=True) * np.where(p < 0, -1, 1)
        e = p - delta
        # The optimizer multiplies by lr, so it receives the step divided by lr.
        assert np.allclose(lr * step(sim, xs), delta.mean(axis=0), rtol=1e-4, atol=1e-6)
        for rank in range(ranks):
            assert np.allclose(state(sim, rank), e[rank], rtol=1e-4, atol=1e-6)


def test_memory_is_plain_error_feedback_up_to_the_learning_rate():
    """C is positively homogeneous, so the residual in units of the weights is lr times that of the gradients."""
    scaled = simulate(2, (300,), make("efsignsgd"), {"name": "efsignsgd", "lr": 0.125})
    plain = simulate(2, (300,), make("efsignsgd"), "residual")
    for number in range(5):
        xs = [normal(300, 2 * number + rank) for rank in range(2)]
        # lr = 2^-3 changes only exponents, so the bits are equal.
        assert np.array_equal(step(scaled, xs), step(plain, xs))
        assert np.array_equal(state(scaled, 1), state(plain, 1) * np.float32(0.125))


def test_one_bit_per_element_and_one_scale():
    assert bits_per_element(make("efsignsgd"), 2**14) == 1 + 32 / 2**14
