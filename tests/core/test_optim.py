"""The pure steps of the optimizers in every framework, compared with PyTorch and with the papers in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import ConfigError
from grace.core.ops import get_ops
from grace.core.optim.adam import Adam
from grace.core.optim.lamb import Lamb, OneBitLamb
from grace.core.optim.lans import Lans
from grace.core.optim.moments import freeze_step_of, horizon, is_settled
from grace.core.optim.zero_one import ZeroOneAdam
from grace.testing.harness import FRAMEWORKS, array, host

N, STEPS, LR, DECAY = 300, 6, 0.01, 0.1
B1, B2, EPS = 0.9, 0.99, 1e-6
OPTIONS = {"betas": (B1, B2), "eps": EPS, "weight_decay": DECAY}


def given(count=STEPS):
    """Return weights, and gradients of very different sizes, some of which are zero."""
    random = np.random.default_rng(0)
    scale = 10 ** random.uniform(-3, 1, N)
    scale[:7] = 0
    return random.standard_normal(N), [scale * random.standard_normal(N) for _ in range(count)]


class Moved:
    """The optimizer of a framework, one call per step, in NumPy."""

    def __init__(self, framework, rule, weights):
        self.ops, self.rule = get_ops(framework), rule
        self.weights = array(self.ops, weights.astype(np.float32), "float32")
        self.state, self.number = rule.init(self.ops, self.weights), 0

    def step(self, gradient, call="step"):
        self.number += 1
        x = array(self.ops, gradient.astype(np.float32), "float32")
        step = getattr(self.rule, call)
        self.weights, self.state = step(self.ops, self.weights, x, self.state, LR, self.number)
        return host(self.ops, self.weights)

    def freeze(self):
        self.state = self.rule.freeze(self.ops, self.state, self.number)

    def momentum(self, gradient):
        x = array(self.ops, gradient.astype(np.float32), "float32")
        return host(self.ops, self.rule.momentum(self.ops, self.weights, x, self.state))


def norm(x):
    return np.sqrt(np.sum(x * x))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_is_that_of_pytorch(framework, decoupled):
    torch = pytest.importorskip("torch")
    weights, gradients = given()
    ours = Moved(framework, Adam(**OPTIONS, decoupled_weight_decay=decoupled), weights)
    p = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float32))
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)([p], lr=LR, **OPTIONS)
    for gradient in gradients:
        p.grad = torch.tensor(gradient, dtype=torch.float32)
        theirs.step()
        np.testing.assert_allclose(ours.step(gradient), p.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lamb(framework):
    """Algorithm 2 of the paper, in float64, with the limits of DeepSpeed."""
    weights, gradients = given()
    ours = Moved(framework, Lamb(**OPTIONS), weights)
    x, m, v = weights.copy(), np.zeros(N), np.zeros(N)
    for t, g in enumerate(gradients, 1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        u = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS) + DECAY * x
        x = x - LR * np.clip(norm(x) / norm(u), 0.01, 10) * u
        np.testing.assert_allclose(ours.step(g), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_limits_of_lamb_and_norms_of_zero(framework):
    gradients = given()[1]
    small = Moved(framework, Lamb(**{**OPTIONS, "weight_decay": 0.0}, max_coeff=0.5), np.full(N, 100.0))
    u = gradients[0] / (np.abs(gradients[0]) + EPS)
    np.testing.assert_allclose(small.step(gradients[0]), 100 - LR * 0.5 * u, rtol=1e-5)
    # Without weights there is no ratio, and without a gradient no update.
    zero = Moved(framework, Lamb(**OPTIONS), np.zeros(N))
    np.testing.assert_allclose(zero.step(gradients[0]), -LR * u, rtol=1e-4, atol=1e-7)
    for rule in (Lamb, Lans):
        still = Moved(framework, rule(**{**OPTIONS, "weight_decay": 0.0}), np.ones(N))
        assert (still.step(np.zeros(N)) == 1).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lans(framework):
    """Algorithm 2 of the paper, in float64."""
    weights, gradients = given()
    ours = Moved(framework, Lans(**OPTIONS), weights)
    x, m, v = weights.copy(), np.zeros(N), np.zeros(N)
    for t, g in enumerate(gradients, 1):
        g = g / norm(g)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        root = np.sqrt(v / (1 - B2**t)) + EPS
        r, c = m / (1 - B1**t) / root + DECAY * x, g / root + DECAY * x
        x = x - LR * norm(x) * (B1 * r / norm(r) + (1 - B1) * c / norm(c))
        np.testing.assert_allclose(ours.step(g), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("scaled", [False, True])
def test_one_bit_lamb(framework, scaled):
    """Algorithm 1 of the paper, in float64; what is merged is a sign, which moves nothing where v is zero."""
    weights, gradients = given(16)
    ours = Moved(framework, OneBitLamb(**OPTIONS, scaled=scaled), weights)
    x, m, v, average = weights.copy(), np.zeros(N), np.zeros(N), 0.0
    for t, g in enumerate(gradients[:8], 1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        u = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS) + DECAY * x
        ratio = np.clip(norm(x) / norm(u), 0.01, 10)
        average = 0.9 * average + 0.1 * ratio
        x = x - LR * ratio * u
        np.testing.assert_allclose(ours.step(g), x, rtol=1e-4, atol=1e-5)
    ours.freeze()
    frozen = v / (1 - B2**8)
    fresh, average, factor, factors = frozen.copy(), average / (1 - 0.9**8), 1.0, []
    for t, g in enumerate(gradients[8:], 9):
        some, unit = frozen > 0, np.sqrt(frozen) + EPS if scaled else np.ones(N)
        expected = (B1 * m + (1 - B1) * g) / unit
        if scaled:
            # (1 - beta1) / sqrt(1 - beta2) is 1 here.
            expected = np.clip(expected, -1, 1)
        np.testing.assert_allclose(ours.momentum(g)[some], expected[some], rtol=1e-4, atol=1e-6)
        merged = (B1 * m + (1 - B1) * g) + 0.3 * np.abs(m) * np.sign(g + 0.5)
        merged[frozen == 0] = 0
        again = (merged - B1 * m) / (1 - B1)
        fresh, m = B2 * fresh + (1 - B2) * again**2, merged
        now = np.max((np.sqrt(frozen) + EPS)[some] / (np.sqrt(fresh) + EPS)[some])
        factor = np.clip(np.clip(now, 0.5, 4), 0.9 * factor, 1.1 * factor)
        factors.append(factor)
        x = x - LR * average * factor * (m / (1 - B1**t) / (np.sqrt(frozen) + EPS) + DECAY * x)
        sent = np.where(some, merged / unit, 5.0)
        np.testing.assert_allclose(ours.step(sent, "frozen_step"), x, rtol=2e-4, atol=1e-5)
    assert len({round(f, 4) for f in factors}) > 1, "the factor follows the second moment"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_merged_moves_nothing_where_the_second_moment_is_zero(framework):
    weights, gradients = given()
    rules = [kind(betas=(B1, B2), scaled=scaled) for kind in (Adam, OneBitLamb) for scaled in (False, True)]
    for rule in rules:
        ours = Moved(framework, rule, weights)
        ours.step(gradients[0])
        ours.freeze()
        for _ in range(3):
            after = ours.step(np.full(N, 0.1), "frozen_step")
        assert (after[:7] == weights[:7].astype(np.float32)).all()
        assert (after[7:] != weights[7:].astype(np.float32)).all()


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kind", [Adam, OneBitLamb])
def test_a_frozen_step_may_write_over_what_it_gets(kind, scaled):
    weights, gradients = given()
    rule, ops = kind(betas=(B1, B2), scaled=scaled), get_ops("numpy")
    x = weights.astype(np.float32)
    _, state = rule.step(ops, x, gradients[0].astype(np.float32), rule.init(ops, x), LR, 1)
    state, merged = rule.freeze(ops, state, 1), np.full(N, 0.1, np.float32)
    apart, after = rule.frozen_step(ops, x, merged, state, LR, 2)
    assert 0 < np.count_nonzero(after["exp_avg"]) < N
    over = rule.frozen_step(ops, x, merged, state, LR, 2, out=(x, merged))
    assert np.array_equal(over[0], apart)
    assert all(np.array_equal(over[1][key], each) for key, each in after.items())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_gradient_that_the_second_moment_has_not_seen_is_limited(framework):
    """As in Adam, whose quotient is at most (1 - beta1) / sqrt(1 - beta2); NaN must reach the other ranks."""
    weights, gradients = given()
    large = 1e6 * gradients[1]
    large[20] = np.nan
    for kind in (Adam, OneBitLamb):
        ours = Moved(framework, kind(betas=(0.9, 0.999)), weights)
        ours.step(gradients[0])
        ours.freeze()
        sent = ours.momentum(large)
        assert np.isnan(sent[20])
        np.testing.assert_allclose(np.abs(np.delete(sent, 20)[7:]), 0.1 / np.sqrt(0.001), rtol=1e-5)
        plain = Moved(framework, kind(betas=(0.9, 0.999), scaled=False), weights)
        plain.step(gradients[0])
        plain.freeze()
        expected = 0.09 * gradients[0] + 0.1 * large
        np.testing.assert_allclose(plain.momentum(large)[7:], expected[7:], rtol=1e-3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("decoupled", "scaled"), [(False, False), (True, False), (True, True)])
def test_zero_one_adam(framework, decoupled, scaled):
    """Algorithm 1 of the paper in float64, for one rank: syncs after steps 2, 5 and 6, v from steps 1 and 2."""
    weights, gradients = given()
    ops, rule = get_ops(framework), ZeroOneAdam(**OPTIONS, decoupled_weight_decay=decoupled, scaled=scaled)
    y = array(ops, weights.astype(np.float32), "float32")
    state = rule.init(ops, y)
    x, anchor, m, v, u = weights.copy(), weights.copy(), np.zeros(N), np.zeros(N), np.zeros(N)
    rates, learnt = 0.0, 0
    for t, g in enumerate(gradients, 1):
        mine = array(ops, g.astype(np.float32), "float32")
        coupled = g if decoupled else g + DECAY * x
        if t <= 2:
            learnt += 1
            v = B2 * v + (1 - B2) * coupled**2
            state = rule.learn(ops, y, mine, state)
        rate = LR / (1 - B1**t)
        m, rates = B1 * m + (1 - B1) * coupled, rates + rate
        root = np.sqrt(v / (1 - B2**learnt)) + EPS
        if scaled:
            m = np.where(v > 0, np.clip(m, -root, root), 0)
        u = u + rate * m
        shrink = 1 - LR * DECAY if decoupled else 1
        anchor = anchor * shrink
        state = rule.advance(ops, y, mine, state, rate, learnt)
        if t in (2, 5, 6):
            # As a compressor might change it.
            merged = u * (1 + 0.1 * np.sin(np.arange(N)))
            m, x = np.where(v > 0, merged, 0) / rates, anchor - np.where(v > 0, merged, 0) / root
            unit = root if scaled else 1.0
            some = v > 0
            np.testing.assert_allclose(
                host(ops, rule.sent(ops, state, learnt))[some], (u / unit)[some], rtol=1e-4, atol=1e-6
            )
            sent = array(ops, (merged / unit).astype(np.float32), "float32")
            y, state = rule.sync(ops, y, sent, state, LR, 1 / rates, learnt)
            anchor, u, rates = x.copy(), np.zeros(N), 0.0
            assert "anchor" not in state
        else:
            x = x * shrink - rate * np.where(v > 0, m, 0) / root
            y, state = rule.alone(ops, y, state, LR, rate, learnt)
        np.testing.assert_allclose(host(ops, y), x, rtol=1e-4, atol=1e-5)


def test_the_end_of_the_warm_up():
    assert [freeze_step_of(None, total, "") for total in (2, 10, 1000)] == [1, 2, 200]
    assert freeze_step_of(7, None, "") == 7
    assert freeze_step_of(None, None, "") is None
    assert [horizon((0.9, beta)) for beta in (0.0, 0.9, 0.99, 0.999)] == [1, 10, 100, 1000]
    assert [is_settled(before, 1.0) for before in (0.0, 0.95, 0.96, 1.04, 1.05)] == [False] * 2 + [True] * 2 + [False]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Lamb(min_coeff=2, max_coeff=1), "expected 0 <= min_coeff <= max_coeff"),
        (lambda: OneBitLamb(coeff_beta=1), "coeff_beta must lie in"),
        (lambda: OneBitLamb(factor_min=2), "expected 0 < factor_min <= 1 <= factor_max"),
        (lambda: OneBitLamb(factor_threshold=0), "factor_threshold must lie in"),
    ],
)
def test_options_out_of_range_are_refused(make, told):
    with pytest.raises(ConfigError, match=told):
        make()
