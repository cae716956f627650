"""Abdi and Fekri, "Quantized compressive sampling of stochastic gradients", AAAI 2020."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.codecs.rotation import rotate
from grace.core.errors import ConfigError
from grace.testing.harness import exchange
from tests.papers.common import OPS, bits_per_element, make, normal, payload, send, simulate, spec, step, variance

N = 512


def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    made = {"normal": normal(N), "spike": np.eye(1, N, 3)[0], "log-normal": np.exp(2 * rng.standard_normal(N))}
    return {name: x.astype(np.float32) for name, x in made.items()}


def measurements(x: np.ndarray, ratio: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Return A and A x of the first step."""
    key = exchange(make("qcs", block_size=N), OPS, spec(N), [x]).sites[0].key
    rotation = np.array([rotate(OPS, row, N, key) for row in np.eye(N, dtype=np.float32)]).T
    a = rotation[: int(ratio * N)].astype(np.float64)
    return a, a @ x.astype(np.float64)


def error(x: np.ndarray, **options) -> float:
    return variance(make("qcs", block_size=N, **options), x, 20)[0] / float(np.sum(x.astype(np.float64) ** 2))


def test_the_rows_of_the_mixing_matrix_are_orthonormal():
    a, _ = measurements(normal(N))
    assert np.abs(a @ a.T - np.eye(N // 2)).max() < 1e-5


@pytest.mark.parametrize("bits", [2, 4])
def test_a_decoded_measurement_is_at_most_half_a_step_away_and_its_error_is_uniform(bits):
    """Subtractive dither: an error of variance Delta^2 / 12 that does not depend on the measurement."""
    x = gradients()["log-normal"]
    a, y = measurements(x)
    decoded = a @ send(make("qcs", bits=bits, block_size=N, unbiased=True), x) / 2
    delta = np.abs(y).max() / (2 ** (bits - 1) - 1)
    found = (decoded - y) / delta
    assert np.abs(found).max() < 0.5 + 1e-3
    assert np.mean(found**2) == pytest.approx(1 / 12, rel=0.25)
    assert abs(np.corrcoef(found, y)[0, 1]) < 0.2


@pytest.mark.parametrize("kind", gradients())
def test_the_default_scale_has_the_least_error_of_all_scales(kind):
    """The MMSE decoder: no multiple of the decoded gradient is nearer to x."""
    x = gradients()[kind].astype(np.float64)
    sent = [send(make("qcs", bits=2, block_size=N), x.astype(np.float32), step=step) for step in range(10)]
    best = sum(found @ x for found in sent) / sum(found @ found for found in sent)
    assert best == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("kind", gradients())
def test_the_error_is_what_is_not_measured_and_the_noise_of_rounding(kind):
    x = gradients()[kind]
    # 1 - ratio is lost, and the noise is shrunk: 1 / (1 + noise) of the rest is kept.
    assert error(x, bits=8) == pytest.approx(0.5, abs=0.05)
    assert error(x, bits=2) > error(x, bits=4) > error(x, bits=8)
    # Unbiased, the lost half comes back as variance: N / m - 1.
    assert error(x, bits=8, unbiased=True) == pytest.approx(1, abs=0.1)


def test_the_default_has_less_error_than_the_unbiased_one():
    x = normal(N)
    assert error(x) < 0.6 * error(x, unbiased=True)


def test_it_is_unbiased_if_asked():
    x, trials = gradients()["spike"], 400
    compressor = make("qcs", block_size=N, bits=2, unbiased=True)
    sent = np.array([send(compressor, x, step=step) for step in range(trials)])
    # The error of the mean of independent unbiased trials is the variance over their number.
    assert np.sum((sent.mean(axis=0) - x) ** 2) < 1.3 * np.sum(sent.var(axis=0)) / trials


def test_ranks_share_the_mixtures():
    """The mean of all ranks is decoded by one transposed matrix: it lies in the space of its rows."""
    xs = [normal(N, seed) for seed in range(3)]
    merged = step(simulate(3, (N,), make("qcs", block_size=N, bits=8)), xs)
    spread = [payload(make("qcs", block_size=N, bits=8), x)["scales"] for x in xs]
    assert len({float(scale[0]) for scale in spread}) == 3
    assert np.sum((merged - np.mean(xs, axis=0)) ** 2) < 0.6 * np.sum(np.mean(xs, axis=0) ** 2)


def test_bits_per_element():
    assert bits_per_element(make("qcs"), 1 << 16) == 2 + 32 / 4096


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"qcs: bits must be a number from 2 to 8, received 1"):
        make("qcs", bits=1)
    with pytest.raises(ConfigError, match=r"qcs: block_size must be a power of two from 128 to 4096, received 100"):
        make("qcs", block_size=100)
