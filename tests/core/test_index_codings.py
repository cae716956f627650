"""Codings of indices: their sizes, and that decoding restores the indices."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.config.config import make_config
from grace.core.errors import ConfigError, PayloadError
from grace.core.ops import get_ops
from grace.core.spec import Field, TensorSpec
from grace.core.wire import indices
from grace.core.wire.layout import GatherLayout
from grace.testing.harness import array, host
from tests.support.covering import rest_slow
from tests.support.registered import every_framework

SHAPES = {"a": (60, 50), "b": (33,)}


def cases(n):
    rng = np.random.default_rng(n)
    counts = sorted({0, 1, min(n, 2), n // 100, n // 8, n // 2, n})
    drawn = [np.sort(rng.choice(n, k, replace=False)) for k in counts]
    return [*drawn, np.arange(n)[-1:], np.arange(n)[:1], np.arange(n)[:: max(1, n - 1)]]


@every_framework
@pytest.mark.parametrize("coding", indices.CODINGS)
def test_indices_come_back(coding, framework):
    ops = get_ops(framework)
    for n in (1, 2, 9, 1000, 70000):
        for chosen in cases(n):
            given = array(ops, chosen, "int32")
            word = indices.choose(ops, given, n, coding)
            data = indices.encode(ops, given, word, n)
            assert ops.length(data) == int(indices.nbytes(ops, word, len(chosen), n))
            back = indices.decode(ops, data, word, len(chosen), n)
            assert ops.dtype(back) == "int32"
            assert host(ops, back).tolist() == chosen.tolist()


@pytest.mark.parametrize("coding", rest_slow(indices.CODINGS[:0:-1], 1))
def test_indices_come_back_in_a_graph(coding):
    """TensorFlow's graph optimizer must handle lengths that depend on the branch."""
    tf = pytest.importorskip("tensorflow")
    ops = get_ops("tensorflow")
    for n, k in ((4, 1), (64, 6), (1000, 10)):

        @tf.function(autograph=False)
        def there_and_back(given, n=n, k=k):
            given = tf.reshape(given, [k])
            word = indices.choose(ops, given, n, coding)
            return indices.decode(ops, indices.encode(ops, given, word, n), word, k, n)

        for chosen in (np.arange(k), np.arange(n)[-k:]):
            assert there_and_back(tf.constant(chosen, tf.int32)).numpy().tolist() == chosen.tolist()


def nbytes(chosen, n, coding):
    ops = get_ops("numpy")
    return int(indices.nbytes(ops, indices.choose(ops, np.array(chosen, np.int32), n, coding), len(chosen), n))


def test_sizes_are_those_of_the_formulas():
    chosen = [3, 4, 10, 500, 999]  # gaps 3, 0, 5, 489, 498: 9 bits
    # Golomb: the mean gap is 199, so 7 low bits in as many bytes, and 5 + 3 + 3 bits in unary.
    assert [nbytes(chosen, 1000, coding) for coding in indices.CODINGS] == [20, 9 * 1, 7 + 2, 125, 9]
    assert nbytes(range(1000), 1000, "delta") == 0, "no gap, no bit"
    assert nbytes([], 1000, "smallest") == 0
    every_second = range(0, 10000, 2)
    assert [nbytes(every_second, 10000, coding) for coding in indices.CODINGS] == [20000, 625, 1250, 1250, 625]
    rng = np.random.default_rng(0)
    half = np.flatnonzero(rng.random(10000) < 0.5)
    assert nbytes(half, 10000, "smallest") == nbytes(half, 10000, "bitmap") == 1250
    far = [0, 2**30]
    assert nbytes(far, 2**30 + 1, "smallest") == nbytes(far, 2**30 + 1, "int32") == 8


@pytest.mark.parametrize("share", [1 / 64, 0.1, 0.01, 0.001])
def test_golomb_is_near_the_entropy(share):
    """Golomb, 1966; Rice, 1979: for gaps of independent choices, a power of two loses little."""
    n = 1_000_000
    chosen = np.flatnonzero(np.random.default_rng(0).random(n) < share)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    bits = 8 * nbytes(chosen, n, "golomb") / len(chosen)
    assert entropy < bits < 1.02 * entropy
    assert nbytes(chosen, n, "smallest") == nbytes(chosen, n, "golomb") < nbytes(chosen, n, "delta")


