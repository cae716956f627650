"""Hypothesis draws sizes, numbers and options for NumPy's kernels, which must give the reference bytes."""

from __future__ import annotations

import warnings

import hypothesis
import hypothesis.strategies as st
import numpy as np
from hypothesis.extra import numpy as arrays

from grace.core.codecs.levels import bucket_norms, dequantize_sum, quantize_packed
from grace.core.codecs.signs import binarize, binarize_finite, binarize_means, binary_sum, majority, sign_mean
from grace.core.codecs.tables import table_encode, table_sum
from grace.core.compressors.inceptionn import precision_encode, precision_sum
from grace.core.compressors.natural import natural_encode, natural_sum
from grace.core.compressors.threelc import ternary_encode, ternary_sum
from grace.core.ops import get_ops, native
from grace.core.ops.base import packed_size
from grace.core.spec import MAX_MAGNITUDE, Key
from tests.kernels import cases, needs_kernels
from tests.support.covering import ALL

pytestmark = needs_kernels
REFERENCE = get_ops("numpy", native=False)
NATIVE = get_ops("numpy", native=True) if native.module is not None else REFERENCE

# Nothing is kept between runs, and every run draws the same examples.
hypothesis.settings.register_profile(
    "kernels", derandomize=True, database=None, deadline=None, max_examples=150 if ALL else 40, print_blob=False
)
settings = hypothesis.settings(hypothesis.settings.get_profile("kernels"))

DTYPES = st.sampled_from(native.FLOATS)
SIZES = st.one_of(st.integers(0, 200), st.sampled_from([1023, 1024, 1025, 4097]))
KEYS = st.builds(Key, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**20))


@st.composite
def numbers(draw, dtype=None, size=None, special=False, largest=1e30):
    """Draw floats of every size, and NaN and infinity if `special`."""
    kind = np.dtype(draw(DTYPES) if dtype is None else dtype)
    limits = {} if special else {"min_value": -largest, "max_value": largest}
    allowed = {"allow_nan": special, "allow_infinity": special, "width": 8 * kind.itemsize}
    elements = st.floats(**({k: float(kind.type(v)) for k, v in limits.items()} | allowed))
    few = arrays.arrays(kind, draw(st.integers(1, 30)), elements=elements)
    pattern, n = draw(few), draw(SIZES) if size is None else size
    # Repeat a short pattern in random order, because drawing long arrays element by element takes too long.
    return pattern[np.random.default_rng(draw(st.integers(0, 99))).integers(0, pattern.size, n)]


def agree(call):
    """Assert that a call gives the same results with kernels and with the reference. Return the results."""
    results = []
    for ops in (NATIVE, REFERENCE):
        found = call(ops)
        results.append([np.asarray(x) for x in (found if isinstance(found, (tuple, list)) else [found])])
    for got, wanted in zip(*results, strict=True):
        assert cases.difference(got, wanted) is None, cases.difference(got, wanted)
    return results[0]


@settings
@hypothesis.given(st.data(), SIZES, st.integers(1, 16))
def test_packing_is_undone_by_unpacking(data, n, bits):
    codes = np.random.default_rng(data.draw(st.integers(0, 2**32))).integers(0, 2**bits, n)
    (packed,) = agree(lambda ops: ops.pack(codes, bits))
    assert packed.size == packed_size(n, bits)
    assert agree(lambda ops: ops.unpack(packed, bits, n))[0].tolist() == codes.tolist()


@settings
@hypothesis.given(SIZES, KEYS, st.integers(0, 2**16 - 1))
def test_random_numbers(n, key, stream):
    words = agree(lambda ops: ops.words(n, key, stream))[0]
    assert not n or 0 <= words.min() <= words.max() < 2**32
    drawn = agree(lambda ops: ops.uniform(n, key, stream))[0]
    assert drawn.tolist() == ((words >> 8) * 2.0**-24).tolist()


