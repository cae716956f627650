"""Cho et al., "GradZip", NeurIPS workshop 2019: alternating ridge regression; the numbers follow from its objective."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import ConfigError
from grace.core.spec import TensorSpec
from tests.papers.common import make, normal, payload, send, simulate, spec, state, step

ROWS, COLUMNS = 30, 20


def matrix(singular, seed: int = 0) -> np.ndarray:
    """Return a matrix with these singular values."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((n, len(singular))))[0] for n in (ROWS, COLUMNS))
    return ((u * np.array(singular)) @ v.T).astype(np.float32)


def relative_error(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


def ridge(m, factor, regularization):
    """Return the Y that minimises |m - Y X^T|^2 + l |Y|^2, and X: the factor scaled to columns of mean square 1."""
    x = np.asarray(factor, np.float64)
    x = x / np.sqrt(np.mean(np.sum(x * x, axis=0)))
    return m @ x @ np.linalg.inv(x.T @ x + regularization * np.eye(x.shape[1])), x


@pytest.mark.parametrize(("ranks", "memory"), [(1, "none"), (3, "none"), (3, "powersgd"), (3, "residual")])
@pytest.mark.parametrize("regularization", [0.01, 0.5])
def test_the_formulas_with_plain_numpy(ranks, memory, regularization):
    r = 3
    sim = simulate(ranks, (ROWS, COLUMNS), make("gradzip", compress_rank=r, regularization=regularization), memory)
    q, e = state(sim, 0, "q", "compressor"), np.zeros((ranks, ROWS, COLUMNS))
    for number in range(4):
        xs = [normal(ROWS * COLUMNS, 10 * number + rank).reshape(ROWS, COLUMNS) for rank in range(ranks)]
        m = np.array(xs, np.float64) + e
        p = np.mean([ridge(mine, q, regularization)[0] for mine in m], axis=0)
        qs = [ridge(mine.T, p, regularization)[0] for mine in m]
        p = ridge(m[0].T, p, regularization)[1]
        q = np.mean(qs, axis=0)
        if memory == "powersgd":
            e = m - p @ q.T
        elif memory == "residual":
            e = np.array([mine - p @ own.T for mine, own in zip(m, qs, strict=True)])
        assert relative_error(step(sim, xs), p @ q.T) < 1e-4


@pytest.mark.parametrize("regularization", [0.01, 0.1, 0.5])
def test_repeated_it_is_the_svd_with_a_soft_threshold(regularization):
    """At the fixed point, s'_j = max(0, s_j - l mean(s')) along the singular vectors of the matrix."""
    singular = np.array([10.0, 7, 4, 0.3, 0.2])
    m, r = matrix(singular), 4
    sim = simulate(2, m.shape, make("gradzip", compress_rank=r, regularization=regularization), "none")
    for _ in range(400):
        merged = step(sim, [m, m])
    # mean(s') = (sum of the n remaining s_j - n l mean(s')) / r
    for n in range(r, 0, -1):
        threshold = regularization * singular[:n].sum() / (r + n * regularization)
        if singular[n - 1] > threshold:
            break
    expected = np.zeros(len(singular))
    expected[:n] = singular[:n] - threshold
    u, _, v = np.linalg.svd(m.astype(np.float64), full_matrices=False)
    got = np.diag(u.T @ merged @ v.T)
    assert got[: len(singular)] == pytest.approx(expected, abs=2e-3)
    assert n == {0.01: 4, 0.1: 3, 0.5: 3}[regularization]


@pytest.mark.parametrize("regularization", [1e-3, 0.01, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_error_is_that_of_the_ridge_objective(regularization, seed):
    """Q minimises |M - P Q^T|^2 + l |Q|^2, and Q = 0 gives |M|^2; so the error is at most |M|^2 - l |Q|^2."""
    m = normal(ROWS * COLUMNS, seed).reshape(ROWS, COLUMNS)
    compressor = make("gradzip", regularization=regularization)
    q = payload(compressor, m)["q"].astype(np.float64)
    left = np.sum((m - send(compressor, m).reshape(m.shape)) ** 2)
    total = np.sum(m.astype(np.float64) ** 2)
    assert left <= total - regularization * np.sum(q * q) + 1e-6 * total
    # No other Q with the same P is better.
    p = payload(compressor, m)["p"].astype(np.float64).reshape(ROWS, -1)
    for other in (1.01, 0.99):
        worse = q.reshape(COLUMNS, -1) * other
        assert left + regularization * np.sum(q * q) < np.sum((m - p @ worse.T) ** 2) + regularization * np.sum(
            worse**2
        )


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_matrix_of_that_rank_is_nearly_exact(rank):
    m = normal(ROWS * rank).reshape(ROWS, rank) @ normal(rank * COLUMNS, 1).reshape(rank, COLUMNS)
    sim = simulate(2, m.shape, make("gradzip", compress_rank=rank, regularization=1e-9))
    assert relative_error(step(sim, [m, m]), m) < 1e-4


def test_at_rank_1_all_is_smaller_by_one_factor():
    m = matrix([3.0])
    sim = simulate(2, m.shape, make("gradzip", compress_rank=1, regularization=0.25), "none")
    assert relative_error(step(sim, [m, m]), m / 1.25) < 1e-5


def test_the_strength_does_not_depend_on_the_size_of_the_gradient():
    m = normal(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    one = send(make("gradzip"), m)
    # Powers of two do not change the mantissas.
    for scale in (2.0**-90, 2.0**90):
        assert np.array_equal(send(make("gradzip"), (m * np.float32(scale))), one * scale)


def test_p_and_q_travel_and_are_sums():
    """(rows + columns) * r values are sent. Given P, the payloads of the ranks can be added."""
    compressor, tensor = make("gradzip", compress_rank=3), spec(ROWS, COLUMNS)
    assert [(f.length, f.wire) for f in compressor.wire(tensor)] == [(3 * COLUMNS, True), (3 * ROWS, False)]
    assert [f.length for f in compressor.proposed(tensor)] == [3 * ROWS]


def test_zeros_are_survived():
    m = matrix([2.0, 1.0])
    sim = simulate(2, m.shape, make("gradzip", compress_rank=2), "none")
    step(sim, [m, m])
    assert not step(sim, [0 * m, 0 * m]).any()
    assert not state(sim, 0, "q", "compressor").any()
    assert relative_error(step(sim, [m, m]), m) < 0.05


def test_a_rank_that_grows_is_found():
    """A direction that the start lacks comes back from rounding errors, by about 1 / l in each half step."""
    sim = simulate(2, (ROWS, COLUMNS), make("gradzip", compress_rank=2), "none")
    step(sim, [matrix([1.0])] * 2)
    m = matrix([2.0, 1.0], seed=1)
    errors = [relative_error(step(sim, [m, m]), m) for _ in range(12)]
    assert errors[0] > 0.2, "the start has rank 1 only, or this test shows nothing"
    assert errors[-1] < 0.02


def test_options_are_checked():
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="regularization"):
            make("gradzip", regularization=value)
    with pytest.raises(ConfigError, match="gradzip: compress_rank must be at least 1, received 0"):
        make("gradzip", compress_rank=0)
    assert "gradzip needs a matrix" in make("gradzip").unfit(TensorSpec("bias", (64,)))
