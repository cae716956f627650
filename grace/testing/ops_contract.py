"""The contract of every backend of array operations. Expected values are literal, or computed with plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grace.core.codecs.signs import binarize_means, binary_sum, majority
from grace.core.compressors.inceptionn import precision_encode, precision_sum
from grace.core.compressors.powersgd import orthogonalize
from grace.core.compressors.threelc import ternary_encode, ternary_sum
from grace.core.errors import PayloadError, StepError
from grace.core.ops import get_ops
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.spec import GRADIENT_DTYPES, ITEMSIZE, MAX_MAGNITUDE, Key
from grace.testing.harness import FRAMEWORKS, array, host

FLOATS = ("float32", "float64")


def _random(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


class OpsContract:
    """Tests that every backend must pass. Override the fixture `ops` to test a backend from outside grace.

    Results that must be equal on all ranks are compared exactly. Only matrix products may be rounded differently.
    """

    @pytest.fixture(params=FRAMEWORKS)
    def ops(self, request: pytest.FixtureRequest) -> ArrayOps:
        """Return the array operations under test."""
        return get_ops(request.param)

    def test_creation(self, ops: ArrayOps) -> None:
        for dtype in ITEMSIZE:
            made = (ops.zeros(3, dtype), ops.full(2, 5, dtype), ops.arange(4, dtype))
            assert [ops.dtype(x) for x in made] == [dtype] * 3
            assert host(ops, ops.zeros(3, dtype)).tolist() == [0, 0, 0]
            assert host(ops, ops.full(2, 5, dtype)).tolist() == [5, 5]
            assert host(ops, ops.arange(4, dtype)).tolist() == [0, 1, 2, 3]
            assert ops.length(ops.zeros(0, dtype)) == 0
        assert host(ops, ops.full(2, ops.sum(ops.arange(3, "float32")), "float32")).tolist() == [3, 3]

    def test_numbers_keep_the_precision_of_their_dtype(self, ops: ArrayOps) -> None:
        x = array(ops, [-1.0, 1.0], "float64")
        made = (ops.full(1, 0.1, "float64"), ops.where(x > 0, 0.1, x), ops.clip(x, -0.2, 0.1), ops.scale_(x, 0.1))
        assert [float(m[-1]) for m in made] == [0.1] * 4
        assert float(ops.cast(0.1, "float64")) == 0.1

    def test_cast_truncates_and_rounds_to_nearest_even(self, ops: ArrayOps) -> None:
        x = array(ops, [-1.7, -0.5, 0.5, 1.7], "float32")
        assert host(ops, ops.cast(x, "int32")).tolist() == [-1, 0, 0, 1]
        x = array(ops, [1 + 2.0**-11, 1 + 3 * 2.0**-11, 65504, 65520, 1e-8], "float32")
        assert host(ops, ops.cast(x, "float16")).tolist() == [1, 1 + 2.0**-9, 65504, np.inf, 0]
        x = array(ops, [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e30], "float32")
        rounded = host(ops, ops.cast(x, "bfloat16")).astype(np.float64)
        assert rounded[:2].tolist() == [1, 1 + 2.0**-6]
        assert abs(rounded[2] / 1e30 - 1) <= 2.0**-8
        # Rounding to float32 first gives ties, which are then rounded to even.
        x = array(ops, [1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-8 + 2.0**-40], "float64")
        assert float(ops.cast(x, "float16")[0]) == float(ops.cast(x, "bfloat16")[1]) == 1

    def test_cast_to_its_own_dtype_is_no_copy(self, ops: ArrayOps) -> None:
        x = ops.zeros(3, "float32")
        assert ops.cast(x, "float32") is x

    def test_a_copy_has_memory_of_its_own(self, ops: ArrayOps) -> None:
        x = ops.zeros(3, "float32")
        copied = ops.copy(x)
        ops.put_(x, ops.arange(3, "int32"), 1.0)
        assert (ops.dtype(copied), host(ops, copied).tolist()) == ("float32", [0, 0, 0])

    def test_bytes_round_trip(self, ops: ArrayOps) -> None:
        for dtype in ITEMSIZE:
            x = ops.arange(5, dtype)
            data = ops.to_bytes(x)
            assert (ops.dtype(data), ops.length(data)) == ("uint8", 5 * ITEMSIZE[dtype])
            assert ops.dtype(ops.from_bytes(data, dtype)) == dtype
            assert host(ops, ops.from_bytes(data, dtype)).astype(np.int64).tolist() == [0, 1, 2, 3, 4]
        assert host(ops, ops.to_bytes(array(ops, [1.0], "float32"))).tolist() == [0, 0, 128, 63]

    def test_shape_operations(self, ops: ArrayOps) -> None:
        x = ops.arange(6, "int32")
        assert host(ops, ops.reshape(x, (2, 3))).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert host(ops, ops.concat([ops.reshape(x, (2, 3)), ops.zeros(0, "int32"), x[:1]])).tolist() == [*range(6), 0]
        for lengths in ([6], [1, 0, 3, 2]):
            parts = ops.split(x, lengths)
            assert [ops.length(part) for part in parts] == lengths
            assert host(ops, ops.concat(parts)).tolist() == [*range(6)]
        assert [int(size) for size in ops.sizes(x[1:3], 2)] == [1, 2]
        numbers = ops.numbers([3, True, ops.full(1, 2, "int64")[0]], "int32")
        assert (ops.dtype(numbers), host(ops, numbers).tolist()) == ("int32", [3, 1, 2])
        assert host(ops, ops.numbers([False, True], "float32")).tolist() == [0, 1]
        assert host(ops, ops.stack([x[:2], x[2:4]], axis=0)).tolist() == [[0, 1], [2, 3]]
        assert host(ops, ops.stack([x[:2], x[2:4]], axis=1)).tolist() == [[0, 2], [1, 3]]
        assert ops.length(ops.reshape(x, (2, 3))) == 6
        assert host(ops, x[ops.size(x[2]) :]).tolist() == [2, 3, 4, 5]
        assert (ops.min_size(ops.length(x), 9), ops.min_size(3, 2)) == (6, 2)
        assert float(ops.count(x)) == 6

    def test_concatenation_is_a_copy(self, ops: ArrayOps) -> None:
        """The wire buffer must not change when the residual changes."""
        x = ops.zeros(3, "float32")
        joined = ops.concat([x])
        ops.put_(x, ops.arange(3, "int32"), 1.0)
        assert host(ops, joined).tolist() == [0, 0, 0]

    def test_arithmetic(self, ops: ArrayOps) -> None:
        x = array(ops, [-2.5, -0.0, 2.25], "float32")
        assert host(ops, ops.abs(x)).tolist() == [2.5, 0, 2.25]
        assert host(ops, ops.floor(x)).tolist() == [-3, 0, 2]
        assert host(ops, ops.where(x > 0, x, 0.0)).tolist() == [0, 0, 2.25]
        assert host(ops, ops.where(x > 0, 1.0, x)).tolist() == [-2.5, 0, 1]
        assert host(ops, ops.clip(x, -1, 1)).tolist() == [-1, 0, 1]
        assert host(ops, ops.clip(x, -ops.max(x), ops.max(x))).tolist() == [-2.25, 0, 2.25]

    def test_scaling_rounds_once_and_keeps_the_dtype(self, ops: ArrayOps) -> None:
        for dtype in ("float32", "float64"):
            values = [1.0, -3.0, 1e-3]
            for factor in (0.5, 1 / 3, 3):
                x = array(ops, values, dtype)
                scaled = ops.scaled(x, factor)
                assert ops.dtype(scaled) == dtype
                assert host(ops, x).tolist() == host(ops, array(ops, values, dtype)).tolist(), "x is only read"
                assert host(ops, scaled).tobytes() == host(ops, x * factor).tobytes()
                assert host(ops, ops.scale_(x, factor)).tobytes() == host(ops, scaled).tobytes()

    def test_bit_operations(self, ops: ArrayOps) -> None:
        x = array(ops, [12, -8, 2**40], "int64")
        assert host(ops, ops.bit_and(x, 8)).tolist() == [8, 8, 0]
        assert host(ops, ops.bit_or(x, 3)).tolist() == [15, -5, 2**40 + 3]
        assert host(ops, ops.bit_xor(x, x)).tolist() == [0, 0, 0]
        assert host(ops, ops.shift_left(x, 2)).tolist() == [48, -32, 2**42]
        assert host(ops, ops.shift_right(x, 2)).tolist() == [3, -2, 2**38]
        assert host(ops, ops.bit_not(x)).tolist() == [-13, 7, -(2**40) - 1]

    def test_conditions_are_arrays_or_bools(self, ops: ArrayOps) -> None:
        bits = array(ops, [1, 0], "uint8")
        yes, no = ops.conditions(bits > 0, 2)
        x, y = array(ops, [1.0, 2.0], "float32"), array(ops, [3.0, 4.0], "float32")
        for a in (yes, bits[0] > 0, True):
            for b in (no, bits[1] > 0, False):
                assert (bool(ops.bit_and(a, b)), bool(ops.bit_or(a, b))) == (False, True)
                assert (bool(ops.bit_not(a)), bool(ops.bit_not(b))) == (False, True)
                for condition, wanted in ((a, x), (b, y), (ops.bit_or(b, a), x), (ops.bit_not(a), y)):
                    for chosen in (ops.where(condition, x, y), ops.choose(condition, lambda: x, lambda: y)):
                        assert host(ops, chosen).tolist() == host(ops, wanted).tolist()
                assert ops.dtype(ops.where(a, 0.5, ops.sum(x))) == "float32"
                assert host(ops, ops.full(1, a, "float32")).tolist() == [1.0]

    def test_sums_are_rounded_once(self, ops: ArrayOps) -> None:
        """A sum in float32 would lose the small terms, and the loss would depend on the order."""
        x = array(ops, [2.0**24] + [1.0] * 1000, "float32")
        assert float(ops.sum(x)) == 2.0**24 + 1000
        assert float(ops.norm(array(ops, [1e30, 1e30], "float32"))) == np.float32(np.sqrt(2.0) * np.float64(1e30))
        rows = ops.reshape(array(ops, [3, 4, 6, 8], "float32"), (2, 2))
        assert host(ops, ops.sum(rows, axis=1)).tolist() == [7, 14]
        assert host(ops, ops.norm(rows, axis=1)).tolist() == [5, 10]
        assert host(ops, ops.max(rows, axis=1)).tolist() == [4, 8]
        for dtype in FLOATS:
            x = array(ops, [1, 2], dtype)
            assert [ops.dtype(made(x)) for made in (ops.sum, ops.norm, ops.max, ops.min)] == [dtype] * 4
            assert (float(ops.max(x)), float(ops.min(x))) == (2, 1)

    def test_wrapping_sums_wrap_and_keep_every_bit(self, ops: ArrayOps) -> None:
        # In two parts, because arrays are made of float64 numbers.
        x = array(ops, [2**62, 2**62, 2**62, 2**62, 2**53, 2], "int64") + array(ops, [1, 0, 0, 0, 0, 0], "int64")
        assert int(ops.wrapping_sum(x)) == 2**53 + 3
        rows = ops.reshape(x, (2, 3))
        assert host(ops, ops.wrapping_sum(rows, axis=1)).tolist() == [3 * 2**62 + 1 - 2**64, 2**62 + 2**53 + 2]
        assert int(ops.wrapping_sum(x[:0])) == 0

    def test_reductions_of_nothing(self, ops: ArrayOps) -> None:
        empty = ops.zeros(0, "float32")
        assert [float(made(empty)) for made in (ops.sum, ops.max, ops.min, ops.norm)] == [0, 0, 0, 0]
        assert bool(ops.finite(empty))
        assert not bool(ops.any(empty > 0))
        assert ops.length(ops.nonzero(empty > 0)) == ops.length(ops.top_indices(empty, 0)) == 0

    def test_finite_sees_every_bad_element_and_no_other(self, ops: ArrayOps) -> None:
        for dtype in GRADIENT_DTYPES:
            largest = MAX_MAGNITUDE[dtype]
            assert bool(ops.finite(array(ops, [largest] * 4, dtype))), "the sum overflows, but all elements are finite"
            assert bool(ops.finite(array(ops, [largest, -largest], dtype)))
            # 1.01 is enough to reach the next number of every dtype, infinity in float16.
            for bad in (np.nan, np.inf, -np.inf, 1.01 * largest, -1.01 * largest):
                assert not bool(ops.finite(array(ops, [1.0, bad, 2.0], dtype)))
            assert not bool(ops.finite(array(ops, [np.inf, -np.inf], dtype)))

    def test_selection(self, ops: ArrayOps) -> None:
        x = array(ops, [3, -1, 0, 4], "float32")
        found = ops.nonzero(x > 0)
        assert (ops.dtype(found), host(ops, found).tolist()) == ("int32", [0, 3])
        assert host(ops, ops.gather(x, found)).tolist() == [3, 4]
        assert host(ops, ops.put_(x, found, 7.0)).tolist() == [7, -1, 0, 7]
        added = ops.scatter_add_(ops.zeros(4, "float32"), found, array(ops, [1, 2], "float32"))
        assert host(ops, added).tolist() == [1, 0, 0, 2]

    def test_top_indices_prefer_the_lower_index(self, ops: ArrayOps) -> None:
        x = array(ops, [1, -2, 2, -2, 0, 2], "float32")
        expected = {0: [], 1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 3, 5], 5: [0, 1, 2, 3, 5], 6: [0, 1, 2, 3, 4, 5]}
        for k, indices in expected.items():
            found = ops.top_indices(x, k)
            assert (ops.dtype(found), host(ops, found).tolist()) == ("int32", indices)
        assert host(ops, ops.top_indices(ops.zeros(9, "float32"), 4)).tolist() == [0, 1, 2, 3]

    def test_top_indices_equal_a_stable_sort(self, ops: ArrayOps) -> None:
        for seed in range(20):
            x = np.round(_random(257, seed), 1)
            for k in (1, 2, 25, 256, 257):
                expected = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
                assert np.array_equal(host(ops, ops.top_indices(array(ops, x, "float32"), k)), expected)

    def test_order(self, ops: ArrayOps) -> None:
        x = array(ops, [3, -1, 0.5, 4, -1], "float32")
        assert host(ops, ops.sort(x)).tolist() == [-1, -1, 0.5, 3, 4]
        assert host(ops, ops.sort(ops.reshape(array(ops, [2, 1, -3, 5], "float64"), (2, 2)))).tolist() == [
            [1, 2],
            [-3, 5],
        ]
        found = ops.search_sorted(array(ops, [-1, 0, 3], "float32"), x)
        assert (ops.dtype(found), host(ops, found).tolist()) == ("int32", [3, 1, 2, 3, 1])
        sums = ops.cumsum(array(ops, [1, 2**40, -1], "int64"))
        assert (ops.dtype(sums), host(ops, sums).tolist()) == ("int64", [1, 2**40 + 1, 2**40])
        assert [ops.length(ops.sort(x[:0])), ops.length(ops.cumsum(ops.zeros(0, "int64")))] == [0, 0]

    def test_indices_may_repeat_in_segments_and_minima(self, ops: ArrayOps) -> None:
        indices = array(ops, [2, 0, 2, 2, 0], "int32")
        sums = ops.segment_sum(array(ops, [2.0**24, 5, 1, 1, -1], "float32"), indices, 4)
        assert (ops.dtype(sums), host(ops, sums).tolist()) == ("float32", [4, 0, 2.0**24 + 2, 0])
        least = ops.scatter_min_(ops.full(3, 9, "int64"), indices, array(ops, [7, 8, 3, 5, 12], "int64"))
        assert (ops.dtype(least), host(ops, least).tolist()) == ("int64", [8, 9, 3])

    def test_consuming_arithmetic(self, ops: ArrayOps) -> None:
        def x() -> Any:
            return array(ops, [1, 2], "float32")

        assert host(ops, ops.add_(x(), array(ops, [10, 20], "float32"))).tolist() == [11, 22]
        assert host(ops, ops.sub_(x(), array(ops, [10, 20], "float32"))).tolist() == [-9, -18]
        assert host(ops, ops.scale_(x(), 0.5)).tolist() == [0.5, 1]

    def test_linear_algebra(self, ops: ArrayOps) -> None:
        a = ops.reshape(ops.arange(6, "float32"), (2, 3))
        assert host(ops, ops.transpose(a)).tolist() == [[0, 3], [1, 4], [2, 5]]
        across = ops.reshape(ops.arange(6, "float32"), (3, 2))
        assert host(ops, ops.matmul(a, across)).tolist() == [[10, 13], [28, 40]]
        assert host(ops, ops.matmul(a, ops.transpose(a))).tolist() == [[5, 14], [14, 50]]
        assert host(ops, ops.matmul(a, a, transpose_b=True)).tolist() == [[5, 14], [14, 50]]
        assert host(ops, ops.matmul(a, a, transpose_a=True)).tolist() == [[9, 12, 15], [12, 17, 22], [15, 22, 29]]
        assert host(ops, ops.matmul(a, across, transpose_a=True, transpose_b=True)).tolist() == [
            [3, 9, 15],
            [4, 14, 24],
            [5, 19, 33],
        ]

    def test_singular_values(self, ops: ArrayOps) -> None:
        for shape in ((7, 4), (3, 5)):
            a = np.random.default_rng(2).standard_normal(shape)
            u, s, v = (host(ops, x) for x in ops.svd(ops.reshape(array(ops, a.ravel(), "float64"), shape)))
            k = min(shape)
            assert (u.shape, s.shape, v.shape) == ((shape[0], k), (k,), (shape[1], k))
            assert np.abs((u * s) @ v.T - a).max() < 1e-12
            assert np.abs(u.T @ u - np.eye(k)).max() < 1e-12
            assert s.tolist() == sorted(s, reverse=True)
            a[1, 1] = np.nan if shape[0] > shape[1] else np.inf
            u, s, v = (host(ops, x) for x in ops.svd(ops.reshape(array(ops, a.ravel(), "float64"), shape)))
            assert (u.shape, s.shape, v.shape) == ((shape[0], k), (k,), (shape[1], k))
            assert np.isnan(s).all()

    def test_orthogonalize(self, ops: ArrayOps) -> None:
        a = np.random.default_rng(0).standard_normal((40, 5))
        a[:, 3] = a[:, 0] + 1e-3 * a[:, 3]  # nearly dependent: one pass of Gram-Schmidt would not do
        for dtype, eps in (("float32", 1e-6), ("float64", 1e-14)):
            q = host(ops, orthogonalize(ops, ops.reshape(array(ops, a.ravel(), dtype), (40, 5)))).astype(np.float64)
            assert np.abs(q.T @ q - np.eye(5)).max() < 10 * eps
            assert np.linalg.norm(a - q @ (q.T @ a)) < 100 * eps * np.linalg.norm(a)

    def test_orthogonalize_makes_dependent_columns_zero(self, ops: ArrayOps) -> None:
        a = np.random.default_rng(1).standard_normal((40, 4))
        a[:, 1] = 0.0
        a[:, 3] = 0.7 * a[:, 0] - 3 * a[:, 2]
        q = host(ops, orthogonalize(ops, ops.reshape(array(ops, a.ravel(), "float32"), (40, 4))))
        assert np.abs(q.T @ q - np.diag([1, 0, 1, 0])).max() < 1e-5

    def test_control(self, ops: ArrayOps) -> None:
        x = ops.arange(3, "int64")
        assert host(ops, ops.choose(ops.any(x > 1), lambda: x + 1, lambda: x)).tolist() == [1, 2, 3]
        assert host(ops, ops.choose(ops.any(x > 5), lambda: x + 1, lambda: x)).tolist() == [0, 1, 2]
        looped = ops.while_loop(lambda i: ops.any(i < 4), lambda i: i + 1, x)
        assert host(ops, looped).tolist() == [4, 5, 6]

    def test_a_requirement_that_fails_raises_its_error(self, ops: ArrayOps) -> None:
        x = ops.arange(3, "int64")
        same = ops.require(ops.any(x > 1), StepError("not this one"), x)
        assert host(ops, same).tolist() == [0, 1, 2]
        with pytest.raises(StepError, match="this one"):
            ops.require(ops.any(x > 5), StepError("this one"))

    def test_packing_is_tight_and_reversible(self, ops: ArrayOps) -> None:
        for bits in range(1, 17):
            for n in (0, 7, 8, 131) if bits in (1, 8, 9) else (131,):
                codes = np.random.default_rng(bits * 1000 + n).integers(0, 2**bits, n)
                codes[:2] = [2**bits - 1, 0][: len(codes[:2])]
                data = ops.pack(array(ops, codes, "int64"), bits)
                assert ops.dtype(data) == "uint8"
                high = -(-n * (bits - 8) // 8) if bits > 8 else 0
                assert ops.length(data) == packed_size(n, bits) == (n + high if bits > 8 else -(-n * bits // 8))
                unpacked = ops.unpack(data, bits, n)
                assert (ops.dtype(unpacked), host(ops, unpacked).tolist()) == ("int64", codes.tolist())

    def test_packed_format(self, ops: ArrayOps) -> None:
        """The format is little-endian: code i of b bits starts at bit b * i, low bits first."""
        for bits in range(1, 9):
            codes = np.random.default_rng(bits).integers(0, 2**bits, 21)
            stream = [(code >> j) & 1 for code in codes for j in range(bits)]
            expected = np.packbits(np.array(stream, np.uint8), bitorder="little")
            assert host(ops, ops.pack(array(ops, codes, "int64"), bits)).tolist() == expected.tolist()
        codes = np.array([0x1A2, 0x3FF, 0x0, 0x155, 0x2AA])
        packed = host(ops, ops.pack(array(ops, codes, "int64"), 10)).tolist()
        assert packed == [0xA2, 0xFF, 0x00, 0x55, 0xAA, 0b01001101, 0b10]

    def test_quantize_rounds_up_with_the_right_chance(self, ops: ArrayOps) -> None:
        n = 40000
        x, one = ops.full(n, -0.3, "float32"), array(ops, [1.0], "float32")
        codes = host(ops, ops.quantize(x, one, 4, Key(7, 0)))
        # 0.3 * 4 = 1.2, so level 2 has probability 0.2. The bound is 6 standard deviations.
        assert set(codes.tolist()) == {-1, -2}
        assert abs((codes == -2).mean() - 0.2) < 6 * np.sqrt(0.16 / n)
        assert set(host(ops, ops.quantize(x, one * 0.0, 4, Key(7, 0))).tolist()) == {0}
        levels = host(ops, ops.dequantize(array(ops, [-4, 0, 2], "int64"), one * 3.0, 4, "float64"))
        assert (str(levels.dtype), levels.tolist()) == ("float64", [-3.0, 0.0, 1.5])

    def test_sparsify_and_desparsify(self, ops: ArrayOps) -> None:
        x = _random(100)
        values, indices = ops.sparsify(array(ops, x, "float32"), 10)
        dense = host(ops, ops.desparsify(values, indices, 100))
        kept = np.abs(x) >= np.sort(np.abs(x))[-10]
        assert np.array_equal(dense, np.where(kept, x, 0))

    def test_weighted_sum_rounds_either_product_and_changes_nothing(self, ops: ArrayOps) -> None:
        # 1.00024414^2 is not a float32 number. Without rounding before the sum, 2^-24 would remain.
        factor = 1 + 2.0**-12
        x, y = array(ops, [factor, 3.0], "float32"), array(ops, [1 + 2.0**-11, 5.0], "float32")
        assert float(ops.weighted_sum(x, factor, y, -1)[0]) == 0
        for a, b in ((1, 1), (1, -1), (0.5, 1), (0.5, 2)):
            assert float(ops.weighted_sum(x, a, y, b)[1]) == a * 3 + b * 5
        assert (float(x[1]), float(y[1])) == (3, 5)
        assert float(ops.weighted_sum(array(ops, [1.0], "float64"), 0.1, array(ops, [0.0], "float64"), 1)[0]) == 0.1

    def test_sums_over_ranks_add_in_their_order(self, ops: ArrayOps) -> None:
        bits = [ops.pack(array(ops, codes, "uint8"), 1) for codes in ([1, 0, 1], [1, 0, 0], [1, 0, 1])]
        levels = [array(ops, pair, "float32") for pair in ([2, 2.0**24], [3, 1], [4, 1])]
        assert host(ops, binary_sum(ops, bits, levels, 3)).tolist() == [2.0**24, 9, 2.0**24 + 4]
        onto = array(ops, [-(2.0**24), 1, 0], "float32")
        assert host(ops, binary_sum(ops, bits, levels, 3, onto=onto)).tolist() == [2, 10, 2.0**24 + 4]
        # A row of three columns, whose three low levels come before the three high ones.
        pairs = [array(ops, [5, 3, 7, *high], "float32") for high in ([2.0**24, 0, 1], [1, 0, 0], [1, 0, 1])]
        assert host(ops, binary_sum(ops, bits, pairs, 3, columns=3)).tolist() == [2.0**24, 9, 9]
        assert host(ops, majority(ops, bits, 3, "float32")).tolist() == [1, -1, 1]
        assert host(ops, majority(ops, bits[:2], 3, "float64")).tolist() == [1, -1, 0]

    def test_every_column_of_a_matrix_has_means_of_its_own(self, ops: ArrayOps) -> None:
        bits, means = binarize_means(ops, array(ops, [1, -2, 3, 4, 5, -6], "float32"), 0.0, 2)
        assert host(ops, bits).tolist() == [0b011101]
        assert (ops.dtype(means), host(ops, means).tolist()) == ("float32", [0, -4, 3, 4])
        assert host(ops, binary_sum(ops, [bits], [means], 6, columns=2)).tolist() == [3, -4, 3, 4, 3, -4]

    def test_select_knows_which_side_the_bound_is_on(self, ops: ArrayOps) -> None:
        x = array(ops, [-2, 1, 0, 2, -1, 3], "float32")
        cases = {(2, True): [5], (2, False): [0, 3, 5], (0, True): [0, 1, 3, 4, 5], (0, False): [0, 1, 2, 3, 4, 5]}
        for (bound, strict), expected in cases.items():
            for given in (bound, array(ops, [bound], "float32")):
                values, indices = ops.select(x, given, strict)
                assert (ops.dtype(indices), host(ops, indices).tolist()) == ("int32", expected)
                assert host(ops, values).tolist() == host(ops, x)[expected].tolist()
        assert host(ops, ops.select(x, 0, False, nonzero=True)[1]).tolist() == cases[0, True]

    def test_corrupt_payloads_are_refused(self, ops: ArrayOps) -> None:
        """In a graph, TensorFlow's own error is raised."""
        x, half = array(ops, [1, -1, 0, 3], "float32"), array(ops, [0.5], "float32")
        for index in (-1, 4):
            with pytest.raises(_refusals(ops)):
                ops.sparse_sum([x[:1]], [array(ops, [index], "int32")], 4)
        codes = ternary_encode(ops, x, half)
        assert host(ops, ternary_sum(ops, [codes], [half], 4)).tolist() == [0.5, -0.5, 0, 0.5]
        for other in (ops.concat([codes, codes]), codes[:0], array(ops, [255], "uint8")):
            with pytest.raises(_refusals(ops)):
                ternary_sum(ops, [other], [half], 4)
        one = ops.full(1, 1, "float32")
        full, words, small, tags = precision_encode(ops, x, one, 2.0**-10, 5, 0)
        assert host(ops, precision_sum(ops, [(full, words, small, tags)], [one], 5, 0, 4)).tolist() == [1, -1, 0, 3]
        for other in (full[:1], ops.concat([full, full])):
            with pytest.raises(_refusals(ops)):
                precision_sum(ops, [(other, words, small, tags)], [one], 5, 0, 4)


def _refusals(ops: ArrayOps) -> tuple[type[Exception], ...]:
    if not ops.traced:
        return (PayloadError,)
    import tensorflow as tf

    return PayloadError, tf.errors.InvalidArgumentError
