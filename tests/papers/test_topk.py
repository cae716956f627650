"""Aji and Heafield, EMNLP 2017; Stich et al., "Sparsified SGD with memory", NeurIPS 2018."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.papers.common import bits_per_element, make, normal, payload, send, simulate, spec, state, step


@pytest.mark.parametrize("seed", range(5))
def test_no_other_support_of_k_has_a_smaller_error(seed):
    x = normal(10, seed).astype(np.float64)
    error = np.sum((send(make("topk", compress_ratio=0.3), x.astype(np.float32)) - x) ** 2)
    others = [np.sum(np.delete(x, list(kept)) ** 2) for kept in itertools.combinations(range(10), 3)]
    assert error == pytest.approx(min(others), rel=1e-6)


def test_contraction_k_over_d_is_reached_by_equal_magnitudes():
    """The worst case is exactly (1 - k/d) |x|^2."""
    x = np.where(np.arange(100) % 2, 1.0, -1.0).astype(np.float32)
    assert np.sum((send(make("topk", compress_ratio=0.3), x) - x) ** 2) == 70
    assert make("topk", compress_ratio=0.3).contraction(spec(100)) == 0.3


def test_ties_go_to_the_lower_index():
    x = np.array([1, 3, -3, 3, 2, -3], np.float32)
    assert payload(make("topk", compress_ratio=0.5), x)["indices"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("ratio", "n", "k"), [(0.01, 1000, 10), (0.01, 50, 1), (0.3, 7, 2), (1.0, 5, 5)])
def test_k_is_at_least_one(ratio, n, k):
    assert len(payload(make("topk", compress_ratio=ratio), normal(n))["values"]) == k


def test_an_entry_takes_8_bytes():
    assert bits_per_element(make("topk", compress_ratio=0.01), 10000) == 0.01 * 64


def test_memory_delivers_every_coordinate_in_the_end():
    """With error feedback, a constant gradient g is applied in full: the sum of t steps is t g minus the residual."""
    g = normal(100)
    sim = simulate(2, (100,), make("topk", compress_ratio=0.05), "residual")
    applied = np.zeros(100)
    for _ in range(400):
        applied += step(sim, [g, g])
    assert np.allclose(applied + state(sim, 0), 400 * g, rtol=1e-4, atol=1e-3)
    # Stich et al., Lemma 3.1 with delta = k/d: |e|^2 <= 4 (1 - delta) / delta^2 |g|^2.
    assert np.sum(state(sim, 0) ** 2) <= 4 * 0.95 / 0.05**2 * np.sum(g**2)
