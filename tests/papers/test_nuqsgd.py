"""Ramezani-Kebrya et al., "NUQSGD", JMLR 2021: levels that are powers of two, unbiased, and the variance."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import bits_per_element, make, normal, send, variance

N = 512


def log_normal() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (np.exp(2 * rng.standard_normal(N)) * rng.choice([-1, 1], N)).astype(np.float32)


def test_decoded_values_are_powers_of_two_times_the_norm():
    x = normal(N)
    norm = np.abs(x).max()
    found = np.unique(np.abs(send(make("nuqsgd", quantum_num=4), x)) / norm)
    assert found.tolist() == [0.0, 0.125, 0.25, 0.5, 1.0]


def test_an_element_on_a_level_is_not_rounded():
    x = np.array([0.0, 0.125, -0.25, 0.5, -1.0, 1.0], np.float32)
    for step in range(20):
        assert np.array_equal(send(make("nuqsgd", quantum_num=4), x, step=step), x)


@pytest.mark.parametrize("s", [1, 3, 7])
def test_the_variance_is_that_of_rounding_to_a_neighbour(s):
    """Unbiased rounding of an element between the levels a and h has the variance (h - x) (x - a)."""
    x = log_normal().astype(np.float64)
    levels = np.array([0.0, *(2.0 ** (j - s) for j in range(1, s + 1))]) * np.abs(x).max()
    above = np.searchsorted(levels, np.abs(x)).clip(1)
    expected = np.sum((levels[above] - np.abs(x)) * (np.abs(x) - levels[above - 1]))
    compressor = make("nuqsgd", quantum_num=s, bucket_size=0)
    mean, margin = variance(compressor, x.astype(np.float32), 300)
    assert abs(mean - expected) <= margin


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_the_variance_is_within_the_bound(norm):
    """Theorem 4: an eighth of the square of an element above the least level l, a quarter of l^2 below it."""
    x = normal(N)
    size = float(np.linalg.norm(x.astype(np.float64)) if norm == "l2" else np.abs(x).max())
    mean, margin = variance(make("nuqsgd", bucket_size=0, norm=norm), x, 200)
    assert mean <= np.sum(x.astype(np.float64) ** 2) / 8 + N * (2.0**-6 * size) ** 2 / 4 + margin


def test_the_variance_is_below_that_of_even_levels_for_uneven_gradients():
    """Section 5: NUQSGD against QSGD, both with the Euclidean norm and 4 bits."""
    x = log_normal()
    options = {"quantum_num": 7, "bucket_size": 0, "norm": "l2"}
    (uneven, margin), (even, _) = (variance(make(name, **options), x, 200) for name in ("nuqsgd", "qsgd"))
    assert uneven + margin < even / 2


@pytest.mark.parametrize(("s", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4)])
def test_a_code_takes_the_bits_of_its_2s_plus_1_values(s, bits):
    # A norm of 32 bits for 512 elements is 1/16 bit each.
    assert bits_per_element(make("nuqsgd", quantum_num=s), 1 << 16) == bits + 1 / 16


def test_options_are_checked():
    for levels in (0, 8):
        with pytest.raises(ConfigError, match=f"nuqsgd: quantum_num must be .* from 1 to 7, received {levels}"):
            make("nuqsgd", quantum_num=levels)
    with pytest.raises(ConfigError, match="nuqsgd: bucket_size must be at least 0, received -1"):
        make("nuqsgd", bucket_size=-1)
