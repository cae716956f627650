"""Gandikota et al., "vqSGD", AISTATS 2021: random vertices of a cross-polytope, unbiased, with a known variance."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import bits_per_element, make, normal, send, variance

N = 64


def stated(x: np.ndarray, norm: str, samples: int) -> float:
    """Return the variance of the mean of independent vertices +-R e_i, drawn with mean x."""
    square = float(np.sum(x.astype(np.float64) ** 2))
    reach = len(x) * square if norm == "l2" else float(np.abs(x.astype(np.float64)).sum()) ** 2
    return (reach - square) / samples


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("samples", [1, 8])
def test_decoded_buckets_are_means_of_vertices(norm, samples):
    x = normal(N)
    found = send(make("vqsgd", norm=norm, samples=samples), x)
    reach = np.sqrt(N) * np.linalg.norm(x) if norm == "l2" else np.abs(x).sum()
    counts = found / reach * samples
    assert np.abs(counts - np.round(counts)).max() < 1e-5
    assert 1 <= np.abs(np.round(counts)).sum() <= samples


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("samples", [1, 16])
def test_the_variance_is_the_stated_one(norm, samples):
    """Theorem 5 with the cross-polytope, "l2": at most d |x|^2 for one vertex; repetition divides it."""
    x = normal(N) * np.where(np.arange(N) < 8, 4, 1).astype(np.float32)
    mean, margin = variance(make("vqsgd", norm=norm, samples=samples), x, 300)
    expected = stated(x, norm, samples)
    # With one vertex, the error of one draw depends on the sign only.
    assert abs(mean - expected) <= max(margin, 1e-5 * expected)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_mean_is_the_gradient(norm):
    """All buckets, the shorter last one and one of zeros too."""
    x = normal(150)
    x[64:128] = 0
    compressor, trials = make("vqsgd", norm=norm), 400
    mean = np.mean([send(compressor, x, step=step) for step in range(trials)], axis=0)
    # A bucket is 64 elements long even if the tensor ends before. What is drawn beyond its end is dropped.
    total = sum(stated(np.resize(np.r_[part, np.zeros(64)], 64), norm, 16) for part in (x[:64], x[128:]))
    assert np.sum((mean - x) ** 2) < 1.5 * total / trials
    assert not mean[64:128].any()


def test_equal_elements_are_drawn_alike():
    """For them |x|_1 is all of R, and no share is left for other vertices."""
    x = np.array([1.0, -1.0] * 256, np.float32)
    for norm in ("l1", "l2"):
        found = send(make("vqsgd", bucket_size=512, samples=4096, norm=norm), x)
        assert np.all(found * x >= 0)
        assert np.abs(found.sum()) < 512 * 0.1
        assert np.abs(found * x - 1).max() < 1.8  # counts are 8 +- 2.8


def test_l2_sends_vertices_that_cancel():
    x = np.zeros(N, np.float32)
    x[3] = 1.0
    found = send(make("vqsgd", norm="l2", samples=512), x)
    # An eighth belongs to the element, the rest to all 128 vertices alike.
    assert np.count_nonzero(found) > 50
    assert abs(found[3] - 1) < 8 * 6 / np.sqrt(512)
    assert np.array_equal(send(make("vqsgd"), x), x)


@pytest.mark.parametrize(("d", "samples", "bits"), [(512, 1, 10 + 32), (64, 16, 16 * 7 + 32), (32768, 2, 32 + 32)])
def test_a_vertex_takes_the_bits_of_2d_codes(d, samples, bits):
    assert bits_per_element(make("vqsgd", bucket_size=d, samples=samples), 1 << 18) == bits / d


def test_options_are_checked():
    for size in (0, 1, 48, 65536):
        with pytest.raises(ConfigError, match=f"vqsgd: bucket_size must be a power of two .*, received {size}"):
            make("vqsgd", bucket_size=size)
    with pytest.raises(ConfigError, match=r"vqsgd: samples must be .* at least 1, received 0"):
        make("vqsgd", samples=0)
