"""Horvath et al., "Natural compression for distributed deep learning", 2019: unbiased, variance 1/8, 9 bits."""

from __future__ import annotations

import numpy as np
import pytest

from grace.testing.harness import exchange
from tests.papers.common import OPS, bits_per_element, make, normal, payload, spec, variance

both = pytest.mark.parametrize("clipped", [False, True])


def many(compressor, value, n: int = 40_000, dtype: str = "float32", beside: float | None = None) -> np.ndarray:
    """Return the decoded values of n copies of one number, each with its own random number."""
    x = np.full(n, value, dtype)
    if beside is not None:
        x[0] = beside
    ex = exchange(compressor, OPS, spec(n, dtype=dtype), [x])
    return compressor.decompress(ex.payloads[0], ex.sites[0])[1:].astype(np.float64)


@both
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("t", [1.0001, 1.25, -1.5, 2.5, 3.99, 1e-3, -7e5])
def test_rounds_to_a_neighbour_with_the_probability_that_makes_it_unbiased(t, dtype, clipped):
    """t becomes sign(t) 2^ceil with probability (|t| - 2^floor) / 2^floor, otherwise sign(t) 2^floor."""
    low = 2.0 ** np.floor(np.log2(abs(t)))
    p = abs(t) / low - 1
    got = many(make("natural", clipped=clipped), t, dtype=dtype)
    assert set(np.unique(got)) <= {np.sign(t) * low, np.sign(t) * 2 * low}
    up = np.mean(np.abs(got) == 2 * low)
    assert abs(up - p) <= 5 * np.sqrt(p * (1 - p) / len(got)) + 1e-6


@both
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_two_and_zero_are_unchanged(dtype, clipped):
    compressor = make("natural", clipped=clipped)
    x = np.concatenate([2.0 ** np.arange(-60, 61), -(2.0 ** np.arange(-60, 61)), [0.0]]).astype(dtype)
    for step in range(20):
        ex = exchange(compressor, OPS, spec(len(x), dtype=dtype), [x], step=step)
        assert np.array_equal(compressor.decompress(ex.payloads[0], ex.sites[0]), x)


@both
@pytest.mark.parametrize("seed", [0, 1])
def test_variance_is_within_an_eighth_and_what_the_probabilities_say(seed, clipped):
    """The variance of an element is (2^ceil - |t|)(|t| - 2^floor). For t = 4/3 2^floor this is t^2 / 8."""
    x = normal(400, seed)
    wide = np.abs(x.astype(np.float64))
    low = 2.0 ** np.floor(np.log2(wide))
    mean, margin = variance(make("natural", clipped=clipped), x, 150)
    assert abs(mean - np.sum((2 * low - wide) * (wide - low))) <= margin
    assert mean - margin <= np.sum(wide**2) / 8


@both
def test_the_worst_case_attains_an_eighth(clipped):
    got = many(make("natural", clipped=clipped), 4 / 3)
    assert np.mean((got - 4 / 3) ** 2) == pytest.approx((4 / 3) ** 2 / 8, rel=0.04)


@both
@pytest.mark.parametrize("t", [3.0, 40.0, -1000.0, 2.0**22])
def test_denormal_numbers_are_rounded_to_zero_or_the_smallest_normal_one(t, clipped):
    """In units of 2^-149, t becomes 2^23 with probability |t| / 2^23. The integer arithmetic needs no special case."""
    tiny = 2.0**-149
    got = many(make("natural", clipped=clipped), np.float32(t * tiny)) / tiny
    assert set(np.unique(got)) <= {0.0, np.sign(t) * 2.0**23}
    p = abs(t) / 2**23
    assert abs(np.mean(got != 0) - p) <= 5 * np.sqrt(p * (1 - p) / len(got))


@both
def test_the_highest_power_is_rounded_to_and_not_overflown(clipped):
    compressor, x = make("natural", clipped=clipped), np.full(1000, 3e38, np.float32)
    # A step counts so large a magnitude as infinite; the codec alone does not.
    (at,) = exchange(compressor, OPS, spec(len(x)), [np.ones_like(x)]).sites
    assert set(np.unique(compressor.decompress(compressor.compress(x, at), at))) == {2.0**127}


@pytest.mark.parametrize("share", [0.75, 0.25, 0.001])
@pytest.mark.parametrize(("largest", "top"), [(1.5, 2), (2.0**40, 2.0**40), (-3.0, 4)])
def test_below_the_clipped_range_numbers_become_its_lowest_power_or_zero(share, largest, top):
    """There are 127 exponents, from the largest rounded one, `top`, down to L = top / 2^126. Below L it is unbiased."""
    low = top * 2.0**-126
    x = np.full(80_000, share * low)
    x[:2000] = largest
    ex = exchange(make("natural", clipped=True), OPS, spec(len(x), dtype="float64"), [x])
    got = make("natural", clipped=True).decompress(ex.payloads[0], ex.sites[0])
    assert np.abs(got).max() == top
    assert set(np.unique(got[2000:])) == {0.0, low}
    p = np.mean(got[2000:] == low)
    assert abs(p - share) <= 5 * np.sqrt(share * (1 - share) / 78_000)


def test_clipped_codes_count_from_the_base():
    """1 has the biased exponent 127 in float32. As the largest element, its code is 127 above the base."""
    x = np.float32([1.0, -0.5, 2.0**-20, 0.0])
    sent = payload(make("natural", clipped=True), x)
    assert sent["base"].tolist() == [0]
    assert sent["codes"].tolist() == [127, 128 + 126, 107, 0]
    sent = payload(make("natural", clipped=True), x * 2.0**50)
    assert sent["base"].tolist() == [50]
    assert sent["codes"].tolist() == [127, 128 + 126, 107, 0]


def test_codes_are_the_sign_and_the_exponent():
    """The low 8 bits come first, then the signs, 8 in a byte."""
    sent = payload(make("natural"), np.float32([1.0, -2.0, 0.5, -0.25]))
    assert sent["codes"].tolist() == [127, 128, 126, 125, 0b1010]


def test_bits_per_element():
    assert bits_per_element(make("natural"), 2**14) == 9
    assert bits_per_element(make("natural", clipped=True), 2**14) == 8 + 32 / 2**14
    (codes,) = make("natural").wire(spec(2**14, dtype="float64"))
    assert codes.length * 8 / 2**14 == 12
