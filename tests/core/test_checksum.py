"""With `checksum = true` a damaged buffer is refused whatever is damaged, and the error names its rank."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.errors import PayloadError
from grace.core.ops import get_ops
from grace.core.session.simulation import poll_all
from grace.core.spec import Field, TensorSpec
from grace.core.wire.checksum import checksum
from grace.core.wire.layout import GatherLayout
from grace.testing.harness import array, host
from tests.support.registered import BACKENDS, every_framework, ops_of

SPEC = TensorSpec("a", (300,))
FIELDS = [
    (Field("values", "float32", "kept"), Field("indices", "int32", "kept", below=300, coding="delta")),
    (Field("wide", "float64", 3), Field("codes", "uint8", 5)),
]
TENSORS = {"w": (40, 50), "v": (30, 40), "bias": (40,)}


def draw(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8)


def of(data):
    return int(checksum(get_ops("numpy"), data)[0])


def buffers(ops, layout, ranks=2):
    """Return a good buffer per rank; they differ."""
    found = []
    for rank in range(ranks):
        indices = np.arange(0, 290, 7 + rank)
        sent = {"values": array(ops, indices / 3, "float32"), "indices": array(ops, indices, "int32")}
        rest = {"wide": array(ops, [1.0, rank, 2.0], "float64"), "codes": array(ops, range(5), "uint8")}
        found.append(layout.encode(ops, [sent, rest], [False, rank == 1], 9))
    return found


def test_every_backend_gives_the_stored_numbers():
    """The numbers are part of the wire format."""
    lengths = {
        4: 4409700655188709681,
        16: -6786422554197615113,
        4096: -7956240350679867125,
        4104: -3144977331070528434,
        12_296: -599625300648813958,
    }
    data = draw(max(lengths))
    for backend in BACKENDS:
        ops = ops_of(backend)
        found = {n: int(checksum(ops, array(ops, data[:n], "uint8"))[0]) for n in lengths}
        assert found == lengths, backend


def test_a_graph_gives_the_same_numbers():
    tf = pytest.importorskip("tensorflow")
    ops = get_ops("tensorflow")
    graph = tf.function(lambda x: checksum(ops, x), autograph=False, input_signature=[tf.TensorSpec([None], tf.uint8)])
    for n in (4, 4096, 12_296):
        assert int(graph(tf.constant(draw(n)))[0]) == of(draw(n))


@pytest.mark.parametrize("n", [16, 4096, 8208])
def test_every_bit_counts(n):
    data, seen = draw(n), set()
    for position in range(0, n, max(1, n // 512)):
        for bit in range(8):
            data[position] ^= 1 << bit
            seen.add(of(data))
            data[position] ^= 1 << bit
    assert len(seen) == 8 * len(range(0, n, max(1, n // 512)))
    assert of(data) not in seen


@pytest.mark.parametrize("change", ["swap words", "swap rows", "two signs", "all signs", "shift", "zeros", "ones"])
def test_other_damage_counts(change):
    words = draw(3 * 4096 + 64).view(np.int32)
    before, other = of(words.view(np.uint8)), words.copy()
    rows = other[: 3 * 1024].reshape(3, 1024)
    if change == "swap words":
        rows[0, [5, 6]] = rows[0, [6, 5]]
    elif change == "swap rows":
        rows[[0, 2]] = rows[[2, 0]]
    elif change == "two signs":
        rows[0, 3] ^= -(2**31)
        rows[1, 3] ^= -(2**31)
    elif change == "all signs":
        other ^= -(2**31)
    elif change == "shift":
        other[:] = np.roll(other, 1)
    else:
        other[100:200] = 0 if change == "zeros" else -1
    assert of(other.view(np.uint8)) != before


@every_framework
def test_what_was_written_is_read(framework):
    ops = get_ops(framework)
    plain, layout = (GatherLayout([SPEC, SPEC], FIELDS, [False, True], checksum=c) for c in (False, True))
    one, two = plain.decode(ops, ops.concat(buffers(ops, plain)), 2, 9), None
    two = layout.decode(ops, ops.concat(buffers(ops, layout)), 2, 9)
    for a, b in zip(one.payloads, two.payloads, strict=True):
        for x, y in zip(a, b, strict=True):
            assert {k: host(ops, v).tolist() for k, v in x.items()} == {k: host(ops, v).tolist() for k, v in y.items()}
    assert [bool(flag) for flag in two.flags[1]] == [False, True]
    assert all(map(bool, two.in_step))


def test_it_takes_eight_bytes_and_leaves_fields_aligned():
    ops, plain = get_ops("numpy"), GatherLayout([SPEC], FIELDS[1:], [False])
    layout = GatherLayout([SPEC], FIELDS[1:], [False], checksum=True)
    # 24 + 5 bytes of fields and 4 of the stamp, then padding to 16.
    assert (plain.nbytes, layout.nbytes) == (48, 48)
    buffer = layout.encode(ops, [{"wide": np.ones(3), "codes": np.zeros(5, np.uint8)}], [False], 9)
    assert buffer[:8].view(np.int64)[0] == of(buffer[8:])
    assert buffer[8:32].view(np.float64).tolist() == [1.0] * 3


@every_framework
@pytest.mark.parametrize("rank", [0, 1])
def test_every_damaged_byte_is_refused_and_its_rank_is_named(framework, rank):
    ops, layout = get_ops(framework), GatherLayout([SPEC, SPEC], FIELDS, [False, True], checksum=True)
    good = [host(ops, b) for b in buffers(ops, layout)]
    start, data = len(good[0]) * rank, np.concatenate(good)
    step = 1 if framework == "numpy" else 11
    for position in range(start, start + len(good[rank]), step):
        bad = data.copy()
        bad[position] ^= 1 << (position % 8)
        with pytest.raises(PayloadError, match=rf"^wire buffer of rank {rank}: expected "):
            layout.decode(ops, array(ops, bad, "uint8"), 2, 9)


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_another_length_is_refused(change):
    ops, layout = get_ops("numpy"), GatherLayout([SPEC, SPEC], FIELDS, [False, True], checksum=True)
    data = np.concatenate(buffers(ops, layout))
    data = data[:-16] if change == "shorter" else np.concatenate([data, np.zeros(16, np.uint8)])
    with pytest.raises(PayloadError, match="wire buffer of rank 1"):
        layout.decode(ops, data, 2, 9)


def test_a_graph_refuses_and_names_the_rank():
    tf = pytest.importorskip("tensorflow")
    ops, layout = get_ops("tensorflow"), GatherLayout([SPEC, SPEC], FIELDS, [False, True], checksum=True)

    def decode(data):
        return layout.decode(ops, data, 2, 9).payloads[0][1]["values"]

    graph = tf.function(decode, autograph=False, input_signature=[tf.TensorSpec([None], tf.uint8)])
    good = np.concatenate([host(ops, b) for b in buffers(ops, layout)])
    assert graph(tf.constant(good)).shape[0] is not None
    bad = good.copy()
    bad[-40] ^= 4
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"PayloadError: wire buffer of rank 1: .*checksum"):
        graph(tf.constant(bad))


def damaged_step(**options):
    """Let two ranks step. A bit of every value that rank 1 sends changes on the way."""
    sim = grace.Simulation(2, TENSORS, {"compressor": "topk", "compress_ratio": 0.1, **options})
    rng = np.random.default_rng(0)
    gradients = [{n: rng.standard_normal(s).astype(np.float32) for n, s in TENSORS.items()} for _ in range(2)]
    for run, mine in zip(sim.runs, gradients, strict=True):
        for name, gradient in mine.items():
            run.current.ready(name, gradient)
    for waiting in sim.network.buffers.values():
        (buffer,) = waiting[1]
        if buffer.dtype == np.uint8:
            buffer = buffer.copy()
            buffer[-100] ^= 1
            waiting[1] = (buffer,)
    poll_all(sim.runs)
    return [run.finish() for run in sim.runs]


def test_a_damaged_value_stops_the_step():
    assert set(damaged_step()[0]) == set(TENSORS), "without a checksum nothing is noticed"
    with pytest.raises(PayloadError, match=r"^wire buffer of rank 1: expected a buffer that gives the checksum"):
        damaged_step(checksum=True)


def test_the_report_lists_what_is_not_covered():
    plan = grace.Simulation(2, TENSORS, {"compressor": "topk", "checksum": True}).plan
    assert "warning: checksum = true does not cover what is summed on the way: 1 of 3 tensors (bias)" in plan.report()
    plan = grace.Simulation(2, TENSORS, {"compressor": "powersgd", "checksum": True, "default_rules": False}).plan
    assert "3 of 3 tensors (w, v, bias)" in plan.report()
    assert grace.Simulation(2, TENSORS, {"compressor": "topk"}).plan.warnings == ()
    all_covered = {"compressor": "topk", "checksum": True, "default_rules": False}
    assert grace.Simulation(2, TENSORS, all_covered).plan.warnings == ()


def test_ranks_with_and_without_it_are_told():
    """The descriptions that ranks compare contain the configuration."""
    one, other = (grace.make_config(compressor="topk", checksum=c).to_dict() for c in (False, True))
    assert {key for key in one if one[key] != other[key]} == {"checksum"}
