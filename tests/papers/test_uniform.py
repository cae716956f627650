"""Sapio et al., "Scaling distributed machine learning with in-network aggregation" (SwitchML), NSDI 2021.

And plain uniform quantization, of which SwitchML's aggregation is the case of many bits.
"""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import ConfigError, IncompatibleError
from grace.core.ops import get_ops
from grace.core.wire.lanes import lanes, pack_lanes, unpack_lanes
from grace.testing.harness import array, host
from tests.papers.common import make, normal, payload, send, simulate, state, step, variance
from tests.support.registered import every_framework

EPS = 2.0**-23


def factor(bits, xs):
    """Return f = (2^(bits - 1) - 1) / max|x| over all ranks."""
    return (2 ** (bits - 1) - 1) / max(np.abs(x.astype(np.float64)).max() for x in xs)


@pytest.mark.parametrize("bits", [2, 3, 8, 12, 16, 24])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_error_of_the_mean_is_at_most_half_a_step(bits, ranks):
    """SwitchML, section 3.7 and appendix C: |x_i - round(f x_i) / f| <= 1 / (2 f), on every rank, so in the mean."""
    xs = [normal(2000, rank) * (rank + 1) for rank in range(ranks)]
    f = factor(bits, xs)
    error = np.abs(step(simulate(ranks, (2000,), make("uniform", bits=bits)), xs) - sum(map(np.float64, xs)) / ranks)
    largest = max(np.abs(x).max() for x in xs)
    assert error.max() <= 1 / (2 * f) + 2 * EPS * largest
    # The bound is reached, but for what float32 rounds.
    assert bits > 16 or ranks > 1 or error.max() > 0.95 / (2 * f)


@pytest.mark.parametrize("bits", [2, 4, 8, 13, 24])
def test_what_travels_is_the_nearest_integer(bits):
    x = normal(1000)
    f = np.float32(2 ** (bits - 1) - 1)
    expected = np.sign(x) * np.floor(np.abs(x) / np.abs(x).max() * f + np.float32(0.5))
    assert np.array_equal(payload(make("uniform", bits=bits), x)["codes"], expected)


def test_ties_are_rounded_away_from_zero():
    x = np.float32([3, 1.5, -1.5, 0.5, -0.5, 0.25, -0.25])
    assert payload(make("uniform", bits=3), x)["codes"].tolist() == [3, 2, -2, 1, -1, 0, 0]


def test_the_ranks_share_the_largest_scale_and_add_integers():
    """Every mean is a whole multiple of 1 / (f ranks)."""
    xs = [normal(300, rank) * (rank + 1) for rank in range(3)]
    sums = step(simulate(3, (300,), make("uniform", bits=6)), xs).astype(np.float64) * factor(6, xs) * 3
    assert np.abs(sums - np.round(sums)).max() < 1e-4
    expected = sum(np.sign(x) * np.floor(np.abs(x) * factor(6, xs) + 0.5) for x in xs)
    assert np.array_equal(np.round(sums), expected)


@pytest.mark.parametrize("bits", [2, 8])
def test_random_rounding_is_unbiased_with_at_most_a_quarter_of_a_square_step(bits):
    x = normal(500)
    steps = np.abs(x.astype(np.float64)) * factor(bits, [x])
    share = steps - np.floor(steps)
    expected = np.sum(share * (1 - share)) / factor(bits, [x]) ** 2
    mean, margin = variance(make("uniform", bits=bits, stochastic=True), x, 300)
    assert abs(mean - expected) <= margin
    assert expected <= len(x) / (4 * factor(bits, [x]) ** 2)
    compressor = make("uniform", bits=bits, stochastic=True)
    average = np.mean([send(compressor, x, step=number) for number in range(600)], axis=0)
    assert np.abs(average - x).max() < 6 * 0.5 / factor(bits, [x]) / np.sqrt(600)


def test_ranks_round_independently():
    x = normal(500)
    one, many = (simulate(n, (500,), make("uniform", bits=3, stochastic=True)) for n in (1, 16))
    errors = [np.sum((step(sim, [x] * n) - x) ** 2.0) for sim, n in ((one, 1), (many, 16))]
    assert errors[1] < errors[0] / 8


def test_what_rounding_drops_is_fed_back():
    sim = simulate(2, (300,), make("uniform", bits=3), "residual")
    xs = [normal(300, rank) for rank in range(2)]
    first = step(sim, xs)
    residuals = [state(sim, rank) for rank in range(2)]
    assert np.allclose(first + sum(residuals) / 2, sum(xs) / 2, atol=1e-6)
    assert max(np.abs(r).max() for r in residuals) <= 1 / (2 * factor(3, xs)) * (1 + 1e-5)


