"""The communicator auto: what moves the fewest bytes for a method and a number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.values.config import Method
from grace.core.values.plan import make_plan
from grace.core.values.registry import communicators, compressors, memories
from grace.core.values.spec import Ranks, TensorSpec
from tests.support import registered
from tests.support.steps import simulate

SPECS = [TensorSpec("w", (256, 256))]


def chosen(size, **options):
    plan = make_plan(SPECS, grace.make_config(default_rules=False, **options), ranks=Ranks(size))
    (item,) = plan.assignments
    return communicators.name_of(item.communicator), item.reason, plan


@pytest.mark.parametrize("name", ["topk", "qsgd", "efsignsgd", "terngrad"])
def test_two_ranks_gather_and_more_trade_shards(name):
    assert [chosen(size, compressor=name)[0] for size in (1, 2, 3, 8)] == ["allgather"] * 2 + ["two_shot"] * 2
    assert chosen(2, compressor=name)[1] == ""
    assert chosen(8, compressor=name)[1] == "two_shot: 1.75 payloads per rank, by allgather 7"
    assert "two_shot: 1.75 payloads per rank" in chosen(8, compressor=name)[2].report()


@pytest.mark.parametrize("name", ["none", "fp16", "randomk", "powersgd"])
def test_what_can_be_added_is_added(name):
    assert {chosen(size, compressor=name)[:2] for size in (2, 8)} == {("allreduce", "")}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compressor": "signsgd"}, "a tie has no sign"),
        ({"compressor": "threshold"}, "the mean of all ranks is smaller"),
        ({"compressor": "atomo"}, "needs a whole tensor"),
        ({"compressor": "topk", "memory": "residual", "gradient_clipping": 1.0}, "the memory needs whole tensors"),
    ],
)
def test_what_two_shot_cannot_carry_is_gathered_and_the_report_says_why(options, reason):
    name, why, _ = chosen(8, **options)
    assert name == "allgather"
    assert reason in why


def test_the_users_word_wins():
    assert chosen(8, compressor="topk", communicator="allgather")[:2] == ("allgather", "")
    assert chosen(2, compressor="topk", communicator="two_shot")[:2] == ("two_shot", "")


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("name", ["topk", "qsgd", "efsignsgd", "dgc"])
def test_it_moves_fewer_bytes_than_allgather(name, size):
    """Counted by the transports, with what an allgather forwards."""
    moved = {}
    for communicator in ("auto", "allgather"):
        compressor = compressors.make(name)
        memory = memories.make(compressor.default_memory)
        sim = simulate(Method(compressor, memory, communicators.make(communicator)), size=size, specs=SPECS)
        rng = np.random.default_rng(0)
        sim.step([{"w": rng.standard_normal((256, 256)).astype(np.float32)} for _ in range(size)], lr=0.1)
        kinds = [engine.stats()["collectives"] for engine in sim.engines]
        moved[communicator] = np.mean([k["alltoall"] + (size - 1) * k["allgather"] for k in kinds])
    assert moved["auto"] <= 1.1 * 2 / size * moved["allgather"]


@pytest.mark.parametrize("compressor", registered.all_compressors(), ids=registered.name)
def test_absolute_methods_say_so(compressor):
    """The payload of a quarter of a gradient decodes to a quarter, except with thresholds and in votes."""
    results = []
    for factor in (1.0, 0.25):
        kind = "allreduce" if compressor.summable else "allgather"
        method = Method(compressor, memories.make("none"), communicators.make(kind))
        sim = simulate(method, size=1, specs=[TensorSpec("w", (64, 96))])
        x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32) * np.float32(factor)
        results.append(sim.step([{"w": x}])[0]["w"] / factor)
    scales = np.allclose(*results, rtol=1e-5, atol=1e-6)
    assert scales or compressor.absolute or not compressor.averages
