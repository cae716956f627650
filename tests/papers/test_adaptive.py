"""Dryden et al., "Communication quantization for data-parallel training of deep neural networks", MLHPC 2016."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import make, normal, payload, send, simulate, spec, state, step


def skewed(n: int, seed: int = 0) -> np.ndarray:
    """Return a gradient with three quarters negative elements, of another size than the positive ones, and zeros."""
    rng = np.random.default_rng(seed)
    x = np.abs(rng.standard_normal(n))
    x = np.where(rng.random(n) < 0.75, -3 * x, x)
    return np.where(rng.random(n) < 0.1, 0, x).astype(np.float32)


def reference(x: np.ndarray, ratio: float) -> np.ndarray:
    """Return the expected result. Each sign is sorted separately."""
    decoded = np.zeros(len(x))
    for sign in (1, -1):
        side = np.flatnonzero(sign * x > 0)
        kept = side[np.argsort(-np.abs(x[side]), kind="stable")[: max(1, int(ratio * len(side)))]]
        if len(kept):
            decoded[kept] = x[kept].astype(np.float64).mean()
    return decoded


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_either_sign_has_its_own_threshold_and_mean(ratio):
    x = skewed(2000)
    assert np.allclose(send(make("adaptive", compress_ratio=ratio), x), reference(x, ratio), rtol=1e-6, atol=0)


def test_the_share_is_that_of_either_sign():
    """10 % of the 400 positive and of the 1600 negative elements are kept, although all negative ones are larger."""
    x = np.concatenate([np.linspace(1, 2, 400), np.linspace(-100, -50, 1600)]).astype(np.float32)
    sent = payload(make("adaptive", compress_ratio=0.1), x)
    assert sent["positive"].tolist() == list(range(360, 400))
    assert sent["negative"].tolist() == list(range(400, 560))
    assert np.allclose(sent["means"], [x[360:400].mean(), x[400:560].mean()])


def test_a_worked_example():
    x = np.array([0.0, 3.0, -1.0, 5.0, -2.0, 1.0, 4.0], np.float32)
    sent = payload(make("adaptive", compress_ratio=0.5), x)
    assert sent["positive"].tolist() == [3, 6]
    assert sent["negative"].tolist() == [4]
    assert sent["means"].tolist() == [4.5, -2.0]
    assert send(make("adaptive", compress_ratio=0.5), x).tolist() == [0, 0, 0, 4.5, -2, 0, 4.5]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_sided_gradients(sign):
    sent = payload(make("adaptive", compress_ratio=0.1), (sign * np.arange(1, 101)).astype(np.float32))
    lists = {"positive": len(sent["positive"]), "negative": len(sent["negative"])}
    assert lists == ({"positive": 10, "negative": 0} if sign > 0 else {"positive": 0, "negative": 10})
    assert sent["means"].tolist() == ([95.5, 0] if sign > 0 else [0, -95.5])


def test_an_entry_takes_4_bytes():
    sent = payload(make("adaptive", compress_ratio=0.01), normal(100_000))
    kept = len(sent["positive"]) + len(sent["negative"])
    assert 998 <= kept <= 1000
    assert sum(field.nbytes for field in sent.values()) == 4 * kept + 8


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
def test_the_decoded_gradient_is_a_projection(ratio):
    """|x - C(x)|^2 = |x|^2 - |C(x)|^2, so that the error never exceeds |x|."""
    x = skewed(1000, 1).astype(np.float64)
    decoded = send(make("adaptive", compress_ratio=ratio), x.astype(np.float32))
    assert np.sum((x - decoded) ** 2) == pytest.approx(np.sum(x**2) - np.sum(decoded**2), rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [0.02, 0.2, 0.9])
def test_the_contraction(ratio, seed):
    """The contraction holds even if the mean differs much from the kept values: one large element, many small ones."""
    rng = np.random.default_rng(seed)
    n = 100
    x = (np.abs(rng.standard_normal(n)) * rng.choice([0.01, 0.1, 1.0])).astype(np.float32)
    x[rng.integers(n)] = 1.0 if seed % 2 else 10.0
    error = np.sum((x - send(make("adaptive", compress_ratio=ratio), x)) ** 2)
    delta = make("adaptive").contraction(spec(n))
    assert delta == 1 / n
    assert error <= (1 - delta) * np.sum(x.astype(np.float64) ** 2) * (1 + 1e-6)


def test_errors_are_fed_back():
    x = [skewed(500, seed) for seed in range(4)]
    sim = simulate(1, (500,), make("adaptive", compress_ratio=0.05), "residual")
    total = sum(step(sim, [g]).astype(np.float64) for g in x)
    assert np.allclose(total + state(sim, 0), np.sum(x, axis=0), atol=1e-4)


def test_momentum_is_masked_where_something_was_sent():
    """The memory `dgc` works with this method, because the method selects coordinates."""
    x = skewed(300)
    sim = simulate(1, (300,), make("adaptive", compress_ratio=0.1), "dgc")
    sent = step(sim, [x]) != 0
    momentum = state(sim, 0, "momentum")
    assert 20 < sent.sum() < 40
    assert not momentum[sent].any()
    assert np.array_equal(momentum[~sent], x[~sent])