@settings
@hypothesis.given(
    st.sampled_from([(1, 2), (127, 8), (32767, 16)]),
    st.floats(1, 2, width=32),
    st.sampled_from([-126, -60, -41, -39, -20, 0, 20, 59, 61, 100]),
    KEYS,
)
def test_elements_beside_the_edges_of_levels(level, mantissa, power, key):
    levels, bits = level
    scale = np.float32([np.ldexp(np.float32(mantissa), power)])
    rng = np.random.default_rng(levels)
    # One unit in the last place decides about the level, so that every quotient must be rounded.
    edges = ((rng.integers(0, levels, 1024) + 0.5) / levels * scale.astype(np.float64)).astype(np.float32)
    near = (edges.view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)).ravel().view(np.float32)
    x = near * rng.choice(np.float32([-1, 1]), near.size)
    for noise in (None, key):
        agree(lambda ops, noise=noise: quantize_packed(ops, x, scale, x.size, levels, bits, noise))


@settings
@hypothesis.given(st.integers(1, 5000), st.floats(0, 1), KEYS)
def test_samples_are_distinct(n, share, key):
    k = int(share * n)
    drawn = agree(lambda ops: ops.sample(n, k, key))[0]
    assert len(set(drawn.tolist())) == k
    assert not k or 0 <= drawn.min() <= drawn.max() < n


@settings
@hypothesis.given(numbers(), st.floats(0, 1.2))
def test_top_k(x, share):
    k = int(share * x.size)
    values, indices = agree(lambda ops: ops.sparsify(x, k))
    assert values.size == min(k, x.size)
    assert agree(lambda ops: ops.desparsify(values, indices, x.size))[0][indices].tobytes() == (values + 0).tobytes()


@settings
@hypothesis.given(numbers(special=True), st.integers(0, 500))
def test_top_k_of_anything(x, k):
    values, indices = NATIVE.sparsify(x, k)
    assert values.size == min(k, x.size)
    assert (np.diff(indices) > 0).all()
    assert cases.difference(values, x[indices]) is None


@settings
@hypothesis.given(numbers(special=True), st.floats(0, 2.0**99, width=32), st.booleans(), st.booleans())
def test_selection(x, bound, strict, nonzero):
    agree(lambda ops: ops.select(x, bound, strict, nonzero))


@settings
@hypothesis.given(numbers(special=True), st.floats(-(2.0**99), 2.0**99, width=32), st.booleans())
def test_signs_and_finiteness(x, threshold, strict):
    agree(lambda ops: binarize(ops, x, threshold, strict))
    agree(lambda ops: sign_mean(ops, x)[0])
    finite = bool((np.abs(x) <= MAX_MAGNITUDE[x.dtype.name]).all())
    bits, good = binarize_finite(NATIVE, x, strict)
    assert np.array_equal(bits, binarize(NATIVE, x, 0.0, strict))
    assert (bool(NATIVE.finite(x)), bool(good)) == (finite, finite)


@settings
@hypothesis.given(st.data(), SIZES, DTYPES, st.integers(1, 5), st.booleans())
def test_sums_of_signs_and_votes(data, n, dtype, ranks, onto):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = [rng.integers(0, 256, packed_size(n, 1), np.uint8) for _ in range(ranks)]
    levels = [data.draw(numbers(dtype, 2)) for _ in range(ranks)]
    base = data.draw(numbers(dtype, n)) if onto else None
    agree(lambda ops: binary_sum(ops, bits, levels, n, None if base is None else base.copy()))
    agree(lambda ops: majority(ops, bits, n, dtype))


@settings
@hypothesis.given(st.data(), st.integers(1, 80), st.integers(1, 300), st.integers(1, 3), st.booleans())
def test_means_of_columns(data, rows, columns, ranks, negate):
    n = rows * columns
    xs = [data.draw(numbers("float32", n)) for _ in range(ranks)]
    bits, levels = zip(*(agree(lambda ops, x=x: binarize_means(ops, x, 0.5, columns)) for x in xs), strict=True)
    base = data.draw(numbers("float32", n))
    agree(lambda ops: binary_sum(ops, bits, levels, n, base.copy(), negate, columns))


