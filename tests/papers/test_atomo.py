"""Wang et al., "ATOMO", NeurIPS 2018: the probabilities of least variance, and their variance."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import ConfigError
from grace.core.ops import get_ops
from grace.testing.harness import exchange, inputs, wire_bytes
from tests.papers.common import OPS, make, normal, payload, send, spec, variance
from tests.support.registered import FRAMEWORKS

ROWS, COLUMNS = 30, 20


def probabilities(magnitudes: np.ndarray, budget: float) -> np.ndarray:
    """Return the paper's probabilities: starting with the largest atom, cap at 1 and share the remaining budget."""
    order = np.argsort(-magnitudes)
    p = np.zeros(len(magnitudes))
    for taken, i in enumerate(order):
        rest = magnitudes[order[taken:]].sum()
        if rest == 0:
            break
        if (budget - taken) * magnitudes[i] <= rest:
            p[order[taken:]] = (budget - taken) * magnitudes[order[taken:]] / rest
            break
        p[i] = 1
    return p


def matrix(singular, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((n, len(singular))))[0] for n in (ROWS, COLUMNS))
    return ((u * np.array(singular)) @ v.T).astype(np.float32)


SPECTRA = {
    "flat": np.ones(20),
    "slow": 1 / np.arange(1, 21),
    "steep": 0.6 ** np.arange(20),
    "two sizes": np.where(np.arange(20) < 5, 10.0, 1.0),
    "few": np.where(np.arange(20) < 4, 1.0, 0.0),
}
every_spectrum = pytest.mark.parametrize("name", SPECTRA)


def counts(compressor, x, trials):
    """Return the number of atoms that were sent, for each of `trials` keys."""
    field, length = ("values", 1) if compressor.mode == "entry" else ("right", COLUMNS)
    return np.array([payload(compressor, x, step=step)[field].size / length for step in range(trials)])


def matrix_variance(compressor, m, trials):
    """Return the same as `variance`, for a matrix."""
    errors = [np.sum((send(compressor, m, step=step) - m.ravel()) ** 2) for step in range(trials)]
    return np.mean(errors), 6 * np.std(errors, ddof=1) / np.sqrt(trials)


@every_spectrum
@pytest.mark.parametrize("budget", [1.0, 2.5, 6.0, 12.0])
def test_the_budget_is_spent_on_average(name, budget):
    singular = SPECTRA[name]
    sent = counts(make("atomo", compress_rank=budget), matrix(singular), 150)
    p = probabilities(singular, budget)
    deviation = np.sqrt(np.sum(p * (1 - p)))
    assert p.sum() == pytest.approx(min(budget, np.count_nonzero(singular)))
    assert abs(sent.mean() - p.sum()) <= 6 * deviation / np.sqrt(150) + 1e-9


@every_spectrum
@pytest.mark.parametrize("budget", [1.0, 2.5, 6.0])
def test_the_variance_is_the_least(name, budget):
    """The variance is sum_a l_a^2 (1 / p_a - 1)."""
    singular = SPECTRA[name]
    mean, margin = matrix_variance(make("atomo", compress_rank=budget), matrix(singular), 150)
    p = probabilities(singular, budget)
    kept = singular > 0
    assert abs(mean - np.sum(singular[kept] ** 2 * (1 / p[kept] - 1))) <= margin + 1e-5


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("ratio", [0.02, 0.2, 0.9])
def test_of_entries_too(seed, ratio):
    x = normal(400, seed) ** 3
    compressor = make("atomo", mode="entry", compress_ratio=ratio)
    p = probabilities(np.abs(x.astype(np.float64)), ratio * 400)
    assert (p.max() == 1) == (ratio > 0.1), "with and without entries above the threshold"
    mean, margin = variance(compressor, x, 400)
    wide = x.astype(np.float64)
    assert abs(mean - np.sum(wide**2 * (1 / p - 1))) <= margin + 1e-4
    assert abs(counts(compressor, x, 400).mean() - ratio * 400) <= 6 * np.sqrt(np.sum(p * (1 - p)) / 400)


def test_no_other_probabilities_of_that_budget_are_better():
    """Equation 4 of the paper is a convex problem: moving probability from one atom to another only adds variance."""
    singular = SPECTRA["slow"]
    p = probabilities(singular, 4.0)
    best = np.sum(singular**2 / p)
    rng = np.random.default_rng(0)
    for _ in range(100):
        i, j = rng.choice(20, 2, replace=False)
        moved = p.copy()
        share = min(0.05, 1 - p[i], p[j] / 2)
        moved[i], moved[j] = p[i] + share, p[j] - share
        assert np.sum(singular**2 / moved) >= best - 1e-12


