"""Basu et al., "Qsparse-local-SGD", NeurIPS 2019: Lemma 1 and 3, composed operators are contractions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import bits_per_element, make, normal, payload, send, simulate, spec, state, step, variance

D, K = 1000, 100


def qsparse(**options):
    return make("qsparse", compress_ratio=K / D, **options)


def beta(s: int, k: int = K) -> float:
    return min(k / s**2, math.sqrt(k) / s)


@pytest.mark.parametrize("s", [1, 4, 15, 127])
@pytest.mark.parametrize("sparsifier", ["topk", "randomk"])
def test_declared_contraction_is_that_of_the_paper(s, sparsifier):
    declared = qsparse(sparsifier=sparsifier, quantum_num=s).contraction(spec(D))
    assert declared == pytest.approx(K / (D * (1 + beta(s))))


@pytest.mark.parametrize("s", [1, 4, 15])
@pytest.mark.parametrize("sparsifier", ["topk", "randomk"])
def test_error_is_within_the_contraction(s, sparsifier):
    """The composition is a contraction even if the quantizer is not: with s = 1, its variance is 10 times the square.

    Equal magnitudes are the worst case of sparsifier and quantizer.
    """
    x = np.where(np.arange(D) % 3, 1.0, -1.0).astype(np.float32)
    compressor = qsparse(sparsifier=sparsifier, quantum_num=s)
    mean, margin = variance(compressor, x, 200)
    assert mean <= (1 - compressor.contraction(spec(D))) * D + margin


def test_unscaled_the_error_of_few_levels_exceeds_the_gradient():
    """Without the scaling, the same sparsifier and quantizer in a chain are an expansion."""
    x = normal(D)
    unscaled = make(
        "chain",
        sparsifier={"name": "topk", "compress_ratio": K / D},
        quantizer={"name": "qsgd", "quantum_num": 1, "bucket_size": 0, "norm": "l2"},
    )
    mean, margin = variance(unscaled, x, 100)
    assert mean - margin > np.sum(x.astype(np.float64) ** 2)
    mean, margin = variance(qsparse(quantum_num=1), x, 100)
    assert mean + margin < np.sum(x.astype(np.float64) ** 2)


@pytest.mark.parametrize("s", [2, 15])
def test_mean_of_the_kept_values_is_scaled_by_one_plus_beta(s):
    x = normal(D, 1)
    top = np.argsort(-np.abs(x))[:K]
    sent = np.array([send(qsparse(quantum_num=s), x, step=number)[top] for number in range(200)])
    expected = x[top] / (1 + beta(s))
    norm = np.linalg.norm(x[top].astype(np.float64))
    assert np.abs(sent.mean(axis=0) - expected).max() <= 6 * norm / s / math.sqrt(4 * 200)
    # The values are multiples of norm / (s (1 + beta)).
    levels = sent * s * (1 + beta(s)) / norm
    assert np.abs(levels - np.round(levels)).max() < 1e-4


@pytest.mark.parametrize("sparsifier", ["topk", "randomk"])
def test_sign_of_the_kept_values_with_their_mean_magnitude(sparsifier):
    x = normal(D, 2)
    compressor = qsparse(sparsifier=sparsifier, quantizer="sign")
    kept = payload(compressor, x)["indices"]
    expected = np.zeros(D)
    expected[kept] = np.sign(x[kept]) * np.abs(x[kept]).astype(np.float64).mean()
    assert len(kept) == K
    assert np.allclose(send(compressor, x), expected, rtol=1e-6, atol=0)
    assert compressor.contraction(spec(D)) == pytest.approx(1 / D)


def test_error_of_the_sign_on_each_gradient():
    """|x - C(x)|^2 = |x|^2 - |S(x)|_1^2 / k: the third term of Lemma 3 is the exact error."""
    x = normal(D, 3).astype(np.float64)
    top = np.sort(np.abs(x.astype(np.float32)).astype(np.float64))[-K:]
    error = np.sum((send(qsparse(quantizer="sign"), x.astype(np.float32)) - x) ** 2)
    assert error == pytest.approx(np.sum(x**2) - np.sum(top) ** 2 / K, rel=1e-5)


def test_bytes():
    n, k = 10000, 1000
    total = {
        (sparsifier, quantizer): bits_per_element(
            make("qsparse", compress_ratio=k / n, sparsifier=sparsifier, quantizer=quantizer, quantum_num=15), n
        )
        * n
        / 8
        for sparsifier in ("topk", "randomk")
        for quantizer in ("qsgd", "sign")
    }
    assert total == {
        ("topk", "qsgd"): 4 * k + 5 * k / 8 + 4,
        ("topk", "sign"): 4 * k + k / 8 + 4,
        ("randomk", "qsgd"): 5 * k / 8 + 4,
        ("randomk", "sign"): k / 8 + 4,
    }


@pytest.mark.parametrize("options", [{}, {"sparsifier": "randomk"}, {"quantizer": "sign"}, {"quantum_num": 2}])
def test_memory_delivers_a_constant_gradient_in_the_end(options):
    """With error feedback and a contraction, the sum after t steps is t g minus a bounded residual."""
    g = normal(100)
    sim = simulate(2, (100,), make("qsparse", compress_ratio=0.2, **options), "residual")
    applied, sizes = np.zeros(100), []
    for _ in range(250):
        applied += step(sim, [g, g])
        sizes.append(np.linalg.norm(state(sim, 0)))
    residual = (state(sim, 0) + state(sim, 1)) / 2
    assert np.allclose(applied + residual, 250 * g, rtol=1e-3, atol=1e-2)
    assert max(sizes[170:]) <= 1.5 * max(sizes[80:170])


def test_impossible_options_are_refused():
    with pytest.raises(ConfigError, match="compress_ratio"):
        make("qsparse", compress_ratio=0.0)
    with pytest.raises(ConfigError, match="quantum_num"):
        make("qsparse", quantum_num=0)
    with pytest.raises(ConfigError, match="option 'sparsifier'"):
        make("qsparse", sparsifier="dgc")
