"""Vargaftik et al., "EDEN", ICML 2022, and Suresh et al., "Distributed mean estimation", ICML 2017."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grace.core.codecs.rotation import hadamard
from grace.core.errors import ConfigError
from tests.papers.common import OPS, bits_per_element, make, normal, payload, send, simulate, step

N = 1 << 16
# D / (1 - D) for the error D of the best levels for normal numbers.
LIMIT = {1: 0.5708, 2: 0.1331, 3: 0.0358, 4: 0.00959}


def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "normal": rng.standard_normal(N),
        "laplace": rng.laplace(size=N),
        "log-normal": np.exp(rng.standard_normal(N)) * rng.choice([-1, 1], N),
        "scaled blocks": rng.standard_normal(N) * 2.0 ** (np.arange(N) // 4096 % 7),
        "sparse": rng.standard_normal(N) * (rng.random(N) < 0.01),
        "one large": np.where(np.arange(N) % 4096 == 17, 100.0, rng.standard_normal(N)),
    }


def error(compressor, x: np.ndarray, steps: int = 2) -> float:
    return float(np.mean([np.sum((send(compressor, x, step=i) - x) ** 2) / np.sum(x**2) for i in range(steps)]))


@pytest.mark.parametrize("bits", LIMIT)
@pytest.mark.parametrize("kind", gradients())
def test_the_error_of_eden_is_that_of_normal_numbers_for_all_gradients(kind, bits):
    """EDEN, theorem 2.3: the error is D / (1 - D) for a uniformly random rotation."""
    found = error(make("eden", bits=bits), gradients()[kind].astype(np.float32))
    assert found == pytest.approx(LIMIT[bits], rel=0.03)


@pytest.mark.parametrize("bits", LIMIT)
@pytest.mark.parametrize("kind", [kind for kind in gradients() if kind != "one large"])
def test_one_transform_has_the_same_error_unless_few_elements_dominate_a_block(kind, bits):
    """DRIVE and EDEN compute with random signs and one Hadamard transform in place of a uniformly random rotation."""
    found = error(make("eden", bits=bits, transforms=1), gradients()[kind].astype(np.float32))
    assert found == pytest.approx(LIMIT[bits], rel=0.08)


@pytest.mark.parametrize("transforms", [1, 2])
@pytest.mark.parametrize("bits", LIMIT)
def test_the_result_of_eden_is_as_long_as_x_in_the_direction_of_x(bits, transforms):
    """The scale |x|^2 / <R x, q> makes <x, C(x)> = |x|^2, which an unbiased result needs."""
    x = gradients()["scaled blocks"].astype(np.float32)
    found = send(make("eden", bits=bits, transforms=transforms, block_size=1024), x)
    products, squares = ((x * other).reshape(-1, 1024).sum(axis=1) for other in (found, x.astype(np.float64)))
    assert products == pytest.approx(squares, rel=1e-5)


def two_elements(n: int) -> np.ndarray:
    return np.where(np.arange(n) == 17, 1.0, np.where(np.arange(n) == 70, 0.6, 0.0)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "transforms", "unbiased"), [("eden", 1, False), ("eden", 2, True), ("rotated", 1, True)]
)
def test_one_transform_leaves_a_bias_of_eden_where_two_elements_are_a_block(name, transforms, unbiased):
    """H D x takes four values only, whatever the signs, so that all steps make the same error; H D' H D x does not."""
    x, compressor = two_elements(4096), make(name, bits=1, transforms=transforms)
    sent = [send(compressor, x, step=i) for i in range(50)]
    bias = np.sum((np.mean(sent, axis=0) - x) ** 2) / np.mean([np.sum((one - x) ** 2) for one in sent])
    assert compressor.unbiased is unbiased
    assert (bias < 0.1) if unbiased else (bias > 0.9)


def test_one_transform_can_lose_small_elements_in_every_step():
    """The examples of docs/errors.md."""
    x, beside = two_elements(4096), normal(4096)
    beside[17] = 1000
    for i in range(5):
        sent = send(make("eden", bits=1, transforms=1), x, step=i)
        assert sent == pytest.approx(np.where(np.arange(4096) == 17, 1.36, 0), abs=1e-6)
        sent = send(make("eden", bits=1, transforms=1), beside, step=i)
        assert np.abs(np.delete(sent, 17)).max() < 1e-3
    few, some = np.zeros((2, 4096), np.float32)
    few[[17, 70, 900, 3000]] = 1, 0.7, 0.5, 0.3
    some[17::256] = normal(16)
    for x, least, most in ((few, 0.5, 0.8), (some, 0, 0.1)):
        sent = [send(make("eden", transforms=1), x, step=i) for i in range(40)]
        whole = np.mean([np.sum((one - x) ** 2) for one in sent])
        assert least < np.sum((np.mean(sent, axis=0) - x) ** 2) / whole < most


@pytest.mark.parametrize("bits", LIMIT)
def test_the_levels_are_the_best_ones_for_normal_numbers(bits):
    """Lloyd (1982) and Max (1960): a level is the mean of the numbers that are nearest to it."""
    levels = np.array(make("eden", bits=bits).levels)
    edges = [-math.inf, *(levels[:-1] + levels[1:]) / 2, math.inf]
    density = [math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi) for edge in edges]
    below = [math.erfc(-edge / math.sqrt(2)) / 2 for edge in edges]
    means = -np.diff(density) / np.diff(below)
    assert np.abs(levels - means).max() < 1e-8
    # What the levels keep of the variance is 1 - D.
    kept = np.sum(levels**2 * np.diff(below))
    assert (1 - kept) / kept == pytest.approx(LIMIT[bits], rel=1e-3)


