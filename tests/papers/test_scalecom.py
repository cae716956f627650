"""Chen et al., "ScaleCom", NeurIPS 2020: the cyclic local top-k and its low-pass filter, Algorithm 1."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.config.registry import memories
from grace.core.errors import ConfigError
from grace.core.methods.compressor import usual_communicator
from grace.testing.communicator_contract import residuals
from tests.papers.common import bits_per_element, make, normal, simulate, state, step

N, RANKS = 200, 3


def top(x, k):
    return np.argsort(-np.abs(x), kind="stable")[:k]


def test_one_update_by_hand():
    """Two ranks, k = 1, beta = 0.5. Rank 0 leads step 0, rank 1 step 1."""
    sim = simulate(2, (3,), make("scalecom", compress_ratio=0.34), {"name": "lowpass", "beta": 0.5})
    # Rank 0 chooses element 2, where rank 1 has its smallest.
    first = step(sim, [np.float32([1, 2, 4]), np.float32([8, 4, 2])])
    assert first.tolist() == [0, 0, 3]
    assert [state(sim, rank).tolist() for rank in range(2)] == [[0.5, 1, 0], [4, 2, 0]]
    # Rank 1 has x = [5, 2, 1] and chooses element 0; x = [1.5, 1, 1] on rank 0.
    second = step(sim, [np.float32([1, 0, 1]), np.float32([1, 0, 1])])
    assert second.tolist() == [3.25, 0, 0]
    # m = m / 2 + (x - sent) / 2. Where x was sent, half of the old m stays.
    assert [state(sim, rank).tolist() for rank in range(2)] == [[0.25, 1, 0.5], [2, 2, 0.5]]


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.1])
def test_algorithm_1(beta):
    """x_r = m_r + g_r; all send x_r at the leader's top-k; m_r = (1 - beta) m_r + beta (x_r - sent)."""
    sim = simulate(RANKS, (N,), make("scalecom", compress_ratio=0.05), {"name": "lowpass", "beta": beta})
    m = np.zeros((RANKS, N), np.float32)
    for number in range(7):
        xs = [normal(N, 10 * number + rank) for rank in range(RANKS)]
        given = m + np.array(xs)
        kept = top(given[number % RANKS], 10)
        sent = np.zeros_like(given)
        sent[:, kept] = given[:, kept]
        m = np.float32(1 - beta) * m + np.float32(beta) * (given - sent)
        assert np.allclose(step(sim, xs), sent.mean(axis=0), rtol=1e-5, atol=1e-6)
        for rank in range(RANKS):
            assert np.allclose(state(sim, rank), m[rank], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [1.0, 0.3, 0.1])
def test_the_filter_loses_nothing(beta):
    """The difference of what was given and what was sent is m / beta."""
    sim = simulate(RANKS, (N,), make("scalecom", compress_ratio=0.05), {"name": "lowpass", "beta": beta})
    given, sent = np.zeros(N), np.zeros(N)
    for number in range(200):
        xs = [normal(N, 10 * number + rank) + np.float32(0.1) for rank in range(RANKS)]
        given += sum(map(np.float64, xs)) / RANKS
        sent += step(sim, xs)
    owed = sum(state(sim, rank).astype(np.float64) for rank in range(RANKS)) / RANKS / beta
    assert np.allclose(given, sent + owed, atol=2e-3)
    # The debt is bounded: most of the mean of 20 has arrived.
    assert sent.mean() > 0.5 * given.mean()


@pytest.mark.parametrize("communicator", ["two_shot", "hierarchical", "sparse_allreduce"])
def test_the_filter_loses_nothing_on_any_way(communicator):
    """An owner's memory sees the mean in units of the gradient, whatever part of its debt a rank adds to it."""
    way = {"name": communicator, **({"local_size": 2} if communicator == "hierarchical" else {})}
    compressor, shape = make("topk", compress_ratio=0.05), (60, 50)
    sim = simulate(4, shape, compressor, {"name": "lowpass", "beta": 0.5}, way)
    given, sent = np.zeros(shape), np.zeros(shape)
    for number in range(6):
        xs = [normal(3000, 10 * number + rank).reshape(shape) for rank in range(4)]
        given += sum(map(np.float64, xs)) / 4
        sent += step(sim, xs)
    assert np.allclose(given, sent + residuals(sim)["w"], atol=1e-4)


def test_the_debt_stays_below_its_bound():
    """|m| / beta <= s G / (beta (1 - s)) with s = sqrt(1 - delta), on one rank, whose top-k has delta = k / d."""
    beta, delta = 0.2, 0.1
    sim = simulate(1, (N,), make("scalecom", compress_ratio=delta), {"name": "lowpass", "beta": beta})
    s = np.sqrt(1 - delta)
    for number in range(300):
        g = normal(N, number % 7) + 1
        step(sim, [(g / np.linalg.norm(g)).astype(np.float32)])
        assert np.linalg.norm(state(sim, 0)) / beta <= s / (beta * (1 - s))


def test_without_a_filter_it_is_plain_error_feedback():
    sims = [
        simulate(2, (N,), make("scalecom", compress_ratio=0.05), memory)
        for memory in ("residual", {"name": "lowpass", "beta": 1.0})
    ]
    for number in range(5):
        xs = [normal(N, 2 * number + rank) for rank in range(2)]
        assert np.allclose(*(step(sim, xs) for sim in sims), rtol=1e-6, atol=1e-7)


def test_the_bytes_do_not_grow_with_the_ranks():
    """k values by allreduce, and k indices of the leader; topk gathers both from every rank."""
    compressor = make("scalecom", compress_ratio=0.1)
    assert usual_communicator(compressor) == "allreduce"
    assert bits_per_element(compressor, 1000) == 0.1 * 32
    sent = []
    for ranks in (2, 5):
        sim = simulate(ranks, (1000,), compressor, "lowpass")
        step(sim, [normal(1000, rank) for rank in range(ranks)])
        sent.append(sim.runs[0].stats()["tensors"]["w"]["wire_bytes"])
    assert sent == [800, 800]


@pytest.mark.parametrize("beta", [0.0, -0.1, 1.5])
def test_a_filter_that_forgets_or_overshoots_is_refused(beta):
    with pytest.raises(ConfigError, match=r"beta must lie in \(0, 1\]"):
        memories.make({"name": "lowpass", "beta": beta})
