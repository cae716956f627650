"""Damaged payloads that once gave an error of the array library, or asked for gigabytes, now give a PayloadError."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from grace.core.config.registry import compressors
from grace.core.errors import PayloadError
from grace.core.ops import get_ops
from grace.core.spec import TensorSpec
from grace.core.wire import indices
from grace.core.wire.codings import NONE, Coding
from grace.core.wire.layout import GatherLayout
from grace.testing.harness import draw, exchange, host
from tests.support.covering import rest_slow
from tests.support.registered import BACKENDS, ops_of
from tests.support.steps import each

SPEC = TensorSpec("w", (12, 25))
# The counts in a header are in the order of the fields; the words of coded fields come next.
SKETCHML = {"name": "sketchml", "compress_ratio": 0.3}
QSGD = {"name": "qsgd", "quantum_num": 3}
DEEPREDUCE = {"name": "deepreduce", "policy": "p0", "compress_ratio": 0.1, "false_positives": 0.1}
CASES = {
    "atomo: part of a vector": ("atomo", "int32", {0: 23}, "left vectors"),
    "atomo: a vector too few": ("atomo", "int32", {0: 12}, "left vectors"),
    "atomo: no right vectors": ("atomo", "int32", {1: 0}, "left vectors"),
    "sketchml: fewer widths": (SKETCHML, "int32", {0: 20}, "keys"),
    "sketchml: another sketch": (SKETCHML, "int32", {2: 7}, "sketch"),
    "deepreduce: fewer values": (DEEPREDUCE, "int32", {0: 20}, "as many values as the filter"),
    "deepreduce: a shorter order": ({**DEEPREDUCE, "pieces": 4}, "int32", {0: 20}, "as many values as the filter"),
    # The filter is behind the stamp.
    "deepreduce: another filter": ("deepreduce", "int32", {1: 0}, "at least 3 positions"),
    "gradiveq: fewer values": ("gradiveq", "int32", {0: 299}, "299|300 values"),
    "delta: 2^31 indices": ("adaptive", "delta", {0: 2**31 - 1, 2: 1}, "at most 300 indices"),
    "delta: one index too many": ("adaptive", "delta", {0: 301, 2: 1}, "at most 300 indices"),
    "smallest: 2^31 indices": ("adaptive", "smallest", {1: 2**31 - 1, 3: 1}, "at most 300 indices"),
    "delta: bytes that wrap around": ("adaptive", "delta", {0: 300, 2: 4 * 9 + 1, 1: 300, 3: 4 * 9 + 1}, "as many"),
    "huffman: fewer bytes": (QSGD, "huffman", {0: 50}, "huffman: expected"),
    "rans: fewer bytes": (QSGD, "rans", {0: 50}, "rans: expected"),
    "rans: 2^31 bytes": ("3lc", "rans", {0: 2**31 - 1, 1: 1}, "at most 1024 bytes of .* per coded byte"),
    "bitmap: fewer bits": ({"name": "topk", "compress_ratio": 0.3}, "bitmap", None, "bitmap"),
}
every_backend = pytest.mark.parametrize("backend", [*BACKENDS, "tensorflow-reference"])


def ops_with(backend):
    if backend == "tensorflow-reference":
        pytest.importorskip("tensorflow")
        return get_ops("tensorflow", native=False)
    return ops_of(backend)


def damaged(ops, case):
    """Return a function that decodes a buffer, the good buffer, a damaged one, and the text of its error."""
    name, coding, header, text = CASES[case]
    compressor = compressors.make(name)
    fields = tuple(f._replace(coding=Coding(coding).of(f) or NONE) for f in compressor.wire(SPEC))
    layout = GatherLayout([SPEC], [fields], [True])
    ex = exchange(compressor, ops, SPEC, [draw(SPEC, 1)], step=3)
    good = bytes(host(ops, layout.encode(ops, ex.payloads, [False], 3)))
    words = np.frombuffer(good, np.int32).copy()
    if header is None:
        # The bitmap is at the end, before less than 16 bytes of padding.
        words[-8] ^= words[-8]
    else:
        for word, value in header.items():
            words[layout._counts_offset // 4 + word] = value

    def decode(buffer):
        received = layout.decode(ops, buffer, 1, 3)
        return compressor.merge(received.payloads[0], ex.sites[0])

    return decode, np.frombuffer(good, np.uint8).copy(), words.view(np.uint8), text


@each(case=list(CASES), backend=[*BACKENDS, "tensorflow-reference"])
def test_refused(case, backend):
    ops = ops_with(backend)
    decode, good, bad, text = damaged(ops, case)
    assert tuple(decode(ops.cast(good, "uint8")).shape) == (SPEC.numel,)
    with pytest.raises(PayloadError, match=text):
        decode(ops.cast(bad, "uint8"))


IN_GRAPHS = [case for case in CASES if not case.startswith("gradiveq")]


@pytest.mark.parametrize("backend", rest_slow(["tensorflow", "tensorflow-reference"], 1))
@pytest.mark.parametrize("chosen", rest_slow(IN_GRAPHS, 3))
def test_refused_in_a_graph(chosen, backend):
    """A graph runs in any order: what reads the payload must wait for the check.

    gradiveq is not checked in graphs, in which the length of its payload cannot be told.
    """
    tf = pytest.importorskip("tensorflow")
    ops = ops_with(backend)
    decode, good, bad, text = damaged(ops, chosen)
    graph = tf.function(decode, input_signature=[tf.TensorSpec([None], tf.uint8)], autograph=False)
    assert tuple(graph(tf.constant(good)).shape) == (SPEC.numel,)
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"PayloadError: .*({text})"):
            graph(tf.constant(bad))


@pytest.mark.parametrize("backend", ["numpy", "numpy-reference"])
def test_gaps_of_no_bits_take_a_multiple_of_the_memory_of_the_indices(backend):
    """Such a header needs no byte of data, however many indices it announces."""
    ops, n = ops_of(backend), 1_000_000
    word = ops.full(1, indices._DELTA, "int64")[0]
    tracemalloc.start()
    found = indices.decode(ops, ops.zeros(0, "uint8"), word, n, n)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tolist() == list(range(n))
    assert peak < 48 * n