@pytest.mark.parametrize("mode", ["spectral", "entry"])
def test_the_mean_is_the_gradient(mode):
    """The mean is within six standard deviations of the gradient; these follow from the least variance."""
    x, trials = matrix(SPECTRA["slow"]), 600
    compressor = make("atomo", mode=mode, compress_rank=3, compress_ratio=0.1)
    mean = np.mean([send(compressor, x, step=step) for step in range(trials)], axis=0)
    u, s, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    if mode == "spectral":
        error = np.diag(u.T @ (mean.reshape(x.shape) - x) @ v.T)
        p = probabilities(s, 3)
    else:
        error, s = mean - x.ravel(), np.abs(x.ravel().astype(np.float64))
        p = probabilities(s, 0.1 * x.size)
    assert np.all(np.abs(error) <= 6 * s * np.sqrt((1 / p - 1) / trials) + 1e-6)


@pytest.mark.parametrize(("q", "size"), [(np.inf, np.max), (2, np.linalg.norm)], ids=["TernGrad", "QSGD"])
def test_remark_1_of_grace(q, size):
    """With s = |x|_1 / |x|_q, p_i = |x_i| / |x|_q, sent as sign(x_i) |x|_q: TernGrad, and QSGD with one level."""
    x = normal(500)
    wide = x.astype(np.float64)
    scale = size(np.abs(wide))
    # Slightly less, because rounding up would put an entry with p = 1 above the threshold.
    ratio = np.abs(wide).sum() / scale / 500 * (1 - 1e-6)
    compressor = make("atomo", mode="entry", compress_ratio=ratio)
    sent = np.array([send(compressor, x, step=step) for step in range(400)])
    assert np.allclose(np.unique(np.abs(sent)), [0, scale], rtol=1e-5)
    assert np.all(sent * wide >= 0)
    p = np.abs(wide) / scale
    assert np.all(np.abs((sent != 0).mean(axis=0) - p) <= 6 * np.sqrt(p * (1 - p) / 400) + 1e-5)
    # The variance is |x|_q |x|_1 - |x|_2^2.
    mean, margin = variance(compressor, x, 400)
    assert abs(mean - (scale * np.abs(wide).sum() - np.sum(wide**2))) <= margin


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_matrix_of_at_most_that_rank_is_exact(rank):
    m = matrix(np.arange(1.0, rank + 1))
    compressor = make("atomo", compress_rank=4)
    for step in range(5):
        sent = payload(compressor, m, step=step)
        assert sent["right"].size == rank * COLUMNS, "rounding errors are no atoms"
        assert np.abs(send(compressor, m, step=step).reshape(m.shape) - m).max() < 1e-5


def test_entries_above_the_threshold_are_exact_and_the_others_equal():
    x = np.concatenate([normal(300) / 10, np.float32([7, -9, 11])])
    sent = payload(make("atomo", mode="entry", compress_ratio=0.1), x)
    values = dict(zip(sent["indices"].tolist(), sent["values"].tolist(), strict=True))
    assert [values[i] for i in (300, 301, 302)] == [7, -9, 11]
    assert len({abs(value) for i, value in values.items() if i < 300}) == 1


@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (3, 3, 8, 16), (30, 20), (4, 5, 6, 7, 8)])
def test_a_triple_takes_rows_and_columns(shape):
    rows, columns = min(((np.prod(shape[:i]), np.prod(shape[i:])) for i in range(1, len(shape))), key=sum)
    triples = []
    for number in range(5):
        sent = payload(make("atomo", compress_rank=2), normal(np.prod(shape)).reshape(shape), step=number)
        assert sent["left"].size / rows == sent["right"].size / columns
        triples.append(sent["left"].size / rows)
    assert 1 <= np.mean(triples) <= 3


def test_every_framework_sends_the_same_entries():
    tensor = spec(24, 40)
    for ratio in (0.1, 0.5, 1.0):
        compressor = make("atomo", mode="entry", compress_ratio=ratio)
        for case, x in inputs(tensor).items():
            if case != "denormal":
                sent = [wire_bytes(compressor, get_ops(framework), tensor, x) for framework in FRAMEWORKS]
                assert len(set(sent)) == 1, case


def test_ranks_draw_for_themselves():
    x = normal(ROWS * COLUMNS)
    ex = exchange(make("atomo", mode="entry"), OPS, spec(ROWS, COLUMNS), [x, x])
    assert ex.payloads[0]["indices"].tolist() != ex.payloads[1]["indices"].tolist()


def test_options_and_tensors_are_checked():
    for options in ({"compress_rank": 0.0}, {"compress_ratio": 0.0}, {"compress_ratio": 1.5}, {"mode": "fourier"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make("atomo", **options)
    assert "atomo needs a matrix" in make("atomo").unfit(spec(100))
    assert "no smaller" in make("atomo").unfit(spec(4, 4))
    assert make("atomo", mode="entry").unfit(spec(100)) is None
    assert "variance" in make("atomo").harmed_by_feedback
