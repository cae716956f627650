"""Dettmers, "8-bit approximations", ICLR 2016, and Micikevicius et al., "FP8 formats", 2022: words, nearest values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from grace.testing.harness import exchange
from tests.papers.common import OPS, bits_per_element, make, normal, payload, send, spec

FORMATS = ("1-3-4", "dynamic", "e4m3", "e5m2")
every = pytest.mark.parametrize("format", FORMATS)


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


def fp8(dtype: type) -> list[float]:
    """Decode all words, divided by the largest number; exponents go on where the format has infinity and NaN."""
    found = np.arange(128).astype(np.uint8).view(dtype).astype(np.float64)
    found = found[np.isfinite(found)]
    largest, step = found[-1], found[-1] - found[-2]
    while len(found) < 128:
        found = np.append(found, found[-1] + step)
        step *= 2 if np.log2(found[-1]).is_integer() else 1
    return list(found / largest)


TABLES = {
    "dynamic": [dynamic(c) for c in range(128)],
    "1-3-4": [minifloat(c) for c in range(128)],
    "e4m3": fp8(ml_dtypes.float8_e4m3fn),
    "e5m2": fp8(ml_dtypes.float8_e5m2),
}


@every
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


def test_the_largest_is_exact_except_in_the_dynamic_tree():
    x = np.float32([3.0, -3.0])
    for format in ("1-3-4", "e4m3", "e5m2"):
        assert send(make("eightbit", format=format), x).tolist() == [3.0, -3.0]
    assert np.allclose(send(make("eightbit"), x), 3 * 1271 / 1280 * np.array([1, -1]), rtol=1e-6)


@every
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


@every
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


@pytest.mark.parametrize(("format", "largest"), [("e4m3", 448), ("e5m2", 57344)])
def test_fp8_sends_the_words_of_the_format(format, largest):
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[format]
    x = normal(5000)
    scaled = (x / np.abs(x).max() * np.float32(largest)).astype(dtype)
    # Halfway values are rounded up, and the product above is rounded: a few words may differ by one.
    words = payload(make("eightbit", format=format), x)["codes"].astype(int)
    assert np.mean(words == scaled.view(np.uint8)) > 0.999
    # No word means NaN or infinity.
    assert np.isfinite(words.astype(np.uint8).view(dtype).astype(np.float32)).all()


@pytest.mark.parametrize(
    ("format", "expected"),
    [("dynamic", 1 - (2.7 / 3.8) ** 2), ("1-3-4", 1 - 1 / 9), ("e4m3", 1 - 1 / 9), ("e5m2", 1 - 1 / 9)],
)
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
