"""Faghri et al., "Adaptive gradient quantization for data-parallel SGD", NeurIPS 2020: ALQ and AMQ."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import bits_per_element, make, normal, payload, send, variance

N = 4000  # no more than the sample has, so that the levels are those of all elements


def shares(x: np.ndarray) -> np.ndarray:
    return np.abs(x.astype(np.float64)) / np.abs(x).max()


def expected(levels: np.ndarray, r: np.ndarray) -> float:
    """Return the variance of rounding r to one of the two levels around it."""
    above = np.searchsorted(levels, r).clip(1)
    return float(np.sum((levels[above] - r) * (r - levels[above - 1])))


def fitted(x: np.ndarray, **options) -> np.ndarray:
    """Return the levels of a payload, with 0 and 1."""
    return np.array([0.0, *payload(make("alq", bucket_size=0, **options), x)["levels"], 1.0])


def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "normal": normal(N),
        "laplace": rng.laplace(size=N).astype(np.float32),
        "log-normal": np.exp(2 * rng.standard_normal(N)).astype(np.float32),
    }


@pytest.mark.parametrize("kind", gradients())
def test_three_free_levels_are_the_best_of_a_fine_grid(kind):
    """ALQ, problem (4): the least expected variance over all levels."""
    x = gradients()[kind]
    r = shares(x)
    grid = np.quantile(r, np.linspace(0, 1, 81)[1:-1])
    least = min(expected(np.array([0.0, *pair, 1.0]), r) for pair in itertools.combinations(grid, 2))
    assert expected(fitted(x, quantum_num=3), r) <= least * 1.001


def improvement(levels: np.ndarray, r: np.ndarray) -> float:
    """Return by what share the variance falls if one level moves between its neighbours, at best."""
    moved = [
        np.array([*levels[:j], other, *levels[j + 1 :]])
        for j in range(1, len(levels) - 1)
        for other in np.linspace(levels[j - 1], levels[j + 1], 50)[1:-1]
    ]
    return 1 - min(expected(one, r) for one in moved) / expected(levels, r)


@pytest.mark.parametrize("kind", gradients())
def test_no_free_level_can_be_improved(kind):
    """ALQ, theorem 1: between its neighbours, each level is the best one."""
    x = gradients()[kind]
    assert improvement(fitted(x), shares(x)) < 0.001


@pytest.mark.parametrize("kind", gradients())
def test_exponential_levels_have_the_best_multiplier(kind):
    """AMQ: powers of one multiplier."""
    x = gradients()[kind]
    r, levels = shares(x), fitted(x, spacing="exponential")
    multiplier = levels[-2]
    powers = [np.array([0.0, *(p ** (7 - j) for j in range(1, 8))]) for p in (multiplier, *(np.arange(8, 61) / 64))]
    assert np.abs(levels - powers[0]).max() < 1e-5
    assert expected(levels, r) <= min(expected(one, r) for one in powers) * 1.001


@pytest.mark.parametrize("kind", gradients())
def test_the_variance_is_below_that_of_fixed_levels(kind):
    """ALQ, section 5: the variance of ALQ, then AMQ, is below that of NUQSGD and QSGD."""
    x = gradients()[kind]
    settings = [{"name": "alq"}, {"name": "alq", "spacing": "exponential"}, {"name": "nuqsgd"}, {"name": "qsgd"}]
    options = {"quantum_num": 7, "bucket_size": 0}
    free, exponential, uneven, even = (variance(make(**one, **options), x, 30) for one in settings)
    assert free[0] + free[1] < min(uneven[0], even[0])
    assert free[0] < exponential[0] < uneven[0] + uneven[1]


@pytest.mark.parametrize("options", [{}, {"spacing": "exponential"}, {"quantum_num": 2, "norm": "l2"}])
def test_it_is_unbiased_whatever_the_levels(options):
    x = gradients()["log-normal"][:500]
    trials = 400
    sent = np.array([send(make("alq", **options), x, step=step) for step in range(trials)])
    # The error of the mean of independent unbiased trials is the variance over their number.
    assert np.sum((sent.mean(axis=0) - x) ** 2) < 1.3 * np.sum(sent.var(axis=0)) / trials


def test_a_sample_of_a_large_tensor_is_enough():
    # The first half is a thousand times smaller, so a sample must have elements of all parts.
    x = normal(200_000, 1) * np.where(np.arange(200_000) < 100_000, 1e-3, 1.0).astype(np.float32)
    assert improvement(fitted(x), shares(x)) < 0.02


def test_levels_travel_with_the_payload():
    # 4 bits per element, a norm for 512 elements, and six levels.
    assert bits_per_element(make("alq"), 1 << 16) == 4 + 1 / 16 + 6 * 32 / (1 << 16)


@pytest.mark.parametrize("spacing", ["free", "exponential"])
def test_few_elements_and_zeros_have_levels(spacing):
    compressor = make("alq", spacing=spacing)
    assert send(compressor, np.array([-3.0], np.float32)).tolist() == [-3.0]
    assert not send(compressor, np.zeros(100, np.float32)).any()


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"alq: quantum_num must be .* from 1 to 7, received 8"):
        make("alq", quantum_num=8)
