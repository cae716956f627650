"""Li et al., "A network-centric hardware/algorithm co-design" (INCEPTIONN), MICRO 2018: the bound and the classes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grace.core.errors import ConfigError
from grace.testing.harness import exchange
from tests.papers.common import OPS, make, normal, payload, send, simulate, spec, step

BOUNDS = [0.9, 0.5, 0.3, 2**-4, 0.001, 2**-10, 2**-14, 2**-15, 2**-16, 1e-6, 2**-24, 2**-64]
every_bound = pytest.mark.parametrize("bound", BOUNDS)


def values(bound: float, dtype: str) -> np.ndarray:
    """Return numbers of every size, and the neighbours of every power of two and of the bound."""
    rng = np.random.default_rng(0)
    powers = 2.0 ** np.arange(-70, 3)
    near = np.concatenate([powers, np.array([bound, 1.0])]).astype(dtype)
    near = np.concatenate([near, np.nextafter(near, 0), np.nextafter(near, np.inf).astype(dtype)])
    wide = rng.uniform(-1, 1, 2000) * 2.0 ** rng.uniform(-40, 3, 2000)
    return np.concatenate([near, -near, wide, rng.uniform(-1, 1, 2000), [0.0]]).astype(dtype)


@every_bound
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_error_bound_holds_in_every_element(bound, dtype):
    x = values(bound, dtype)
    compressor = make("inceptionn", error_bound=bound, relative=False)
    ex = exchange(compressor, OPS, spec(len(x), dtype=dtype), [x])
    got = compressor.decompress(ex.payloads[0], ex.sites[0]).astype(np.float64)
    x = x.astype(np.float64)
    assert np.abs(got - x).max() <= bound
    assert np.array_equal(got[np.abs(x) >= 1], x[np.abs(x) >= 1])
    assert np.all(got[np.abs(x) < bound * (1 - 1e-7)] == 0)
    assert np.all(np.abs(got) <= np.abs(x)), "truncated towards zero"
    assert np.all(got * x >= 0)


@every_bound
def test_classes_by_an_independent_reading(bound):
    """With b bits after the point: the lower half of the exponents takes 8 bits, the upper 16, if b bits fit."""
    b = next(k for k in range(1, 70) if 2.0**-k <= bound)
    x = values(bound, "float64")
    size = np.abs(x)
    expected = np.zeros(len(x), int)
    expected[size >= bound] = 1
    expected[(size >= bound) & ((size >= 2.0 ** -math.ceil(b / 2)) | (size >= 2.0 ** (7 - b)))] = 2
    expected[(size >= 1) | (size >= 2.0 ** (15 - b))] = 3
    ex = exchange(make("inceptionn", error_bound=bound, relative=False), OPS, spec(len(x), dtype="float64"), [x])
    assert np.array_equal(OPS.unpack(ex.payloads[0]["tags"], 2, len(x)), expected)


def test_short_forms():
    """With the bound 2^-10, 8 bits are a sign and steps of 2^-12 below 2^-5, 16 bits a sign and steps of 2^-15."""
    x = np.float32([0.02, -0.75, 1.5, 2**-10, -(2.0**-5), 0.0009, -(1 - 2**-20), -(2.0**-5) + 2**-15])
    sent = payload(make("inceptionn", relative=False), x)
    assert sent["full"].tolist() == [1.5]
    assert sent["words"].tolist() == [-0.75 * 2**15, -(2.0**10), -32767]
    assert sent["bytes"].tolist() == [81, 4, -127]
    assert sent["tags"].tolist() == [0b01111001, 0b01100010]


def test_bits_by_class():
    x = np.repeat(np.float32([0.0, 0.02, 0.5, 2.0]), 100)
    sent = payload(make("inceptionn", relative=False), x)
    assert {k: v.nbytes for k, v in sent.items()} == {"full": 400, "words": 200, "bytes": 100, "tags": 100}


def test_lengths_differ_between_ranks():
    sim = simulate(3, (200,), make("inceptionn", relative=False))
    xs = [normal(200, rank) * 10.0 ** (-2 * rank) for rank in range(3)]
    expected = sum(send(make("inceptionn", relative=False), x.astype(np.float32)) for x in xs) / 3
    assert np.allclose(step(sim, [x.astype(np.float32) for x in xs]), expected, rtol=1e-6)


def test_a_smaller_bound_sends_more_and_loses_less():
    x = normal(5000) / 50
    sizes, errors = [], []
    for bound in (2**-4, 2**-7, 2**-10, 2**-14):
        sent = payload(make("inceptionn", error_bound=bound, relative=False), x)
        sizes.append(sum(v.nbytes for v in sent.values()))
        errors.append(np.abs(send(make("inceptionn", error_bound=bound, relative=False), x) - x).max())
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("size", [1e-6, 3e-4, 1.0, 1e6])
def test_the_default_bound_follows_the_tensor(size):
    """With an absolute bound of 2^-10, gradients with a standard deviation of 1e-4 would all be lost."""
    x = (size * normal(5000)).astype(np.float32)
    got, largest = send(make("inceptionn"), x), np.abs(x).max()
    assert np.abs(got - x).max() <= 2**-10 * largest * (1 + 1e-6)
    assert np.sum((got - x) ** 2.0) <= 1e-5 * np.sum(x**2.0)
    assert 1.5 < x.nbytes / sum(v.nbytes for v in payload(make("inceptionn"), x).values()) < 4
    assert send(make("inceptionn", relative=False), x).any() == (size > 1e-4)


@pytest.mark.parametrize("bound", [0.0, 1.0, -0.1, 2**-65])
def test_bounds_without_sense_are_refused(bound):
    with pytest.raises(ConfigError, match="error_bound"):
        make("inceptionn", error_bound=bound, relative=False)
