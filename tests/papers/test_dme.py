"""Konecny and Richtarik, "Randomized distributed mean estimation: accuracy vs. communication", 2018."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import make, normal, payload, send, simulate, step, variance

X = (normal(400) + 3).astype(np.float32)


def formula(x: np.ndarray, p: np.ndarray | float) -> float:
    """Return lemma 3.2: sum of (1 / p_i - 1) (x_i - mu)^2."""
    wide = x.astype(np.float64)
    return float(np.sum((1 / p - 1) * (wide - wide.mean()) ** 2))


def optimal(x: np.ndarray, k: float) -> np.ndarray:
    """Return p_i proportional to |x_i - mu|, at most 1, with the sum k, by bisection."""
    size = np.abs(x.astype(np.float64) - x.astype(np.float64).mean())
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * size).sum() < k else (low, middle)
    return np.minimum(1, low * size)


def test_a_coordinate_is_the_centre_or_its_distance_from_it_over_the_probability():
    found, sent, mean = (
        send(make("dme", compress_ratio=0.25), X),
        payload(make("dme", compress_ratio=0.25), X),
        X.mean(),
    )
    drawn = np.zeros(len(X), bool)
    drawn[sent["indices"]] = True
    assert 50 < drawn.sum() < 150
    assert np.allclose(found[~drawn], mean)
    assert np.allclose(found[drawn], X[drawn] / 0.25 - 0.75 / 0.25 * mean, rtol=1e-4)


@pytest.mark.parametrize("ratio", [0.1, 0.3])
def test_the_variance_is_that_of_the_paper(ratio):
    mean, margin = variance(make("dme", compress_ratio=ratio), X, 300)
    assert abs(mean - formula(X, ratio)) < margin


def test_optimal_probabilities_have_the_variance_of_the_paper_which_is_less():
    p = optimal(X, 0.2 * len(X))
    mean, margin = variance(make("dme", compress_ratio=0.2, probabilities="optimal"), X, 300)
    assert abs(mean - formula(X, p)) < margin
    assert formula(X, p) < 0.8 * formula(X, 0.2)


@pytest.mark.parametrize("probabilities", ["uniform", "optimal"])
def test_it_is_unbiased(probabilities):
    trials = 300
    sent = np.array([send(make("dme", probabilities=probabilities), X, step=step) for step in range(trials)])
    # The error of the mean of independent unbiased trials is the variance over their number.
    assert np.sum((sent.mean(axis=0) - X) ** 2) < 1.3 * np.sum(sent.var(axis=0)) / trials


def test_a_constant_gradient_arrives_without_error():
    x = np.full(100, 2.5, np.float32)
    assert np.abs(send(make("dme"), x) - x).max() < 1e-6
    assert np.abs(send(make("wangni"), x) - x).max() > 1


def test_ranks_draw_independently_so_their_errors_average_out():
    errors = []
    for ranks in (1, 16):
        merged = step(simulate(ranks, X.shape, make("dme", compress_ratio=0.5)), [X] * ranks)
        errors.append(float(np.sum((merged - X) ** 2)))
    assert errors[1] < errors[0] / 8


def test_every_coordinate_travels_with_a_probability_of_one():
    assert np.abs(send(make("dme", compress_ratio=1.0), X) - X).max() < 1e-5
