"""Vogels et al., "PowerSGD", NeurIPS 2019: Algorithms 1 and 2."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.ops import get_ops
from grace.core.spec import TensorSpec
from grace.testing.harness import exchange, host
from tests.papers.common import make, normal, simulate, spec, state, step
from tests.support.registered import every_framework

ROWS, COLUMNS = 30, 20


def matrix(rank: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((ROWS, rank)) @ rng.standard_normal((rank, COLUMNS))).astype(np.float32)


def relative_error(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_matrix_of_that_rank_is_exact(rank):
    m = matrix(rank)
    sim = simulate(2, m.shape, make("powersgd", compress_rank=rank))
    # P spans the range of M from the first step on, because Q is random.
    assert relative_error(step(sim, [m, m]), m) < 1e-5


@pytest.mark.parametrize("rank", [1, 3])
def test_ranks_with_different_matrices_get_the_mean(rank):
    """The mean of two matrices with the same column space is exact, although no rank has it."""
    a, b = matrix(rank, 0), matrix(rank, 0) @ np.diag(np.linspace(-1, 2, COLUMNS)).astype(np.float32)
    sim = simulate(2, a.shape, make("powersgd", compress_rank=rank))
    assert relative_error(step(sim, [a, b]), (a + b) / 2) < 1e-5


def test_warm_start_converges_to_the_best_approximation():
    """Repeated on one matrix, the error converges to that of the truncated SVD (subspace iteration)."""
    m = normal(ROWS * COLUMNS).reshape(ROWS, COLUMNS) @ np.diag(0.7 ** np.arange(COLUMNS)).astype(np.float32)
    singular = np.linalg.svd(m.astype(np.float64), compute_uv=False)
    best = np.sqrt(np.sum(singular[3:] ** 2)) / np.linalg.norm(singular)
    sim = simulate(1, m.shape, make("powersgd", compress_rank=3), "none")
    errors = [relative_error(step(sim, [m]), m) for _ in range(30)]
    assert all(error >= best * (1 - 1e-5) for error in errors), "nothing of rank 3 can be better than the SVD"
    assert errors[0] > best * 1.001, "one step alone does not reach it, or this test shows nothing"
    assert errors[-1] <= best * (1 + 1e-4)


def test_algorithm_1_and_2_with_plain_numpy():
    """Three ranks, error feedback and warm start against the paper's pseudo-code."""
    ranks, r = 3, 2
    sim = simulate(ranks, (ROWS, COLUMNS), make("powersgd", compress_rank=r), "powersgd")
    q = state(sim, 0, "q", "compressor").astype(np.float64)
    e = np.zeros((ranks, ROWS, COLUMNS))
    for number in range(4):
        xs = [normal(ROWS * COLUMNS, 10 * number + rank).reshape(ROWS, COLUMNS) for rank in range(ranks)]
        m = np.array(xs, np.float64) + e
        p = np.linalg.qr(np.mean(m @ q, axis=0))[0]
        q = np.mean(m.transpose(0, 2, 1) @ p, axis=0)
        expected = p @ q.T
        e = m - expected
        assert relative_error(step(sim, xs), expected) < 1e-4
        for rank in range(ranks):
            assert relative_error(state(sim, rank).reshape(ROWS, COLUMNS), e[rank]) < 1e-4


@every_framework
def test_p_is_orthonormal(framework):
    ops, compressor = get_ops(framework), make("powersgd", compress_rank=4)
    ex = exchange(compressor, ops, spec(ROWS, COLUMNS), [normal(ROWS * COLUMNS)])
    p = host(ops, ex.payloads[0]["p"]).reshape(ROWS, 4).astype(np.float64)
    assert np.abs(p.T @ p - np.eye(4)).max() < 1e-6


def test_a_vanished_column_is_drawn_again():
    """After a zero gradient Q is zero. Without a new random Q, nothing would ever be sent again."""
    m = matrix(2)
    sim = simulate(2, m.shape, make("powersgd", compress_rank=2), "none")
    step(sim, [m, m])
    assert not step(sim, [0 * m, 0 * m]).any()
    assert not state(sim, 0, "q", "compressor").any()
    assert relative_error(step(sim, [m, m]), m) < 1e-5


def test_a_rank_that_grows_is_found():
    """If the matrix changes from rank 1 to rank 2, the vanished second column of Q must come back."""
    sim = simulate(2, (ROWS, COLUMNS), make("powersgd", compress_rank=2), "none")
    step(sim, [matrix(1)] * 2)
    assert (np.abs(state(sim, 0, "q", "compressor")).max(axis=0) == 0).tolist() == [False, True]
    assert relative_error(step(sim, [matrix(2)] * 2), matrix(2)) < 1e-4