@settings
@hypothesis.given(st.data(), numbers(), st.integers(1, 2000), st.integers(1, 32767), KEYS)
def test_levels(data, x, width, levels, key):
    width, bits = min(width, max(1, x.size)), int(2 * levels).bit_length()
    kind = data.draw(st.sampled_from(["l2", "max"]))
    with np.errstate(over="ignore", under="ignore"):
        scales = bucket_norms(REFERENCE, x, width, kind) if x.size else x
        limit = data.draw(st.sampled_from([None, np.array([1.5], x.dtype)]))
        # With a denormal scale, the quotient may overflow.
        hypothesis.assume(not ((scales > 0) & (scales < np.finfo(x.dtype).tiny)).any())
        codes = agree(lambda ops: quantize_packed(ops, x, scales, width, levels, bits, key, limit))[0]
        ranks = data.draw(st.integers(1, 3))
        base = data.draw(st.sampled_from([None, x]))
        agree(
            lambda ops: dequantize_sum(
                ops,
                [codes] * ranks,
                [scales] * ranks,
                width,
                levels,
                bits,
                x.size,
                None if base is None else base.copy(),
            )
        )


@settings
@hypothesis.given(st.data(), numbers(), KEYS, st.booleans())
def test_powers_of_two(data, x, key, clipped):
    codes, base, _ = agree(lambda ops: natural_encode(ops, x, key, clipped))
    negate = data.draw(st.booleans())
    with np.errstate(all="ignore"):
        arguments = (x.size, str(x.dtype), clipped)
        agree(lambda ops: natural_sum(ops, [codes, codes], [base, base], *arguments, x.copy(), negate))


@settings
@hypothesis.given(numbers(largest=1e10), st.floats(0, 1e10, width=32))
def test_ternary_digits(x, half):
    edge = np.array([2 * half], x.dtype)
    codes = agree(lambda ops: ternary_encode(ops, x, edge))[0]
    digits = agree(lambda ops: ternary_sum(ops, [codes], [np.ones(1, x.dtype)], x.size))[0]
    assert digits.tolist() == ((x >= half).astype(int) - (x <= -half)).tolist()


@settings
@hypothesis.given(numbers(largest=1e3), st.integers(1, 40))
def test_numbers_of_several_widths(x, b):
    m, h = max(-(-b // 2), b - 7), max(0, b - 15)
    one = np.ones(1, x.dtype)
    made = agree(lambda ops: precision_encode(ops, x, one, 2.0**-b, m, h))
    total = agree(lambda ops: precision_sum(ops, [tuple(made)], [one], m, h, x.size))[0]
    assert (np.abs(total.astype(np.float64) - x) <= 2.0**-b).all()


@settings
@hypothesis.given(numbers(), st.data())
def test_tables(x, data):
    table = np.sort(data.draw(numbers(str(x.dtype), 128, largest=1.0)))
    scale = np.abs(x).max(initial=0).reshape(1)
    hypothesis.assume(not 0 < scale[0] < np.finfo(x.dtype).tiny)
    codes = agree(lambda ops: table_encode(ops, x, scale, table, max(1, x.size)))[0]
    with np.errstate(all="ignore"):
        agree(lambda ops: table_sum(ops, [codes, codes], [scale, -scale], table, max(1, x.size), x.copy()))


@settings
@hypothesis.given(numbers("float32", special=True), st.sampled_from(["float16", "bfloat16"]))
def test_halves(x, half):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        narrow = agree(lambda ops: ops.cast(x, half))[0]
        agree(lambda ops: ops.cast(narrow, "float32"))


@settings
@hypothesis.given(st.data(), st.integers(1, 3000), DTYPES, st.integers(1, 4), st.booleans())
def test_sums_at_indices(data, n, dtype, ranks, onto):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    indices = [rng.permutation(n)[: rng.integers(n + 1)].astype(np.int32) for _ in range(ranks)]
    if data.draw(st.booleans()):
        indices = [np.sort(index) for index in indices]
    values = [data.draw(numbers(dtype, index.size)) for index in indices]
    base = data.draw(numbers(dtype, n)) if onto else None
    agree(lambda ops: ops.sparse_sum(values, indices, n, None if base is None else base.copy()))
    agree(lambda ops: ops.gather(values[0] if n == 0 else np.resize(values[0], n), indices[-1]))
