"""Fields in a buffer are aligned, without gaps, of the announced size, and can be read back from all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import PayloadError
from grace.core.ops import get_ops
from grace.core.spec import ITEMSIZE, Field, TensorSpec
from grace.core.wire.layout import GatherLayout, SumLayout, payload_bytes
from grace.testing.harness import array, host, same
from tests.support.registered import every_framework

SPECS = [TensorSpec(name, (10,)) for name in ("a", "b", "c")]
FIXED = (
    (Field("scale", "float32", 1), Field("codes", "uint8", 13), Field("home", "int32", 5, wire=False)),
    (Field("half", "float16", 3), Field("wide", "float64", 2), Field("brain", "bfloat16", 1)),
    (Field("bits", "uint8", 0), Field("index", "int32", 4), Field("small", "int8", 3), Field("short", "int16", 1)),
)
RAGGED = (
    (Field("values", "float32", "kept"), Field("indices", "int32", "kept")),
    (Field("scale", "float32", 1), Field("codes", "uint8", "n"), Field("wide", "float64", "m")),
    (Field("bits", "uint8", 3),),
)


def payload(ops, fields, lengths, seed):
    rng = np.random.default_rng(seed)
    return {f.name: array(ops, rng.integers(0, 100, lengths.get(f.length, f.length)), f.dtype) for f in fields}


def lengths_of(rank, tensor):
    """Return run-time lengths that differ between ranks and tensors. Rank 1 selects nothing."""
    return {"kept": 3 * rank * (rank - 1), "n": 5 * tensor + rank, "m": 2 - rank}


@every_framework
@pytest.mark.parametrize("fields", [FIXED, RAGGED], ids=["fixed", "ragged"])
@pytest.mark.parametrize("guarded", [(True, True, True), (False, True, False), (False, False, False)])
def test_what_was_written_is_read(framework, fields, guarded):
    ops = get_ops(framework)
    layout = GatherLayout(SPECS, fields, guarded)
    ranks = 3
    sent = [[payload(ops, f, lengths_of(r, i), 10 * r + i) for i, f in enumerate(fields)] for r in range(ranks)]
    buffers = [layout.encode(ops, sent[rank], [rank == 2, False, rank == 0], 5) for rank in range(ranks)]
    received, flags, in_step = layout.decode(ops, ops.concat(buffers), ranks, 5)
    assert [bool(condition) for condition in in_step] == [True] * ranks
    for i, tensor_fields in enumerate(fields):
        for rank in range(ranks):
            assert set(received[i][rank]) == {f.name for f in tensor_fields if f.wire}
            for f in tensor_fields:
                if f.wire:
                    assert same(host(ops, received[i][rank][f.name]), host(ops, sent[rank][i][f.name])), f
    expected = [[False, False, True], [False, False, False], [True, False, False]]
    for i, guard in enumerate(guarded):
        assert [bool(flag) for flag in flags[i]] == (expected[i] if guard else [])


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_flags_in_main_memory_are_bools(framework):
    """Operations on arrays of one element would take longer than the kernels of a small tensor."""
    pytest.importorskip(framework)
    ops = get_ops(framework)
    fields = [(Field("values", "float32", 3),)] * 2
    sent = [payload(ops, own, {}, i) for i, own in enumerate(fields)]
    gathered = GatherLayout(SPECS[:2], fields, (True, True))
    received = gathered.decode(ops, gathered.encode(ops, sent, [False, True], 5), 1, 5)
    assert (received.flags, received.in_step) == ([[False], [True]], [True])
    assert all(isinstance(condition, bool) for flags in (*received.flags, received.in_step) for condition in flags)
    summed = SumLayout(SPECS[:2], fields, (True, True))
    buffers, lengths = summed.encode(ops, sent, [False, True], 5, 1)
    flags = summed.decode(ops, buffers, 1, lengths).flags
    assert flags == [[False], [True]]
    assert all(isinstance(flag, bool) for of_unit in flags for flag in of_unit)


def test_size_is_known_before_the_first_step():
    ops = get_ops("numpy")
    layout = GatherLayout(SPECS, FIXED, (True, False, True))
    # 4 + 13; 6 + 16 + 2; 16 + 3 + 2 bytes of fields, 4 of the stamp, 2 flags: 68, padded to 16.
    assert layout.counts == []
    assert layout.nbytes == 80
    buffer = layout.encode(ops, [payload(ops, f, {}, 0) for f in FIXED], [False] * 3, 0)
    assert (buffer.dtype, buffer.size) == (np.uint8, 80)
    assert GatherLayout(SPECS[:1], [(Field("x", "uint8", 1),)], [False]).nbytes == 16


def test_a_rank_that_selects_nothing_sends_a_header_only():
    ops = get_ops("numpy")
    layout = GatherLayout(SPECS[:1], RAGGED[:1], [True])
    buffers = [layout.encode(ops, [payload(ops, RAGGED[0], {"kept": n}, 0)], [False], 0) for n in (0, 1, 100)]
    # One count, the stamp and one flag, padded. Then 8 bytes per entry.
    assert [b.size for b in buffers] == [16, 32, 16 * -(-(16 + 800) // 16)]
    assert layout.nbytes == 16
    assert layout.counts == [(0, "kept")]


def test_format_of_a_fixed_buffer():
    """The exact bytes: the widest fields first, with the stamp, then flags, then zeros."""
    ops = get_ops("numpy")
    fields = ((Field("codes", "uint8", 3), Field("scale", "float32", 1)),)
    layout = GatherLayout(SPECS[:1], fields, [True])
    sent = {"codes": np.array([1, 2, 3], np.uint8), "scale": np.array([1.0], np.float32)}
    stamp = [2, 1, 0, 0]
    assert layout.encode(ops, [sent], [True], 258).tolist() == [0, 0, 128, 63, *stamp, 1, 2, 3, 1] + [0] * 4


def test_format_of_a_ragged_buffer():
    """The order is: wide fields, counts and stamp, flags, padding to 8, run-time fields, padding to 16."""
    ops = get_ops("numpy")
    layout = GatherLayout(SPECS[:1], RAGGED[:1], [True])
    sent = {"values": np.array([1.0], np.float32), "indices": np.array([7], np.int32)}
    expected = [1, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0] + [0, 0, 128, 63, 7, 0, 0, 0] + [0] * 8
    assert layout.encode(ops, [sent], [True], 9).tolist() == expected


@pytest.mark.parametrize("fields", [FIXED, RAGGED], ids=["fixed", "ragged"])
def test_every_field_is_aligned_to_its_width(fields):
    """A view of the buffer in the field's dtype must be possible on every framework and device."""
    ops = get_ops("numpy")
    layout = GatherLayout(SPECS, fields, [True] * 3)
    buffers = [
        layout.encode(ops, [payload(ops, f, lengths_of(rank, i), i) for i, f in enumerate(fields)], [False] * 3, 0)
        for rank in range(3)
    ]
    assert all(b.size % 16 == 0 for b in buffers)
    data = np.concatenate(buffers)
    base = data.__array_interface__["data"][0]
    received = layout.decode(ops, data, 3, 0).payloads
    for i, tensor_fields in enumerate(fields):
        for rank in range(3):
            for f in tensor_fields:
                if f.wire and received[i][rank][f.name].size:
                    offset = received[i][rank][f.name].__array_interface__["data"][0] - base
                    assert offset % ITEMSIZE[f.dtype] == 0, (f, offset)


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_ranks_at_different_steps_are_noticed(ranks):
    """Any one rank that is ahead by one step is noticed, and equal steps are not."""
    ops, fields = get_ops("numpy"), [(Field("x", "float32", 1),)]
    gather, total = GatherLayout(SPECS[:1], fields, [True]), SumLayout(SPECS[:1], fields, [True])
    sent = [{"x": np.ones(1, np.float32)}]
    for number in (0, 1, 2**20, 2**31 - 1, 2**31, 2**40):
        for odd in (None, 0, ranks - 1):
            steps = [number + (rank == odd) for rank in range(ranks)]
            data = np.concatenate([gather.encode(ops, sent, [False], n) for n in steps])
            in_step = [bool(c) for c in gather.decode(ops, data, ranks, number).in_step]
            assert in_step == [rank != odd for rank in range(ranks)]
            buffers = [total.encode(ops, sent, [False], n, ranks)[0]["float32"] for n in steps]
            summed = {"float32": np.sum(buffers, axis=0, dtype=np.float32)}
            assert [bool(c) for c in total.decode(ops, summed, ranks, {}).in_step] == [odd is None]


