"""Shlezinger et al., "UVeQFed", IEEE Transactions on Signal Processing 2020: subtractive dither on lattices."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.compressors.contrib.uveqfed import rectangle
from grace.core.errors import ConfigError
from tests.papers.common import bits_per_element, make, normal, send, simulate, step

N = 1 << 14
SETTINGS = [(1, 1), (1, 4), (2, 2), (2, 4), (2, 8)]
every_setting = pytest.mark.parametrize(("dimension", "bits"), SETTINGS)


def unit(dimension: int, bits: int) -> float:
    """Return Delta for gradients whose largest magnitude is 1."""
    return 2 / (2**bits - 1) if dimension == 1 else 1 / rectangle(bits)[2]


def variance_of_a_cell(dimension: int, delta: float) -> float:
    return delta**2 / 12 if dimension == 1 else delta**2 * 5 / 72


def errors(x: np.ndarray, dimension: int, bits: int, at: int = 0) -> np.ndarray:
    compressor = make("uveqfed", dimension=dimension, bits=bits, bucket_size=0)
    return send(compressor, x, step=at) - x.astype(np.float64)


def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {
        "normal": normal(N),
        "heavy": rng.standard_t(2, N),
        "on the grid": rng.integers(-7, 8, N) / 7,
        "largest": np.where(np.arange(N) % 3, 1.0, -1.0),
    }
    for x in found.values():
        x[0] = 0.999 * np.abs(x).max() or 1.0
    return {name: (x / np.abs(x).max()).astype(np.float32) for name, x in found.items()}


@every_setting
@pytest.mark.parametrize("kind", ["normal", "heavy", "on the grid", "largest"])
def test_the_variance_is_that_of_a_cell_whatever_the_gradient(dimension, bits, kind):
    """Theorem 1: the error is uniform in a cell around 0 and has its second moment."""
    x = gradients()[kind]
    found = errors(x, dimension, bits)
    expected = variance_of_a_cell(dimension, unit(dimension, bits))
    # The squared error of an element varies by less than its mean.
    assert abs(np.mean(found**2) / expected - 1) < 6 / np.sqrt(N)
    assert abs(found.mean()) < 6 * np.sqrt(expected / N)
    assert abs(np.corrcoef(found[1:], x[1:])[0, 1]) < 6 / np.sqrt(N)


@every_setting
def test_the_error_stays_in_the_cell(dimension, bits):
    found = errors(gradients()["normal"], dimension, bits) / unit(dimension, bits)
    if dimension == 1:
        assert np.abs(found).max() < 0.5001
        return
    # A hexagon: no farther from 0 than from any of the six neighbours.
    across, down = found.reshape(-1, 2).T
    for angle in np.arange(6) * np.pi / 3:
        assert np.max(across * np.cos(angle) + down * np.sin(angle)) < 0.5001
    assert np.hypot(across, down).max() > 0.55


@pytest.mark.parametrize("dimension", [1, 2])
def test_the_mean_is_the_gradient(dimension):
    x, trials = gradients()["heavy"][:500], 80
    mean = np.mean([errors(x, dimension, 2, at=trial) for trial in range(trials)], axis=0)
    expected = variance_of_a_cell(dimension, unit(dimension, 2)) * (np.abs(x).max()) ** 2
    assert np.mean(mean**2) < 2 * expected / trials


def test_the_hexagonal_lattice_has_less_variance_than_the_grid_for_equal_cells():
    """Conway and Sloane: second moments of 5 / (36 sqrt(3)) and 1 / 12, that is 0.17 dB."""
    x = gradients()["normal"]
    scalar = np.mean(errors(x, 1, 4) ** 2) / unit(1, 4) ** 2
    hexagonal = np.mean([np.mean(errors(x, 2, 4, at=at) ** 2) for at in range(8)]) / (unit(2, 4) ** 2 * np.sqrt(3) / 2)
    assert 10 * np.log10(1 / 12 / hexagonal) == pytest.approx(0.167, abs=0.06)
    assert hexagonal < scalar


@pytest.mark.parametrize(("bits", "share"), [(4, 1.11), (6, 0.994), (8, 0.970)])
def test_the_rectangle_loses_less_with_more_bits(bits, share):
    """Against a grid of 2^bits points; without the edges, the share would be 0.962."""
    columns, rows, _ = rectangle(bits)
    assert columns * rows <= 4**bits
    assert rows % 2 == 0
    ratio = variance_of_a_cell(2, unit(2, bits)) / variance_of_a_cell(1, unit(1, bits))
    assert ratio == pytest.approx(share, abs=0.005)


def test_ranks_draw_dithers_of_their_own():
    """Then the variance of the mean falls with the number of ranks."""
    x = gradients()["normal"].reshape(128, 128)
    merged = step(simulate(4, (128, 128), make("uveqfed", bits=2, bucket_size=0)), [x] * 4)
    assert np.mean((merged - x) ** 2) == pytest.approx(variance_of_a_cell(1, unit(1, 2)) / 4, rel=0.05)


@pytest.mark.parametrize("dimension", [1, 2])
def test_bits_per_element(dimension):
    # A norm for 512 elements is 1/16 bit each; the number of the key takes 32 bits.
    found = bits_per_element(make("uveqfed", dimension=dimension, bits=3), 1 << 16)
    assert found == 3 + 1 / 16 + 32 / (1 << 16)


@pytest.mark.parametrize("dimension", [1, 2])
def test_zeros_decode_to_zeros(dimension):
    assert not send(make("uveqfed", dimension=dimension), np.zeros(101, np.float32)).any()


def test_options_are_checked():
    for dimension, bits, most in ((1, 5, 4), (2, 9, 8), (2, 0, 8)):
        with pytest.raises(ConfigError, match=f"uveqfed: bits must be a number from 1 to {most} .*received {bits}"):
            make("uveqfed", dimension=dimension, bits=bits)
    with pytest.raises(ConfigError, match="uveqfed: dimension must be 1 or 2, received 3"):
        make("uveqfed", dimension=3)
    with pytest.raises(ConfigError, match="uveqfed: bucket_size must be even with dimension=2, received 7"):
        make("uveqfed", dimension=2, bucket_size=7)
