"""Zhang et al., "Evaluation and optimization of gradient compression for distributed deep learning", ICDCS 2023."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import make, normal, simulate, state, step

ROWS, COLUMNS = 24, 40


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def test_alternating_steps_with_plain_numpy():
    """Three ranks, with error feedback: Q is fixed in even steps and P in odd ones."""
    ranks, r = 3, 2
    sim = simulate(ranks, (ROWS, COLUMNS), make("acpsgd", compress_rank=r), "powersgd")
    q = state(sim, 0, "q", "compressor").astype(np.float64)
    assert np.allclose(q.T @ q, np.eye(r), atol=1e-6)
    e = np.zeros((ranks, ROWS, COLUMNS))
    for number in range(5):
        xs = [normal(ROWS * COLUMNS, 10 * number + rank).reshape(ROWS, COLUMNS) for rank in range(ranks)]
        m = np.array(xs, np.float64) + e
        mean = m.mean(axis=0)
        if number % 2 == 0:
            expected = mean @ q @ q.T
            p = np.linalg.qr(mean @ q)[0]
        else:
            expected = p @ p.T @ mean
            q = np.linalg.qr(mean.T @ p)[0]
        e = m - expected
        assert relative_error(step(sim, xs), expected) < 1e-4
        assert relative_error(state(sim, 1).reshape(ROWS, COLUMNS), e[1]) < 1e-4


def test_it_converges_to_the_best_approximation():
    """Repeated on one matrix it is subspace iteration, as powersgd, at one factor per step."""
    m = normal(ROWS * COLUMNS).reshape(ROWS, COLUMNS) @ np.diag(0.7 ** np.arange(COLUMNS)).astype(np.float32)
    singular = np.linalg.svd(m.astype(np.float64), compute_uv=False)
    best = np.sqrt(np.sum(singular[3:] ** 2)) / np.linalg.norm(singular)
    sim = simulate(1, m.shape, make("acpsgd", compress_rank=3), "none")
    errors = [relative_error(step(sim, [m]), m) for _ in range(60)]
    assert all(error >= best * (1 - 1e-5) for error in errors), "nothing of rank 3 can be better than the SVD"
    assert errors[0] > best * 1.001, "one step alone does not reach it, or this test shows nothing"
    assert errors[-1] <= best * (1 + 1e-4)


def test_one_factor_travels_per_step():
    sim = simulate(2, (ROWS, COLUMNS), make("acpsgd", compress_rank=2), "powersgd")
    sizes = []
    for number in range(4):
        step(sim, [normal(ROWS * COLUMNS, number).reshape(ROWS, COLUMNS)] * 2)
        sizes.append(sim.stats()["wire_bytes"])
    assert sizes[0] == sizes[2]
    assert sizes[1] - sizes[0] == pytest.approx(4 * 2 * (COLUMNS - ROWS), abs=16)
    assert sizes[1] < 4 * 2 * (ROWS + COLUMNS)


def test_zeros_do_not_end_the_training():
    sim = simulate(1, (ROWS, COLUMNS), make("acpsgd", compress_rank=2), "none")
    m = normal(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    for number in range(6):
        found = step(sim, [m * np.float32(number > 2)])
    assert relative_error(found, m) < 0.99
