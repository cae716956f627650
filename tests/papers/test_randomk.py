"""Random-k: Stich et al., NeurIPS 2018; unbiased with the factor d/k."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.ops import get_ops
from grace.core.spec import Key
from tests.papers.common import bits_per_element, make, normal, payload, send, simulate, step, variance


def test_scaled_variance():
    """E|C(x) - x|^2 = (d/k - 1) |x|^2."""
    x = normal(200)
    mean, margin = variance(make("randomk", compress_ratio=0.1, scaled=True), x, 1000)
    assert abs(mean - 9 * np.sum(x.astype(np.float64) ** 2)) <= margin


def test_unscaled_error():
    """E|C(x) - x|^2 = (1 - k/d) |x|^2."""
    x = normal(200)
    mean, margin = variance(make("randomk", compress_ratio=0.1), x, 1000)
    assert abs(mean - 0.9 * np.sum(x.astype(np.float64) ** 2)) <= margin


def test_scaled_values_are_d_over_k_times_the_gradient():
    x = normal(200)
    sent = payload(make("randomk", compress_ratio=0.1, scaled=True), x)
    assert np.allclose(sent["values"], 10 * x[sent["indices"]], rtol=1e-6)


@pytest.mark.parametrize(("n", "k"), [(20, 5), (33, 8), (64, 16)])
def test_every_element_and_every_pair_is_drawn_equally_often(n, k):
    trials, single, pair = 4000, np.zeros(n), np.zeros((n, n))
    ops = get_ops("numpy")
    for t in range(trials):
        drawn = ops.sample(n, k, Key(42, t))
        assert len(set(drawn.tolist())) == k
        single[drawn] += 1
        pair[np.ix_(drawn, drawn)] += 1
    p = k / n
    # By Hoeffding and a union bound over n + n^2 / 2 frequencies, larger deviations have a probability below 1e-6.
    allowed = np.sqrt(np.log(2 * (n + n * n / 2) / 1e-6) / (2 * trials))
    assert np.abs(single / trials - p).max() <= allowed
    q = k * (k - 1) / (n * (n - 1))
    others = pair[~np.eye(n, dtype=bool)] / trials
    assert np.abs(others - q).max() <= allowed
    # All counts together: chi-square of n dependent cells, with mean n - 1 and standard deviation at most sqrt(2n).
    chi = np.sum((single - trials * p) ** 2) / (trials * p * (1 - p)) * (n - 1) / n
    assert abs(chi - (n - 1)) <= 7 * np.sqrt(2 * n)


def test_indices_are_equal_on_all_ranks_and_new_every_step():
    compressor = make("randomk", compress_ratio=0.1)
    sim = simulate(3, (200,), compressor)
    supports = []
    for number in range(5):
        xs = [normal(200, 10 * number + rank) for rank in range(3)]
        merged = step(sim, xs)
        support = np.flatnonzero(merged)
        assert np.allclose(merged[support], np.mean(xs, axis=0)[support], rtol=1e-5, atol=1e-6)
        assert len(support) == 20, "ranks with different indices would fill up to 60 coordinates"
        supports.append(tuple(support))
    assert len(set(supports)) == 5


def test_indices_do_not_travel():
    assert bits_per_element(make("randomk", compress_ratio=0.01), 10000) == 0.01 * 32


def test_all_elements_are_the_gradient_itself():
    x = normal(100)
    assert np.array_equal(send(make("randomk", compress_ratio=1.0), x), x)


def test_a_block_is_one_run_of_coordinates_that_all_ranks_share():
    """Block-random-k; the run goes on at the beginning, and every coordinate has the same share of all steps."""
    n, k, steps = 20, 6, 400
    compressor = make("randomk", compress_ratio=0.3, mode="block")
    sim, counts, starts = simulate(2, (n,), compressor), np.zeros(n), set()
    for _ in range(steps):
        sent = step(sim, [np.ones(n, np.float32), np.full(n, 3, np.float32)])
        assert set(sent.tolist()) == {0, 2}
        begins = np.flatnonzero((sent != 0) & (np.roll(sent, 1) == 0))
        assert (len(begins), np.count_nonzero(sent)) == (1, k)
        starts.add(int(begins[0]))
        counts += sent != 0
    assert len(starts) == n
    # 120 steps each, with a standard deviation of 9.2.
    assert np.abs(counts - steps * k / n).max() <= 45


def test_scaled_blocks_are_unbiased():
    x, compressor = normal(20), make("randomk", compress_ratio=0.3, mode="block", scaled=True)
    mean = np.mean([send(compressor, x, step=number) for number in range(3000)], axis=0)
    assert np.abs(mean - x).max() <= 5 * np.abs(x).max() * np.sqrt(20 / 6 / 3000)
