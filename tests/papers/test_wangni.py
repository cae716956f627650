"""Wangni et al., "Gradient sparsification for communication-efficient distributed optimization", NeurIPS 2018."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import make, normal, payload, send, variance


def heavy(n: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) ** 3).astype(np.float32)


def closed_form(x: np.ndarray, eps: float) -> np.ndarray:
    """Return Algorithm 2's probabilities. It sorts, and finds the smallest k with |x_(k+1)| A_k <= eps |x|^2 + B_k."""
    size = np.abs(x.astype(np.float64))
    ordered = np.sort(size)[::-1]
    for k in range(len(x)):
        rest = ordered[k:]
        below = eps * np.sum(size**2) + np.sum(rest**2)
        if ordered[k] * rest.sum() <= below:
            return np.minimum(1, size * rest.sum() / below)
    raise AssertionError("the last element always fulfils the condition")


def greedy(x: np.ndarray, density: float, rounds: int) -> np.ndarray:
    """Return Algorithm 3's probabilities. It rescales those below 1 to restore the density, and clips at 1."""
    size = np.abs(x.astype(np.float64))
    p = np.minimum(1, density * len(x) * size / size.sum())
    for _ in range(rounds):
        free = p < 1
        c = (density * len(x) - len(x) + free.sum()) / p[free].sum()
        if c <= 1:
            break
        p = np.where(free, np.minimum(1, c * p), 1)
    return p


def probabilities(compressor, x: np.ndarray) -> np.ndarray:
    """Return the probabilities from the payload, where 1/scale is lambda."""
    scale = payload(compressor, x)["scale"].astype(np.float64)
    return np.minimum(1, np.abs(x.astype(np.float64)) / scale)


@pytest.mark.parametrize("eps", [0.05, 0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_budget_gives_the_closed_form(eps, seed):
    x = heavy(500, seed)
    p = closed_form(x, eps)
    assert np.allclose(probabilities(make("wangni", variance_budget=eps), x), p, rtol=1e-6)
    assert p.sum() < 500
    # The variance budget is used up exactly.
    assert np.sum(x.astype(np.float64) ** 2 / p) == pytest.approx(
        (1 + eps) * np.sum(x.astype(np.float64) ** 2), rel=1e-6
    )


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.4, 0.9])
@pytest.mark.parametrize("make_x", [normal, heavy])
def test_the_density_is_that_of_the_greedy_form(ratio, make_x):
    x = make_x(1000)
    p = probabilities(make("wangni", compress_ratio=ratio), x)
    assert np.allclose(p, greedy(x, ratio, 100), rtol=1e-6)
    assert p.sum() == pytest.approx(1000 * ratio, rel=1e-5)


def test_two_rounds_of_the_paper_are_nearly_there_and_never_above():
    x = heavy(1000)
    two, all_rounds = greedy(x, 0.4, 2), probabilities(make("wangni", compress_ratio=0.4), x)
    assert (two <= all_rounds * (1 + 1e-6)).all()
    assert two.sum() < all_rounds.sum() < 1.1 * two.sum()


@pytest.mark.parametrize("options", [{"compress_ratio": 0.1}, {"variance_budget": 0.5}, {"variance_budget": 3.0}])
def test_variance_and_number_of_elements(options):
    """The variance is sum x_i^2 (1/p_i - 1), and sum p_i elements are sent on average."""
    x, trials, compressor = heavy(400), 400, make("wangni", **options)
    p = probabilities(compressor, x)
    wide = x.astype(np.float64)
    expected = np.sum(wide**2 * (1 / p - 1))
    mean, margin = variance(compressor, x, trials)
    assert abs(mean - expected) <= margin
    if "variance_budget" in options:
        assert expected <= options["variance_budget"] * np.sum(wide**2) * (1 + 1e-6)
    counts = [np.count_nonzero(send(compressor, x, step=number)) for number in range(trials)]
    assert abs(np.mean(counts) - p.sum()) <= 6 * np.sqrt(np.sum(p * (1 - p)) / trials)


def test_every_element_is_kept_as_often_as_it_should():
    x, trials, compressor = heavy(60), 1000, make("wangni", compress_ratio=0.3)
    p = probabilities(compressor, x)
    share = np.mean([send(compressor, x, step=number) != 0 for number in range(trials)], axis=0)
    assert (np.abs(share - p) <= 6 * np.sqrt(p * (1 - p) / trials)).all()
    assert (p == 1).sum() >= 5
    assert (p < 0.1).sum() >= 5


@pytest.mark.parametrize("options", [{"compress_ratio": 0.2}, {"variance_budget": 0.5}])
def test_top_elements_are_never_dropped_and_travel_exactly(options):
    x, compressor = heavy(1000), make("wangni", **options)
    p = probabilities(compressor, x)
    top = np.argsort(-np.abs(x))[: (p == 1).sum()]
    assert len(top) > 10
    for number in range(20):
        sent = payload(compressor, x, step=number)
        assert sorted(sent["indices"].tolist()) == sorted(top.tolist())
        assert np.array_equal(sent["values"], x[sent["indices"]])
        assert len(sent["signed"]) > 0


def test_all_others_decode_to_one_magnitude_with_their_sign():
    x, compressor = heavy(1000), make("wangni", compress_ratio=0.2)
    sent = payload(compressor, x)
    drawn = np.where(sent["signed"] < 0, -1 - sent["signed"], sent["signed"])
    assert np.array_equal(np.unique(drawn), drawn)
    assert not set(drawn.tolist()) & set(sent["indices"].tolist())
    decoded = send(compressor, x)
    assert np.array_equal(decoded[drawn], np.sign(x[drawn]) * sent["scale"])
    assert np.abs(x[drawn]).max() < sent["scale"] <= np.abs(sent["values"]).min()
    assert (x[drawn] < 0).sum() > 20


def test_an_uncertain_element_takes_4_bytes_and_a_certain_one_8():
    sent = payload(make("wangni", compress_ratio=0.2), heavy(1000))
    assert sum(field.nbytes for field in sent.values()) == 4 + 8 * len(sent["values"]) + 4 * len(sent["signed"])


def test_equal_elements_share_the_budget():
    """All elements have p = 1/(1 + eps), or the density."""
    x = np.full(1000, -2.0, np.float32)
    assert probabilities(make("wangni", variance_budget=3.0), x) == pytest.approx(0.25)
    assert probabilities(make("wangni", compress_ratio=0.3), x) == pytest.approx(0.3)


def test_everything_is_kept_where_the_density_allows_it():
    x = heavy(300)
    assert np.allclose(send(make("wangni", compress_ratio=1.0), x), x, rtol=1e-6)
    # Each has a probability of exactly 1.
    equal = np.full(64, -2.0, np.float32)
    assert np.array_equal(send(make("wangni", compress_ratio=1.0), equal), equal)


def test_zeros_send_nothing():
    sent = payload(make("wangni"), np.zeros(100, np.float32))
    assert len(sent["values"]) == len(sent["signed"]) == 0


def test_a_budget_must_be_positive():
    with pytest.raises(ConfigError, match="variance_budget"):
        make("wangni", variance_budget=0.0)
