"""Cui et al., "Slashing communication traffic in federated learning", JSAC 2021: MUCSC and B-MUCSC."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import bits_per_element, make, normal, payload, send, variance

N = 2000  # no more than the sample has, so that the centroids are those of all elements


def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "normal": normal(N),
        "laplace": rng.laplace(size=N).astype(np.float32),
        "log-normal": np.exp(rng.standard_normal(N)).astype(np.float32),
    }


def distance(x: np.ndarray, centroids: np.ndarray) -> float:
    return float(np.sum(np.min((x.astype(np.float64)[:, None] - centroids) ** 2, axis=1)))


def centroids(x: np.ndarray, **options) -> np.ndarray:
    return payload(make("mucsc", **options), x)["centroids"].astype(np.float64)


@pytest.mark.parametrize("kind", gradients())
def test_two_inner_centroids_are_the_best_of_a_fine_grid(kind):
    """The objective of k-means, the squared distance to the nearest centroid; the outermost two are the ends."""
    x = gradients()[kind]
    found = centroids(x, bits=2)
    assert found[[0, -1]].tolist() == [x.min(), x.max()]
    grid = np.linspace(x.min(), x.max(), 40)[1:-1]
    least = min(distance(x, np.array([x.min(), *pair, x.max()])) for pair in itertools.combinations(grid, 2))
    assert distance(x, found) < least * 1.01


@pytest.mark.parametrize("kind", gradients())
def test_each_inner_centroid_is_the_mean_of_its_cluster(kind):
    x = gradients()[kind].astype(np.float64)
    found = centroids(gradients()[kind], bits=3)
    nearest = np.abs(x[:, None] - found).argmin(axis=1)
    means = np.array([x[nearest == j].mean() for j in range(8)])
    moved = np.concatenate([found[:1], means[1:-1], found[-1:]])
    assert distance(x, moved) > distance(x, found) * 0.98


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_an_element_becomes_one_of_its_neighbours_with_the_stated_variance(bits):
    x = gradients()["log-normal"]
    compressor, table = make("mucsc", bits=bits), centroids(x, bits=bits)
    above = np.searchsorted(table, x).clip(1)
    low, high = table[above - 1], table[above]
    found = send(compressor, x)
    assert np.all((np.abs(found - low) < 1e-6) | (np.abs(found - high) < 1e-6))
    expected = float(np.sum((high - x) * (x - low)))
    mean, margin = variance(compressor, x, 40)
    assert abs(mean - expected) <= margin + 1e-6


def test_the_mean_is_the_gradient():
    x, trials = normal(500), 100
    sent = np.array([send(make("mucsc", bits=2), x, step=step) for step in range(trials)])
    assert np.sum((sent.mean(axis=0) - x) ** 2) < 1.3 * np.sum(sent.var(axis=0)) / trials


def test_one_table_follows_a_gradient_that_is_not_symmetric():
    """The levels of ALQ are multiples of a norm, and equal for both signs."""
    x = (normal(N) + 5).astype(np.float32)
    errors = [variance(make(*name, **options), x, 5)[0] for name, options in (
        (("mucsc",), {}), (("alq",), {"bucket_size": 0}),
    )]  # fmt: skip
    assert errors[0] < errors[1] / 2


def test_a_sample_of_a_large_tensor_is_enough():
    # The first half is a thousand times smaller, so a sample must have elements of all parts.
    x = normal(200_000, 1) * np.where(np.arange(200_000) < 100_000, 1e-3, 1.0).astype(np.float32)
    found = centroids(x, bits=3)
    assert np.sum(np.abs(found) > 0.3) >= 5
    assert np.sum(np.abs(found) < 0.1) == 1


def test_the_super_cluster_has_the_elements_nearest_to_zero():
    """B-MUCSC: they are not sent."""
    x = normal(N)
    compressor = make("mucsc", super_cluster=0.9)
    found = send(compressor, x)
    largest = np.argsort(-np.abs(x))[: N // 10]
    assert sorted(np.flatnonzero(found)) == sorted(largest)
    assert payload(compressor, x)["codes"].size == N // 20
    assert bits_per_element(compressor, 1 << 16) < bits_per_element(make("mucsc"), 1 << 16)


def test_elements_that_are_sent_keep_their_sign_and_mean():
    x, trials = normal(N), 60
    kept = np.abs(x) >= np.sort(np.abs(x))[-N // 2]
    compressor = make("mucsc", super_cluster=0.5, bits=2)
    sent = np.array([send(compressor, x, step=step)[kept] for step in range(trials)])
    assert np.all(sent * x[kept] > 0)
    assert np.sum((sent.mean(axis=0) - x[kept]) ** 2) < 1.3 * np.sum(sent.var(axis=0)) / trials
    assert set(np.unique(np.abs(sent)).astype(np.float32)) == {np.abs(x[kept]).min(), np.abs(x[kept]).max()}


def test_the_table_travels_with_the_payload():
    assert bits_per_element(make("mucsc"), 1 << 16) == 4 + 16 * 32 / (1 << 16)


@pytest.mark.parametrize("options", [{}, {"bits": 1}, {"super_cluster": 0.5}])
def test_few_and_equal_elements_have_centroids(options):
    compressor = make("mucsc", **options)
    assert send(compressor, np.array([-3.0], np.float32)).tolist() == [-3.0]
    assert send(compressor, np.array([3.0, 3.0], np.float32))[1 if options else 0] in (0.0, 3.0)
    assert not send(compressor, np.zeros(100, np.float32)).any()


def test_options_are_checked():
    for options, least in (({"bits": 5}, 1), ({"bits": 0}, 1), ({"bits": 1, "super_cluster": 0.5}, 2)):
        with pytest.raises(ConfigError, match=f"mucsc: bits must be a number from {least} to 4 .*{options['bits']}"):
            make("mucsc", **options)
    with pytest.raises(ConfigError, match=r"mucsc: super_cluster must be .* received 1\.0"):
        make("mucsc", super_cluster=1.0)
