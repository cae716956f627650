"""Kernels refuse wrong arguments with a Python exception that says what was expected and received. They never crash."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.codecs.bloom import BloomFilter, filter_positions
from grace.core.codecs.levels import dequantize_sum, quantize_packed
from grace.core.codecs.listed import levels_sum, round_packed
from grace.core.codecs.rotation import rotated_encode, rotated_sum, shared_rotated_sum
from grace.core.codecs.signs import binarize_means, binary_sum, majority
from grace.core.codecs.tables import table_sum
from grace.core.compressors.contrib.adacomp import select_in_bins
from grace.core.compressors.contrib.alq import best_levels
from grace.core.compressors.contrib.fedqcs import largest_of_blocks, recover_sparse
from grace.core.compressors.contrib.kashin import project_from_frame, spread_in_frame
from grace.core.compressors.contrib.szx import leading_encode, leading_sum
from grace.core.compressors.contrib.vqsgd import draw_vertices, vertices_sum
from grace.core.compressors.inceptionn import precision_sum
from grace.core.compressors.lpc import floor_packed
from grace.core.compressors.natural import natural_sum
from grace.core.compressors.sketchedsgd import count_sketch
from grace.core.compressors.threelc import ternary_sum
from grace.core.compressors.uniform import from_integers, to_integers
from grace.core.compressors.variance import power_fade_, power_sum, power_words
from grace.core.compressors.wangni import draw_kept, drawn_entries, keep_odds
from grace.core.errors import PayloadError
from grace.core.memories.variance import square_sum
from grace.core.ops import get_ops, native
from grace.core.optim.moments import limited_sum, masked_sum
from grace.core.spec import Key
from grace.core.wire.huffman import huffman_decode, huffman_encode
from grace.core.wire.indices import decode_gaps, encode_gaps, gap_facts
from grace.core.wire.lanes import pack_lanes, unpack_lanes
from grace.core.wire.rans import rans_decode, rans_encode
from grace.core.wire.runs import run_length_decode
from grace.core.wire.shuffle import bitshuffle_decode
from grace.testing.harness import FRAMEWORKS, array
from tests.kernels import BACKENDS, needs_kernels, ops_of

pytestmark = needs_kernels
KEY = Key(1, 2)
TEN = np.arange(10.0)
DTYPES = ["float32", "float64", "uint8", "int8", "int16", "int32", "int64", "float16"]
every_backend = pytest.mark.parametrize("framework", BACKENDS)


class Make:
    """A factory for arrays of a framework: f(loats), i(ndices) and b(ytes)."""

    def __init__(self, ops):
        self.ops = ops

    def f(self, n, dtype="float32"):
        return array(self.ops, np.arange(n), dtype)

    def i(self, *values, dtype="int32"):
        return array(self.ops, values, dtype)

    def b(self, n, value=0):
        return array(self.ops, [value] * n, "uint8")


# For each kernel: a wrong call with ten elements, the error, and its text.
REFUSED = {
    "codes of another dtype": (lambda o, m: o.unpack(m.i(1, 2), 8, 2), TypeError, "expected uint8, received int32"),
    "bits of another dtype": (lambda o, m: majority(o, [m.i(0, 0)], 10, "float32"), TypeError, "expected uint8"),
    "int64 indices": (
        lambda o, m: o.put_(m.f(10), m.i(1, dtype="int64"), 1.0),
        TypeError,
        "expected int32, received int64",
    ),
    "values of two dtypes": (
        lambda o, m: o.sparse_sum([m.f(1), m.f(1, "float64")], [m.i(1), m.i(2)], 10),
        TypeError,
        "expected float32, received float64",
    ),
    "odds: of fewer than no elements": (
        lambda o, m: keep_odds(o, m.f(10), -1, None),
        ValueError,
        "expected a length from 0 to .*, received -1",
    ),
    "odds: one": (
        lambda o, m: draw_kept(o, m.f(10), m.f(1, "float64"), KEY),
        PayloadError,
        "expected 2 elements, received 1",
    ),
    "odds: of float32": (
        lambda o, m: draw_kept(o, m.f(10), m.f(2), KEY),
        TypeError,
        "expected float64, received float32",
    ),
    "drawn elements: two scales": (
        lambda o, m: drawn_entries(o, m.i(1, -2), m.f(2)),
        PayloadError,
        "expected 1 elements, received 2",
    ),
    "drawn elements: of 64 bits": (
        lambda o, m: drawn_entries(o, m.i(1, -2, dtype="int64"), m.f(1)),
        TypeError,
        "expected int32, received int64",
    ),
    "words: noise of another length": (
        lambda o, m: power_words(o, m.f(10), m.f(9), 1.5),
        PayloadError,
        "expected 10 elements, received 9",
    ),
    "words: noise of another dtype": (
        lambda o, m: power_words(o, m.f(10), m.f(10, "float64"), 1.5),
        TypeError,
        "expected float32, received float64",
    ),
    "words: an index too large": (
        lambda o, m: power_sum(o, [m.i(-(2**31) + 10)], [m.f(1)], 10),
        PayloadError,
        "from 0 to 9, received 10",
    ),
    "words: two scales": (
        lambda o, m: power_sum(o, [m.i(1)], [m.f(2)], 10),
        PayloadError,
        "expected 1 elements, received 2",
    ),
    "words: ranks missing": (lambda o, m: power_sum(o, [m.i(1)] * 2, [m.f(1)], 10), ValueError, "expected 4 arrays"),
    "words: an index to be erased too large": (
        lambda o, m: power_fade_(o, m.f(10), m.i(3, 7 * 2**28 + 11), 0.5),
        PayloadError,
        "from 0 to 9, received 11",
    ),
    "factors of another length": (
        lambda o, m: limited_sum(o, m.f(10), 0.9, m.f(10), 0.1, m.f(9), 1.0),
        PayloadError,
        "expected 10 elements, received 9",
    ),
    "a mask of another length": (
        lambda o, m: masked_sum(o, m.f(10), 1.0, m.f(10), 0.1, m.f(9)),
        PayloadError,
        "expected 10 elements, received 9",
    ),
    "squares of two lengths": (
        lambda o, m: square_sum(o, m.f(10), m.f(9), 4.0),
        PayloadError,
        "expected 10 elements, received 9",
    ),
    "columns that fill no block": (
        lambda o, m: count_sketch(o, m.f(10), 3, 40, KEY),
        ValueError,
        "expected a multiple of 16 columns.* received 40",
    ),
    "indices that do not ascend": (
        lambda o, m: gap_facts(o, m.i(3, 2), 0),
        ValueError,
        "expected indices from 0 on that ascend",
    ),
    "gaps without room": (
        lambda o, m: encode_gaps(o, m.i(3, 90), 2, 1, 7),
        ValueError,
        "expected gaps that fit the lengths, received 86",
    ),
    "gaps of half a byte": (lambda o, m: decode_gaps(o, m.b(4), 3, 0, 8, 7), PayloadError, "expected 3 .*, received 4"),
    "symbols of 9 bits": (lambda o, m: huffman_encode(o, m.b(4), 9), ValueError, "expected symbols of 3 to 8 bits"),
    "symbols of 2 bits": (lambda o, m: rans_encode(o, m.b(4), 2), ValueError, "3 to 8 bits, received 2"),
    "a table cut short": (lambda o, m: huffman_decode(o, m.b(127), 8, 5), PayloadError, "huffman: .* is damaged"),
    "words of 13 bits": (lambda o, m: huffman_decode(o, m.b(140, 0xDD), 8, 5), PayloadError, "huffman: .* is damaged"),
    "symbols without bits": (
        lambda o, m: huffman_decode(o, m.b(4, 1), 3, 99),
        PayloadError,
        "huffman: .* is damaged",
    ),
    "no frequencies": (lambda o, m: rans_decode(o, m.b(48), 8, 5), PayloadError, "rans: .* is damaged"),
    "frequencies of too much": (lambda o, m: rans_decode(o, m.b(99, 255), 3, 5), PayloadError, "rans: .* is damaged"),
    "runs of too many": (lambda o, m: run_length_decode(o, m.b(3, 1), 9), PayloadError, "run_length: .* is damaged"),
    "blocks that are missing": (
        lambda o, m: bitshuffle_decode(o, m.b(9, 255), 8, 99),
        PayloadError,
        "bitshuffle: .* is damaged",
    ),
    "levels of integers": (
        lambda o, m: binary_sum(o, [m.b(2)], [m.i(1, 2)], 10),
        TypeError,
        "expected float32 or float64, received int32",
    ),
    "onto of another dtype": (
        lambda o, m: binary_sum(o, [m.b(2)], [m.f(2)], 10, m.f(10, "float64")),
        TypeError,
        "expected float32, received float64",
    ),
    "packed codes truncated": (lambda o, m: o.unpack(m.b(4), 4, 10), PayloadError, "expected 5 .*, received 4"),
    "packed codes too long": (lambda o, m: o.unpack(m.b(6), 4, 10), PayloadError, "expected 5 .*, received 6"),
    "a negative length": (lambda o, m: o.unpack(m.b(0), 4, -1), ValueError, "from 0 to .*, received -1"),
    "a length beyond all memory": (lambda o, m: o.uniform(2**62, KEY), ValueError, f"received {2**62}"),
    "0 bits": (lambda o, m: o.pack(m.b(10), 0), ValueError, "expected 1 to 16 bits, received 0"),
    "17 bits": (lambda o, m: o.unpack(m.b(99), 17, 10), ValueError, "expected 1 to 16 bits, received 17"),
    "more draws than elements": (
        lambda o, m: o.sample(3, 4, KEY),
        ValueError,
        "k = 4 and n = 3",
    ),
    "the bound of none": (lambda o, m: o.top_bound(m.f(10), 0), ValueError, "from 1 to 10, received 0"),
    "the bound of too many": (lambda o, m: o.top_bound(m.f(10), 11), ValueError, "from 1 to 10, received 11"),
    "rows of several lengths": (
        lambda o, m: o.half_sum([m.f(10, "float16"), m.f(9, "float16")]),
        PayloadError,
        "expected rows of 10 elements, received 9",
    ),
    "rows of two dtypes": (
        lambda o, m: o.run("half_sum", [m.f(4, "float16"), m.f(4)], (), [1.0], outputs=["float16"], lengths=[4]),
        TypeError,
        "expected float16 or bfloat16, received float32",
    ),
    "no rows": (
        lambda o, m: o.run("half_sum", [], (), [1.0], outputs=["float16"], lengths=[4]),
        ValueError,
        "expected at least one row, received none",
    ),
    "a negative k": (lambda o, m: o.sparsify(m.f(10), -1), ValueError, "received -1"),
    "an index too large": (lambda o, m: o.gather(m.f(10), m.i(3, 10)), PayloadError, "from 0 to 9, received 10"),
    "a negative index": (lambda o, m: o.gather(m.f(10), m.i(-1)), PayloadError, "from 0 to 9, received -1"),
    "a negative place": (lambda o, m: o.put_(m.f(10), m.i(2, -5), 1.0), PayloadError, "received -5"),
    "a place too large": (
        lambda o, m: o.scatter_add_(m.f(10), m.i(2, 2**31 - 1), m.f(2)),
        PayloadError,
        f"received {2**31 - 1}",
    ),
    "fewer values than places": (
        lambda o, m: o.scatter_add_(m.f(10), m.i(1, 2, 3), m.f(2)),
        PayloadError,
        "expected 3 elements, received 2",
    ),
    "sparse: an index too large": (lambda o, m: o.sparse_sum([m.f(1)], [m.i(10)], 10), PayloadError, "received 10"),
    "sparse: a negative index": (
        lambda o, m: o.sparse_sum([m.f(2), m.f(2)], [m.i(0, 1), m.i(-3, 4)], 10, m.f(10)),
        PayloadError,
        "received -3",
    ),
    "sparse: an index of no elements": (lambda o, m: o.sparse_sum([m.f(1)], [m.i(0)], 0), PayloadError, "received 0"),
    "sparse: more values than indices": (
        lambda o, m: o.sparse_sum([m.f(3)], [m.i(1, 2)], 10),
        PayloadError,
        "expected 2 elements, received 3",
    ),
    "sparse: ranks missing": (lambda o, m: o.sparse_sum([m.f(1)], [m.i(1)] * 2, 10), ValueError, "expected 2 arrays"),
    "sparse: onto too short": (
        lambda o, m: o.sparse_sum([m.f(1)], [m.i(1)], 10, m.f(9)),
        PayloadError,
        "expected 10 elements, received 9",
    ),
    "sums of two lengths": (
        lambda o, m: o.weighted_sum(m.f(10), 0.5, m.f(9), 0.5),
        PayloadError,
        "expected 10 elements, received 9",
    ),
    "signs: truncated": (lambda o, m: binary_sum(o, [m.b(1)], [m.f(2)], 10), PayloadError, "expected 2 .*, received 1"),
    "signs: three levels": (
        lambda o, m: binary_sum(o, [m.b(2)], [m.f(3)], 10),
        PayloadError,
        "expected 2 .*, received 3",
    ),
    "signs: onto too long": (
        lambda o, m: binary_sum(o, [m.b(2)], [m.f(2)], 10, m.f(11)),
        PayloadError,
        "expected 10 .*, received 11",
    ),
    "columns: truncated": (
        lambda o, m: binary_sum(o, [m.b(1)], [m.f(4)], 10, columns=2),
        PayloadError,
        "expected 2 .*, received 1",
    ),
    "columns: levels of another": (
        lambda o, m: binary_sum(o, [m.b(2)], [m.f(2)], 10, columns=2),
        PayloadError,
        "expected 4 .*, received 2",
    ),
    "columns: no whole rows": (
        lambda o, m: binary_sum(o, [m.b(2)], [m.f(6)], 10, columns=3),
        ValueError,
        "divide 10 elements, received 3",
    ),
    "columns: of nothing": (
        lambda o, m: binarize_means(o, m.f(10), 0.0, 0),
        ValueError,
        "divide 10 elements, received 0",
    ),
    "columns: more than elements": (
        lambda o, m: binarize_means(o, m.f(0), 0.0, 2**30),
        ValueError,
        f"divide 0 elements, received {2**30}",
    ),
    "votes: truncated": (
        lambda o, m: majority(o, [m.b(2), m.b(1)], 10, "float32"),
        PayloadError,
        "expected 2 .*, received 1",
    ),
    "votes: of nobody": (lambda o, m: majority(o, [], 10, "float32"), ValueError, "expected 1 arrays.* received 0"),
    "levels: truncated": (
        lambda o, m: dequantize_sum(o, [m.b(9)], [m.f(2)], 5, 127, 8, 10),
        PayloadError,
        "expected 10 .*, received 9",
    ),
    "levels: scales missing": (
        lambda o, m: dequantize_sum(o, [m.b(10)], [m.f(1)], 5, 127, 8, 10),
        PayloadError,
        "expected 2 .*, received 1",
    ),
    "levels: buckets of nothing": (
        lambda o, m: dequantize_sum(o, [m.b(10)], [m.f(2)], 0, 127, 8, 10),
        ValueError,
        "at least 1 element, received 0",
    ),
    "levels: none": (
        lambda o, m: dequantize_sum(o, [m.b(10)], [m.f(2)], 5, 0, 8, 10),
        ValueError,
        "expected 1 to 32768 levels, received 0",
    ),
    "levels: too many for their bits": (
        lambda o, m: quantize_packed(o, m.f(10), m.f(2), 5, 200, 8, KEY),
        ValueError,
        "fit 8 bits, received 200",
    ),
    "levels: scales too few": (
        lambda o, m: quantize_packed(o, m.f(10), m.f(1), 5, 7, 8, KEY),
        PayloadError,
        "expected 2 elements, received 1",
    ),
    "levels: 17 bits of floors": (
        lambda o, m: floor_packed(o, m.f(10), m.f(1), 17, KEY),
        ValueError,
        "expected 1 to 16 bits, received 17",
    ),
    "levels: two distances": (
        lambda o, m: floor_packed(o, m.f(10), m.f(2), 8, KEY),
        PayloadError,
        "expected 1 elements, received 2",
    ),
    "fitted levels: no sizes": (
        lambda o, m: best_levels(o, m.f(0, "float64"), 3, False),
        ValueError,
        "at least one size, received none",
    ),
    "fitted levels: too many": (
        lambda o, m: best_levels(o, m.f(10, "float64"), 65, False),
        ValueError,
        "expected 1 to 63 levels, received 64",
    ),
    "fitted levels: sizes of another dtype": (
        lambda o, m: best_levels(o, m.f(10), 3, False),
        TypeError,
        "expected float64, received float32",
    ),
    "integers: two scales": (
        lambda o, m: to_integers(o, m.f(10), m.f(2), 7, None, "int8"),
        PayloadError,
        "expected 1 elements, received 2",
    ),
    "integers: too large for their bits": (
        lambda o, m: to_integers(o, m.f(10), m.f(1), 128, None, "int8"),
        ValueError,
        "from 1 that fits 8 bits, received 128",
    ),
    "integers: of 64 bits": (
        lambda o, m: to_integers(o, m.f(10), m.f(1), 7, None, "int64"),
        ValueError,
        "of 8, 16 or 32 bits, received 64",
    ),
    "integers: unsigned": (
        lambda o, m: from_integers(o, m.b(10), m.f(1), 7),
        TypeError,
        "expected int8, int16 or int32, received uint8",
    ),
    "integers: of no level": (
        lambda o, m: from_integers(o, m.i(1, 2), m.f(1), 0),
        ValueError,
        "from 1 that fits 32 bits, received 0",
    ),
    "integers: no scale": (
        lambda o, m: from_integers(o, m.i(1, 2), m.f(0), 7),
        PayloadError,
        "expected 1 elements, received 0",
    ),
    "lanes: too many": (
        lambda o, m: pack_lanes(o, m.i(1, 2), 2, 17),
        ValueError,
        "expected 1 to 16 lanes, received 17",
    ),
    "lanes: of 64 bits": (
        lambda o, m: pack_lanes(o, m.i(1, 2, dtype="int64"), 2, 2),
        TypeError,
        "expected int8, int16 or int32, received int64",
    ),
    "lanes: none": (lambda o, m: unpack_lanes(o, m.i(1, 2), 2, 0), ValueError, "expected 1 to 16 lanes, received 0"),
    "lanes: words missing": (
        lambda o, m: unpack_lanes(o, m.i(1, 2), 10, 3),
        PayloadError,
        "expected 4 elements, received 2",
    ),
    "sum of levels: long buckets": (
        lambda o, m: o.run(
            "sum_round",
            [m.f(9), m.f(9), m.f(4)],
            [513],
            [1.0, 1.0],
            outputs=["float32", "uint8", "float32", "bool"],
            lengths=[9, 3, 1, 1],
        ),
        ValueError,
        "expected buckets of at most 512 elements, received 513",
    ),
    "listed levels: five": (
        lambda o, m: round_packed(o, m.f(10), m.f(2), m.f(5), 5, KEY),
        ValueError,
        "expected 2, 4, 8 or 16 levels, received 5",
    ),
    "listed levels: buckets of nothing": (
        lambda o, m: round_packed(o, m.f(10), m.f(2), m.f(4), 0, None),
        ValueError,
        "at least 1 element, received 0",
    ),
    "listed levels: scales too few": (
        lambda o, m: round_packed(o, m.f(10), m.f(1), m.f(4), 5, None),
        PayloadError,
        "expected 2 elements, received 1",
    ),
    "listed levels: truncated": (
        lambda o, m: levels_sum(o, [m.b(2)], [m.f(2)], [m.f(4)], 5, 10),
        PayloadError,
        "expected 3 elements, received 2",
    ),
    "listed levels: scales missing": (
        lambda o, m: levels_sum(o, [m.b(3)], [m.f(1)], [m.f(4)], 5, 10),
        PayloadError,
        "expected 2 elements, received 1",
    ),
    "listed levels: of other bits": (
        lambda o, m: levels_sum(o, [m.b(3)] * 2, [m.f(2)] * 2, [m.f(4), m.f(8)], 5, 10),
        PayloadError,
        "expected 4 elements, received 8",
    ),
    "rotation: blocks of no power of two": (
        lambda o, m: rotated_encode(o, m.f(10), m.f(2), 384, True, False, KEY),
        ValueError,
        "a block of 128 to 4096 elements, a power of two, received 384",
    ),
    "vertices: buckets of no power of two": (
        lambda o, m: draw_vertices(o, m.f(10), m.f(1), 12, 3, 0, KEY),
        ValueError,
        "expected a bucket of 2 to 32768 elements, a power of two, received 12",
    ),
    "vertices: none per bucket": (
        lambda o, m: draw_vertices(o, m.f(10), m.f(2), 8, 0, 0, KEY),
        ValueError,
        "expected 1 to 2.31 - 1 vertices, received 0",
    ),
    "vertices: norms too few": (
        lambda o, m: draw_vertices(o, m.f(10), m.f(1), 8, 3, 0, KEY),
        PayloadError,
        "expected 2 elements, received 1",
    ),
    "vertices: a reach of 33 bits": (
        lambda o, m: draw_vertices(o, m.f(10), m.f(2), 8, 3, 2**32, KEY),
        ValueError,
        "expected a reach below 2.32, received 4294967296",
    ),
    "vertices: codes too few": (
        lambda o, m: vertices_sum(o, [m.i(1, 2, dtype="int64")], [m.f(2)], 8, 3, 10),
        PayloadError,
        "expected 6 elements, received 2",
    ),
    "vertices: codes of 32 bits": (
        lambda o, m: vertices_sum(o, [m.i(*range(6))], [m.f(2)], 8, 3, 10),
        TypeError,
        "expected int64, received int32",
    ),
    "measurements: too few": (
        lambda o, m: recover_sparse(o, m.f(2), 10, 128, 3, 2, 0.1, 0.1, KEY),
        PayloadError,
        "expected 5 elements, received 2",
    ),
    "measurements: of too many elements": (
        lambda o, m: recover_sparse(o, m.f(1), 10, 128, 129, 2, 0.1, 0.1, KEY),
        ValueError,
        "expected 1 to 128 elements per measurement, received 129",
    ),
    "measurements: no rounds": (
        lambda o, m: recover_sparse(o, m.f(5), 10, 128, 3, 0, 0.1, 0.1, KEY),
        ValueError,
        "expected at least one round, received 0",
    ),
    "largest of blocks: of no power of two": (
        lambda o, m: largest_of_blocks(o, m.f(10), 384, 0.1),
        ValueError,
        "a block of 128 to 4096 elements, a power of two, received 384",
    ),
    "largest of blocks: more than there are": (
        lambda o, m: o.run("largest_of_blocks", [m.f(10)], [128, 129, 1], outputs=["float32"], lengths=[10]),
        ValueError,
        "expected 1 to 128 elements of a block, received 129",
    ),
    "frame: blocks of no power of two": (
        lambda o, m: spread_in_frame(o, m.f(10), 384, 2, KEY),
        ValueError,
        "a block of 128 to 4096 elements, a power of two, received 384",
    ),
    "frame: three coefficients per element": (
        lambda o, m: project_from_frame(o, m.f(384), 128, 3, KEY),
        ValueError,
        "expected a redundancy of 2 to 128, a power of two, received 3",
    ),
    "frame: part of a block": (
        lambda o, m: project_from_frame(o, m.f(10), 128, 2, KEY),
        ValueError,
        "expected whole blocks of 128 coefficients, received 10",
    ),
    "filter: truncated": (
        lambda o, m: filter_positions(o, BloomFilter(17, 2), m.b(2), 10, KEY),
        PayloadError,
        "expected 3 elements, received 2",
    ),
    "filter: hash functions too many": (
        lambda o, m: filter_positions(o, BloomFilter(17, 70_000), m.b(3), 10, KEY),
        ValueError,
        "expected 1 to 65536 hash functions, received 70000",
    ),
    "filter: of 32-bit words": (
        lambda o, m: filter_positions(o, BloomFilter(17, 2), m.i(1, 2, 3), 10, KEY),
        TypeError,
        "expected uint8, received int32",
    ),
    "rotation: three levels": (
        lambda o, m: rotated_encode(o, m.f(10), m.f(3), 128, True, False, KEY),
        ValueError,
        "expected 2, 4, 8 or 16 levels, received 3",
    ),
    "rotation: three transforms": (
        lambda o, m: rotated_encode(o, m.f(10), m.f(2), 128, True, False, KEY, transforms=3),
        ValueError,
        "expected 1 or 2 transforms, received 3",
    ),
    "rotation: truncated": (
        lambda o, m: rotated_sum(o, [m.b(1)], [m.f(1)], [m.i(0)], m.f(2), 128, 10, KEY),
        PayloadError,
        "expected 2 elements, received 1",
    ),
    "rotation: scales too many": (
        lambda o, m: rotated_sum(o, [m.b(2)], [m.f(2)], [m.i(0)], m.f(2), 128, 10, KEY),
        PayloadError,
        "expected 1 elements, received 2",
    ),
    "rotation: shared, and truncated": (
        lambda o, m: shared_rotated_sum(o, [m.b(2), m.b(1)], [m.f(1)] * 2, m.f(2), 128, 10, KEY),
        PayloadError,
        "expected 2 elements, received 1",
    ),
    "rotation: two salts": (
        lambda o, m: rotated_sum(o, [m.b(2)], [m.f(1)], [m.i(0, 1)], m.f(2), 128, 10, KEY),
        PayloadError,
        "expected 1 elements, received 2",
    ),
    "bins: a maximum too few": (
        lambda o, m: select_in_bins(o, m.f(10), m.f(10), m.f(1), 5),
        PayloadError,
        "expected 2 elements, received 1",
    ),
    "bins: of no element": (
        lambda o, m: select_in_bins(o, m.f(10), m.f(10), m.f(10), 0),
        ValueError,
        "bucket of at least 1 element, received 0",
    ),
    "powers: truncated": (
        lambda o, m: natural_sum(o, [m.b(11)], [m.i(0)], 10, "float32", False),
        PayloadError,
        "expected 12 .*, received 11",
    ),
    "powers: no base": (
        lambda o, m: natural_sum(o, [m.b(10)], [], 10, "float32", True),
        ValueError,
        "expected 2 arrays",
    ),
    "table: of 100": (
        lambda o, m: table_sum(o, [m.b(10)], [m.f(1)], m.f(100), 10),
        PayloadError,
        "expected 128 elements, received 100",
    ),
    "table: scales missing": (
        lambda o, m: table_sum(o, [m.b(10)], [m.f(1)], m.f(128), 5),
        PayloadError,
        "expected 2 elements, received 1",
    ),
    "table: codes of two lengths": (
        lambda o, m: table_sum(o, [m.b(10), m.b(9)], [m.f(1), m.f(1)], m.f(128), 10),
        PayloadError,
        "expected 10 elements, received 9",
    ),
    "digits: truncated": (lambda o, m: ternary_sum(o, [m.b(1, 121)], [m.f(1)], 10), PayloadError, "decode to 2 bytes"),
    "digits: a run too long": (lambda o, m: ternary_sum(o, [m.b(1, 255)], [m.f(1)], 10), PayloadError, "decode to 2"),
    "digits: a run beyond the end": (
        lambda o, m: ternary_sum(o, [m.i(121, 244, dtype="uint8")], [m.f(1)], 10),
        PayloadError,
        "decode to 2 bytes",
    ),
    "widths: a number too many": (
        lambda o, m: precision_sum(o, [(m.f(1), m.i(dtype="int16"), m.i(dtype="int8"), m.b(3))], [m.f(1)], 5, 0, 10),
        PayloadError,
        "expected 0 numbers.*received 1",
    ),
    "widths: tags truncated": (
        lambda o, m: precision_sum(o, [(m.f(0), m.i(dtype="int16"), m.i(dtype="int8"), m.b(2))], [m.f(1)], 5, 0, 10),
        PayloadError,
        "expected 3 .*, received 2",
    ),
    "widths: words missing": (
        lambda o, m: precision_sum(o, [(m.f(0), m.i(dtype="int16"), m.i(dtype="int8"), m.b(3, 2))], [m.f(1)], 5, 0, 10),
        PayloadError,
        "expected 3 numbers.*tags 2.*received 0",
    ),
    "leading bits: blocks of 6": (
        lambda o, m: leading_encode(o, m.f(10), m.f(1), 0.5, 6),
        ValueError,
        "expected blocks of a multiple of 4 elements, received 6",
    ),
    "leading bits: a bound of 1": (
        lambda o, m: leading_encode(o, m.f(10), m.f(1), 1.0, 8),
        ValueError,
        "expected a bound from 2\\^-20 to 1, received 1",
    ),
    "leading bits: a block missing": (
        lambda o, m: leading_sum(o, [(m.f(2), m.b(3), m.b(0), m.b(0))], [m.f(1)], 4, 10),
        PayloadError,
        "expected 3 elements, received 2",
    ),
    "leading bits: codes missing": (
        lambda o, m: leading_sum(o, [(m.f(3), m.b(3, 9), m.b(2), m.b(24))], [m.f(1)], 4, 10),
        PayloadError,
        "expected 3 bytes of codes, as the lengths of blocks ask for, received 2",
    ),
    "leading bits: a byte missing": (
        lambda o, m: leading_sum(o, [(m.f(3), m.b(3, 9), m.b(3), m.b(23))], [m.f(1)], 4, 10),
        PayloadError,
        "expected 24 bytes, as the lengths of blocks ask for, received 23",
    ),
    "leading bits: a byte too many": (
        lambda o, m: leading_sum(o, [(m.f(3), m.b(3), m.b(0), m.b(1))], [m.f(1)], 4, 10),
        PayloadError,
        "expected 0 bytes, as the lengths of blocks ask for, received 1",
    ),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(framework, name):
    call, error, text = REFUSED[name]
    ops = ops_of(framework)
    with pytest.raises(error, match=text):
        call(ops, Make(ops))


def run(kernel, *inputs, integers=(), numbers=(), consumes=False):
    return native.module.run(kernel, list(inputs), list(integers), list(numbers), consumes, 1, None)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([1.0, 2.0], "received another .*list"),
        (None, "NoneType"),
        (TEN[::2], "contiguous"),
        (TEN.astype(">f4"), "as this processor has them"),
        (TEN.astype(np.float16), "expected float32 or float64, received float16"),
        (TEN.astype(np.complex64), "another dtype of 64 bits"),
        (np.array([None]), "array of numbers"),
        (np.zeros(41, np.uint8)[1:].view(np.float32), "multiple of an element of float32"),
    ],
)
def test_the_module_takes_flat_aligned_arrays_only(given, text):
    with pytest.raises(TypeError, match=text):
        run("max_abs", given)


def test_the_module_counts_its_arguments():
    with pytest.raises(ValueError, match="there is no kernel 'maximum'"):
        run("maximum", TEN)
    with pytest.raises(ValueError, match="expected 1 arrays, 0 integers and 0 numbers, received 0, 0 and 0"):
        run("max_abs")
    with pytest.raises(ValueError, match="received 2, 1 and 1"):
        run("max_abs", TEN, TEN, integers=[1], numbers=[2.0])
    with pytest.raises(TypeError, match="incompatible function arguments"):
        run("uniform", integers=[2**64, 1, 1, 1, 1])


@pytest.mark.parametrize("kernel", native.module.kernels() if native.module else [])
def test_every_kernel_refuses_to_be_called_with_nothing_or_with_rubbish(kernel):
    with pytest.raises(ValueError, match=r"expected .* received"):
        run(kernel)
    rng = np.random.default_rng(0)
    for seed in range(300):
        dtypes = rng.choice(DTYPES, rng.integers(5))
        if seed % 2:
            dtypes[:] = dtypes[0] if dtypes.size else dtypes
        inputs = [rng.integers(-3, 20, rng.choice([0, 1, 2, 3, 16, 128])).astype(dtype) for dtype in dtypes]
        integers = rng.choice([0, 1, 2, 3, 8, 16, 128, -1, 2**40, 2**62, -(2**63)], rng.integers(8)).tolist()
        # Huge output lengths are allowed for these kernels, but would take too long.
        if kernel in ("words", "uniform", "sample", "majority") and 2**40 in integers[:2]:
            continue
        try:
            run(kernel, *inputs, integers=integers, numbers=rng.standard_normal(rng.integers(3)), consumes=seed % 3 > 0)
        except (TypeError, ValueError, MemoryError):
            continue


def test_numbers_whose_product_no_integer_holds_are_refused():
    with pytest.raises(ValueError, match="at most 1099511627776 elements, received 16777216 x 1099511627776"):
        run("orthogonalize", TEN[:0], integers=[2**24, 2**40])
    with pytest.raises(ValueError, match="fit 8 bits, received 4611686018427387904"):
        run("quantize_packed", TEN, TEN[:1], integers=[10, 2**62, 8, 1, 0, 0, 0, 0])


@every_backend
def test_what_is_changed_in_place_must_be_writable_and_in_order(framework):
    ops = get_ops(framework, native=True)
    where = array(ops, [1], "int32")
    with pytest.raises(TypeError, match="contiguous"):
        ops.put_(array(ops, np.zeros(20), "float32")[::2], where, 1.0)
    if framework == "numpy":
        fixed = np.zeros(10, np.float32)
        fixed.flags.writeable = False
        with pytest.raises(ValueError, match="may be changed, received a read-only one"):
            ops.put_(fixed, where, 1.0)
        assert not fixed.any()


@every_backend
def test_what_is_only_read_may_have_steps_odd_addresses_or_be_read_only(framework):
    ops = get_ops(framework, native=True)
    wanted = np.arange(10.0, dtype=np.float32)
    steps = ops.cast(np.repeat(wanted, 2), "float32")[::2]
    data = np.concatenate([np.zeros(1, np.uint8), wanted.view(np.uint8)])
    if framework == "numpy":
        fixed = wanted.copy()
        fixed.flags.writeable = False
        odd = [data[1:].view(np.float32), fixed]
    else:
        torch = pytest.importorskip("torch")
        odd = [torch.frombuffer(bytearray(data.tobytes()), dtype=torch.float32, offset=1)]
    for x in (steps, *odd):
        assert float(ops.max_abs(x)) == 9.0
        values, indices = ops.select(x, 7.0, strict=True)
        assert (values.tolist(), indices.tolist()) == ([8.0, 9.0], [8, 9])
        assert ops.weighted_sum(x, 1, x, 1).tolist() == (2 * wanted).tolist()


def test_tensors_of_a_pytorch_before_2_10_go_through_python():
    torch = pytest.importorskip("torch")

    class Old(torch.Tensor):
        __dlpack_c_exchange_api__ = None

    x, where = torch.arange(10.0), torch.tensor([3], dtype=torch.int32)
    (total,) = native.module.run("weighted_sum", [x, x], [], [1, 2], False, 1, Old)
    assert type(total) is torch.Tensor
    assert torch.equal(total, 3 * x)
    assert native.module.run("put", [x, where], [], [-1.0], True, 1, Old) == []
    assert x[3] == -1
    with pytest.raises(TypeError, match="contiguous"):
        native.module.run("max_abs", [x[::2]], [], [], False, 1, Old)


@every_backend
def test_what_a_kernel_judges_is_a_bool(framework):
    ops = get_ops(framework, native=True)
    good, bad = array(ops, [1.0, 2.0], "float32"), array(ops, [1.0, np.inf], "float32")
    assert (ops.finite(good), ops.finite(bad)) == (True, False)
    for y, finite in ((good, True), (bad, False)):
        total, found = ops.finite_sum(good, 1, y, 1)
        assert found is finite
        assert ops.length(total) == 2


def test_arrays_of_numpy_and_of_torch_are_told_apart():
    torch = pytest.importorskip("torch")
    x, tensor = np.zeros(3, np.float32), torch.zeros(3)
    with pytest.raises(TypeError, match=r"expected a NumPy array of .*, received .*Tensor"):
        get_ops("numpy", native=True).max_abs(tensor)
    with pytest.raises(TypeError, match=r"expected a PyTorch tensor of .*, received .*ndarray"):
        get_ops("torch", native=True).max_abs(x)
    with pytest.raises(TypeError, match=r"received another .*numpy.ndarray"):
        binary_sum(get_ops("torch", native=True), [np.zeros(2, np.uint8)], [torch.zeros(2)], 10)
    with pytest.raises(RuntimeError, match="meta"):
        get_ops("torch", native=True).max_abs(torch.zeros(3, device="meta"))
    for cls, x in (("NumPy array", [1.0]), ("PyTorch tensor", 1.0)):
        with pytest.raises(TypeError, match=f"expected a {cls}"):
            get_ops({"NumPy array": "numpy", "PyTorch tensor": "torch"}[cls], native=True).dtype(x)
