"""Wen et al., "TernGrad", NIPS 2017."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import bits_per_element, make, normal, payload, send, variance


@pytest.mark.parametrize("seed", [0, 1])
def test_variance_is_s_l1_minus_l2(seed):
    """Var = sum_i s|x_i| - x_i^2, of s sign(x_i) Bernoulli(|x_i| / s)."""
    x = normal(400, seed)
    wide = x.astype(np.float64)
    expected = np.abs(wide).max() * np.abs(wide).sum() - np.sum(wide**2)
    mean, margin = variance(make("terngrad", clip_factor=None), x, 400)
    assert abs(mean - expected) <= margin


def test_values_are_ternary():
    x = normal(1000)
    decoded = send(make("terngrad", clip_factor=None), x)
    scale = float(np.abs(x).max())
    assert set(decoded.tolist()) == {-scale, 0.0, scale}
    assert np.all(decoded * x >= 0)
    assert abs(decoded[np.argmax(np.abs(x))]) == scale, "the largest element is sent for certain"


@pytest.mark.parametrize("c", [1.0, 2.5])
def test_clipping_limits_the_scale_to_c_standard_deviations_around_zero(c):
    x = np.concatenate([normal(1000), np.float32([50.0])])
    sent = payload(make("terngrad", clip_factor=c), x)
    assert sent["scale"][0] == pytest.approx(c * np.sqrt(np.mean(x.astype(np.float64) ** 2)), rel=1e-6)


def test_clipping_spares_a_gradient_far_from_zero_mean():
    """Around its own mean the deviation is small, and 2.5 of it would clip nearly everything away."""
    x = (100 + normal(1000)).astype(np.float32)
    assert payload(make("terngrad"), x)["scale"][0] == x.max()


def test_clipping_beyond_the_largest_changes_nothing():
    x = normal(1000)
    free, wide = payload(make("terngrad", clip_factor=None), x), payload(make("terngrad", clip_factor=100.0), x)
    assert all(np.array_equal(free[name], wide[name]) for name in free)


def test_clipping_lowers_the_variance():
    x = np.concatenate([normal(1000), np.float32([50.0])])
    free, _ = variance(make("terngrad", clip_factor=None), x, 30)
    clipped, _ = variance(make("terngrad", clip_factor=2.5), np.clip(x, -5, 5), 30)
    assert clipped < free / 2


def test_two_bits_per_element():
    assert bits_per_element(make("terngrad"), 2**14) == 2 + 32 / 2**14
