"""Thresholds that are estimated: SIDCo, Gaussian-k, MSTop-k, RedSync, DCT and SDAGC."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import make, normal, payload, simulate, state, step

N = 200_000
LAPLACE = np.random.default_rng(3).laplace(size=N).astype(np.float32)


def uniform_pareto(shape: float) -> np.ndarray:
    """Return values whose magnitudes follow a generalized Pareto distribution."""
    rng = np.random.default_rng(5)
    return (rng.choice([-1, 1], N) * ((1 - rng.uniform(size=N)) ** -shape - 1) / shape).astype(np.float32)


def share(compressor, x: np.ndarray) -> float:
    sent = payload(compressor, x)
    least = np.abs(sent["values"]).min()
    assert sent["indices"].tolist() == np.flatnonzero(np.abs(x) >= least).tolist(), "all from a threshold on"
    return len(sent["values"]) / len(x)


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("stages", [1, None])
def test_sidco_is_exact_on_laplace_values(ratio, stages):
    """Abdelmoniem et al., section 2: |x| is exponential then, and so is every tail of it."""
    assert share(make("sidco", compress_ratio=ratio, stages=stages), LAPLACE) == pytest.approx(ratio, rel=0.15)


def test_sidco_by_hand():
    """The mean of 1 .. 8 is 4.5; above 4.5 ln 4 are 7 and 8, and their mean is 7.5. Half of these two should stay."""
    x = np.float32([1, -2, 3, -4, 5, -6, 7, -8])
    first = 4.5 * np.log(4)
    bound = first + (7.5 - first) * np.log(2)
    assert 7 < bound < 8
    assert payload(make("sidco", compress_ratio=1 / 8, stages=2), x)["values"].tolist() == [-8]
    assert payload(make("sidco", compress_ratio=1 / 4), x)["values"].tolist() == [7, -8]
    # None reaches the first threshold, 0.55 ln 4 = 0.76, and the largest travels. All 16 are above 0, 4 should be, and
    # none counts as half of one: the next threshold lies ln 4 / ln 32 = 0.4 of the way up from 0, at 0.31. Then follow
    # 0.4 of the way to 0.76 again, 0.49, and once more, 0.6.
    x = np.float32([0.5] * 12 + [0.7, 0.7, 0.7, -0.71])
    lengths = [len(payload(make("sidco", compress_ratio=1 / 4, stages=m), x)["values"]) for m in (1, 2, 3, 4, None)]
    assert lengths == [1, 16, 16, 4, 4]
    few = np.float32([0] * 14 + [1, -2])
    assert payload(make("sidco", compress_ratio=1 / 4), few)["values"].tolist() == [1, -2], "all that are not zero"


@pytest.mark.parametrize("ratio", [0.01, 0.001])
def test_sidco_refines_the_fit_of_the_tail_in_stages(ratio):
    """Section 2.4: one stage misses the ratio on values of another distribution, several come close."""
    x = normal(N)
    one, several = (share(make("sidco", compress_ratio=ratio, stages=stages), x) for stages in (1, None))
    assert abs(np.log(one / ratio)) > 1
    assert 0.8 <= several / ratio <= 1.2


@pytest.mark.parametrize("distribution", ["exponential", "pareto"])
@pytest.mark.parametrize("ratio", [0.5, 0.1, 0.01, 0.001])
def test_sidco_adds_stages_until_the_number_fits(distribution, ratio):
    """The paper's tolerance is 20 %. The last three defeat any number of stages that is fixed in advance."""
    x, rng = normal(N), np.random.default_rng(4)
    mixed = x * np.where(rng.uniform(size=N) < 0.02, 1, 1e-4).astype(np.float32)
    outlier = np.append(x, np.float32(1e6))
    for values in (x, np.float32(1e25) * x, LAPLACE, rng.uniform(-1, 1, N).astype(np.float32), x**5, mixed, outlier):
        found = share(make("sidco", compress_ratio=ratio, distribution=distribution), values)
        assert 0.79 <= found / ratio <= 1.21


