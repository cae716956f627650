"""Alistarh et al., "QSGD", NIPS 2017: Lemma 3.1 (unbiased, variance, sparsity) and the size of a code."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.papers.common import bits_per_element, make, normal, payload, send, variance

N = 512


@pytest.mark.parametrize("s", [1, 2, 7, 15, 127])
@pytest.mark.parametrize("seed", [0, 1])
def test_variance_is_within_the_bound(s, seed):
    x = normal(N, seed)
    mean, margin = variance(make("qsgd", quantum_num=s, bucket_size=0, norm="l2"), x, 200)
    bound = min(N / s**2, math.sqrt(N) / s) * float(np.sum(x.astype(np.float64) ** 2))
    assert mean <= bound + margin


@pytest.mark.parametrize("s", [1, 3, 15])
def test_variance_is_that_of_stochastic_rounding(s):
    """The variance is sum_i (norm/s)^2 p_i (1 - p_i), where p_i is the fractional part of s|x_i|/norm."""
    x = normal(N, 2).astype(np.float64)
    norm = np.linalg.norm(x)
    p = s * np.abs(x) / norm % 1
    mean, margin = variance(make("qsgd", quantum_num=s, bucket_size=0, norm="l2"), x.astype(np.float32), 300)
    assert abs(mean - np.sum((norm / s) ** 2 * p * (1 - p))) <= margin


def test_variance_with_the_largest_norm_is_smaller():
    x = normal(N, 3)
    l2, _ = variance(make("qsgd", quantum_num=7, bucket_size=0, norm="l2"), x, 100)
    largest, margin = variance(make("qsgd", quantum_num=7, bucket_size=0, norm="max"), x, 100)
    assert largest + margin < l2


@pytest.mark.parametrize("s", [1, 2, 4])
def test_expected_nonzeros_are_few(s):
    """E|C(x)|_0 <= s (s + sqrt(n))."""
    x = normal(N, 4)
    compressor = make("qsgd", quantum_num=s, bucket_size=0, norm="l2")
    counts = [np.count_nonzero(send(compressor, x, step=step)) for step in range(100)]
    assert np.mean(counts) <= s * (s + math.sqrt(N)) + 6 * np.std(counts) / 10


def test_decoded_values_are_levels_of_the_norm():
    x = normal(N, 5)
    norm = np.linalg.norm(x.astype(np.float64))
    levels = send(make("qsgd", quantum_num=4, bucket_size=0, norm="l2"), x) / norm * 4
    assert np.abs(levels - np.round(levels)).max() < 1e-5
    assert np.all(np.abs(np.round(levels) - 4 * x / norm) <= 1)
    assert np.all(np.round(levels) * np.sign(x) >= 0)


@pytest.mark.parametrize("s", [1, 7, 127])
def test_variance_with_the_largest_norm_is_within_its_bound(s):
    """A Bernoulli variable of step max|x| / s has at most a variance of a quarter of its square."""
    x = normal(N, 3)
    mean, margin = variance(make("qsgd", quantum_num=s, bucket_size=0), x, 200)
    assert mean <= N * float(np.abs(x).max()) ** 2 / (4 * s**2) + margin


def test_figure_3_of_grace():
    """s = 4 has the magnitudes 0, 1/4, 1/2, 3/4, 1. An element on a level is not rounded."""
    x = np.array([0.0, 0.25, -0.5, 0.75, 1.0], np.float32)
    compressor = make("qsgd", quantum_num=4, bucket_size=0, norm="max")
    for step in range(20):
        assert np.array_equal(send(compressor, x, step=step), x)


@pytest.mark.parametrize(("s", "bits"), [(1, 2), (3, 3), (4, 4), (7, 4), (8, 5), (15, 5), (127, 8), (128, 9)])
def test_a_code_takes_the_bits_of_its_2s_plus_1_values(s, bits):
    assert bits == math.ceil(math.log2(2 * s + 1))
    compressor = make("qsgd", quantum_num=s, bucket_size=1024)
    # One float32 norm per 1,024 elements.
    assert bits_per_element(compressor, 2**14) == bits + 32 / 1024


@pytest.mark.parametrize("s", [1, 7, 127, 300])
def test_all_2s_plus_1_codes_occur(s):
    ramp = (np.arange(-2 * s, 2 * s + 1) / (2 * s)).astype(np.float32)
    decoded = send(make("qsgd", quantum_num=s, bucket_size=0, norm="max"), ramp)
    assert set(np.round(decoded * s).astype(int)) == set(range(-s, s + 1))


def test_buckets_have_norms_of_their_own():
    x = np.concatenate([normal(100, 0), 1000 * normal(100, 1), np.zeros(50, np.float32)])
    sent = payload(make("qsgd", bucket_size=100, norm="l2"), x)
    expected = [np.linalg.norm(x[i : i + 100].astype(np.float64)) for i in (0, 100, 200)]
    assert np.array_equal(sent["norms"], np.array(expected).astype(np.float32))


def test_zero_vector_is_sent_as_zero():
    assert not send(make("qsgd"), np.zeros(N, np.float32)).any()
