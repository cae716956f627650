"""Wen et al., "TernGrad", NIPS 2017."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grace.core.errors import IncompatibleError
from grace.core.methods.compressor import usual_communicator
from tests.papers.common import bits_per_element, make, normal, payload, send, simulate, step, variance


@pytest.mark.parametrize("seed", [0, 1])
def test_variance_is_s_l1_minus_l2(seed):
    """The variance of s sign(x_i) Bernoulli(|x_i| / s) is sum_i s|x_i| - x_i^2."""
    x = normal(400, seed)
    wide = x.astype(np.float64)
    expected = np.abs(wide).max() * np.abs(wide).sum() - np.sum(wide**2)
    mean, margin = variance(make("terngrad", clip_factor=None), x, 400)
    assert abs(mean - expected) <= margin


def test_values_are_ternary():
    x = normal(1000)
    decoded = send(make("terngrad", clip_factor=None), x)
    scale = float(np.abs(x).max())
    assert set(decoded.tolist()) == {-scale, 0.0, scale}
    assert np.all(decoded * x >= 0)
    assert abs(decoded[np.argmax(np.abs(x))]) == scale, "the largest element is sent for certain"


@pytest.mark.parametrize("c", [1.0, 2.5])
def test_clipping_limits_the_scale_to_c_standard_deviations_around_zero(c):
    x = np.concatenate([normal(1000), np.float32([50.0])])
    sent = payload(make("terngrad", clip_factor=c), x)
    assert sent["scale"][0] == pytest.approx(c * np.sqrt(np.mean(x.astype(np.float64) ** 2)), rel=1e-6)


def test_clipping_spares_a_gradient_far_from_zero_mean():
    """The deviation around its own mean is small. Clipping at 2.5 of it would remove almost everything."""
    x = (100 + normal(1000)).astype(np.float32)
    assert payload(make("terngrad"), x)["scale"][0] == x.max()


def test_clipping_beyond_the_largest_changes_nothing():
    x = normal(1000)
    free, wide = payload(make("terngrad", clip_factor=None), x), payload(make("terngrad", clip_factor=100.0), x)
    assert all(np.array_equal(free[name], wide[name]) for name in free)


def test_clipping_lowers_the_variance():
    x = np.concatenate([normal(1000), np.float32([50.0])])
    free, _ = variance(make("terngrad", clip_factor=None), x, 30)
    clipped, _ = variance(make("terngrad", clip_factor=2.5), np.clip(x, -5, 5), 30)
    assert clipped < free / 2


def test_two_bits_per_element():
    assert bits_per_element(make("terngrad"), 2**14) == 2 + 32 / 2**14


# --- scaler sharing ---------------------------------------------------------------------------------------------


def shared(ranks: int, n: int = 300, **options):
    return simulate(ranks, (n,), make("terngrad", shared_scale=True, **options))


@pytest.mark.parametrize("clip_factor", [None, 2.5])
def test_ranks_share_the_largest_scale_and_add_integers(clip_factor):
    """Every decoded mean is a whole multiple of s / ranks, where s is the largest scale of all ranks."""
    sim = shared(3, clip_factor=clip_factor)
    xs = [normal(300, rank) * (rank + 1) for rank in range(3)]
    scales = [np.abs(x).max() for x in xs]
    if clip_factor is not None:
        scales = [
            min(s, clip_factor * np.sqrt(np.mean(x.astype(np.float64) ** 2))) for s, x in zip(scales, xs, strict=True)
        ]
    codes = step(sim, xs) / (max(scales) / 3)
    assert np.abs(codes - np.round(codes)).max() < 1e-4
    assert set(np.round(codes).astype(int)) <= set(range(-3, 4))


def test_variance_with_a_shared_scale():
    """The variance of the mean is the sum over ranks of s |x|_1 - |x|^2 with the largest s, over ranks squared."""
    xs = [normal(200, rank) for rank in range(3)]
    s = max(float(np.abs(x).max()) for x in xs)
    expected = sum(s * np.abs(x.astype(np.float64)).sum() - np.sum(x.astype(np.float64) ** 2) for x in xs) / 9
    sim, mean = shared(3, 200, clip_factor=None), sum(x.astype(np.float64) for x in xs) / 3
    errors = [np.sum((step(sim, xs) - mean) ** 2) for _ in range(300)]
    assert abs(np.mean(errors) - expected) <= 6 * np.std(errors) / np.sqrt(300)


def test_one_rank_with_its_own_scale_decodes_to_the_same():
    x = normal(300)
    assert np.array_equal(send(make("terngrad", shared_scale=True), x), send(make("terngrad"), x))


def test_a_byte_per_element_travels_by_allreduce():
    compressor = make("terngrad", shared_scale=True)
    assert compressor.summable
    assert usual_communicator(compressor) == "allreduce"
    assert bits_per_element(compressor, 2**14) == 8
    assert not make("terngrad").summable
    assert usual_communicator(make("terngrad")) == "allgather"


def test_127_ranks_that_agree_fill_a_byte_and_128_are_refused():
    """The neighbours in the word do not matter: all sign combinations of four elements, and a remainder."""
    x = np.float32([*itertools.product([-2, 0, 2], repeat=4)]).ravel()[:-2]
    assert np.array_equal(step(shared(127, len(x), clip_factor=None), [x] * 127), x)
    with pytest.raises(IncompatibleError, match="127"):
        shared(128, 3)
    simulate(128, (3,), make("terngrad"))


def test_a_rank_with_nan_rolls_all_of_them_back():
    sim = shared(2, 4)
    x = normal(4)
    bad = x.copy()
    bad[1] = np.nan
    assert all(np.isnan(mine["w"]).all() for mine in sim.step([{"w": x}, {"w": bad}]))
    assert np.isfinite(step(sim, [x, x])).all()