@pytest.mark.parametrize("distribution", ["exponential", "pareto"])
@pytest.mark.parametrize("memory", ["residual", "none"])
def test_sidco_sends_its_ratio_in_training(distribution, memory):
    """Residuals and gradients of a perceptron, of which every step has others: 50 steps, then the mean of 50 more."""
    rng, batch, ratio = np.random.default_rng(0), 32, 0.01
    inputs = rng.standard_normal((2000, 40)) * (rng.uniform(size=(2000, 40)) < 0.3)
    classes = np.eye(10)[np.argmax(inputs @ rng.standard_normal((40, 10)), axis=1)]
    first, second = rng.standard_normal((40, 64)) * (2 / 40) ** 0.5, rng.standard_normal((64, 10)) * (2 / 64) ** 0.5
    compressor = make("sidco", compress_ratio=ratio, distribution=distribution)
    sims = [simulate(1, weight.shape, compressor, memory) for weight in (first, second)]
    sent = []
    for _ in range(100):
        rows = rng.integers(0, 2000, batch)
        hidden = np.maximum(inputs[rows] @ first, 0)
        power = np.exp(hidden @ second - (hidden @ second).max(axis=1, keepdims=True))
        error = (power / power.sum(axis=1, keepdims=True) - classes[rows]) / batch
        gradients = inputs[rows].T @ (error @ second.T * (hidden > 0)), hidden.T @ error
        merged = [step(sim, [g.astype(np.float32)]) for sim, g in zip(sims, gradients, strict=True)]
        first, second = first - 0.3 * merged[0], second - 0.3 * merged[1]
        sent.append([np.count_nonzero(m) / int(ratio * m.size) for m in merged])
    assert np.mean(sent[50:], axis=0) == pytest.approx([1, 1], rel=0.2)


@pytest.mark.parametrize("shape", [0.3, 0.1, -0.2])
def test_sidco_fits_a_generalized_pareto_distribution(shape):
    x = uniform_pareto(shape)
    fitted = share(make("sidco", compress_ratio=0.001, distribution="pareto", stages=1), x)
    assert fitted == pytest.approx(0.001, rel=0.35)
    assert abs(np.log(share(make("sidco", compress_ratio=0.001, stages=1), x) / 0.001)) > 0.5


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_gaussian_k_needs_no_adjustment_for_normal_values(ratio):
    """Shi et al. 2019: the percent point of the fitted normal distribution."""
    assert share(make("gaussiank", compress_ratio=ratio, adjustments=0), normal(N)) == pytest.approx(ratio, rel=0.1)


def test_gaussian_k_adjusts_until_the_number_fits():
    """The first threshold lets 2.6 % pass, 1.5 times of it 0.4 %, the middle of both 1.06 %."""
    for adjustments, expected in ((0, 0.0262), (1, 0.0042), (2, 0.0106), (9, 0.0106)):
        found = share(make("gaussiank", compress_ratio=0.01, adjustments=adjustments), LAPLACE)
        assert found == pytest.approx(expected, rel=0.1), adjustments
    with_few = normal(N) * (np.arange(N) % 1000 == 0) + np.float32(1e-3) * normal(N, 1)
    assert share(make("gaussiank", compress_ratio=0.01, adjustments=0), with_few) < 0.01 * 2 / 3
    assert 0.01 * 2 / 3 <= share(make("gaussiank", compress_ratio=0.01, adjustments=12), with_few) <= 0.01 * 4 / 3


@pytest.mark.parametrize("ratio", [0.9, 0.3, 0.01, 0.0001])
def test_mstop_k_is_top_k_with_enough_trials(ratio):
    x = normal(20_000)
    exact, found = (payload(make(name, compress_ratio=ratio), x) for name in ("topk", "mstopk"))
    assert found["indices"].tolist() == exact["indices"].tolist()


