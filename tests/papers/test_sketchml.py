"""Jiang et al., "SketchML: accelerating distributed machine learning with data sketches", SIGMOD 2018."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.codecs.sketch import decode_keys, encode_keys
from grace.core.errors import ConfigError
from grace.core.spec import TensorSpec
from tests.papers.common import OPS, make, normal, payload, send, simulate, spec, state, step

N = 6000


def buckets_and_means(magnitudes: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return buckets of equal counts and their means: a stable sort, cut at j * count / number."""
    magnitudes = magnitudes.astype(np.float64)
    order = np.argsort(magnitudes, kind="stable")
    bucket = np.empty(len(magnitudes), np.int64)
    cuts = [j * len(magnitudes) // number for j in range(number + 1)]
    for j in range(number):
        bucket[order[cuts[j] : cuts[j + 1]]] = j
    means = np.array([magnitudes[bucket == j].mean() if (bucket == j).any() else 0.0 for j in range(number)])
    return bucket, means


def exactly(x: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bucket of every element within its sign, its decoded value without a sketch, and the means."""
    bucket, decoded = np.zeros(len(x), np.int64), np.zeros(len(x))
    means = np.zeros((2, number))
    for sign, mine in enumerate((x > 0, x < 0)):
        bucket[mine], means[sign] = buckets_and_means(np.abs(x[mine]), number)
        decoded[mine] = (1 - 2 * sign) * means[sign][bucket[mine]]
    return bucket, decoded, means


def test_without_collisions_elements_decode_to_the_means_of_their_buckets():
    """One row with a thousand bins per key has almost no collisions."""
    x = normal(N)
    sent = send(make("sketchml", compress_ratio=1.0, columns=1000.0, rows=3), x)
    _, decoded, _ = exactly(x, 64)
    assert np.allclose(sent, decoded, rtol=1e-6, atol=0)


def test_means_on_the_wire_are_those_of_equal_counts():
    x = normal(N, 1)
    _, _, means = exactly(x, 64)
    assert np.allclose(payload(make("sketchml", compress_ratio=1.0), x)["means"], means.ravel(), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"rows": 1}, {"columns": 0.05}, {"groups": 1}, {"groups": 64}])
def test_a_query_is_never_above_the_bucket_and_stays_in_its_group(options):
    x = normal(N, 2)
    sent = send(make("sketchml", compress_ratio=1.0, **options), x)
    bucket, decoded, means = exactly(x, 64)
    width = 64 // options.get("groups", 8)
    sign = (x < 0).astype(int)
    floor = means[sign, bucket // width * width]
    assert (np.abs(sent) <= np.abs(decoded) * (1 + 1e-6)).all()
    assert (np.abs(sent) >= floor * (1 - 1e-6)).all()
    if width > 1:
        assert np.abs(sent).sum() < 0.999 * np.abs(decoded).sum(), "collisions shrink, or this test shows nothing"
    else:
        assert np.allclose(sent, decoded, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_no_sign_flips(shift):
    x = normal(N, 3) + np.float32(shift)
    sent = send(make("sketchml", compress_ratio=1.0, columns=0.02), x)
    assert np.array_equal(np.sign(sent), np.sign(x))


def test_more_rows_err_less():
    x = normal(N, 4)
    _, decoded, _ = exactly(x, 64)
    sent = [send(make("sketchml", compress_ratio=1.0, columns=0.5, rows=rows), x) for rows in (1, 2, 4)]
    errors = [np.sum((values - decoded) ** 2) for values in sent]
    assert errors[0] > 1.3 * errors[1]
    assert errors[1] > 1.3 * errors[2]


def test_hidden_by_a_collision_with_the_chance_of_the_paper():
    """An element shrinks if a smaller bucket falls into its bin in every row, which is rarer with more columns.

    A bin of one row is hit by a Poisson number of keys of the group with mean 1 / columns; with 8 equal buckets, the
    one of rank r survives a row if no smaller one hits it: exp(-r / (8 columns)).
    """
    x = normal(20000, 5)
    bucket, decoded, _ = exactly(x, 64)
    for columns, rows in ((0.5, 1), (0.5, 2), (2.0, 1)):
        sent = send(make("sketchml", compress_ratio=1.0, columns=columns, rows=rows), x)
        right = np.isclose(sent, decoded, rtol=1e-6, atol=0)
        for r in range(8):
            expected = 1 - (1 - np.exp(-r / 8 / columns)) ** rows
            assert abs(right[bucket % 8 == r].mean() - expected) < 0.04


def test_selection_is_the_largest_share_of_the_non_zeros():
    x = normal(N, 6)
    x[::2] = 0
    sent = send(make("sketchml", compress_ratio=0.1), x)
    assert set(np.flatnonzero(sent)) == set(np.argsort(-np.abs(x))[:600])
    sent = send(make("sketchml", compress_ratio=0.8), x)
    assert np.array_equal(sent != 0, x != 0)
    assert payload(make("sketchml", compress_ratio=1.0), x)["count"].tolist() == [np.count_nonzero(x)]


def test_keys_take_as_many_bytes_as_their_differences_need():
    keys = np.array([0, 1, 256, 257, 257 + 256, 2**16 + 513, 2**24, 2**25 + 1, 2**32 - 1], np.int64)
    widths, data = encode_keys(OPS, keys)
    steps = np.diff(keys, prepend=0)
    expected = [max(1, (int(s).bit_length() + 7) // 8) for s in steps]
    assert set(expected) == {1, 2, 3, 4}
    assert (len(widths), len(data)) == (-(-len(keys) // 4), sum(expected))
    assert data.tobytes() == b"".join(int(s).to_bytes(w, "little") for s, w in zip(steps, expected, strict=True))
    assert np.array_equal(decode_keys(OPS, widths, data, len(keys)), keys)


def test_bytes_of_a_large_tensor_are_less_than_three_per_kept_element():
    """A key takes 2.1 bytes (its distance in one of 16 lists is geometric with mean 1600), plus 0.4 bins of 3 bits."""
    n, k = 200_000, 2000
    sent = payload(make("sketchml"), normal(n))
    assert sent["count"].tolist() == [k]
    assert sent["means"].nbytes == 2 * 64 * 4
    assert sent["widths"].nbytes == k / 4
    expected = 2 - (1 - np.exp(-255 / 1600))
    assert abs(sent["keys"].nbytes / k - expected) < 0.03
    # The last column of each list may be almost empty.
    assert 0.4 * k * 3 / 8 <= sent["sketch"].nbytes <= (0.4 * k + 2 * 16) * 3 / 8 + 1
    total = sum(f.nbytes for f in sent.values())
    assert total < 2.75 * k


def test_error_is_far_below_what_was_kept():
    x = normal(N, 7)
    kept = np.argsort(-np.abs(x))[:600]
    sent = send(make("sketchml", compress_ratio=0.1), x)[kept]
    size = np.sum(x[kept].astype(np.float64) ** 2)
    # Collisions stay within a group, an eighth of the quantiles. The group of the largest values is the widest.
    assert np.sum((sent - x[kept]) ** 2) < 0.02 * size


def test_a_bucket_may_expand_small_elements():
    """The method is no contraction: one large element and many small ones can share a bucket and its mean."""
    x = np.full(100, 1e-3, np.float32)
    x[0] = 10.0
    sent = send(make("sketchml", compress_ratio=1.0, quantiles=1, groups=1), x)
    assert np.allclose(sent, 10.099 / 100, rtol=1e-5)
    assert (np.abs(sent[1:] - x[1:]) > x[1:]).all()
    assert make("sketchml").contraction(spec(100)) is None


def test_memory_holds_the_rounding_and_the_rest():
    xs = [normal(N, seed) for seed in (8, 9)]
    sim = simulate(2, (N,), make("sketchml"), "residual")
    applied = np.zeros(N)
    for _ in range(5):
        applied += step(sim, xs)
    left = np.mean([state(sim, rank).astype(np.float64) for rank in range(2)], axis=0)
    assert np.allclose(applied + left, 5 * np.mean(xs, axis=0), rtol=0, atol=1e-5)


def test_a_gradient_of_zeros_and_one_of_one_sign_travel():
    compressor = make("sketchml", compress_ratio=1.0, quantiles=1, groups=1)
    assert not send(compressor, np.zeros(50, np.float32)).any()
    assert payload(compressor, np.zeros(50, np.float32))["keys"].size == 0
    assert np.allclose(send(compressor, np.full(50, -2.0, np.float32)), -2)


def test_what_cannot_work_is_refused():
    assert "32 bits" in make("sketchml").unfit(TensorSpec("w", (2**28,)))
    for options in ({"quantiles": 60}, {"groups": 0}, {"quantiles": 4}, {"rows": 0}, {"columns": 0.0}):
        with pytest.raises(ConfigError, match=r"sketchml: .*received"):
            make("sketchml", **options)
