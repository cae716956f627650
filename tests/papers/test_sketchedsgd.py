"""Ivkin et al., "Communication-efficient distributed SGD with sketching", NeurIPS 2019; bounds of Count-Sketch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grace.core.compressors.sketchedsgd import SKETCH_BLOCK, count_sketch, hashes
from grace.core.errors import ConfigError
from grace.core.ops.random import hash_words
from grace.core.spec import Key, TensorSpec
from grace.core.wire.layout import payload_bytes
from grace.testing.harness import exchange, wide
from tests.papers.common import OPS, make, normal, payload, simulate, spec, state, step

N = 4000


def sketch(x: np.ndarray, *, number: int = 0, **options) -> np.ndarray:
    return exchange(make("sketchedsgd", **options), OPS, spec(*x.shape), [x], step=number).sites[0].negotiated


def estimate(compressor, xs: list[np.ndarray], *, number: int = 0) -> np.ndarray:
    return compressor.estimate(exchange(compressor, OPS, spec(*xs[0].shape), xs, step=number).sites[0])


def test_sketch_is_linear():
    """The test uses integers, whose sums are exact."""
    a, b = (np.round(8 * normal(N, seed)) for seed in (0, 1))
    assert np.array_equal(sketch(a) + sketch(b), sketch(a + b))
    assert np.array_equal(3 * sketch(a), sketch(3 * a))
    assert sketch(a).any()


def test_every_element_is_once_in_every_row_with_its_sign():
    """The sketch of a unit vector is one entry of +1 or -1 per row."""
    tables = []
    for i in range(40):
        unit = np.zeros(N, np.float32)
        unit[i] = 1
        table = sketch(unit, compress_ratio=0.01, columns_per_k=2.0).reshape(5, 80)
        assert (np.abs(table).sum(axis=1) == 1).all()
        tables.append(table)
    together = np.zeros(N, np.float32)
    together[:40] = 1
    assert np.array_equal(sum(tables), sketch(together).reshape(5, 80))


def test_hashes_are_uniform_and_pairwise_independent():
    """With a multiply-shift hash, a pair of elements collides in 1/16 of the draws, and the signs cancel."""
    items = np.array([0, 1, 2, 1000, 65537, 2**30, 2**31 - 1], np.int64)
    draws = np.array([hash_words(OPS, items, 8, Key(5, number)) for number in range(1000)]).reshape(-1, len(items))
    trials = len(draws)
    assert (draws.min(), draws.max() < 2**32) >= (0, True)
    buckets, signs = draws * 16 >> 32, np.where(draws >> 31, -1, 1)
    for i in range(len(items)):
        counts = np.bincount(buckets[:, i], minlength=16)
        assert np.abs(counts - trials / 16).max() <= 5 * math.sqrt(trials / 16)
        for j in range(i):
            share = np.mean(buckets[:, i] == buckets[:, j])
            assert abs(share - 1 / 16) <= 5 * math.sqrt(1 / 16 / trials)
            assert abs(np.mean(signs[:, i] * signs[:, j])) <= 5 / math.sqrt(trials)
    # The functions of one key differ, and different keys give different functions.
    assert len(np.unique(draws[:, 3])) > 0.999 * trials


@pytest.mark.parametrize("columns", [16, 80])
def test_blocks_of_elements_collide_as_elements_with_hashes_of_their_own(columns):
    """Elements of two blocks share a bucket in 1/columns of the draws, elements of one block never.

    Their signs are uncorrelated, even if they share a bucket: bucket and sign are independent.
    """
    n, rows, keys = 4 * SKETCH_BLOCK, 5, 800
    hashed = [list(hashes(OPS, n, rows, columns, Key(11, number))) for number in range(keys)]
    buckets = np.array([bucket for drawn in hashed for bucket, _ in drawn])
    signs = np.array([np.where(odd, -1, 1) for drawn in hashed for _, odd in drawn])
    trials = len(buckets)
    assert (buckets.min(), buckets.max()) == (0, columns - 1)
    # Five standard deviations, for the largest of 2000 pairs.
    for i in range(n):
        same = buckets[:, i : i + 1] == buckets[:, :i]
        near = np.arange(i) // SKETCH_BLOCK == i // SKETCH_BLOCK
        assert not same[:, near].any()
        deviation = math.sqrt((1 - 1 / columns) / columns / trials)
        assert np.abs(same[:, ~near].mean(axis=0) - 1 / columns).max(initial=0) <= 5 * deviation
        product = signs[:, i : i + 1] * signs[:, :i]
        assert np.abs(product.mean(axis=0)).max(initial=0) <= 5 / math.sqrt(trials)
        assert np.abs((product * same).mean(axis=0)).max(initial=0) <= 5 / math.sqrt(columns * trials)
    assert np.abs(signs.mean(axis=0)).max() <= 5 / math.sqrt(trials)


def test_columns_fill_blocks():
    """The number of columns is rounded up to a multiple of a block, at least 16. Other widths are refused."""
    for k_columns, columns in ((0.1, 16), (1.0, 48), (1.2, 48), (2.0, 80), (2.01, 96)):
        assert len(sketch(normal(N), rows=1, columns_per_k=k_columns)) == columns
    with pytest.raises(ValueError, match="multiple of 16 columns, received 40"):
        count_sketch(OPS, normal(N), 3, 40, Key(1, 0))


def test_multiply_shift_with_plain_integers():
    """Python's integers, which do not overflow, give the same words."""
    uniform = OPS.uniform(12, Key(9, 4)).astype(np.float64) * 2**24
    a, b = ((int(p[0]) << 40) ^ (int(p[1]) << 16) ^ (int(p[2]) >> 8) for p in uniform.reshape(4, 3)[2:])
    items = [0, 1, 77, 2**31 - 1]
    expected = [((a * i + b) % 2**64) >> 32 for i in items]
    assert hash_words(OPS, np.array(items, np.int64), 2, Key(9, 4))[1].tolist() == expected


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("c", [1.5, 3.0])
def test_error_of_an_estimate_is_within_the_bound(rows, c):
    """P[|est_i - x_i| > c |x| / sqrt(columns)] <= P[Binomial(rows, 1/c^2) > rows / 2], for every element."""
    x = normal(N, 1)
    compressor = make("sketchedsgd", rows=rows)
    columns = len(sketch(x, rows=rows)) // rows
    assert columns == 80
    bound = c * np.linalg.norm(x.astype(np.float64)) / math.sqrt(columns)
    failures = [np.mean(np.abs(estimate(compressor, [x], number=number) - x) > bound) for number in range(20)]
    p = 1 / c**2
    allowed = sum(math.comb(rows, j) * p**j * (1 - p) ** (rows - j) for j in range(rows // 2 + 1, rows + 1))
    assert np.mean(failures) <= allowed


def test_variance_of_one_row_is_that_of_the_others_over_the_columns():
    """E (est_i - x_i)^2 = (|x|^2 - |block of i|^2) / columns exactly, and the mean error is 0."""
    x = normal(N, 2)
    compressor = make("sketchedsgd", rows=1, columns_per_k=4.8)
    trials = 200
    errors = np.array([wide(estimate(compressor, [x], number=number)) - x for number in range(trials)])
    blocks = np.sum(wide(x).reshape(-1, SKETCH_BLOCK) ** 2, axis=1)
    expected = np.mean(np.sum(blocks) - blocks) / 192
    # The elements of a block collide together. So the draws are independent, but the elements are not.
    for sample, mean in ((np.mean(errors**2, axis=1), expected), (errors.mean(axis=1), 0)):
        assert abs(sample.mean() - mean) <= 6 * sample.std(ddof=1) / math.sqrt(trials)
    assert np.mean(errors**2, axis=1).std() < expected / 2


def test_the_median_of_rows_is_better_than_one():
    x = normal(N, 3)
    errors = [np.abs(estimate(make("sketchedsgd", rows=rows), [x]) - x).mean() for rows in (1, 3, 5, 9)]
    assert errors == sorted(errors, reverse=True)


def test_heavy_hitters_of_the_sum_are_found_where_no_rank_sees_them():
    """Every rank has its own large elements, which cancel. The large elements of the sum are small on every rank."""
    ranks, heavy = 8, np.arange(0, N, N // 10)
    noise = [0.02 * normal(N, 10 + rank) for rank in range(ranks)]
    xs = [mine.copy() for mine in noise]
    for rank in range(ranks):
        xs[rank][heavy] += 1.0
        xs[rank][7 + rank // 2 :: N // 40] += 3.0 if rank % 2 else -3.0
    for x in xs:
        top = np.argsort(-np.abs(x))[:40]
        assert not set(top) & set(heavy), "or this test shows nothing"
    merged = step(simulate(ranks, (N,), make("sketchedsgd", candidates=1)), xs)
    mean = np.mean([x.astype(np.float64) for x in xs], axis=0)
    assert np.count_nonzero(merged) == 40
    assert (merged[heavy] != 0).all()
    assert np.allclose(merged[heavy], mean[heavy], rtol=1e-5, atol=0), "values are exact"


def test_all_ranks_choose_the_same_elements_and_others_in_another_step():
    xs = [normal(N, seed) for seed in range(4)]
    chosen = [p["indices"] for p in exchange(make("sketchedsgd"), OPS, spec(N), xs).payloads]
    assert all(np.array_equal(chosen[0], other) for other in chosen)
    assert len(set(chosen[0].tolist())) == 160
    assert not np.array_equal(chosen[0], exchange(make("sketchedsgd"), OPS, spec(N), xs, step=1).payloads[0]["indices"])


def test_a_sketch_that_overflowed_still_chooses_k():
    ex = exchange(make("sketchedsgd"), OPS, spec(N), [normal(N)])
    negotiated = ex.sites[0].negotiated.copy()
    negotiated[:100:3], negotiated[1:200:3], negotiated[2:300:3] = np.inf, -np.inf, np.nan
    at = ex.sites[0]._replace(negotiated=negotiated)
    assert len(set(make("sketchedsgd").compress(ex.xs[0], at)["indices"].tolist())) == 160


def test_more_candidates_find_more_of_the_largest():
    """Recall of elements of 8 standard deviations, planted in the sum of four ranks."""
    n, k = 20_000, 200
    rng = np.random.default_rng(0)
    xs, planted = [normal(n, seed) for seed in range(4)], rng.choice(n, k, replace=False)
    for x in xs:
        x[planted] += np.float32(8) * np.where(planted % 2, 1, -1)
    found = []
    for candidates in (1, 4):
        ex = exchange(make("sketchedsgd", candidates=candidates), OPS, spec(n), xs)
        indices = ex.payloads[0]["indices"]
        assert len(indices) == candidates * k
        found.append(np.isin(planted, indices).mean())
    # All of these, drawn at random with as many values in all, would be 14 %.
    assert found[0] < 0.4
    assert found[1] > 0.5


def test_bytes_do_not_depend_on_the_ranks_and_are_a_seventh_of_dense():
    compressor, tensor = make("sketchedsgd"), spec(1000, 1000)
    fields = [*compressor.proposed(tensor), *compressor.wire(tensor)]
    assert payload_bytes(fields) == 4 * (5 * 20000 + 40000)
    assert len(payload(compressor, normal(N))["values"]) == 160


def test_memory_holds_what_was_not_sent():
    xs = [normal(N, seed) for seed in range(3)]
    sim = simulate(3, (N,), make("sketchedsgd"), "residual")
    applied = np.zeros(N)
    for _ in range(5):
        applied += step(sim, xs)
    left = np.mean([state(sim, rank).astype(np.float64) for rank in range(3)], axis=0)
    assert np.allclose(applied + left, 5 * np.mean(xs, axis=0), rtol=0, atol=1e-5)


def test_momentum_correction_with_plain_numpy():
    """u = m u + g, v = v + u. Both are set to zero at the sent coordinates, which are equal on all ranks."""
    ranks = 2
    sim = simulate(ranks, (N,), make("sketchedsgd", candidates=1), {"name": "dgc", "momentum": 0.9})
    u, v = np.zeros((ranks, N)), np.zeros((ranks, N))
    for number in range(4):
        xs = [normal(N, 10 * number + rank) for rank in range(ranks)]
        u = 0.9 * u + xs
        v = v + u
        merged = step(sim, xs)
        sent = merged != 0
        assert np.count_nonzero(sent) == 40
        assert np.allclose(merged[sent], v.mean(axis=0)[sent], rtol=1e-4, atol=1e-5)
        u[:, sent], v[:, sent] = 0, 0
        for rank in range(ranks):
            assert np.allclose(state(sim, rank), v[rank], rtol=1e-4, atol=1e-5)
            assert np.allclose(state(sim, rank, "momentum"), u[rank], rtol=1e-4, atol=1e-5)


def test_tensors_that_would_not_shrink_stay_dense_and_impossible_options_are_refused():
    compressor = make("sketchedsgd", candidates=1)
    assert "no smaller" in compressor.unfit(TensorSpec("bias", (10,)))
    assert compressor.unfit(TensorSpec("w", (100,))) is None
    with pytest.raises(ConfigError, match="rows must be odd"):
        make("sketchedsgd", rows=4)
    with pytest.raises(ConfigError, match="columns_per_k"):
        make("sketchedsgd", columns_per_k=0.0)
