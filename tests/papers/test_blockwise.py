"""Dettmers et al., "QLoRA", NeurIPS 2023 (NormalFloat), and Rouhani et al., "Microscaling data formats", 2023."""

from __future__ import annotations

from itertools import pairwise
from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import bits_per_element, make, normal, payload, send, spec

FORMATS = ("int8", "int4", "nf4", "fp4", "mxfp4")
N = 64 * 64


def error(x: np.ndarray, **options) -> float:
    return float(np.sum((send(make("blockwise", **options), x) - x) ** 2) / np.sum(x**2))


@pytest.mark.parametrize("name", FORMATS)
def test_each_element_becomes_the_nearest_level(name):
    x = normal(N)
    compressor = make("blockwise", format=name)
    blocks = x.astype(np.float64).reshape(-1, 64)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    if name == "mxfp4":
        scales = 2.0 ** (np.floor(np.log2(scales)) - 2)
    levels = np.array(compressor.levels) * scales[:, :, None]
    distance = np.abs(blocks[:, :, None] - levels).min(axis=2)
    found = np.abs(send(compressor, x).reshape(-1, 64) - blocks)
    assert np.abs(found - distance).max() < 1e-6


def test_normal_float_has_quantiles_of_the_normal_distribution():
    """QLoRA, section 3: 0 and both ends exactly, and as many numbers between two levels as between two others."""
    last = (29 / 30 + 31 / 32) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(0.5, last, 9)]
    below = [quantile(p) for p in np.linspace(1 - last, 0.5, 8)]
    expected = np.array([*below, *above[1:]]) / above[-1]
    assert np.abs(np.array(make("blockwise").levels) - expected).max() < 1e-9


def test_fp4_has_all_numbers_of_its_format():
    """e2m1: exponents 0 to 3 with a bias of 1, one bit of mantissa, denormals for the exponent 0."""
    numbers = {(mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)) * sign
               for exponent in range(4) for mantissa in range(2) for sign in (-1, 1)}  # fmt: skip
    assert list(make("blockwise", format="mxfp4").levels) == sorted(numbers)
    assert np.allclose(np.array(make("blockwise", format="fp4").levels) * 6, sorted(numbers))


def test_normal_float_has_the_least_error_of_4_bits_for_normal_numbers():
    x = normal(N)
    found = {name: error(x, format=name) for name in FORMATS}
    assert found["nf4"] == min(found[name] for name in ("int4", "nf4", "fp4", "mxfp4"))
    assert found["int8"] < found["nf4"] / 100


def test_small_blocks_lower_the_error_of_uneven_gradients():
    x = (normal(N) * 2.0 ** (np.arange(N) // 64 % 7)).astype(np.float32)
    assert error(x) < error(x, bucket_size=0) / 2


@pytest.mark.parametrize(("largest", "scale", "kept"), [(4.0, 1.0, 4.0), (7.5, 1.0, 6.0), (1e-3, 2.0**-12, None)])
def test_mx_scales_are_powers_of_two_and_the_ends_are_cut(largest, scale, kept):
    """Microscaling, section 5: the exponent of the largest element, less that of the format's largest number."""
    x = np.array([largest, scale / 2, 0.0], np.float32)
    assert payload(make("blockwise", format="mxfp4"), x)["norms"].tolist() == [127 + int(np.log2(scale))]
    found = send(make("blockwise", format="mxfp4"), x)
    assert found[1:].tolist() == [scale / 2, 0.0]
    assert kept is None or found[0] == kept


def test_mx_scales_end_at_the_smallest_normal_number():
    x = np.array([2.0**-126, -(2.0**-125), 0.0], np.float32)
    assert payload(make("blockwise", format="mxfp4"), x)["norms"].tolist() == [1]
    assert np.array_equal(send(make("blockwise", format="mxfp4"), x), x)


@pytest.mark.parametrize(("name", "block", "bits"), [("int8", 64, 8.5), ("nf4", 64, 4.5), ("mxfp4", 32, 4.25)])
def test_bits_per_element(name, block, bits):
    assert bits_per_element(make("blockwise", format=name, bucket_size=block), 1 << 16) == bits


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_the_stated_contraction_is_reached(name):
    """All elements but the largest lie in the middle of the widest gap, in proportion to their size."""
    compressor = make("blockwise", format=name)
    least = compressor.contraction(spec(64))
    worst = 0.0
    for low, high in pairwise(compressor.levels):
        x = np.full(64, (low + high) / 2)
        x[0] = 1.0
        worst = max(worst, error(x, format=name))
    assert worst <= (1 - least) * (1 + 1e-5)
    assert worst == pytest.approx(1 - least, rel=1e-3)


def test_elements_above_the_largest_mx_number_lose_at_most_a_quarter():
    cut = error(np.full(64, 7.999, np.float32), format="mxfp4")
    assert 0.06 < cut <= 1 / 16


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_decode_to_zeros(name):
    assert not send(make("blockwise", format=name), np.zeros(100, np.float32)).any()


def test_options_are_checked():
    with pytest.raises(ConfigError, match="blockwise: bucket_size must be at least 0, received -1"):
        make("blockwise", bucket_size=-1)


# The dtype of each FP8 format, and the largest relative error from its smallest normal number on.
FP8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 1 / 17), "e5m2": (ml_dtypes.float8_e5m2, 1 / 9)}
every_fp8 = pytest.mark.parametrize("name", FP8)


