"""Lyubarskii and Vershynin, "Uncertainty principles and vector quantization", 2010, and Safaryan et al., 2022."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grace.core.compressors.contrib.kashin import project_from_frame, spread_in_frame
from grace.core.errors import ConfigError
from grace.core.spec import Key
from tests.papers.common import OPS, bits_per_element, make, normal, send, variance

KEY = Key(5, 1)


def gradients(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    spikes = np.zeros(n)
    spikes[:: n // 4] = 1e3
    made = {
        "normal": normal(n),
        "one spike": np.eye(1, n, 7)[0],
        "spikes": spikes + 0.1 * rng.standard_normal(n),
        "log-normal": np.exp(2 * rng.standard_normal(n)),
        "constant": np.ones(n),
    }
    return {name: x.astype(np.float32) for name, x in made.items()}


@pytest.mark.parametrize("redundancy", [2, 4])
@pytest.mark.parametrize("block", [256, 4096])
@pytest.mark.parametrize("kind", gradients(64))
def test_no_coefficient_is_larger_than_a_constant_times_the_norm(kind, block, redundancy):
    """Kashin: max |a| <= K |x| / sqrt(N), whatever x is and however large N is, and the coefficients represent x."""
    x = gradients(block // redundancy)[kind]
    found = spread_in_frame(OPS, x, block, redundancy, KEY)
    assert np.abs(found).max() <= 2.2 * np.linalg.norm(x) / math.sqrt(block)
    assert np.abs(project_from_frame(OPS, found, block, redundancy, KEY) - x).max() < 1e-5 * np.linalg.norm(x)


@pytest.mark.parametrize("kind", ["normal", "one spike", "spikes"])
@pytest.mark.parametrize("bits", [2, 4])
def test_the_error_is_below_that_of_one_rotation_at_equal_bits_per_coefficient(kind, bits):
    x = gradients(4096)[kind]
    kashin, rotated = (variance(make(name, bits=bits), x, 5)[0] for name in ("kashin", "rotated"))
    assert kashin < rotated / 4


def test_the_error_follows_from_the_bound():
    """Each coefficient has a variance of at most a quarter of the squared gap; a redundancy of r leaves 1/r of it."""
    x = gradients(4096)["log-normal"]
    mean, spread_of_mean = variance(make("kashin", bits=3), x, 10)
    gap = 2 * 2.2 / 7
    assert mean - spread_of_mean < gap**2 / 4 / 2 * np.sum(x.astype(np.float64) ** 2)


def test_it_is_unbiased():
    x, trials = gradients(200)["spikes"], 300
    sent = np.array([send(make("kashin", bits=2, block_size=128), x, step=step) for step in range(trials)])
    # The error of the mean of independent unbiased trials is the variance over their number.
    assert np.sum((sent.mean(axis=0) - x) ** 2) < 1.3 * np.sum(sent.var(axis=0)) / trials


def test_bits_per_element():
    # Two coefficients per element, and a float for 2,048 elements.
    assert bits_per_element(make("kashin"), 1 << 16) == 2 * 4 + 32 / 2048


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"kashin: redundancy must be a power of two from 2 to 16, received 3"):
        make("kashin", redundancy=3)
    with pytest.raises(ConfigError, match=r"kashin: block_size must be a power of two from 128 to 4096, received 64"):
        make("kashin", block_size=64)
