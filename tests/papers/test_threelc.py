"""Lim, Andersen and Kaminsky, "3LC", MLSys 2019: ternary values, five per byte, runs of zeros in one byte."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.compressors.threelc import decode_runs, encode_runs, from_bytes, to_bytes
from grace.core.errors import ConfigError
from tests.papers.common import OPS, make, normal, payload, send, simulate, state, step


def coded(values) -> list[int]:
    """Encode the runs element by element."""
    codes, run = [], 0
    for value in [*values, None]:
        if value == 121:
            run += 1
            continue
        while run:
            length = min(run, 14)
            codes.append(121 if length == 1 else 241 + length)
            run -= length
        if value is not None:
            codes.append(value)
    return codes


def ternary(x: np.ndarray, s: float) -> tuple[np.ndarray, float]:
    scale = s * np.abs(x).max()
    return np.sign(x) * np.floor(np.abs(x) / scale + 0.5), scale


@pytest.mark.parametrize("s", [1.0, 1.5, 1.75])
def test_the_formula(s):
    x = normal(1003, 1)
    q, scale = ternary(x.astype(np.float64), s)
    assert set(q.tolist()) == {-1, 0, 1}
    assert np.allclose(send(make("3lc", sparsity_multiplier=s), x), scale * q, rtol=1e-6, atol=0)


def test_a_worked_example():
    """Ten values take two bytes: 22021 and 11111 in base 3. The second one is a single zero byte."""
    x = np.array([4.0, 2.0, -3.0, 2.5, 0.0, 1.0, -1.0, 0.5, 1.9, 0.0], np.float32)
    sent = payload(make("3lc"), x)
    assert sent["scale"].tolist() == [4.0]
    assert sent["codes"].tolist() == [2 * 81 + 2 * 27 + 0 * 9 + 2 * 3 + 1, 121]


def test_the_bytes_of_sparse_gradients():
    """A single spike in 70 zero bytes gives four full runs, 13 zero bytes, the spike, and a single zero byte."""
    x = np.zeros(71 * 5, np.float32)
    x[69 * 5 + 4] = -1.0
    assert payload(make("3lc"), x)["codes"].tolist() == [255] * 4 + [254, 120, 121]
    # 70 elements take one byte.
    assert payload(make("3lc"), np.zeros(700, np.float32))["codes"].tolist() == [255] * 10


@pytest.mark.parametrize("n", range(1, 23))
def test_five_digits_per_byte_come_back(n):
    digits = np.random.default_rng(n).integers(0, 3, n)
    values = to_bytes(OPS, digits)
    assert len(values) == -(-n // 5)
    assert ((values >= 0) & (values <= 242)).all()
    assert np.array_equal(from_bytes(OPS, values, n), digits)


CASES = {
    "empty": [],
    "no zeros": [5, 0, 242, 120, 122] * 9,
    "all codes that are no run": list(range(243)),
    "alternating": [121, 7] * 20,
    **{f"only zeros, {n}": [121] * n for n in range(1, 41)},
    **{f"zeros inside, {n}": [1] + [121] * n + [240] for n in range(1, 41)},
    **{
        f"random, {share}": np.random.default_rng(0).choice([121, 3], 5000, p=[share, 1 - share]).tolist()
        for share in (0.1, 0.5, 0.9, 0.99)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_coding_of_runs_loses_nothing(case):
    values = np.array(CASES[case], np.int64)
    codes = encode_runs(OPS, values)
    assert codes.dtype == np.uint8
    assert codes.tolist() == coded(CASES[case])
    assert np.array_equal(decode_runs(OPS, codes, len(values)), values)


@pytest.mark.parametrize("s", [1.0, 1.9])
def test_no_error_exceeds_half_the_scale_nor_the_element(s):
    x = normal(5000, 1)
    error = np.abs(send(make("3lc", sparsity_multiplier=s), x) - x)
    assert error.max() <= s * np.abs(x).max() / 2 * (1 + 1e-6)
    assert (error <= np.abs(x) * (1 + 1e-6)).all()


def test_a_larger_multiplier_sends_more_zeros_and_fewer_bytes():
    x = normal(10000, 2)
    zeros, sizes = [], []
    for s in (1.0, 1.3, 1.6, 1.9):
        compressor = make("3lc", sparsity_multiplier=s)
        zeros.append((send(compressor, x) == 0).sum())
        sizes.append(len(payload(compressor, x)["codes"]))
    assert zeros == sorted(set(zeros))
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] <= 2000, "never above 1.6 bits per element"


def test_errors_are_fed_back():
    x = [normal(200, seed) for seed in range(3)]
    sim = simulate(1, (200,), make("3lc"), "residual")
    total = sum(step(sim, [g]).astype(np.float64) for g in x)
    assert np.allclose(total + state(sim, 0), np.sum(x, axis=0), atol=1e-5)


@pytest.mark.parametrize("s", [0.99, 2.0])
def test_multipliers_outside_of_the_paper_are_refused(s):
    with pytest.raises(ConfigError, match=r"\[1, 2\)"):
        make("3lc", sparsity_multiplier=s)
