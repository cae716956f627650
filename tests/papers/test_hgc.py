"""Hu, Wu and Zhu, "HGC: hybrid gradient compression in distributed deep learning", ICAIS 2021."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import make, normal, payload, send, simulate, state, step

X = np.random.default_rng(0).laplace(size=5000).astype(np.float32)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_the_threshold_is_a_number_of_mean_magnitudes(alpha):
    bound = alpha * np.abs(X.astype(np.float64)).mean()
    assert np.array_equal(payload(make("hgc", alpha=alpha), X)["indices"], np.flatnonzero(np.abs(X) >= bound))


def test_the_sparsity_is_low_and_follows_the_distribution():
    """Of Laplace numbers a share of e^-alpha reaches alpha mean magnitudes, of normal ones 2 (1 - Phi(0.798 alpha))."""
    laplace, gauss = (len(payload(make("hgc"), x)["indices"]) / len(x) for x in (X, normal(5000)))
    assert laplace == pytest.approx(math.exp(-2), rel=0.1)
    assert gauss == pytest.approx(math.erfc(2 / math.sqrt(math.pi)), rel=0.1)


def test_kept_values_are_quantized_without_bias():
    kept = payload(make("hgc", quantum_num=1), X)["indices"]
    sent = np.array([send(make("hgc", quantum_num=1), X, step=step) for step in range(200)])
    assert np.abs(sent.mean(axis=0) - X)[kept].mean() < 4 * np.abs(X).max() / math.sqrt(200)
    assert np.sum((sent.mean(axis=0) - X)[kept] ** 2) < 1.3 * np.sum(sent.var(axis=0)) / 200
    assert not np.delete(sent, kept, axis=1).any()


def test_the_bytes_are_an_index_and_few_bits_per_kept_value():
    sent = payload(make("hgc"), X)
    count = len(sent["indices"])
    assert len(sent["values/codes"]) == -(-count * 4 // 8)
    assert len(sent["values/norms"]) == -(-count // 512)


def test_what_was_not_sent_stays_in_the_residual():
    sim = simulate(1, X.shape, make("hgc"), "residual")
    merged = step(sim, [X])
    assert np.allclose(merged + state(sim, 0), X, rtol=0, atol=1e-6)
    assert 0 < np.sum(state(sim, 0) ** 2) < np.sum(X**2)


def test_equal_magnitudes_all_travel():
    x = np.array([1.0, -1.0] * 50, np.float32)
    assert np.array_equal(send(make("hgc"), x), x)


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"hgc: alpha \(in mean magnitudes\) must be positive, received 0"):
        make("hgc", alpha=0)
    with pytest.raises(ConfigError, match=r"qsgd: quantum_num must be .* received 0"):
        make("hgc", quantum_num=0)