@pytest.mark.parametrize("transforms", [1, 2])
def test_many_ranks_average_their_errors_away(transforms):
    """With equal gradients on all ranks, the error of the mean falls as 1 / N only if rotations are independent."""
    x = normal(8192)
    for name in ("eden", "rotated"):
        compressor = make(name, bits=2, transforms=transforms)
        means = step(simulate(16, (8192,), compressor), [x] * 16)
        alone = error(compressor, x)
        assert np.sum((means - x) ** 2) / np.sum(x**2) == pytest.approx(alone / 16, rel=0.15)


def mean_error(compressor, gradients: list[np.ndarray]) -> float:
    """Return the error of the mean of ranks, relative to the mean of their squares."""
    means = step(simulate(len(gradients), gradients[0].shape, compressor), gradients)
    return float(np.sum((means - np.mean(gradients, axis=0)) ** 2) / np.mean([np.sum(x**2) for x in gradients]))


@pytest.mark.parametrize("transforms", [1, 2])
def test_ranks_that_share_a_rotation_share_its_error(transforms):
    """With equal gradients, nearest levels give every rank the same error; a random choice of each rank averages."""
    x = normal(N)
    options = {"bits": 2, "shared_rotation": True, "transforms": transforms}
    eden, rotated = (make(name, **options) for name in ("eden", "rotated"))
    assert mean_error(eden, [x] * 16) == pytest.approx(LIMIT[2], rel=0.1)
    assert mean_error(rotated, [x] * 16) == pytest.approx(error(make("rotated", bits=2), x) / 16, rel=0.15)


@pytest.mark.parametrize("name", ["eden", "rotated"])
def test_a_shared_rotation_costs_unlike_gradients_nothing(name):
    gradients = [np.random.default_rng(rank).standard_normal(8192).astype(np.float32) for rank in range(16)]
    shared, private = (mean_error(make(name, bits=2, shared_rotation=each), gradients) for each in (True, False))
    assert shared == pytest.approx(private, rel=0.1)


@pytest.mark.parametrize("name", ["eden", "rotated"])
@pytest.mark.parametrize("options", [{"shared_rotation": True}, {"transforms": 1}])
def test_the_mean_over_rotations_is_the_gradient(name, options):
    """With one transform, eden promises it of no gradient, and `rotated` of all."""
    x, compressor = normal(4096), make(name, bits=1, **options)
    means = np.mean([send(compressor, x, step=i) for i in range(200)], axis=0)
    assert np.sum((means - x) ** 2) / np.sum(x**2) < 1.5 * error(compressor, x, 20) / 200


def test_a_step_has_rotations_of_its_own():
    x = normal(4096)
    for shared in (False, True):
        eden = make("eden", shared_rotation=shared)
        assert not np.array_equal(send(eden, x, step=1), send(eden, x, step=2))


@pytest.mark.parametrize("width", [8, 128, 4096])
def test_the_transform_is_its_own_inverse(width):
    x = np.random.default_rng(width).integers(-1000, 1000, 2 * width).astype(np.float64)
    assert np.array_equal(hadamard(OPS, hadamard(OPS, x, width), width), x * width)


def test_levels_lie_evenly_up_to_the_largest_rotated_element():
    """Suresh et al., section 3: k levels, rounded up or down at random, with the rotated element as mean."""
    compressor = make("rotated", bits=2, block_size=128)
    assert np.allclose(compressor.levels, [-1, -1 / 3, 1 / 3, 1])
    x = normal(128)
    means = np.mean([send(compressor, x, step=i) for i in range(500)], axis=0)
    deviation = np.sqrt(error(compressor, x, 50) * np.sum(x**2) / 128 / 500)
    assert np.abs(means - x).max() < 6 * deviation


def test_a_rotation_lowers_the_error_of_uneven_gradients():
    """Suresh et al., theorem 3: the error falls from O(d / k^2) to O(log d / k^2)."""
    x = gradients()["log-normal"].astype(np.float32)
    plain = make("qsgd", quantum_num=7, bucket_size=4096)
    assert error(make("rotated", bits=4), x) < error(plain, x) / 5


def test_zeros_and_powers_of_two_fill_the_last_block():
    for n, coded in ((1, 8), (9, 16), (4096, 4096), (4096 + 100, 4096 + 128)):
        assert payload(make("eden"), normal(n))["codes"].size == coded / 2
    assert bits_per_element(make("eden", bits=3), 1 << 20) == pytest.approx(3, abs=0.01)


@pytest.mark.parametrize("name", ["eden", "rotated"])
def test_zeros_decode_to_zeros(name):
    assert not send(make(name, bits=1), np.zeros(5000, np.float32)).any()


@pytest.mark.parametrize("name", ["eden", "rotated"])
def test_options_are_checked(name):
    with pytest.raises(ConfigError, match=f"{name}: bits must be a number from 1 to 4, received 5"):
        make(name, bits=5)
    for block in (64, 8192, 200):
        with pytest.raises(
            ConfigError, match=f"{name}: block_size must be a power of two from 128 .* received {block}"
        ):
            make(name, block_size=block)
    with pytest.raises(ConfigError, match=f"{name}: transforms must be 1 or 2, received 3"):
        make(name, transforms=3)