def test_mstop_k_keeps_k_after_any_number_of_trials():
    """One trial: all from the mean on are candidates, and the first 100 travel. Ties cannot change the number."""
    x = normal(10_000)
    few = payload(make("mstopk", compress_ratio=0.01, trials=1), x)["indices"]
    assert few.tolist() == np.flatnonzero(np.abs(x) >= np.abs(x).mean())[:100].tolist()
    captured = [
        np.sum(payload(make("mstopk", compress_ratio=0.01, trials=trials), x)["values"] ** 2) for trials in (1, 6, 12)
    ]
    assert captured == sorted(captured)
    for tied in (np.sign(x), np.zeros(10_000, np.float32)):
        assert len(payload(make("mstopk", compress_ratio=0.01), tied)["values"]) == 100


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("x", [normal(N), LAPLACE, normal(N) ** 5], ids=["normal", "laplace", "heavy"])
def test_redsync_sends_k_to_2_k(ratio, x):
    assert ratio - 1 / N <= share(make("redsync", compress_ratio=ratio), x) <= 2 * ratio


def test_redsync_without_a_threshold_for_k_to_2_k_sends_the_k_largest():
    x = np.where(np.arange(1000) % 2, 1.0, 0.1).astype(np.float32)
    x[[100, 300]] = [5.0, -7.0]
    sent = payload(make("redsync", compress_ratio=0.01), x)
    assert len(sent["values"]) == 10
    assert {5.0, -7.0} <= set(sent["values"].tolist())


@pytest.mark.parametrize("ratio", [0.7, 0.1, 0.01])
def test_redsync_trimmed_is_top_k(ratio):
    x = LAPLACE[:20_000]
    exact, found = (
        payload(make("topk", compress_ratio=ratio), x),
        payload(make("redsync", compress_ratio=ratio, search="trimmed"), x),
    )
    assert found["indices"].tolist() == exact["indices"].tolist()


def test_dct_keeps_the_threshold_between_renewals():
    """Gupta et al.: the k-th magnitude, found every `refresh` steps; here its mean over two ranks."""
    sim = simulate(2, (1000,), make("dct", compress_ratio=0.01, refresh=3))
    xs = [normal(1000, seed) for seed in range(2)]
    top = [np.sort(np.abs(x))[-10] for x in xs]
    bounds = []
    for factor in (1.0, 2.0, 0.75, 4.0, 1.0):
        merged = step(sim, [np.float32(factor) * x for x in xs])
        bounds.append(state(sim, 0, "threshold", "compressor")[0])
        chosen = top if len(bounds) == 1 else [4.0 * t for t in top] if len(bounds) == 4 else [bounds[-2]] * 2
        mine = [factor * x * (np.abs(factor * x) >= bound * (1 - 1e-6)) for x, bound in zip(xs, chosen, strict=True)]
        mine = [x if x.any() else factor * y * (np.abs(y) == np.abs(y).max()) for x, y in zip(mine, xs, strict=True)]
        assert np.allclose(merged, np.mean(mine, axis=0), atol=1e-6), len(bounds)
    assert bounds == pytest.approx([np.mean(top)] * 3 + [4 * np.mean(top)] * 2)


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.0])
def test_sdagc_counts_in_standard_deviations(alpha):
    """The share depends on the distribution only, not on the size; the mean does not count."""
    x = normal(N)
    expected = {1.0: 0.3173, 2.0: 0.0455, 3.0: 0.0027}[alpha]
    for factor in (1e-6, 1.0, 1e6):
        assert share(make("sdagc", alpha=alpha), np.float32(factor) * x) == pytest.approx(expected, rel=0.1)
    shifted = payload(make("sdagc", alpha=alpha), x + np.float32(10))
    assert len(shifted["values"]) == N, "the deviation of x + 10 is still 1"


@pytest.mark.parametrize("name", ["sidco", "gaussiank", "sdagc"])
def test_a_threshold_that_none_reaches_becomes_the_largest(name):
    """Equal elements, or a single one, would wait for good."""
    options = {"alpha": 30.0} if name == "sdagc" else {"compress_ratio": 1e-6}
    assert len(payload(make(name, **options), np.full(1, -0.5, np.float32))["values"]) == 1
    x = np.append(np.ones(9, np.float32), np.float32(-1.5))
    assert payload(make(name, **options), x)["values"].tolist()[-1] == -1.5
    assert len(payload(make(name, **options), np.zeros(50, np.float32))["values"]) == 0