def decoded(codes: np.ndarray, name: str) -> np.ndarray:
    return codes.view(FP8[name][0]).astype(np.float64)


@every_fp8
@pytest.mark.parametrize("prefix", ["fp8", "mxfp8"])
def test_fp8_codes_are_those_of_the_format_with_a_scale_per_block(prefix, name):
    """Microscaling, section 5: an element is its FP8 number times the scale of its block."""
    x = (normal(N) * 2.0 ** (np.arange(N) // 32 % 9)).astype(np.float32)
    compressor = make("blockwise", format=f"{prefix}_{name}", bucket_size=32)
    sent = payload(compressor, x)
    largest = np.abs(x.reshape(-1, 32)).max(axis=1).astype(np.float64)
    most = float(ml_dtypes.finfo(FP8[name][0]).max)
    scales = largest / most
    if prefix == "mxfp8":
        scales = 2.0 ** (np.floor(np.log2(largest)) - np.floor(np.log2(most)))
        assert np.array_equal(2.0 ** (sent["norms"].astype(float) - 127), scales)
    found = send(compressor, x)
    assert np.abs(found / (decoded(sent["codes"], name) * np.repeat(scales, 32)) - 1).max() < 1e-6
    numbers = decoded(np.arange(256).astype(np.uint8), name)
    numbers = numbers[np.isfinite(numbers)]
    nearest = np.abs(x[:640, None] / np.repeat(scales, 32)[:640, None] - numbers).min(axis=1)
    assert np.abs(nearest * np.repeat(scales, 32)[:640] - np.abs(found - x)[:640]).max() < 1e-6 * largest.max()


@every_fp8
def test_the_error_of_mxfp8_is_that_of_the_mantissa_except_where_it_is_cut(name):
    x = np.abs(normal(N)) + np.float32(0.01)
    size = x / np.repeat(np.abs(x.reshape(-1, 32)).max(axis=1), 32)
    relative = np.abs(send(make("blockwise", format=f"mxfp8_{name}", bucket_size=32), x) / x - 1)
    assert relative.max() <= 1 / 8
    assert 0.98 * FP8[name][1] < relative[size < 0.8].max() <= FP8[name][1]


@every_fp8
def test_mxfp8_saturates_and_never_sends_nan(name):
    x = np.array([511.9, -300.0, 1e-9, 0.0], np.float32)
    compressor = make("blockwise", format=f"mxfp8_{name}", bucket_size=32)
    values = decoded(payload(compressor, x)["codes"], name)
    assert np.isfinite(values).all()
    assert values[0] == float(ml_dtypes.finfo(FP8[name][0]).max)
    assert 1 - send(compressor, x)[0] / 511.9 == pytest.approx(1 / 8, rel=1e-2)


def test_fp8_per_block_keeps_small_blocks_that_a_scale_for_the_tensor_loses():
    x = (normal(N) * 10.0 ** -(np.arange(N) // 64 % 4 * 3)).astype(np.float32)
    small = np.arange(N) // 64 % 4 == 3

    def lost(compressor) -> float:
        return float(np.sum((send(compressor, x) - x)[small] ** 2) / np.sum(x[small] ** 2))

    assert lost(make("blockwise", format="fp8_e4m3")) < 0.001
    assert lost(make("eightbit", format="e4m3")) > 0.99
