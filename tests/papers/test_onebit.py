"""Seide et al., "1-bit stochastic gradient descent", Interspeech 2014."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.spec import TensorSpec
from tests.papers.common import bits_per_element, make, normal, payload, send, simulate, state, step


@pytest.mark.parametrize("threshold", [0.0, 0.5, -1.0])
def test_bits_decode_to_the_means_of_either_side(threshold):
    x = normal(1001).astype(np.float64)
    high = x >= threshold
    expected = np.where(high, x[high].mean(), x[~high].mean())
    assert np.allclose(send(make("onebit", threshold=threshold), x.astype(np.float32)), expected, rtol=1e-6)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_the_error_is_orthogonal_to_what_was_sent(threshold):
    """Decoding projects onto gradients of two values, one per side, so no other pair of values is better."""
    x = normal(1001).astype(np.float64)
    sent = send(make("onebit", threshold=threshold), x.astype(np.float32))
    assert abs(np.dot(x - sent, sent)) < 1e-4
    assert np.sum((x - sent) ** 2) == pytest.approx(np.sum(x**2) - np.sum(sent**2), rel=1e-6)
    rng = np.random.default_rng(0)
    for low, high in rng.normal(sent.min(), 0.1, (20, 2)):
        other = np.where(x >= threshold, high, low)
        assert np.sum((x - other) ** 2) >= np.sum((x - sent) ** 2)


@pytest.mark.parametrize("threshold", [0.0, 0.5, -0.5])
def test_no_contraction_is_claimed_where_there_is_none(threshold):
    """All elements lie on one side of a threshold other than 0. Their mean is 0, and so is what is decoded."""
    x, compressor = np.float32([0.25, -0.25] * 50), make("onebit", threshold=threshold)
    kept = 1 - np.sum((x - send(compressor, x)) ** 2) / np.sum(x**2)
    assert kept == (threshold == 0)
    assert compressor.contraction(TensorSpec("w", x.shape)) <= kept


def test_the_mean_of_the_gradient_is_kept():
    x = normal(1001)
    assert send(make("onebit"), x).sum() == pytest.approx(float(x.astype(np.float64).sum()), abs=1e-3)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_empty_side_is_no_division_by_zero(sign):
    x = (sign * (1 + np.abs(normal(100)))).astype(np.float32)
    assert np.allclose(send(make("onebit"), x), x.astype(np.float64).mean(), rtol=1e-6)
    assert np.isfinite(payload(make("onebit"), x)["means"]).all()


def test_error_feedback():
    """e = (g + e) - C(g + e), with plain NumPy."""
    n = 200
    sim = simulate(2, (n,), make("onebit"), "residual")
    e = np.zeros((2, n))
    for number in range(5):
        xs = [normal(n, 2 * number + rank) for rank in range(2)]
        p = np.array(xs, np.float64) + e
        sent = np.array([np.where(row >= 0, row[row >= 0].mean(), row[row < 0].mean()) for row in p])
        e = p - sent
        assert np.allclose(step(sim, xs), sent.mean(axis=0), rtol=1e-4, atol=1e-5)
        assert np.allclose(state(sim, 0), e[0], rtol=1e-4, atol=1e-5)


def test_one_bit_per_element_and_two_means():
    assert bits_per_element(make("onebit"), 2**14) == 1 + 64 / 2**14


def test_an_element_on_the_threshold_is_not_below_it():
    """The paper's rule: the bit is 0 if the element is below the threshold, else 1."""
    x = np.float32([0.5, 0.5, 0.25, 1.0])
    assert np.unpackbits(payload(make("onebit", threshold=0.5), x)["bits"], bitorder="little")[:4].tolist() == [
        1,
        1,
        0,
        1,
    ]
    zeros = payload(make("onebit"), np.zeros(3, np.float32))
    assert zeros["bits"].tolist() == [0b111]
