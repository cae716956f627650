"""Oh et al., "Communication-efficient federated learning via quantized compressed sensing", 2023."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.codecs.rotation import NORMAL_ERRORS, normal_levels, rotate
from grace.core.compressors.contrib.fedqcs import recover_sparse
from grace.core.errors import ConfigError
from grace.core.spec import Key
from tests.papers.common import OPS, bits_per_element, exchange, make, normal, send, spec
from tests.support.registered import ops_of

N, KEY = 4096, Key(3, 1)


def gradients(n: int = N) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    made = {
        "normal": rng.standard_normal(n),
        "laplace": rng.laplace(size=n),
        "log-normal": rng.standard_normal(n) * np.exp(rng.standard_normal(n)),
    }
    return {name: x.astype(np.float32) for name, x in made.items()}


def sparse(x: np.ndarray, ratio: float) -> np.ndarray:
    return np.where(abs(x) >= np.sort(abs(x))[-int(ratio * len(x))], x, 0)


def error(found: np.ndarray, x: np.ndarray) -> float:
    return float(np.sum((found - x) ** 2) / np.sum(x.astype(np.float64) ** 2))


def measured(x: np.ndarray, noise: float, reduction: int = 3) -> np.ndarray:
    """Return measurements of a block, scaled to a variance of 1, with normal noise."""
    y = rotate(OPS, x / np.linalg.norm(x) * np.sqrt(len(x), dtype=np.float32), len(x), KEY)[: len(x) // reduction]
    return (y + np.sqrt(noise) * normal(len(y), 9)).astype(np.float32)


def plain_message_passing(z: np.ndarray, n: int, rounds: int, share: float, noise: float, key: Key = KEY) -> np.ndarray:
    """Vector approximate message passing with a Bernoulli-Gaussian prior and expectation maximization, in float64."""
    a = np.array([rotate(OPS, row, n, key)[: len(z)] for row in np.eye(n)]).T
    per = n / len(z)
    z = z.astype(np.float64)
    total = max(np.mean(z**2) - noise, 1e-3 * np.mean(z**2))
    size, copy, error = total / share, per * a.T @ z, total * (per - 1) + noise * per
    for _ in range(rounds):
        large = np.exp(-(copy**2) / 2 / (size + error)) / np.sqrt(size + error) * share
        small = np.exp(-(copy**2) / 2 / error) / np.sqrt(error) * (1 - share)
        chance = large / (large + small)
        mean, variance = copy * size / (size + error), size * error / (size + error)
        estimate = chance * mean
        second = chance * (mean**2 + variance)
        trust = np.clip(np.mean(second - estimate**2) / error, 1e-4, 0.95)
        share, size = np.mean(chance), np.sum(second) / np.sum(chance)
        fresh, error = (estimate - trust * copy) / (1 - trust), error * trust / (1 - trust)
        # The linear estimate of x, and again without what it only repeats.
        gain = error / (error + noise)
        better, left = fresh + gain * a.T @ (z - a @ fresh), 1 - gain / per
        copy, error = (better - left * fresh) / (1 - left), error * left / (1 - left)
    return estimate


@pytest.mark.parametrize("backend", ["numpy", "numpy-reference"])
@pytest.mark.parametrize("rounds", [1, 4, 10])
def test_it_is_message_passing(rounds, backend):
    x, noise = sparse(gradients(512)["laplace"], 0.05), 0.04
    z = measured(x, noise)
    found = recover_sparse(ops_of(backend), z, 512, 512, 3, rounds, 0.05, noise, KEY)
    expected = plain_message_passing(z, 512, rounds, 0.05, noise)
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("bits", [1, 3])
def test_rounding_shrinks_measurements_and_adds_noise(bits):
    """Bussgang: a level is (1 - D) times the measurement plus noise, so it is divided by 1 - D before it is decoded."""
    x, d = gradients(512)["laplace"], NORMAL_ERRORS[bits]
    method = make("fedqcs", bits=bits, block_size=512, compress_ratio=0.05)
    sent = exchange(method, OPS, spec(512), [x])
    y = rotate(OPS, sparse(x, 0.05), 512, sent.sites[0].key)[:170]
    levels = np.array(normal_levels(bits))
    rounded = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, y / np.sqrt(np.mean(y**2)))]
    found = plain_message_passing(rounded / (1 - d), 512, method.rounds, 0.05, d / (1 - d), sent.sites[0].key)
    decoded = OPS.cast(method.decompress(sent.payloads[0], sent.sites[0]), "float64")
    assert error(decoded, found * (found @ x) / (found @ found)) < 1e-5


@pytest.mark.parametrize("kind", gradients())
def test_a_third_of_the_measurements_at_three_bits_find_the_large_elements(kind):
    x = gradients()[kind]
    large = sparse(x, 0.05)
    found = send(make("fedqcs"), x)
    assert error(found, large) < 0.05
    # Without the prior, two thirds of a vector are lost.
    assert error(send(make("qcs", compress_ratio=1 / 3, bits=8), large), large) > 0.6


@pytest.mark.parametrize("kind", gradients())
def test_more_bits_and_more_measurements_find_more(kind):
    x = gradients()[kind]
    by_bits = [error(send(make("fedqcs", bits=bits, compress_ratio=0.1), x), x) for bits in (1, 2, 4)]
    assert by_bits == sorted(by_bits, reverse=True)
    by_measurements = [error(send(make("fedqcs", reduction=r, compress_ratio=0.1), x), x) for r in (8, 4, 2)]
    assert by_measurements == sorted(by_measurements, reverse=True)


@pytest.mark.parametrize("options", [{}, {"compress_ratio": 1.0, "reduction": 16}, {"bits": 1, "rounds": 50}], ids=str)
def test_the_error_never_exceeds_the_gradient(options):
    """The sender scales down what is decoded if the elements cannot be found, as in dense gradients."""
    rng = np.random.default_rng(6)
    given = [*gradients(1000).values(), np.ones(1000), np.eye(1, 1000, 7)[0], rng.integers(-1, 2, 1000)]
    for i, x in enumerate(given):
        sent = send(make("fedqcs", **options), x.astype(np.float32), step=i)
        assert error(sent, x) <= 1 + 1e-6
        # No other factor has less error.
        assert sent @ x == pytest.approx(sent @ sent, rel=1e-5)


def test_levels_are_the_best_for_normal_numbers():
    rng = np.random.default_rng(8)
    x = rng.standard_normal(1_000_000)
    for bits, expected in NORMAL_ERRORS.items():
        levels = np.array(normal_levels(bits))
        found = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
        assert np.mean((found - x) ** 2) == pytest.approx(expected, rel=0.01)
        # Bussgang: the levels are means of what is rounded to them, so the error is uncorrelated with the level.
        assert np.mean((found - x) * found) == pytest.approx(0, abs=0.005)


def test_bits_per_element():
    assert bits_per_element(make("fedqcs"), 1 << 16) == pytest.approx(3 * 1365 / 4096 + 32 / 4096, abs=1e-3)
    assert bits_per_element(make("fedqcs", bits=1, reduction=4), 1 << 16) == pytest.approx(1 / 4 + 32 / 4096)


def test_options_are_checked():
    for options, text in (
        ({"bits": 5}, "bits must be a number from 1 to 4, received 5"),
        ({"block_size": 100}, "block_size must be a power of two from 128 to 4096, received 100"),
        ({"reduction": 0}, "reduction must be a number of elements per measurement from 1 to 128, received 0"),
        ({"rounds": 0}, "rounds must be a number from 1 to 100, received 0"),
    ):
        with pytest.raises(ConfigError, match=f"fedqcs: {text}"):
            make("fedqcs", **options)