@every_framework
@pytest.mark.parametrize("native", [False, True])
def test_a_damaged_unary_part_is_refused(framework, native):
    ops, n = get_ops(framework, native=native), 1000
    given = array(ops, np.arange(0, n, 50), "int32")
    word = indices.choose(ops, given, n, "golomb")
    data = host(ops, indices.encode(ops, given, word, n))
    # Too few ends, and too many.
    for bits in (0, 255):
        damaged = data.copy()
        damaged[-2] = bits
        with pytest.raises(PayloadError, match="the payload is damaged"):
            indices.decode(ops, array(ops, damaged, "uint8"), word, 20, n)


@every_framework
def test_layout_with_coded_indices(framework):
    """Coded fields of static and of run-time length lie between others; several ranks, some of them empty."""
    ops = get_ops(framework)
    specs = [TensorSpec("a", (1000,)), TensorSpec("b", (77,)), TensorSpec("c", (5,))]
    fields = [
        (Field("values", "float32", "kept"), Field("indices", "int32", "kept", below=1000, coding="smallest")),
        (Field("values", "float32", 7), Field("indices", "int32", 7, below=77, coding="delta")),
        (Field("codes", "uint8", 3), Field("bytes", "uint8", "some")),
    ]
    layout = GatherLayout(specs, fields, [True, False, True])
    rng = np.random.default_rng(0)
    sent = []
    for kept, some in ((0, 5), (13, 0), (900, 2)):
        picked = [np.sort(rng.choice(n, k, replace=False)) for n, k in ((1000, kept), (77, 7))]
        sent.append(
            [
                {"values": rng.standard_normal(kept), "indices": picked[0]},
                {"values": rng.standard_normal(7), "indices": picked[1]},
                {"codes": np.arange(3), "bytes": np.arange(some)},
            ]
        )
    payloads = [
        [{f.name: array(ops, mine[f.name], f.dtype) for f in tensor} for mine, tensor in zip(rank, fields, strict=True)]
        for rank in sent
    ]
    buffers = [layout.encode(ops, rank, [False, False, r == 1], 9) for r, rank in enumerate(payloads)]
    assert all(ops.length(buffer) % 16 == 0 for buffer in buffers)
    received = layout.decode(ops, ops.concat(buffers), 3, 9)
    assert all(bool(condition) for condition in received.in_step)
    assert [[int(flag) for flag in flags] for flags in received.flags] == [[0, 0, 0], [], [0, 1, 0]]
    for i, tensor in enumerate(fields):
        for rank in range(3):
            for f in tensor:
                expected, got = (host(ops, p[f.name]) for p in (payloads[rank][i], received.payloads[i][rank]))
                assert np.array_equal(expected, got), (rank, f)


@pytest.mark.parametrize("coding", indices.CODINGS[1:])
@pytest.mark.parametrize("name", ["topk", "threshold", "dgc", "hardthreshold"])
def test_training_is_the_same_with_fewer_bytes(name, coding):
    config = {"compressor": name, "default_rules": False, **({"threshold": 1.5} if "threshold" in name else {})}
    sims = [grace.Simulation(2, SHAPES, {**config, "index_coding": c}) for c in ("int32", coding)]
    for step in range(4):
        rng = np.random.default_rng(step)
        drawn = [{n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()} for _ in "xy"]
        merged = [sim.step(drawn)[0] for sim in sims]
        assert all(np.array_equal(merged[0][n], merged[1][n]) for n in "ab")
        stats = [sim.runs[0].stats() for sim in sims]
        assert stats[1]["tensors"]["a"]["wire_bytes"] <= stats[0]["tensors"]["a"]["wire_bytes"] or coding == "bitmap"
    if coding == "smallest":
        assert stats[1]["wire_bytes"] < stats[0]["wire_bytes"]
    assert (sims[1].plan.assignments[0].wire_bytes, sims[1].plan.assignments[1].wire_bytes) == (None, None)


def test_broadcast_keeps_its_fixed_size():
    config = make_config({"compressor": "topk", "communicator": "broadcast", "index_coding": "smallest"})
    sim = grace.Simulation(2, {"a": (60, 50)}, config)
    assert sim.plan.assignments[0].wire_bytes == 30 * 8


def test_unknown_codings_are_refused():
    with pytest.raises(ConfigError, match="smallest"):
        make_config({"compressor": "topk", "index_coding": "smalest"})
