"""Tsuzuku et al., "Variance-based gradient compression for efficient distributed deep learning", ICLR 2018 workshop."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.config.registry import memories
from grace.core.errors import ConfigError, IncompatibleError
from tests.papers.common import make, normal, payload, send, simulate, spec, state, step


def memory(decay: float = 0.999) -> dict:
    return {"name": "variance", "decay": decay}


def nearest_power(x: np.ndarray) -> np.ndarray:
    """Return the nearest power of two, computed arithmetically. Ties go to the larger one."""
    x = x.astype(np.float64)
    lower = 2.0 ** np.floor(np.log2(np.abs(x)))
    return np.sign(x) * np.where(np.abs(x) >= 1.5 * lower, 2 * lower, lower)


def reference(grads: np.ndarray, alpha: float, decay: float):
    """Run the algorithm for one rank, coordinate by coordinate."""
    n = grads.shape[1]
    r, v = np.zeros(n), np.zeros(n)
    for g in grads.astype(np.float64):
        r, v = r + g, v + g * g
        power = np.zeros(n)
        clear = np.flatnonzero(r * r > alpha * v)
        power[clear] = nearest_power(r[clear])
        power[np.abs(power) < np.abs(power).max() / 2**7] = 0
        sent = power != 0
        r[sent] = 0
        v[sent] = 0
        v[~sent] *= decay
        yield power, r.copy(), v.copy()


@pytest.mark.parametrize(("alpha", "decay"), [(1.1, 0.999), (1.5, 0.999), (2.0, 0.5)])
def test_the_algorithm(alpha, decay):
    """r += g, v += g^2. Where r^2 > alpha v, r is sent and both are reset; elsewhere v *= decay."""
    n = 300
    drift = normal(n, 99)
    grads = np.array([drift * 0.3 + normal(n, number) for number in range(12)])
    sim = simulate(1, (n,), make("variance", alpha=alpha), memory(decay))
    shares = []
    for g, (power, r, v) in zip(grads, reference(grads, alpha, decay), strict=True):
        sent = step(sim, [g])
        assert np.array_equal(sent, power)
        assert np.allclose(state(sim, 0), r, rtol=1e-5, atol=1e-5)
        assert np.allclose(state(sim, 0, "variance"), v, rtol=1e-5, atol=1e-6)
        shares.append((sent != 0).mean())
    assert shares[0] == 0, "of a single sample the variance is all there is"
    assert 0.05 < np.mean(shares[1:]) < 0.5


def test_a_steady_gradient_is_sent_and_one_that_turns_waits():
    """After t steps r^2 = t^2 g^2 and v = t g^2, so it is sent when t > alpha. With alternating signs r^2 <= g^2."""
    g = np.array([1.0, 1.0], np.float32)
    sim = simulate(1, (2,), make("variance", alpha=2.5), memory(1.0))
    merged = [step(sim, [g * np.float32([1.0, (-1.0) ** number])]) for number in range(6)]
    assert np.array(merged)[:, 0].tolist() == [0, 0, 4, 0, 0, 4]
    assert not np.array(merged)[:, 1].any()


def test_a_word_has_a_sign_three_bits_of_exponent_and_28_of_index():
    x = np.zeros(300, np.float32)
    x[[2, 255, 299]] = [-16.0, 0.125, 4.0]
    sent = payload(make("variance"), x)
    assert sent["scale"].tolist() == [16.0]
    words = sent["words"].view(np.uint32)
    assert [hex(word) for word in words] == ["0x80000002", hex(7 << 28 | 255), hex(2 << 28 | 299)]


def test_an_element_takes_4_bytes():
    sent = payload(make("variance"), normal(5000))
    assert 4000 < len(sent["words"]) < 5000
    assert (sent["words"].nbytes, sent["scale"].nbytes) == (4 * len(sent["words"]), 4)


def test_values_are_the_nearest_powers_of_two():
    x = np.concatenate([np.linspace(1, 127, 1000), -np.linspace(1, 127, 999), [1.5, 3.0, -6.0]]).astype(np.float32)
    decoded = send(make("variance"), x)
    assert np.array_equal(decoded, nearest_power(x))
    assert decoded[-3:].tolist() == [2, 4, -8]
    assert (np.abs(decoded - x) <= np.abs(x) / 3 * (1 + 1e-6)).all()


def test_elements_7_exponents_below_the_largest_are_sent_and_8_are_not():
    x = 2.0 ** -np.arange(12).astype(np.float32)
    assert send(make("variance"), x).tolist() == [*(2.0**-i for i in range(8)), 0, 0, 0, 0]
    # The rounded element decides: 1.5 * 2^-8 rounds to 2^-7.
    assert send(make("variance"), np.float32([1.0, 1.5 * 2**-8, 1.49 * 2**-8])).tolist() == [1, 2**-7, 0]


def test_the_range_begins_at_the_largest_element_that_is_sent():
    """A large element that is pure noise does not prevent small ones from being sent."""
    sim = simulate(1, (2,), make("variance"), memory())
    step(sim, [np.float32([1000.0, 1.0])])
    assert step(sim, [np.float32([-1000.0, 1.0])]).tolist() == [0, 2]


def test_the_rounding_error_is_not_fed_back():
    sim = simulate(1, (1,), make("variance"), memory())
    step(sim, [np.float32([2.6])])
    assert step(sim, [np.float32([2.6])]).tolist() == [4]
    assert state(sim, 0).tolist() == [0]
    # As with any compressor, other memories keep what was not sent as the residual.
    other = simulate(1, (1,), make("variance"), "residual")
    step(other, [np.float32([5.2])])
    assert state(other, 0)[0] == pytest.approx(1.2, rel=1e-6)


def test_enormous_gradients_are_forgotten_in_time():
    """Their squares overflow float32. The buffer must not stay infinite."""
    sim = simulate(1, (1,), make("variance"), memory(0.5))
    assert step(sim, [np.float32([1e30])]).tolist() == [nearest_power(np.array([1e30]))[0]]
    assert state(sim, 0, "variance").tolist() == [0]
    for sign in (1, -1, 1, -1):
        step(sim, [np.float32([sign * 1e25])])
    assert np.isfinite(state(sim, 0, "variance")).all()


def test_tensors_beyond_the_index_stay_dense():
    assert make("variance").unfit(spec(2**28 - 1)) is None
    assert "28 bits" in make("variance").unfit(spec(2**28))


def test_the_memory_serves_what_selects_coordinates_only():
    memories.make("variance").check(make("topk"))
    with pytest.raises(IncompatibleError, match="Valid memories"):
        memories.make("variance").check(make("qsgd"))


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_a_decay_is_a_factor(decay):
    with pytest.raises(ConfigError, match="decay"):
        memories.make(memory(decay))


def test_alpha_is_not_negative():
    with pytest.raises(ConfigError, match="alpha"):
        make("variance", alpha=-1.0)
