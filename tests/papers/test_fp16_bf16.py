"""Rounding to 16 bits (IEEE 754 binary16; bfloat16 is the upper half of binary32), and no compression at all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.common import bits_per_element, make, normal, send, simulate, step


@pytest.mark.parametrize(("name", "mantissa", "largest"), [("fp16", 10, 65504.0), ("bf16", 7, 3.3895e38)])
def test_rounding_error_is_half_a_unit_in_the_last_place(name, mantissa, largest):
    x = (normal(2000).astype(np.float64) * np.logspace(-3, 3, 2000)).astype(np.float32)
    error = np.abs(send(make(name), x) - x)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(x.astype(np.float64)))) - mantissa)
    # Below 2^-14 float16 has subnormal numbers, 2^-24 apart.
    ulp = np.maximum(ulp, 2.0**-24 if name == "fp16" else 0)
    assert (error <= ulp / 2).all()
    assert (error > ulp / 4).any()
    assert send(make(name), np.float32([largest, -largest])).tolist() == pytest.approx([largest, -largest], rel=1e-3)


def test_float16_overflows_and_bfloat16_does_not():
    x = np.float32([1e5, 1.0])
    assert send(make("fp16"), x).tolist() == [np.inf, 1.0]
    assert send(make("bf16"), x)[0] == pytest.approx(1e5, rel=2**-8)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_ties_go_to_even(name):
    unit = 2.0 ** -(10 if name == "fp16" else 7)
    x = np.float32([1 + unit / 2, 1 + 3 * unit / 2])
    assert send(make(name), x).tolist() == [1.0, 1 + 2 * unit]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_sixteen_bits_per_element(name):
    assert bits_per_element(make(name), 1000) == 16


def test_a_mean_does_not_overflow_where_the_sum_would():
    """4 x 40000 exceeds the range of float16. Each value is divided in float32, before the sum."""
    sim = simulate(4, (3,), make("fp16"))
    assert step(sim, [np.full(3, 40000, np.float32)] * 4).tolist() == [40000.0] * 3


@pytest.mark.parametrize(("name", "unit"), [("fp16", 2.0**-10), ("bf16", 2.0**-7)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mean_is_rounded_once(name, unit, ranks):
    """A division in 16 bits before the sum would lose the smallest numbers, and the last bits of others."""
    sim = simulate(ranks, (3,), make(name))
    gradients = [np.full(3, 1 + (unit if rank == 0 else 0), np.float32) for rank in range(ranks)]
    # With 2 ranks this is a tie, which rounds to the even neighbour.
    assert step(sim, gradients).tolist() == [1.0] * 3
    gradients = [np.full(3, 1 + (0 if rank == 0 else unit), np.float32) for rank in range(ranks)]
    assert step(sim, gradients).tolist() == [1.0 if ranks == 2 else 1 + unit] * 3
    # The smallest number of float16 is kept, although its half is not representable.
    assert step(sim, [np.full(3, 2.0**-24, np.float32)] * ranks).tolist() == [2.0**-24] * 3


def test_no_compression_is_exact():
    x = normal(1000)
    assert np.array_equal(send(make("none"), x), x)
    sim = simulate(2, (1000,), make("none"))
    y = normal(1000, 1)
    assert np.array_equal(step(sim, [x, y]), (x + y) * np.float32(0.5))
