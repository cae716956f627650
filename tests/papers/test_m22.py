"""Liu et al., "M22", IEEE Transactions on Communications 2024: levels for the error weighted by |g|^M, after top-k."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import bits_per_element, make, normal, payload, send

N, RATIO = 20_000, 0.1  # fewer values are kept than the sample has, so that the levels are those of all
K = int(N * RATIO)


def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "normal": normal(N),
        "laplace": rng.laplace(size=N).astype(np.float32),
        "weibull": (rng.weibull(0.7, N) * rng.choice([-1, 1], N)).astype(np.float32),
    }


def kept(x: np.ndarray) -> np.ndarray:
    return np.sort(np.abs(x.astype(np.float64)))[-K:]


def distortion(values: np.ndarray, magnitudes: np.ndarray, power: int) -> float:
    error = np.min((values[:, None] - magnitudes) ** 2, axis=1)
    return float(np.sum(values**power * error))


def magnitudes(x: np.ndarray, **options) -> np.ndarray:
    return payload(make("m22", compress_ratio=RATIO, **options), x)["values/magnitudes"].astype(np.float64)


@pytest.mark.parametrize("kind", gradients())
@pytest.mark.parametrize("power", [0, 2, 8])
def test_two_magnitudes_have_the_least_weighted_error_of_a_fine_grid(kind, power):
    values = kept(gradients()[kind])
    found = magnitudes(gradients()[kind], bits=2, power=power)
    grid = np.linspace(values[0], values[-1], 50)
    least = min(distortion(values, np.array(pair), power) for pair in itertools.combinations(grid, 2))
    assert distortion(values, found, power) < least * 1.02


@pytest.mark.parametrize("kind", gradients())
@pytest.mark.parametrize("power", [0, 2, 4])
def test_each_magnitude_is_the_weighted_mean_of_its_cluster(kind, power):
    values, found = kept(gradients()[kind]), magnitudes(gradients()[kind], power=power)
    nearest = np.abs(values[:, None] - found).argmin(axis=1)
    weights = values**power
    means = [np.average(values[nearest == j], weights=weights[nearest == j]) for j in range(8)]
    assert distortion(values, np.array(means), power) > distortion(values, found, power) * 0.98


@pytest.mark.parametrize("power", [0, 2, 4])
def test_no_other_power_has_less_of_its_error(power):
    x = gradients()["laplace"]
    found = {other: distortion(kept(x), magnitudes(x, bits=3, power=other), power) for other in (0, 2, 4)}
    assert found[power] == min(found.values())


def test_one_magnitude_is_a_ratio_of_moments():
    x = gradients()["weibull"]
    for power in (0, 1, 3):
        expected = np.sum(kept(x) ** (power + 1)) / np.sum(kept(x) ** power)
        assert magnitudes(x, bits=1, power=power) == pytest.approx([expected], rel=1e-4)


def test_the_largest_elements_become_the_nearest_level_of_their_sign():
    x = gradients()["normal"]
    found, levels = send(make("m22", compress_ratio=RATIO), x), magnitudes(x)
    chosen = np.argsort(-np.abs(x))[:K]
    assert sorted(np.flatnonzero(found)) == sorted(chosen)
    distance = np.abs(np.abs(x[chosen, None]) - levels).min(axis=1)
    assert np.abs(found[chosen] - x[chosen]) == pytest.approx(distance, abs=1e-6)
    assert np.all(found[chosen] * x[chosen] > 0)


@pytest.mark.parametrize("kind", gradients())
def test_the_error_of_four_bits_is_nearly_that_of_topk(kind):
    x = gradients()[kind]
    lost, topk = (np.sum((send(make(name, compress_ratio=RATIO), x) - x) ** 2) for name in ("m22", "topk"))
    assert lost - topk < 0.012 * np.sum(x.astype(np.float64) ** 2)


def test_levels_of_many_values_are_fitted_to_a_sample():
    x = normal(200_000, 1)
    found = payload(make("m22", compress_ratio=0.5), x)["values/magnitudes"]
    values = np.sort(np.abs(x.astype(np.float64)))[-100_000:]
    whole = np.average(values, weights=values**2)
    assert len(found) == 8
    assert found[0] < whole < found[-1]
    assert np.all(np.diff(found) > 0)


def test_bits_per_kept_value():
    # An index of 32 bits, a code of `bits`, and 2^(bits - 1) magnitudes.
    n = 1 << 16
    for bits in (1, 4):
        expected = (n // 8 * (32 + bits) + 32 * 2 ** (bits - 1)) / n
        assert bits_per_element(make("m22", compress_ratio=1 / 8, bits=bits), n) == expected


def test_options_are_checked():
    for options, text in (
        ({"bits": 5}, "m22: bits must be a number from 1 to 4, received 5"),
        ({"power": 9}, "m22: power must be a number from 0 to 8, received 9"),
        ({"power": 0.5}, "option 'power': expected int, received 0.5"),
        ({"compress_ratio": 0}, "m22: compress_ratio must be .*; received 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            make("m22", **options)