@pytest.mark.parametrize("ranks", [4, 256])
def test_steps_of_any_distance_are_told_apart_in_sums(ranks):
    layout, ops = SumLayout(SPECS[:1], [(Field("x", "float32", 0),)], [True]), get_ops("numpy")
    sent = [{"x": np.ones(0, np.float32)}]

    def stamp(step):
        return layout.encode(ops, sent, [False], step, ranks)[0]["float32"].tobytes()

    mine = stamp(7)
    assert [distance for distance in range(1, 100_001) if stamp(7 + distance) == mine] == []


@every_framework
def test_sums_travel_in_one_buffer_per_dtype(framework):
    ops = get_ops(framework)
    fields = (
        (Field("values", "float32", 3), Field("home", "int32", 2, wire=False)),
        (Field("half", "float16", 2), Field("by step", "float32", "width")),
        (Field("more", "float32", 1),),
    )
    layout = SumLayout(SPECS, fields, (True, True, False))
    sent = [payload(ops, f, {"width": 5}, i) for i, f in enumerate(fields)]
    buffers, lengths = layout.encode(ops, sent, [True, False, True], 5, 2)
    # A run-time length, two flags, and six numbers for the step.
    assert {dtype: ops.length(b) for dtype, b in buffers.items()} == {"float32": 3 + 5 + 1 + 2 + 6, "float16": 2}
    assert layout.nbytes == 12 * 4 + 2 * 2
    doubled = {dtype: b + b for dtype, b in buffers.items()}
    received, flags, in_step = layout.decode(ops, doubled, 2, lengths)
    assert [bool(condition) for condition in in_step] == [True]
    for i, tensor_fields in enumerate(fields):
        assert len(received[i]) == 1
        for f in tensor_fields:
            if f.wire:
                assert np.array_equal(host(ops, received[i][0][f.name]), 2 * host(ops, sent[i][f.name]))
    assert [[bool(flag) for flag in mine] for mine in flags] == [[True], [False], []]


