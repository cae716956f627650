"""Li et al., "Accelerating distributed deep learning using lossless homomorphic compression", 2024."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grace import make_config
from grace.core.codecs.peeling import BLOCK, ROWS, Hashes, Sizes, peel, sketch_sparse, spread
from grace.core.errors import ConfigError
from grace.core.plan.plan import make_plan
from grace.core.spec import Key, Ranks, TensorSpec
from grace.testing.harness import exchange, wide
from tests.papers.common import OPS, bits_per_element, make, normal, payload, send, simulate, spec, state, step

N = 4000


def sparse(seed: int, count: int, n: int = N) -> np.ndarray:
    """Return n integers, of which `count` are not zero; sums of integers are exact."""
    rng = np.random.default_rng(seed)
    x = np.zeros(n, np.float32)
    x[rng.choice(n, count, replace=False)] = rng.integers(1, 100, count) * rng.choice([-1, 1], count)
    return x


def summed(payloads: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the payload that an allreduce makes."""
    return {name: sum(p[name] for p in payloads) for name in payloads[0]}


def recovered(x: np.ndarray, sizes: Sizes, key: Key) -> np.ndarray:
    """Return what is peeled from the sketch of all elements that are not zero."""
    indices = np.flatnonzero(x).astype(np.int32)
    return peel(OPS, *sketch_sparse(OPS, x[indices], indices, len(x), *sizes, key), len(x), *sizes, key)


