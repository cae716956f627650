"""Chen et al., "AdaComp: adaptive residual gradient compression", AAAI 2018."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import make, normal, payload, send, simulate, state, step


def pack(residual: np.ndarray, gradient: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what Algorithm 2 sends and its next residual, in float64, bin by bin."""
    g, h = residual + gradient, residual + 2 * gradient
    bins = [slice(start, start + size) for start in range(0, len(g), size)]
    maxima = [np.abs(g[b]).max() for b in bins]
    sent = np.zeros_like(g)
    for b, most in zip(bins, maxima, strict=True):
        sent[b] = np.where(np.abs(h[b]) >= most, np.sign(g[b]) * np.mean(maxima), 0.0)
    return sent, g - sent


def test_a_worked_example():
    """Without a residual, H = 2 G: elements of at least half the maximum of their bin travel, as the mean maximum."""
    x = np.array([4.0, -2.0, 1.9, 0.5, -0.25, 0.2, 0.0, 0.0, 0.0, -3.0], np.float32)
    sent = payload(make("adacomp", bin_size=3), x)
    scale = (4 + 0.5 + 0 + 3) / 4
    assert np.allclose(sent["scale"], scale)
    assert sent["positive"].tolist() == [0, 3]
    assert sent["negative"].tolist() == [1, 4, 9]
    assert np.allclose(send(make("adacomp", bin_size=3), x), scale * np.array([1, -1, 0, 1, -1, 0, 0, 0, 0, -1]))


@pytest.mark.parametrize("size", [5, 64])
def test_the_latest_gradient_counts_twice(size):
    """Algorithm 2 over some steps, whose residuals differ from the latest gradient."""
    n, residual = 203, np.zeros(203)
    sim = simulate(1, (n,), make("adacomp", bin_size=size), "adacomp")
    for number in range(6):
        gradient = normal(n, number)
        expected, residual = pack(residual, gradient.astype(np.float64), size)
        assert np.allclose(step(sim, [gradient]), expected, rtol=1e-5, atol=1e-6)
        assert np.allclose(state(sim, 0), residual, rtol=1e-5, atol=1e-5)


def test_with_another_memory_the_compensated_gradient_counts_twice():
    n, residual = 200, np.zeros(200)
    sim = simulate(1, (n,), make("adacomp", bin_size=20), "residual")
    for number in range(3):
        x = residual + normal(n, number)
        sent, _ = pack(np.zeros(n), x, 20)
        assert np.allclose(step(sim, [normal(n, number)]), sent, rtol=1e-5, atol=1e-6)
        residual = x - sent


def test_the_share_follows_the_gradients():
    """Section 2: bins with an outlier send little, bins without one more; nobody chose a share."""
    outliers = 0.01 * normal(10_000)
    outliers[::500] = 1.0
    few, more = (len(np.flatnonzero(send(make("adacomp"), x))) for x in (outliers, normal(10_000)))
    assert few == 20
    assert 5 * few < more < 1500