# --- integers that are added in as few bits as their sum needs --------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "ranks", "expected"),
    [
        (8, 1, 4),
        (8, 2, 3),
        (8, 4, 3),
        (8, 5, 2),
        (8, 258, 2),
        (8, 259, 1),
        (4, 2, 6),
        (4, 4, 5),
        (4, 18, 4),
        (4, 19, 3),
    ],
)
def test_a_word_holds_as_many_integers_as_the_sum_allows(bits, ranks, expected):
    """As the docstring says; the sum of all ranks' largest integers fits its lane, one more would not."""
    most = ranks * make("uniform", bits=bits).most
    assert lanes(most) == expected
    assert most <= 2 ** (32 // expected - 1) - 1
    assert most > 2 ** (32 // (expected + 1) - 1) - 1


@pytest.mark.parametrize("bits", [2, 4, 8, 9, 16, 24])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 18, 19, 100])
def test_no_sum_of_largest_integers_overflows(bits, ranks):
    """All ranks send the same extreme elements, of both signs side by side; a remainder fills the last words."""
    x = np.float32([2, -2, -2, 2, 0, 2, 2, -2, 0, -2, 2])
    sim = simulate(ranks, (len(x),), make("uniform", bits=bits))
    assert np.allclose(step(sim, [x] * ranks), x, rtol=4 * EPS, atol=0)
    sent = sim.runs[0].stats()["tensors"]["w"]["wire_bytes"]
    per_word = lanes(ranks * make("uniform", bits=bits).most)
    # The words and the proposal.
    assert sent == 4 * -(-len(x) // per_word) + 4


def test_ranks_whose_sum_needs_more_than_32_bits_are_refused():
    assert make("uniform", bits=24).check_ranks(256) is None
    with pytest.raises(IncompatibleError, match="at most 256 ranks, received 257; lower bits"):
        make("uniform", bits=24).check_ranks(257)
    with pytest.raises(IncompatibleError, match="at most 256 ranks"):
        simulate(257, (3,), make("uniform", bits=24))
    make("uniform", bits=8).check_ranks(16_909_320)
    with pytest.raises(ConfigError, match="2 to 24, received 25"):
        make("uniform", bits=25)


@every_framework
@pytest.mark.parametrize("most", [1, 2, 7, 14, 127, 254, 508, 1100, 40_000, 2**31 - 1])
def test_words_of_sums_are_sums_of_words(framework, most):
    ops, rng = get_ops(framework), np.random.default_rng(most)
    for n in (0, 1, 5, 101):
        # Two parts whose sum has the largest magnitude, of either sign, at both ends.
        total = rng.integers(-most, most + 1, n)
        total[:2], total[-2:] = most, -most
        part = np.round(total * rng.random(n)).astype(np.int64)
        count = lanes(most)
        words = [pack_lanes(ops, array(ops, p, "int32"), n, count) for p in (part, total - part)]
        added = sum(host(ops, word).astype(np.int64) for word in words)
        assert np.abs(added).max(initial=0) < 2**31
        assert np.array_equal(host(ops, unpack_lanes(ops, array(ops, added, "int32"), n, count)), total)


@pytest.mark.parametrize("communicator", ["allgather", "broadcast"])
def test_gathered_integers_give_the_same_mean(communicator):
    xs = [normal(301, rank) for rank in range(3)]
    compressor = make("uniform")
    summed, gathered = (simulate(3, (301,), compressor, communicator=name) for name in ("allreduce", communicator))
    assert np.array_equal(step(summed, xs), step(gathered, xs))
    assert [sim.runs[0].stats()["tensors"]["w"]["wire_bytes"] for sim in (summed, gathered)] == [
        101 * 4 + 4,
        301 + 4,
    ]


@pytest.mark.parametrize("local_size", [1, 2, 4])
def test_integers_are_added_between_nodes(local_size):
    """With two nodes of two ranks, each of two ranks rounds the mean of a node, and lanes are those of two ranks."""
    xs = [normal(3000, rank) for rank in range(4)]
    communicator = {"name": "hierarchical", "local_size": local_size}
    sim = simulate(4, (3000,), make("uniform"), communicator=communicator)
    error = np.abs(step(sim, xs) - sum(map(np.float64, xs)) / 4)
    assert error.max() <= (local_size < 4) / (2 * factor(8, xs)) + 1e-5
