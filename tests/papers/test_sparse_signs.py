"""Strom's threshold (Interspeech 2015), sparse binary compression (IJCNN 2019), and rTop-k (2020)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import make, normal, payload, send, simulate, state, step, variance


def test_strom_sends_a_sign_and_an_index_in_a_word():
    x = np.float32([0.5, -0.5, 0.6, -3.0, 0.0])
    sent = payload(make("strom", threshold=0.5), x)
    assert list(sent) == ["words"]
    assert sent["words"].dtype == np.int32
    assert sent["words"].tolist() == [2, -1 - 3]
    assert send(make("strom", threshold=0.5), x).tolist() == [0, 0, 0.5, -0.5, 0]


def test_strom_subtracts_tau_from_the_residual():
    """Section 2: what exceeds tau stays, and travels in later steps, one tau at a time."""
    sim = simulate(1, (3,), make("strom", threshold=1.0), "residual")
    gradient = np.float32([3.5, -1.25, 0.5])
    sent = [step(sim, [gradient * (number == 0)]) for number in range(5)]
    assert [x.tolist() for x in sent] == [[1, -1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert state(sim, 0).tolist() == [0.5, -0.25, 0.5]


def by_hand(x: np.ndarray, ratio: float) -> np.ndarray:
    sides = []
    for side in (np.flatnonzero(x > 0), np.flatnonzero(x < 0)):
        best = side[np.argsort(-np.abs(x[side]), kind="stable")][: max(1, int(ratio * len(side)))]
        sides.append((x[best].mean(), best))
    mean, best = max(sides, key=lambda side: abs(side[0]))
    decoded = np.zeros(len(x))
    decoded[best] = mean
    return decoded


@pytest.mark.parametrize("ratio", [0.01, 0.3])
@pytest.mark.parametrize("sign", [1, -1])
def test_sbc_sends_the_mean_of_the_stronger_side(ratio, sign):
    """Algorithm 2 of Sattler et al."""
    x = np.float32(sign) * np.where(normal(1000) > 0, 2, 1).astype(np.float32) * normal(1000)
    decoded = send(make("sbc", compress_ratio=ratio), x)
    assert np.allclose(decoded, by_hand(x, ratio), rtol=1e-6)
    assert np.sign(decoded[decoded != 0]).tolist() == [sign] * int((decoded != 0).sum())


def test_sbc_brings_the_other_side_later():
    sim = simulate(1, (4,), make("sbc", compress_ratio=0.5), "residual")
    sent = [step(sim, [np.float32([4, 1, -3, 0]) * (number == 0)]) for number in range(2)]
    assert [x.tolist() for x in sent] == [[4, 0, 0, 0], [0, 0, -3, 0]]


def test_rtopk_draws_k_of_the_r_largest():
    x, compressor = normal(1000), make("rtopk", compress_ratio=0.01, spread=4.0)
    largest = set(np.argsort(-np.abs(x))[:40].tolist())
    drawn = [payload(compressor, x, step=number)["indices"].tolist() for number in range(200)]
    assert all(len(set(some)) == 10 and set(some) <= largest and some == sorted(some) for some in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=1000)[sorted(largest)]
    # 200 draws of a quarter of the elements: 50 each, with a standard deviation of 6.1.
    assert counts.sum() == 2000
    assert np.abs(counts - 50).max() <= 28


def test_rtopk_has_the_variance_of_random_k_on_the_r_largest():
    x = normal(400)
    mean, margin = variance(make("rtopk", compress_ratio=0.05, spread=3.0), x, 300)
    top = np.sort(x.astype(np.float64) ** 2)[-60:].sum()
    assert mean == pytest.approx(np.sum(x.astype(np.float64) ** 2) - top / 3, abs=margin)


def test_rtopk_draws_otherwise_on_every_rank():
    sim = simulate(2, (1000,), make("rtopk", compress_ratio=0.01, spread=50.0))
    merged = step(sim, [normal(1000)] * 2)
    assert np.count_nonzero(merged) > 10


def test_rtopk_without_spread_is_top_k():
    x = normal(1000)
    one, other = payload(make("rtopk", spread=1.0), x), payload(make("topk"), x)
    assert one["indices"].tolist() == other["indices"].tolist()
