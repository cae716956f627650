"""Mishchenko et al., "Distributed learning with compressed gradient differences", and EF21, which is a case of it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import make, normal, send, simulate, step
from tests.papers.test_two_shot import distances

N, RANKS = 150, 3


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("name", "options"), [("topk", {"compress_ratio": 0.1}), ("efsignsgd", {})])
def test_algorithm_1(name, options, alpha):
    """D_i = C(g_i - h_i), h_i += alpha D_i; g = h + mean D_i, h += alpha mean D_i."""
    compressor = make(name, **options)
    sim = simulate(RANKS, (N,), compressor, {"name": "diana", "alpha": alpha})
    own, mean = np.zeros((RANKS, N)), np.zeros(N)
    for number in range(8):
        xs = [normal(N, 10 * number + rank) + np.float32(rank) for rank in range(RANKS)]
        sent = np.array([send(compressor, (x - h).astype(np.float32)) for x, h in zip(xs, own, strict=True)])
        assert np.allclose(step(sim, xs), mean + sent.mean(axis=0), rtol=1e-4, atol=1e-5)
        own, mean = own + alpha * sent, mean + alpha * sent.mean(axis=0)
    assert np.abs(mean).max() > 0.1 * alpha


@pytest.mark.parametrize(
    ("memory", "momentum"),
    [("ef21", 0.0), ({"name": "diana", "alpha": 1.0}, 0.0), ({"name": "ef21", "momentum": 0.75}, 0.75)],
    ids=["ef21", "diana", "momentum"],
)
def test_ef21(memory, momentum):
    """Richtarik et al., 2021, Algorithm 2: g_i += C(grad_i - g_i), and all ranks apply the mean of the g_i.

    With momentum, v_i += (1 - momentum) (grad_i - v_i) takes the place of grad_i: Fatkhullin et al., 2023, Algorithm 1.
    """
    compressor = make("topk", compress_ratio=0.1)
    sim = simulate(RANKS, (N,), compressor, memory)
    own, running = np.zeros((RANKS, N)), np.zeros((RANKS, N))
    for number in range(8):
        xs = [normal(N, 10 * number + rank) for rank in range(RANKS)]
        running += (1 - momentum) * (np.array(xs) - running)
        own += np.array([send(compressor, (x - g).astype(np.float32)) for x, g in zip(running, own, strict=True)])
        assert np.allclose(step(sim, xs), own.mean(axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "memory"),
    [({"compressor": "qsgd", "quantum_num": 7}, "diana"), ({"compressor": "topk", "compress_ratio": 0.1}, "ef21")],
    ids=["qsgd", "EF21 by topk"],
)
def test_a_linear_rate_where_the_ranks_differ(options, memory):
    """Theorem 2 without noise in the gradients. Without shifts there is a floor."""
    shifted = distances({**options, "memory": memory, "communicator": "allgather"}, 201)
    plain = distances({**options, "memory": "none", "communicator": "allgather"}, 201)
    assert shifted[100] < 0.1 * shifted[50]
    assert shifted[200] < 0.01 * shifted[100] or shifted[200] < 1e-5
    assert min(plain) > 0.01


def test_the_mean_keeps_its_expectation():
    """With an unbiased quantizer, for every shift."""
    sim = simulate(2, (N,), make("qsgd", quantum_num=3), "diana")
    xs = [normal(N, rank) for rank in range(2)]
    mean = sum(x.astype(np.float64) for x in xs) / 2
    errors = np.array([step(sim, xs) - mean for _ in range(400)])
    assert np.abs(errors.mean(axis=0)).max() < 6 * errors.std(axis=0).max() / np.sqrt(len(errors))
    # The same gradients again and again: the shifts learn them.
    assert np.abs(errors[0]).max() > 0.1
    assert np.abs(errors[300:]).max() < 1e-4


# --- with error feedback ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.5])
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize(("name", "options"), [("topk", {"compress_ratio": 0.1}), ("efsignsgd", {})])
def test_feedback(name, options, ranks, alpha):
    """Gorbunov et al., "Linearly converging error compensated SGD", 2020, with one message.

    x_i = e_i + g_i - h_i, v_i = C(x_i), e_i = x_i - v_i, h_i += alpha v_i; g = h + mean v_i, h += alpha mean v_i.
    """
    compressor = make(name, **options)
    sim = simulate(ranks, (N,), compressor, {"name": "diana", "alpha": alpha, "feedback": True})
    again = simulate(ranks, (N,), compressor, {"name": "diana", "alpha": alpha, "feedback": True})
    errors, own, mean, given, got = np.zeros((ranks, N)), np.zeros((ranks, N)), np.zeros(N), np.zeros(N), np.zeros(N)
    for number in range(8):
        xs = [normal(N, 10 * number + rank) + np.float32(rank) for rank in range(ranks)]
        compensated = errors + np.array(xs) - own
        sent = np.array([send(compressor, x.astype(np.float32)) for x in compensated])
        merged = step(sim, xs)
        assert np.allclose(merged, mean + sent.mean(axis=0), rtol=1e-3, atol=1e-4)
        errors, own, mean = compensated - sent, own + alpha * sent, mean + alpha * sent.mean(axis=0)
        given, got = given + np.mean(xs, axis=0), got + merged
        # What has not arrived is the mean of the errors.
        assert np.allclose(given - got, errors.mean(axis=0), atol=1e-3)
        if number == 3:
            again.load_state_dict(sim.state_dict())
        elif number > 3:
            assert np.array_equal(step(again, xs), merged)
    assert min(np.abs(mean).max(), np.abs(errors).max()) > 0.1 * alpha


def test_feedback_with_shifts_has_a_linear_rate_where_error_feedback_stalls():
    """Error feedback alone meets a floor, because the ranks' gradients differ at the optimum."""
    topk = {"compressor": "topk", "compress_ratio": 0.1, "communicator": "allgather"}
    shifted = distances({**topk, "memory": {"name": "diana", "alpha": 0.04, "feedback": True}}, 201)
    plain = distances({**topk, "memory": "residual"}, 101)
    assert shifted[100] < 0.1
    assert shifted[200] < 0.05 * shifted[100]
    assert min(plain) > 0.3
