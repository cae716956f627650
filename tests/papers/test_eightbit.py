"""Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016: code words and nearest values."""

from __future__ import annotations

import numpy as np
import pytest

from grace.testing.harness import exchange
from tests.papers.common import OPS, bits_per_element, make, normal, payload, send, spec

FORMATS = ("1-3-4", "dynamic")
both = pytest.mark.parametrize("format", FORMATS)


def dynamic(code: int) -> float:
    """Decode a word of the dynamic tree: leading zeros are powers of ten, 1 is the flag, the rest bisects (0.1, 1)."""
    word = f"{code:07b}"
    if "1" not in word:
        return 0.0
    zeros = word.index("1")
    low, high = 0.1, 1.0
    for bit in word[zeros + 1 :]:
        middle = (low + high) / 2
        low, high = (middle, high) if bit == "1" else (low, middle)
    return 10.0**-zeros * (low + high) / 2


def minifloat(code: int) -> float:
    """Decode a word with 3 bits of exponent, 4 bits of mantissa and denormals, divided by the largest value."""
    word = f"{code:07b}"
    exponent, mantissa = int(word[:3], 2), int(word[3:], 2) / 16
    value = 2.0 ** (exponent - 7) * (1 + mantissa) if exponent else 2.0**-6 * mantissa
    return value / (1 + 15 / 16)


TABLES = {"dynamic": [dynamic(c) for c in range(128)], "1-3-4": [minifloat(c) for c in range(128)]}


@both
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_code_word(format, dtype):
    """All 256 words are decoded, with scale 2.5."""
    compressor = make("eightbit", format=format)
    at = exchange(compressor, OPS, spec(256, dtype=dtype), [np.zeros(256, dtype)]).sites[0]
    words = {"scale": np.array([2.5], dtype), "codes": np.arange(256).astype(np.uint8)}
    table = np.array(TABLES[format])
    assert np.all(np.diff(table) > 0)
    expected = 2.5 * np.concatenate([table, -table])
    assert np.allclose(compressor.decompress(words, at), expected, rtol=4 * np.finfo(dtype).eps, atol=0)


def test_examples_of_the_dynamic_tree():
    """With the largest value 1: 0 000000 1 is 0.55e-6, 0 0 1 00000 the lowest of 0.01..0.1, 0 1 111111 the highest."""
    x = np.float32([1.0, 5e-7, 0.0114, -1.0, 1e-8, 0.0])
    assert payload(make("eightbit"), x)["codes"].tolist() == [0b1111111, 1, 0b0100000, 0b11111111, 0, 0]


def test_the_largest_is_exact_in_1_3_4_only():
    x = np.float32([3.0, -3.0])
    assert send(make("eightbit", format="1-3-4"), x).tolist() == [3.0, -3.0]
    assert np.allclose(send(make("eightbit"), x), 3 * 1271 / 1280 * np.array([1, -1]), rtol=1e-6)


@both
@pytest.mark.parametrize("x", [normal(5000), normal(5000) ** 9, np.linspace(-1, 1, 4001).astype(np.float32)])
def test_the_nearest_value_is_taken(format, x):
    table = np.array(TABLES[format])
    values = np.concatenate([-table[::-1], table]) * float(np.abs(x).max())
    best = np.abs(values[None, :] - x.astype(np.float64)[:, None]).min(axis=1)
    got = np.abs(send(make("eightbit", format=format), x) - x)
    assert np.all(got <= best + 1e-6 * np.abs(x).max() * 0.1 + 1e-6 * np.abs(x))


def test_relative_error_of_the_dynamic_tree():
    """The error is at most half a cell of 0.9 / 2^k, relative to 0.1: 4.5 / 2^k with k = 6 - e."""
    for e in range(5):
        x = np.concatenate([[1.0], np.linspace(10.0 ** -(e + 1), 10.0**-e, 999)]).astype(np.float32)
        error = np.abs(send(make("eightbit"), x) / x - 1)[1:]
        assert error.max() <= 4.5 / 2 ** (6 - e) * 1.001
        assert error.max() >= 4.5 / 2 ** (6 - e) / 3, "the bound says something"


@both
def test_contraction_is_nearly_attained_by_the_worst_gradient(format):
    """The worst case: one element is the largest, the others are in the middle of the widest relative gap."""
    table = TABLES[format]
    x = np.full(20_000, (table[1] + table[2]) / 2)
    x[0] = 1.0
    if format == "dynamic":
        # 1e11 such elements would be needed to outweigh the largest one. So this checks only the bound.
        x[0] = 2e-4
        x = x / 2e-4
    error = np.sum((send(make("eightbit", format=format), x.astype(np.float32)) - x) ** 2)
    bound = 1 - make("eightbit", format=format).contraction(spec(len(x)))
    assert error <= bound * np.sum(x**2)


@pytest.mark.parametrize(("format", "expected"), [("dynamic", 1 - (2.7 / 3.8) ** 2), ("1-3-4", 1 - 1 / 9)])
def test_contraction_follows_from_the_table(format, expected):
    table = np.array(TABLES[format])
    widest = np.max((table[2:] - table[1:-1]) / (table[2:] + table[1:-1]))
    delta = make("eightbit", format=format).contraction(spec(1000))
    assert delta == pytest.approx(1 - widest**2 - 1000 * (table[1] / 2) ** 2, rel=1e-9)
    assert delta == pytest.approx(expected, abs=1e-4)
    assert make("eightbit", format="1-3-4").contraction(spec(10**9)) == 0


def test_eight_bits_per_element():
    for format in FORMATS:
        assert bits_per_element(make("eightbit", format=format), 2**14) == 8 + 32 / 2**14
