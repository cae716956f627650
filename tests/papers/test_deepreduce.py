"""Xu et al., "DeepReduce", NeurIPS 2021: indices in a Bloom filter with three policies, values on a fitted curve."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from grace.core.codecs.bloom import filter_for, filter_positions, insert, smallest_conflict
from grace.core.codecs.curve import along, free_knots
from grace.core.errors import ConfigError
from grace.core.spec import Key
from tests.papers.common import OPS, bits_per_element, make, normal, payload, send, simulate, spec, state, step

N, RATIO = 20_000, 0.01
K = int(N * RATIO)
POLICIES = ("p0", "p1", "p2")

INDEX_SETS = {
    "random": np.sort(np.random.default_rng(0).choice(N, K, replace=False)),
    "run": np.arange(5000, 5000 + K),
    "stride": np.arange(0, N, N // K),
}


def largest(x: np.ndarray, k: int = K) -> np.ndarray:
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


def found_by(indices: np.ndarray, false_positives: float, number: int) -> np.ndarray:
    form, key = filter_for(len(indices), N, false_positives), Key(3, number)
    return filter_positions(OPS, form, insert(OPS, form, indices.astype(np.int32), key), N, key)


def lost(x: np.ndarray, sent: np.ndarray) -> float:
    return float(np.sum((x - sent) ** 2) / np.sum(x.astype(np.float64) ** 2))


def fitted_error(values: np.ndarray, pieces: int) -> float:
    ordered = np.sort(values.astype(np.float64))
    knots = free_knots(OPS, ordered, pieces)
    curve = along(OPS, knots, ordered[knots], np.arange(len(ordered), dtype=np.int32))
    return float(np.linalg.norm(curve - ordered) / np.linalg.norm(ordered))


# --- Bloom filter -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INDEX_SETS)
@pytest.mark.parametrize("false_positives", [0.25, 0.01, 0.001])
def test_every_index_and_the_chosen_share_of_others_are_found(kind, false_positives):
    indices, shares = INDEX_SETS[kind], []
    for number in range(40):
        found = found_by(indices, false_positives, number)
        assert np.isin(indices, found).all()
        assert (np.diff(found) > 0).all()
        shares.append((len(found) - K) / (N - K))
    assert np.mean(shares) == pytest.approx(false_positives, rel=0.2)


def test_an_index_takes_1_44_bits_for_each_halving_of_the_false_positives():
    for halvings in (1, 4, 10, 20):
        form = filter_for(100_000, 10**9, 2.0**-halvings)
        assert form.hashes == halvings
        assert form.bits / 100_000 == pytest.approx(1.4427 * halvings, rel=1e-3)
        assert form.nbytes * 8 == form.bits


def test_half_of_the_bits_are_set():
    form = filter_for(K, N, 0.001)
    data = insert(OPS, form, INDEX_SETS["random"].astype(np.int32), Key(3, 0))
    assert np.unpackbits(data).mean() == pytest.approx(0.5, abs=0.03)


def test_a_bitmap_takes_the_place_of_a_larger_filter():
    assert filter_for(100, 1443, 0.001) == (1440, 10)
    assert filter_for(100, 1440, 0.001) == (1440, 0)
    x = normal(100)
    sent = payload(make("deepreduce", compress_ratio=0.3, policy="p0"), x)
    assert np.array_equal(np.unpackbits(sent["filter"], bitorder="little", count=100).nonzero()[0], largest(x, 30))
    assert np.array_equal(sent["values"], x[largest(x, 30)])


def test_other_steps_have_other_false_positives():
    first, second = (set(found_by(INDEX_SETS["run"], 0.01, number)) - set(INDEX_SETS["run"]) for number in range(2))
    assert len(first & second) < 0.1 * len(first)


def test_a_position_with_a_bit_of_its_own_is_in_the_set():
    form, key, indices = filter_for(K, N, 0.02), Key(3, 1), INDEX_SETS["random"]
    found = filter_positions(OPS, form, insert(OPS, form, indices.astype(np.int32), key), N, key)
    conflict = smallest_conflict(OPS, form, found, key)
    alone = found[conflict == 1]
    assert np.isin(alone, indices).all()
    assert 0 < len(alone) < K < len(found)
    assert conflict.min() == 1


# --- policies -----------------------------------------------------------------------------------------------------


def test_p0_loses_nothing_that_topk_sends():
    x = normal(N)
    sent, topk = (send(make(name, **o), x) for name, o in (("deepreduce", {"policy": "p0"}), ("topk", {})))
    assert np.array_equal(sent[largest(x)], x[largest(x)])
    carried = np.flatnonzero(sent)
    assert np.array_equal(sent[carried], x[carried])
    assert K < len(carried) < K + 2 * 0.001 * N
    assert lost(x, sent) < lost(x, topk)


@pytest.mark.parametrize("policy", ["p1", "p2"])
def test_p1_and_p2_send_k_exact_values_of_reported_positions(policy):
    x = normal(N)
    positions = np.flatnonzero(send(make("deepreduce", policy="p0", false_positives=0.01), x))
    sent = send(make("deepreduce", policy=policy, false_positives=0.01), x)
    carried = np.flatnonzero(sent)
    assert len(carried) == K < len(positions)
    assert np.isin(carried, positions).all()
    assert np.array_equal(sent[carried], x[carried])
    assert lost(x, sent) < 1


def test_p1_chooses_each_reported_position_alike():
    """Of positions that every filter reports, k of |P| remain: a share of k / |P|, whatever the magnitude."""
    x, shares, expected = normal(2000), [], []
    for number in range(300):
        options = {"compress_ratio": 0.05, "false_positives": 0.05}
        reports = np.count_nonzero(send(make("deepreduce", policy="p0", **options), x, step=number))
        shares.append(send(make("deepreduce", policy="p1", **options), x, step=number)[largest(x, 100)] != 0)
        expected.append(100 / reports)
    by_position = np.mean(shares, axis=0)
    assert by_position.mean() == pytest.approx(np.mean(expected), rel=0.02)
    assert np.abs(by_position - np.mean(expected)).max() < 5 * math.sqrt(0.25 / 300)


def test_p2_keeps_what_is_certain_and_errs_less_than_p1():
    x = normal(N)
    for false_positives, bound in ((0.001, 0.02), (0.01, 0.4)):
        options = {"false_positives": false_positives}
        missing, errors = {}, {}
        for policy in POLICIES:
            sent = [send(make("deepreduce", policy=policy, **options), x, step=number) for number in range(5)]
            missing[policy] = np.mean([np.mean(one[largest(x)] == 0) for one in sent])
            errors[policy] = np.mean([lost(x, one) for one in sent])
        assert missing["p0"] == 0
        assert missing["p2"] < bound
        assert missing["p2"] < 0.7 * missing["p1"]
        assert errors["p0"] < errors["p2"] < errors["p1"]


def test_p2_prefers_the_smaller_of_two_conflicts():
    """With 5 % false positives hardly a position is certain, but the true ones share their bits with fewer others."""
    x = normal(N)
    kept = {
        policy: np.mean(
            [
                np.mean(send(make("deepreduce", policy=policy, false_positives=0.05), x, step=number)[largest(x)] != 0)
                for number in range(5)
            ]
        )
        for policy in ("p1", "p2")
    }
    assert kept["p2"] > 1.4 * kept["p1"]


def test_ranks_decode_the_choices_of_others():
    xs = [normal(N, rank) for rank in range(3)]
    for policy in POLICIES:
        compressor = make("deepreduce", policy=policy, false_positives=0.01)
        sim = simulate(3, (N,), compressor, "residual")
        merged = step(sim, xs)
        left = [state(sim, rank) for rank in range(3)]
        assert np.allclose(3 * merged + sum(left), sum(xs), rtol=0, atol=1e-5)
        assert all(0.005 * N < np.count_nonzero(x != rest) < 0.03 * N for x, rest in zip(xs, left, strict=True))


# --- values -------------------------------------------------------------------------------------------------------


def test_the_error_of_a_curve_falls_with_the_square_of_its_pieces():
    """The values are quantiles of an exponential distribution, whose curve bends more and more."""
    values = -np.log(1 - (np.arange(20_000) + 0.5) / 20_000)
    errors = [fitted_error(values, pieces) for pieces in (4, 8, 16, 32, 64)]
    assert all(3 < more / fewer < 5 for more, fewer in itertools.pairwise(errors))
    assert errors[2] < 0.025


def test_free_knots_are_where_the_curve_bends():
    ordered = np.concatenate([np.linspace(-9, -8, 100), np.linspace(8, 18, 50), np.linspace(19, 219, 30)])
    knots = free_knots(OPS, ordered, 5)
    assert knots.tolist() == [0, 99, 100, 149, 150, 179]
    assert fitted_error(ordered, 5) < 1e-12
    # Without anything to gain, knots repeat.
    assert set(free_knots(OPS, ordered, 8)) <= set(range(180))
    assert fitted_error(ordered, 8) < 1e-12


def test_free_knots_err_less_than_equal_pieces():
    ordered = np.sort(np.random.default_rng(2).standard_normal(5000) ** 3)
    even = np.linspace(0, 4999, 17).astype(int)
    equal = np.interp(np.arange(5000), even, ordered[even])
    assert fitted_error(ordered, 16) < 0.5 * np.linalg.norm(equal - ordered) / np.linalg.norm(ordered)


@pytest.mark.parametrize("policy", POLICIES)
def test_fitted_values_are_near_the_exact_ones(policy):
    x = normal(N)
    exact, fitted = (send(make("deepreduce", policy=policy, pieces=pieces), x) for pieces in (0, 16))
    carried = np.flatnonzero(exact)
    assert np.linalg.norm((fitted - exact)[carried]) < 0.02 * np.linalg.norm(exact)
    assert not np.delete(fitted, carried).any()
    order = carried[np.argsort(exact[carried])]
    assert (np.diff(fitted[order]) >= -1e-6).all()
    assert (np.sign(fitted) == np.sign(exact)).mean() > 0.999


def test_as_many_pieces_as_values_are_exact():
    x = normal(1000)
    exact, fitted = (send(make("deepreduce", pieces=pieces), x) for pieces in (0, 500))
    assert np.array_equal(fitted, exact)
    assert len(payload(make("deepreduce", pieces=500), x)["knots"]) == 10
    equal = np.full(100, -2.5, np.float32)
    assert np.array_equal(send(make("deepreduce", compress_ratio=1.0, pieces=4), equal), equal)


def test_zeros_have_no_sign():
    """Frameworks sort zeros of both signs in different ways."""
    sent = payload(make("deepreduce", compress_ratio=1.0, pieces=2), np.full(10, -0.0, np.float32))
    assert not np.signbit(sent["heights"]).any()


def test_neighbors_share_a_place_in_the_order_of_more_than_65536_values():
    x = normal(140_000)
    sent = send(make("deepreduce", compress_ratio=1.0, pieces=256), x)
    assert len(np.unique(sent)) == pytest.approx(140_000 / 3, rel=0.01)
    assert lost(x, sent) < 1e-5
    # On a line, the curve is exact: three neighbors all become the one in the middle.
    line = np.arange(139_998, dtype=np.float32)
    sent = send(make("deepreduce", compress_ratio=1.0, pieces=256), line)
    assert np.array_equal(sent, 3 * (np.arange(139_998) // 3) + 1)


def test_bits_per_kept_element():
    n = 1 << 20
    k = int(0.01 * n)
    filter_bits = k * math.log2(1000) / math.log(2)
    exact, fitted = (bits_per_element(make("deepreduce", pieces=pieces), n) * n for pieces in (0, 16))
    assert exact == pytest.approx(filter_bits + 32 * k, rel=1e-4)
    assert fitted == pytest.approx(filter_bits + 14 * k + 17 * 64, rel=1e-4)
    assert fitted / k == pytest.approx(28.5, abs=0.1)


def test_the_memory_holds_what_the_curve_lost():
    x = normal(N)
    sim = simulate(1, x.shape, make("deepreduce", pieces=8), "residual")
    merged = step(sim, [x])
    assert np.allclose(merged + state(sim, 0), x, rtol=0, atol=1e-6)
    assert 0 < np.abs(state(sim, 0)[np.flatnonzero(merged)]).max() < 0.5


def test_options_are_checked():
    for options, text in (
        ({"policy": "p3"}, "deepreduce: policy must be one of p0, p1, p2, received 'p3'"),
        ({"false_positives": 0}, r"deepreduce: false_positives must be .* in \(0, 0.5\]; received 0"),
        ({"false_positives": 0.6}, "received 0.6"),
        ({"pieces": -1}, r"deepreduce: pieces must be a number from 0 \(exact values\) to 1024, received -1"),
        ({"compress_ratio": 2}, "deepreduce: compress_ratio must be .*; received 2"),
    ):
        with pytest.raises(ConfigError, match=text):
            make("deepreduce", **options)
    assert make("deepreduce").contraction(spec(100)) == 0
    assert make("deepreduce", policy="p0").contraction(spec(100)) == 0.01
    assert make("deepreduce", pieces=4).contraction(spec(100)) is None