def test_what_a_rank_sends_of_a_million_elements():
    """As the docstring of the method says."""
    config, tensor = make_config(compressor="homomorphic"), TensorSpec("w", (10**6,))
    for ranks in (4, 7):
        (unit,) = make_plan([tensor], config, ranks=Ranks(ranks)).units
        sketch, counters = unit.fields
        assert (sketch.length, counters.length, 32 // counters.lanes) == (33_792, 230_912, 4)
        assert unit.compressor.compress_ratio == 0.02


def test_the_sum_of_payloads_is_the_payload_of_the_sum():
    """Sketches add as numbers; a counter of the sum is 0 exactly where that of the sum's filter is."""
    a, b = (np.abs(sparse(seed, 30)) for seed in (0, 1))
    one, other = exchange(make("homomorphic"), OPS, spec(N), [a, b]).payloads
    total = summed([one, other])
    whole = payload(make("homomorphic"), a + b)
    assert np.array_equal(total["sketch"], whole["sketch"])
    assert np.array_equal(total["filter"] > 0, whole["filter"] > 0)
    assert total["filter"].max() == 2
    assert whole["filter"].max() == 1
    assert whole["sketch"].any()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_sums_of_sparse_gradients_are_exact(ranks):
    """They are, where ranks agree on some places, where they do not, and where values cancel."""
    compressor = make("homomorphic")
    count = compressor.held(spec(N)) // ranks
    xs = [sparse(rank, count) for rank in range(ranks)]
    for x in xs[1:]:
        there = np.flatnonzero(xs[0])[:4]
        x[np.flatnonzero(x)[:4]] = 0
        x[there] = -xs[0][there]
    ex = exchange(compressor, OPS, spec(N), xs)
    assert np.array_equal(compressor.decompress(summed(ex.payloads), ex.sites[0]), sum(xs))
    assert np.array_equal(compressor.merge(ex.payloads, ex.sites[0]), sum(xs))
    for x, left in zip(xs, ex.payloads, strict=True):
        assert np.array_equal(compressor.decompress(left, ex.sites[0]), x)


def test_only_the_largest_of_each_rank_travel_so_that_the_sum_has_room():
    """Each of N ranks sends held / N elements, so the sum never has more than the payload can hold."""
    for ranks in (1, 2, 5):
        xs = [normal(N, rank) for rank in range(ranks)]
        ex = exchange(make("homomorphic"), OPS, spec(N), xs)
        merged = make("homomorphic").merge(ex.payloads, ex.sites[0])
        tops = [np.argsort(-np.abs(x), kind="stable")[: 80 // ranks] for x in xs]
        expected = np.zeros(N)
        for x, top in zip(xs, tops, strict=True):
            expected[top] += x[top]
        # What passes the filter by mistake may get a rounding in place of 0.
        assert set(np.flatnonzero(np.abs(merged) > 1e-5)) == set(np.concatenate(tops))
        assert np.allclose(merged, expected, rtol=0, atol=1e-5)


def test_ranks_that_share_their_places_need_no_room_of_their_own():
    """With `disjoint=False` each rank sends as many elements as the sum may have."""
    there, ranks = sparse(0, 80) != 0, 8
    xs = [np.where(there, np.round(9 * normal(N, rank)) + 0.5, 0).astype(np.float32) for rank in range(ranks)]
    for disjoint in (False, True):
        compressor = make("homomorphic", disjoint=disjoint)
        ex = exchange(compressor, OPS, spec(N), xs)
        merged = compressor.decompress(summed(ex.payloads), ex.sites[0])
        assert np.array_equal(merged, sum(xs)) == (not disjoint)
        assert np.count_nonzero(send(compressor, xs[0])) == 80


@pytest.mark.parametrize(("dtype", "eps"), [("float32", 2.0**-23), ("float64", 2.0**-52)])
def test_sums_of_real_numbers_are_exact_up_to_rounding(dtype, eps):
    """A bucket is rounded on each rank and by each addition; what is taken out of it brings its own roundings."""
    worst = 0.0
    for seed in range(20):
        rng, expected = np.random.default_rng(seed), np.zeros(N, np.longdouble)
        xs = [rng.standard_normal(N).astype(dtype) for _ in range(4)]
        for x in xs:
            top = OPS.top_indices(x, 20)
            expected[top] += x[top]
        ex = exchange(make("homomorphic"), OPS, spec(N, dtype=dtype), xs, step=seed)
        merged = make("homomorphic").decompress(summed(ex.payloads), ex.sites[0])
        worst = max(worst, np.abs(merged - expected).max() / np.abs(expected).max())
    assert 0 < worst < 8 * eps


def test_a_gradient_that_is_sparse_enough_loses_nothing():
    x = sparse(0, 80)
    sim = simulate(1, (N,), make("homomorphic"), "residual")
    assert np.array_equal(step(sim, [x]), x)
    assert not state(sim, 0).any()


def test_zeros_do_not_travel():
    few = sparse(0, 5)
    assert np.array_equal(send(make("homomorphic"), few), few)
    assert payload(make("homomorphic"), few)["filter"].sum() <= 5 * make("homomorphic").sizes(spec(N)).functions
    assert not any(value.any() for value in payload(make("homomorphic"), 0 * few).values())


@pytest.mark.parametrize(("per_element", "most_failures"), [(1.2, 20), (1.4, 0), (1.5, 0)])
def test_peeling_succeeds_above_its_threshold(per_element, most_failures):
    """Four rows need 1.295 buckets per element: with fewer it fails, with more it succeeds, on many elements."""
    count = 2000
    sizes = Sizes(BLOCK * math.ceil(per_element * count / ROWS / BLOCK), 16, BLOCK * 200)
    xs = [sparse(seed, count, 20_000) for seed in range(20)]
    failures = sum(not np.array_equal(recovered(x, sizes, Key(1, seed)), x) for seed, x in enumerate(xs))
    assert failures == most_failures


@pytest.mark.parametrize("n", [400, 4000])
def test_sketches_of_the_defaults_are_peeled_but_for_a_few_in_a_thousand(n):
    compressor = make("homomorphic")
    sizes = compressor.sizes(spec(n))
    xs = [sparse(seed, compressor.held(spec(n)), n) for seed in range(300)]
    left = [np.count_nonzero(recovered(x, sizes, Key(3, seed)) != x) for seed, x in enumerate(xs)]
    assert np.count_nonzero(left) <= 2
    assert max(left) <= 4


@pytest.mark.parametrize("count", [80, 800])
@pytest.mark.parametrize("of", ["rows", "columns"])
def test_neighbours_are_peeled_as_others_are(of, count):
    """They come into different blocks. Of one block they would share their buckets, and few blocks often fail."""
    failures, n = 0, 50 * count
    for seed in range(100):
        rng, x = np.random.default_rng(seed), np.zeros((n // BLOCK, BLOCK), np.float32)
        x[rng.choice(len(x), count // BLOCK, replace=False)] = rng.integers(1, 100, (count // BLOCK, BLOCK))
        x = x.ravel() if of == "rows" else x.T.ravel()
        failures += not np.array_equal(recovered(x, make("homomorphic").sizes(spec(n)), Key(12, seed)), x)
    assert failures <= 1


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 1003, 40_000, 10**6, 2**24, 2**31 - 16])
def test_the_new_order_is_one_and_parts_neighbours(n):
    factor, length = spread(n)
    assert n <= length < n + BLOCK
    assert math.gcd(factor, length) == 1
    if n >= 1000:
        assert min(min(i * factor % length, -i * factor % length) for i in range(1, BLOCK)) >= BLOCK


def test_what_cannot_be_peeled_is_estimated_without_bias():
    """Of 140 elements in 128 buckets, some are found exactly. The mean error of the estimates is 0."""
    x, sizes, keys = sparse(3, 140, 1000), Sizes(32, 16, 320), 300
    errors = np.array([recovered(x, sizes, Key(2, number)) - wide(x) for number in range(keys)])
    there = x != 0
    assert 0.01 < (errors[:, there] == 0).mean() < 0.5
    assert np.abs(errors).max() > 0
    assert np.abs(errors[:, there].mean(axis=0)).max() <= 5 * errors[:, there].std() / math.sqrt(keys)


@pytest.mark.parametrize("functions", [1, 4, 8])
def test_the_filter_passes_all_elements_and_few_others(functions):
    """One of 2^functions other elements passes, if as many elements were put in as the filter is made for."""
    n, count = 20_000, 400
    sizes, passed = Sizes(BLOCK, functions, BLOCK * round(count / math.log(2) / BLOCK)), []
    for number in range(20):
        indices = np.flatnonzero(sparse(number, count, n)).astype(np.int32)
        _, counts = sketch_sparse(OPS, np.ones(count, np.float32), indices, n, *sizes, Key(4, number))
        found = Hashes.draw(OPS, n, sizes, Key(4, number)).passing(OPS, counts, n)
        factor, length = spread(n)
        assert np.isin(indices.astype(np.int64) * factor % length, found).all()
        passed.append(len(found) - count)
    assert np.mean(passed) == pytest.approx((n - count) / 2**functions, rel=0.15)


def test_places_are_uniform_and_elements_of_a_block_never_meet():
    n, keys, sizes = 4 * BLOCK, 400, Sizes(3 * BLOCK, 2, 5 * BLOCK)
    drawn = [Hashes.draw(OPS, n, sizes, Key(6, number)).buckets(OPS, np.arange(n)) for number in range(keys)]
    places = np.array([place for place, _ in drawn]).reshape(keys * ROWS, n) % sizes.columns
    signs = np.array([sign for _, sign in drawn]).reshape(keys * ROWS, n)
    trials, near = len(places), np.arange(n) // BLOCK
    deviation = math.sqrt(1 / sizes.columns / trials)
    assert np.abs(np.bincount(places.ravel(), minlength=48) / places.size - 1 / 48).max() < 5 * deviation
    for i in range(n):
        same = places[:, i : i + 1] == places[:, :i]
        assert not same[:, near[:i] == near[i]].any()
        assert np.abs(same[:, near[:i] != near[i]].mean(axis=0) - 1 / sizes.columns).max(initial=0) < 5 * deviation
        assert np.abs((signs[:, i : i + 1] * signs[:, :i]).mean(axis=0)).max(initial=0) < 5 / math.sqrt(trials)


def test_sizes_are_those_of_the_fewest_words_and_do_not_depend_on_the_ranks():
    compressor = make("homomorphic")
    sizes = compressor.sizes(spec(1000, 1000))
    assert sizes == (8448, 8, 28864)
    assert bits_per_element(compressor, 10**6) == (4 * 32 * sizes.columns + 8 * 8 * sizes.counters) / 10**6
    # On the way, on 4 to 7 ranks, a counter has 4 bits.
    assert sizes.words / 10**6 == pytest.approx(0.0627, abs=0.0001)
    for other in (sizes.functions - 1, sizes.functions + 1):
        passed = 20_000 + 980_000 / 2**other
        passed += 2 * math.sqrt(passed)
        assert 1.4 * passed + other * 20_000 / math.log(2) / 8 > sizes.words


def test_memory_holds_what_was_not_sent():
    xs = [normal(N, seed) for seed in range(3)]
    sim = simulate(3, (N,), make("homomorphic"), "residual")
    applied = np.zeros(N)
    for _ in range(5):
        applied += step(sim, xs)
    left = np.mean([state(sim, rank).astype(np.float64) for rank in range(3)], axis=0)
    assert np.allclose(applied + left, 5 * np.mean(xs, axis=0), rtol=0, atol=1e-5)


def test_tensors_that_would_not_shrink_stay_dense_and_impossible_options_are_refused():
    assert "no smaller" in make("homomorphic").unfit(TensorSpec("bias", (64,)))
    assert make("homomorphic").unfit(TensorSpec("w", (200,))) is None
    assert "no smaller" in make("homomorphic", compress_ratio=0.5).unfit(TensorSpec("w", (10**6,)))
    with pytest.raises(ConfigError, match=r"homomorphic: compress_ratio must be .* received 0"):
        make("homomorphic", compress_ratio=0)
    with pytest.raises(ConfigError, match=r"homomorphic: buckets_per_value must be positive, received 0"):
        make("homomorphic", buckets_per_value=0)
