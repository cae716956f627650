"""Yu et al., "Exploring fast and communication-efficient algorithms in large-scale distributed networks", 2019."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.config.config import Method
from grace.core.config.registry import communicators, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.ops import get_ops
from grace.testing.harness import exchange, host
from tests.papers.common import bits_per_element, make, normal, payload, send, simulate, spec, state, step, variance
from tests.support.registered import every_framework

N = 400


@pytest.mark.parametrize("width", [2, 3, 4, 8, 12])
def test_decoded_values_are_the_two_nearest_levels(width):
    x = normal(N)
    compressor = make("lpc", width=width)
    delta = float(payload(compressor, x)["delta"][0])
    assert delta == pytest.approx(np.abs(x).max() / (2 ** (width - 1) - 1), rel=1e-6)
    for number in range(5):
        level = send(compressor, x, step=number) / delta
        assert np.abs(level - np.round(level)).max() < 1e-3
        assert np.abs(level - x / delta).max() <= 1 + 1e-3


@pytest.mark.parametrize("width", [2, 4, 8])
def test_variance_is_that_of_stochastic_rounding(width):
    """The variance is sum_i delta^2 p_i (1 - p_i), at most d delta^2 / 4."""
    x = normal(N, 1)
    delta = float(np.abs(x).max()) / (2 ** (width - 1) - 1)
    p = x.astype(np.float64) / delta % 1
    mean, margin = variance(make("lpc", width=width), x, 200)
    assert abs(mean - np.sum(delta**2 * p * (1 - p))) <= margin
    assert mean <= N * delta**2 / 4 + margin


def test_probabilities():
    """g in [eps, eps + delta] becomes eps with probability (eps + delta - g) / delta."""
    for value, low, p_low in [(0.7, 0.5, 0.2), (-0.7, -0.75, 0.8), (0.2, 0.0, 0.2), (-0.1, -0.25, 0.4)]:
        got = send(make("lpc", width=4, delta=0.25), np.full(40_000, value, np.float32))
        assert set(np.unique(got)) == {low, low + 0.25}
        assert abs(np.mean(got == low) - p_low) <= 5 * np.sqrt(p_low * (1 - p_low) / len(got))


@pytest.mark.parametrize("width", [2, 5, 16])
def test_a_fixed_delta_has_all_2_to_the_w_levels_and_clips_outside(width):
    half = 2 ** (width - 1)
    x = (np.arange(-half - 3, half + 3) * 0.5).astype(np.float32)
    got = send(make("lpc", width=width, delta=0.5), x)
    assert np.array_equal(got, np.clip(x, -half * 0.5, (half - 1) * 0.5))
    assert len(np.unique(got)) == 2**width
    assert np.array_equal(send(make("lpc", width=width, delta=0.5), np.float32([1e30, -1e30])), [got[-1], got[0]])


@every_framework
def test_a_fixed_delta_keeps_the_precision_of_float64(framework):
    """The delta 0.001 is used in float64, not rounded to float32."""
    ops, compressor = get_ops(framework), make("lpc", delta=0.001)
    x = np.arange(-100, 100) * 0.001 + 1e-7
    ex = exchange(compressor, ops, spec(200, dtype="float64"), [x])
    got = host(ops, compressor.decompress(ex.payloads[0], ex.sites[0]))
    assert set(got) <= {k * 0.001 for k in range(-128, 128)}


def test_the_largest_magnitude_is_a_level():
    x = np.float32([-3.5, 0.1, 1.0])
    for number in range(10):
        assert send(make("lpc", width=4), x, step=number)[0] == -3.5


def test_bits_per_element():
    assert bits_per_element(make("lpc", width=5), 2**14) == 5 + 32 / 2**14
    assert bits_per_element(make("lpc", width=5, delta=0.1), 2**14) == 5


@pytest.mark.parametrize("options", [{"width": 1}, {"width": 17}, {"delta": 0.0}, {"delta": -1.0}])
def test_ranges(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        make("lpc", **options)


# --- the control variate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("method", ["lpc", "topk", "terngrad"])
def test_control_variate(method, period):
    """x_i = g_i - c; merged = mean C(x_i) + c; c becomes merged at the snapshots, and is equal on all ranks."""
    compressor = make(method)
    sim = simulate(2, (N,), compressor, {"name": "svrg", "period": period})
    plain = simulate(2, (N,), compressor, "none")
    c = np.zeros(N, np.float32)
    for number in range(7):
        xs = [normal(N, 2 * number + rank) for rank in range(2)]
        # At the same step the keys are equal, so the compressor alone gives the same result for the same input.
        expected = step(plain, [x - c for x in xs]) + c
        merged = step(sim, xs)
        assert np.array_equal(merged, expected)
        if number % period == 0:
            c = merged
        for rank in range(2):
            assert np.array_equal(state(sim, rank, "snapshot"), c)


def test_without_loss_the_control_variate_changes_nothing():
    sim = simulate(2, (N,), make("none"), {"name": "svrg", "period": 2})
    for number in range(5):
        xs = [normal(N, 2 * number + rank) for rank in range(2)]
        assert np.allclose(step(sim, xs), (xs[0] + xs[1]) / 2, rtol=0, atol=1e-6)


def test_gradients_that_hardly_change_lose_hardly_anything():
    """The error is proportional to g - c, not to g. With period 1, it shrinks from step to step."""
    g = normal(N)
    sim = simulate(2, (N,), make("lpc", width=4), {"name": "svrg", "period": 1})
    errors = [float(np.linalg.norm(step(sim, [g, g]) - g)) for _ in range(8)]
    assert errors[0] > 0.1 * np.linalg.norm(g)
    assert errors[-1] < 1e-4 * errors[0]


def test_a_gradient_handed_out_is_not_the_snapshot():
    """Optimizers change gradients in place."""
    sim = simulate(1, (N,), make("none"), {"name": "svrg", "period": 5})
    x = normal(N)
    merged = sim.step([{"w": x.copy()}])[0]["w"]
    merged *= 0
    assert np.array_equal(state(sim, 0, "snapshot"), x)


def test_votes_are_refused():
    with pytest.raises(IncompatibleError, match="vote"):
        Method(make("signsgd"), memories.make("svrg"), communicators.make("allgather"))


def test_period_counts_steps():
    with pytest.raises(ConfigError, match="period"):
        memories.make({"name": "svrg", "period": 0})


@pytest.mark.parametrize("width", [2, 8, 16])
def test_a_delta_is_refused_if_a_level_overflows(width):
    largest = 2.0**127 / 2 ** (width - 1)
    sent = send(make("lpc", width=width, delta=largest), np.full(N, -(2.0**126), np.float32))
    assert np.isfinite(sent).all()
    with pytest.raises(ConfigError, match="expected levels that float32 can hold"):
        make("lpc", width=width, delta=largest * 1.01)
