"""The simulated collectives behave like real ones: order of ranks, roots, and an error where real ranks would hang."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import grace
from grace.core.compressors.fp16 import FP16
from grace.core.config.registry import compressors
from grace.core.errors import ConfigError, StepError
from grace.core.ops import get_ops
from grace.core.session.simulation import SimulatedTransport
from grace.core.spec import Field, TensorSpec
from grace.testing.harness import array, host
from tests.support.registered import every_framework
from tests.support.steps import assert_same, states


@pytest.fixture
def transports(request):
    def make(framework, size=3):
        sim = grace.Simulation(size, {"w": (2,)}, {"compressor": "none"}, framework=framework)
        return get_ops(framework), [run.transport for run in sim.runs]

    return make


@every_framework
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32"])
def test_allreduce_sums_and_compares_element_by_element(transports, framework, dtype):
    ops, ranks = transports(framework)
    for op, expected in (("sum", [3, 30, -60]), ("max", [2, 20, -10])):
        given = [array(ops, [rank, 10 * rank, -10 * (rank + 1)], dtype) for rank in range(3)]
        handles = [t.allreduce(x, op=op, name=op) for t, x in zip(ranks, given, strict=True)]
        for handle in handles:
            result = handle.wait()
            assert ops.dtype(result) == dtype
            assert host(ops, result).astype(int).tolist() == expected


@every_framework
def test_allgather_keeps_the_order_of_ranks_and_their_lengths(transports, framework):
    ops, ranks = transports(framework)
    handles = [t.allgather(array(ops, [t.rank] * t.rank, "uint8"), name="g") for t in reversed(ranks)]
    assert all(host(ops, handle.wait()).tolist() == [1, 2, 2] for handle in handles)


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_brings_the_buffer_of_the_root(transports, root):
    ops, ranks = transports("numpy")
    handles = [t.broadcast(array(ops, [t.rank], "int32"), root=root, name="b") for t in ranks]
    assert all(handle.wait().tolist() == [root] for handle in handles)


def test_collectives_are_matched_by_name():
    """Ranks may start collectives in any order, as gradients become ready."""
    sim = grace.Simulation(2, {"w": (2,)}, {"compressor": "none"})
    a, b = (run.transport for run in sim.runs)
    x, y = np.float32([1]), np.float32([10])
    handles = [a.allreduce(x, op="sum", name="x"), a.allreduce(y, op="sum", name="y")]
    handles += [b.allreduce(y, op="sum", name="y"), b.allreduce(x, op="sum", name="x")]
    assert [float(handle.wait()[0]) for handle in handles] == [2, 20, 20, 2]
    again = [t.allreduce(x, op="sum", name="x") for t in (a, b)]
    assert [float(handle.wait()[0]) for handle in again] == [2, 2], "a name is free again once all ranks are served"


def test_a_collective_started_twice_or_by_some_only_is_an_error():
    sim = grace.Simulation(2, {"w": (2,)}, {"compressor": "none"})
    transport = sim.runs[0].transport
    assert isinstance(transport, SimulatedTransport)
    handle = transport.allgather(np.zeros(1, np.uint8), name="g")
    with pytest.raises(StepError, match="rank 0 started the collective 'g' twice"):
        transport.allgather(np.zeros(1, np.uint8), name="g")
    with pytest.raises(StepError, match=r"would hang: ranks \[1\]"):
        handle.wait()


@pytest.mark.parametrize("fails", ["missing", "finish"])
def test_a_step_that_fails_leaves_all_states_as_they_were(fails, monkeypatch):
    """The first bucket is complete when the step fails: its memories are committed, or all of rank 0's states are."""
    shapes, topk = {"w": (40, 30), "v": (30, 20)}, {"compressor": "topk", "granularity": "layer", "bucket_bytes": 8}
    sim, twin = (grace.Simulation(2, shapes, topk, default_rules=False) for _ in "ab")
    rngs = [np.random.default_rng(rank) for rank in range(2)]
    given = [{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for rng in rngs]
    assert len(sim.plan.buckets) == 2
    sim.step(given)
    twin.step(given)
    with monkeypatch.context() as patched:
        if fails == "finish":
            patched.setattr(sim.runs[1].current, "finish", lambda: 1 / 0)
        with pytest.raises(StepError if fails == "missing" else ZeroDivisionError):
            sim.step([{"w": mine["w"]} for mine in given] if fails == "missing" else given)
    assert_same(states(sim), states(twin))
    for _ in range(2):
        assert_same(sim.step(given), twin.step(given))
    assert_same(states(sim), states(twin))


def test_specs_may_be_given_whole():
    sim = grace.Simulation(2, [TensorSpec("w", (3,), "float64")], {"compressor": "none"})
    merged = sim.step([{"w": np.arange(3.0)} for _ in range(2)])
    assert merged[1]["w"].dtype == np.float64
    assert merged[1]["w"].tolist() == [0, 1, 2]


@dataclass(frozen=True)
class HalfAndWide(FP16):
    """A compressor that sends 16-bit numbers and their largest magnitude in full precision."""

    def wire(self, spec):
        return (*super().wire(spec), Field("largest", spec.work_dtype, 1))

    def compress(self, x, at):
        return {**super().compress(x, at), "largest": at.ops.reshape(at.ops.max_abs(x), (1,))}

    def decompress(self, payload, at):
        return at.ops.cast(payload["values"], at.spec.work_dtype) * 0 + payload["largest"]


def test_all_of_a_payload_with_16_bit_fields_is_a_mean(monkeypatch):
    monkeypatch.setitem(compressors._classes, "half and wide", HalfAndWide)
    for average, expected in ((True, 2.5), (False, 10.0)):
        sim = grace.Simulation(4, {"w": (3,)}, {"compressor": HalfAndWide(), "default_rules": False}, average=average)
        merged = sim.step([{"w": np.full(3, rank + 1, np.float32)} for rank in range(4)])
        assert merged[0]["w"].tolist() == [expected] * 3


def test_a_misspelled_argument_is_told_with_the_nearest_one():
    shapes, topk = {"w": (2,)}, {"compressor": "topk"}
    with pytest.raises(ConfigError, match=r"Simulation: there is no argument 'avrage'\. Did you mean 'average'"):
        grace.Simulation(2, shapes, topk, avrage=False)
    with pytest.raises(ConfigError, match="Did you mean 'compress_ratio'"):
        grace.Simulation(2, shapes, topk, compress_rate=0.1)
    assert grace.Simulation(2, shapes, topk, compress_ratio=0.1).config.method.compressor.compress_ratio == 0.1
