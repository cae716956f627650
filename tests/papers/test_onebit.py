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


@pytest.mark.parametrize("columns", [True, False])
def test_one_large_element_of_a_column_is_the_worst_case(columns):
    """Without a negative element, of r elements with one pair of means, 1 / r of the square remains."""
    x = np.zeros((64, 3), np.float32)
    x[5] = [1, 2, -3]
    compressor = make("onebit", columns=columns)
    kept = 1 - np.sum((x - send(compressor, x).reshape(x.shape)) ** 2) / np.sum(x**2)
    assert kept >= compressor.contraction(TensorSpec("w", x.shape))
    x[:, 2] = 0
    kept = 1 - np.sum((x - send(compressor, x).reshape(x.shape)) ** 2) / np.sum(x**2)
    assert kept == pytest.approx(1 / 64 if columns else 9 / 5 / 192)


@pytest.mark.parametrize("threshold", [0.0, 0.5, -0.5])
def test_no_contraction_is_claimed_where_there_is_none(threshold):
    """All elements lie on one side of a threshold other than 0. Their mean is 0, and so is what is decoded."""
    x, compressor = np.float32([0.25, -0.25] * 50), make("onebit", threshold=threshold)
    kept = 1 - np.sum((x - send(compressor, x)) ** 2) / np.sum(x**2)
    assert kept == (threshold == 0)
    assert compressor.contraction(TensorSpec("w", x.shape)) <= kept


def error(compressor, x):
    """Return |x - C(x)|^2 / |x|^2 of a matrix."""
    return np.sum((x - send(compressor, x).reshape(x.shape)) ** 2.0) / np.sum(x**2.0)


def test_columns_of_different_sizes_have_means_of_their_own():
    """The paper's choice. A normal column loses 1 - 2 / pi of its square, whatever its size."""
    x = normal(256 * 100).reshape(256, 100) * np.exp(2 * normal(100, 1))
    assert error(make("onebit"), x) == pytest.approx(1 - 2 / np.pi, abs=0.02)
    assert error(make("onebit", columns=False), x) > 0.8


def test_the_columns_are_those_of_the_matrix_that_powersgd_makes():
    x = normal(64 * 6).reshape(64, 2, 3)
    sent = send(make("onebit"), x).reshape(64, 6)
    for given, column in zip(x.reshape(64, 6).T.astype(np.float64), sent.T, strict=True):
        assert np.allclose(column, np.where(given >= 0, given[given >= 0].mean(), given[given < 0].mean()), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "pairs"),
    [
        ((64, 3), 3),
        ((63, 3), 1),
        ((64, 32, 3, 3), 288),
        ((3, 3, 32, 64), 64),
        ((64, 1), 1),
        ((1000,), 1),
        ((), 1),
        ((64, 0), 1),
        ((0, 64), 1),
    ],
)
def test_columns_have_means_of_their_own_from_64_rows_on(shape, pairs):
    """Two float32 means take as many bytes as the bits of 64 elements."""
    spec = TensorSpec("w", shape)
    means, bits = make("onebit").wire(spec)
    assert (means.length, bits.length) == (2 * pairs, -(-spec.numel // 8))
    assert make("onebit").contraction(spec) == pairs / max(1, spec.numel)
    assert make("onebit", columns=False).wire(spec)[0].length == 2


def test_tensors_are_cut_and_joined_only_where_they_have_one_pair_of_means():
    assert not make("onebit").flat
    assert make("onebit", columns=False).flat


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