def test_two_collectives_per_bucket_whatever_the_number_of_tensors(monkeypatch):
    import grace
    from grace.core.session.simulation import SimulatedTransport

    calls = []
    original = SimulatedTransport.start

    def start(self, collective, name):
        if self.rank == 0 and collective.kind == "allreduce":
            calls.append((name, collective.buffers[0].size))
        return original(self, collective, name)

    monkeypatch.setattr(SimulatedTransport, "start", start)
    tensors = {f"w{i}": (ROWS, COLUMNS) for i in range(3)}
    sim = grace.Simulation(2, tensors, {"compressor": "powersgd", "compress_rank": 2, "default_rules": False})
    sim.step([{name: matrix(3, i) for i, name in enumerate(tensors)} for _ in range(2)])
    # (rows + columns) * rank values and one flag per tensor, and six numbers for the step.
    assert [size for _, size in calls] == [3 * ROWS * 2, 3 * COLUMNS * 2 + 3 + 6]


def test_tensors_that_would_not_shrink_stay_dense():
    compressor = make("powersgd", compress_rank=4)
    assert "matrix" in compressor.unfit(TensorSpec("bias", (64,)))
    assert "no smaller" in compressor.unfit(TensorSpec("w", (4, 4)))
    assert compressor.unfit(TensorSpec("w", (64, 64))) is None


@pytest.mark.parametrize(
    ("shape", "columns"),
    [((64, 32, 3, 3), 32 * 9), ((64, 3, 7, 7), 3 * 49), ((3, 3, 32, 64), 64), ((7, 7, 3, 64), 64), ((128, 1, 3, 3), 9)],
    ids=["PyTorch", "PyTorch's first layer", "Keras", "Keras' first layer", "depthwise"],
)
def test_a_kernel_is_split_where_its_factors_are_smallest(shape, columns):
    assert make("powersgd", compress_rank=4).wire(TensorSpec("kernel", shape))[0].length == columns * 4


SHAPES = {  # shapes of tensors, and of their matrices
    (30, 20): (30, 20),
    (6, 5, 20): (30, 20),
    (1, 30, 20): (30, 20),
    (30, 20, 1): (30, 20),
    (30, 1, 20): (30, 20),
    (16, 8, 3, 3): (16, 72),
    (3, 3, 8, 16): (72, 16),
    (16, 1, 5, 5): (16, 25),
    (1, 1, 16, 16): (16, 16),
    (3, 4, 5, 6, 7): (60, 42),
    (1, 12, 1, 15, 1): (12, 15),
}


@every_framework
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_of_any_number_of_axes_is_a_matrix(shape, framework):
    """A tensor whose matrix has rank r is decoded exactly, and (rows + columns) * r values are sent."""
    rows, columns = SHAPES[shape]
    m = normal(rows * 2).reshape(rows, 2) @ normal(2 * columns, 1).reshape(2, columns)
    compressor, tensor, ops = make("powersgd", compress_rank=2), TensorSpec("w", shape), get_ops(framework)
    assert compressor.unfit(tensor) is None
    ex = exchange(compressor, ops, tensor, [m.ravel()])
    assert [ops.length(ex.payloads[0][name]) for name in "pq"] == [rows * 2, columns * 2]
    assert relative_error(host(ops, compressor.decompress(ex.payloads[0], ex.sites[0])), m.ravel()) < 1e-5


@pytest.mark.parametrize("shape", [(), (1,), (500,), (1, 500), (500, 1), (1, 1, 500, 1), (1, 1, 1, 1, 1), (0, 8), (0,)])
def test_what_is_no_matrix_stays_dense(shape):
    compressor = make("powersgd", compress_rank=1)
    assert compressor.unfit(TensorSpec("w", shape))
    # Shapes that differ in one dimension can be compressed.
    assert compressor.unfit(TensorSpec("w", (3, 500))) is None


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("shape", [(30, 20), (16, 8, 3, 3), (3, 3, 8, 16)])
def test_no_more_than_rank_r_comes_back(rank, shape):
    x = normal(np.prod(shape)).reshape(shape)
    sim = simulate(2, shape, make("powersgd", compress_rank=rank))
    singular = np.linalg.svd(step(sim, [x, x]).reshape(SHAPES[shape]).astype(np.float64), compute_uv=False)
    assert np.all(singular[:rank] > 0.1)
    assert np.all(singular[rank:] < 1e-5 * singular[0])


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e25])
def test_gradients_far_from_one_are_compressed_too(scale):
    """The first P is M Q with Q of the order of one. Later, Q is of the order of M."""
    m = (matrix(2).astype(np.float64) * scale).astype(np.float32)
    sim = simulate(2, m.shape, make("powersgd", compress_rank=2), "none")
    for _ in range(3):
        assert relative_error(step(sim, [m, m]), m.astype(np.float64)) < 1e-3
