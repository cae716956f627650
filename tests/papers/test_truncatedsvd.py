"""Eckart and Young, "The approximation of one matrix by another of lower rank", Psychometrika 1936; FedDLR."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.testing.harness import learnt
from tests.papers.common import OPS, exchange, make, normal, send, simulate, spec, step

SHAPE = (24, 40)


def error(x: np.ndarray, decoded: np.ndarray) -> float:
    return float(np.sum((x - decoded) ** 2))


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_error_is_that_of_the_best_matrix_of_its_rank(rank, size):
    """The theorem: it is the sum of the squares of the singular values that are left out."""
    x = size * normal(24 * 40).astype(np.float64)
    found = error(x, send(make("truncatedsvd", compress_rank=rank), x.astype(np.float32), shape=SHAPE))
    left_out = np.linalg.svd(x.reshape(SHAPE), compute_uv=False)[rank:]
    assert found == pytest.approx(np.sum(left_out**2), rel=1e-4)


def test_power_iteration_approaches_it_from_above():
    """PowerSGD with a warm start, on one gradient again and again."""
    x = (normal(24 * 3).reshape(24, 3) @ normal(3 * 40, 1).reshape(3, 40)).ravel() + 0.3 * normal(24 * 40, 2)
    least = error(x, send(make("truncatedsvd", compress_rank=2), x, shape=SHAPE))
    compressor, state, errors = make("powersgd", compress_rank=2), None, []
    for number in range(30):
        made = exchange(compressor, OPS, spec(*SHAPE), [x], step=number, state=state)
        errors.append(error(x, compressor.decompress(made.payloads[0], made.sites[0])))
        state = learnt(compressor, made.payloads, made.sites[0])
    assert all(found >= least * (1 - 1e-5) for found in errors)
    assert errors[0] > 1.05 * least
    assert errors[-1] == pytest.approx(least, rel=1e-3)


def test_the_triples_of_all_ranks_are_added():
    sim = simulate(3, SHAPE, make("truncatedsvd", compress_rank=2))
    xs = [normal(24 * 40, rank).reshape(SHAPE) for rank in range(3)]
    alone = [send(make("truncatedsvd", compress_rank=2), x.ravel(), shape=SHAPE) for x in xs]
    assert np.allclose(step(sim, xs).ravel(), np.mean(alone, axis=0), rtol=1e-4, atol=1e-5)


def cut(x, rank):
    """Return the best matrix of a rank."""
    u, s, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("second", [None, {"name": "truncatedsvd", "compress_rank": 1}, {"name": "qsgd"}])
def test_both_ends_send_the_best_matrix_of_their_rank(second, ranks):
    """FedDLR: a server, which is one rank here, cuts the mean of what the others have cut, and sends it back."""
    config = {"compressor": {"name": "truncatedsvd", "compress_rank": 4}, "memory": "none", "default_rules": False}
    communicator = {"name": "two_shot", "second": second, "shard_memory": "none"}
    sim = grace.Simulation(ranks, {"w": SHAPE, "v": SHAPE}, config, communicator=communicator)
    given = [{"w": normal(24 * 40, i).reshape(SHAPE), "v": normal(24 * 40, 9 - i).reshape(SHAPE)} for i in range(ranks)]
    first, *others = sim.step(given)
    assert all(np.array_equal(first[name], other[name]) for other in others for name in first)
    for name, found in first.items():
        mean = sum(cut(x[name], 4) for x in given) / ranks
        if second == {"name": "qsgd"}:
            # 127 levels of the norm of each bucket of 512 elements.
            bounds = np.array([np.linalg.norm(part) for part in np.split(mean.ravel(), [512])]) / 127
            assert (np.abs(found - mean).ravel() <= np.repeat(bounds, [512, 24 * 40 - 512]) + 1e-5).all()
        else:
            assert np.allclose(found, cut(mean, second["compress_rank"] if second else 4), atol=1e-4)
    assert [unit.spec.shape for unit in sim.run.plan.units] == [SHAPE, SHAPE]