def test_payload_bytes_count_what_travels():
    assert [payload_bytes(f) for f in FIXED] == [17, 24, 21]
    assert payload_bytes(RAGGED[0]) is None


@pytest.mark.parametrize("layout", [GatherLayout, SumLayout])
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"scale": np.zeros(1, np.float64)}, r"'scale'.*float32.*float64"),
        ({"scale": np.zeros(2, np.float32)}, r"'scale'.* 1 elements.*\(2,\)"),
        ({"scale": np.zeros((1, 1), np.float32)}, r"'scale'.*flat.*\(1, 1\)"),
        ({"extra": np.zeros(1, np.float32)}, "'extra'"),
        ({"codes": None}, "announced"),
    ],
    ids=["dtype", "length", "shape", "extra field", "missing field"],
)
def test_payloads_that_are_not_what_wire_announced_are_refused(layout, wrong, told):
    ops = get_ops("numpy")
    right = {"scale": np.zeros(1, np.float32), "codes": np.zeros(3, np.float32)}
    sent = {name: value for name, value in {**right, **wrong}.items() if value is not None}
    fields = [(Field("scale", "float32", 1), Field("codes", "float32", 3))]
    more = (0,) if layout is GatherLayout else (0, 1)
    layout(SPECS[:1], fields, [True]).encode(ops, [right], [False], *more)
    with pytest.raises(PayloadError, match=told) as error:
        layout(SPECS[:1], fields, [True]).encode(ops, [sent], [False], *more)
    assert "'a'" in str(error.value), "the tensor is named"


def test_fields_that_share_a_run_time_length_must_agree():
    ops = get_ops("numpy")
    layout = GatherLayout(SPECS[:1], RAGGED[:1], [True])
    with pytest.raises(PayloadError, match="'indices'"):
        layout.encode(ops, [{"values": np.zeros(2, np.float32), "indices": np.zeros(3, np.int32)}], [False], 0)


@every_framework
@pytest.mark.parametrize("count", [-1, 3, 2**29, 2**30, 2**31 - 1])
def test_a_count_that_the_buffer_cannot_hold_is_refused(framework, count):
    """It is refused even if the number of bytes exceeds int32, in which TensorFlow counts."""
    ops = get_ops(framework)
    layout = GatherLayout(SPECS[:1], RAGGED[:1], [True])
    data = host(ops, layout.encode(ops, [payload(ops, RAGGED[0], {"kept": 2}, 0)], [False], 0)).copy()
    data[:4] = np.frombuffer(np.array([count], np.int32).tobytes(), np.uint8)

    def decode(buffer):
        return layout.decode(ops, buffer, 1, 0).payloads[0][0]["values"]

    damaged = array(ops, data, "uint8")
    with pytest.raises(PayloadError, match=r"expected .*(as many elements as its header says|lengths from 0 on)"):
        decode(damaged)
    if framework == "tensorflow":
        tf = pytest.importorskip("tensorflow")
        graph = tf.function(decode, autograph=False, input_signature=[tf.TensorSpec([None], tf.uint8)])
        with pytest.raises(tf.errors.InvalidArgumentError, match="PayloadError: wire buffer of rank 0: expected"):
            graph(damaged)
