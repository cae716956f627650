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
    assert chosen(1, compressor=name)[1] == ""


@pytest.mark.parametrize(
    ("size", "options", "why"),
    [
        # 655 of 65,536 elements, 8 bytes each.
        (2, {"compressor": "topk"}, "allgather: 5,240 bytes per rank, by two_shot as many"),
        (8, {"compressor": "topk"}, "two_shot: 9,170 bytes per rank, by allgather 36,680 bytes"),
        (8, {"compressor": "sidco"}, "two_shot: about 9,170 bytes per rank, by allgather about 36,680 bytes"),
        (8, {"compressor": "variance"}, "two_shot: 1.75 payloads per rank, by allgather 7 payloads"),
        (8, {"compressor": "topk", "index_coding": "golomb"}, "two_shot: 1.75 payloads per rank, by allgather 7"),
        (2, {"compressor": "none"}, "allreduce: 262,144 bytes per rank, by allgather as many"),
        # A byte per element and the negotiated scale; three integers of the sum share a word on 2 ranks, two on 8.
        (2, {"compressor": "uniform"}, "allgather: 65,540 bytes per rank, by allreduce 87,388 bytes"),
        (8, {"compressor": "uniform"}, "allreduce: 229,383 bytes per rank, by allgather 458,759 bytes"),
    ],
)
def test_the_report_names_the_bytes_of_the_best_and_of_the_next(size, options, why):
    _, reason, plan = chosen(size, **options)
    assert reason.startswith(why)
    assert why in plan.report()


def test_the_reason_of_nodes_is_that_of_their_shards():
    name, reason, plan = chosen(8, compressor="qsgd", communicator="hierarchical", local_size=2)
    assert name == "hierarchical"
    assert reason.startswith("between nodes, two_shot: 49,536 bytes per rank, by allgather 99,072")
    assert communicators.name_of(plan.units[0].onward.communicator) == "two_shot"


@pytest.mark.parametrize("name", ["none", "fp16", "randomk", "powersgd"])
def test_what_can_be_added_is_added(name):
    assert {chosen(size, compressor=name)[0] for size in (1, 2, 8)} == {"allreduce"}


def test_a_sum_that_takes_more_bits_is_gathered_where_that_moves_less():
    """Integers of 16 bits: one of a sum takes a word. On 4 ranks both move as many bytes, and fewer payloads win."""
    for bits, gathered in ((4, ()), (8, (2,)), (16, (2, 3))):
        by = {size: chosen(size, compressor="uniform", bits=bits)[0] for size in range(2, 6)}
        assert by == {size: "allgather" if size in gathered else "allreduce" for size in by}, bits


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_empty_tensor_travels_like_the_others(size):
    specs = [*SPECS, TensorSpec("empty", (0, 4))]
    plan = make_plan(specs, grace.make_config(compressor="topk", default_rules=False), ranks=Ranks(size))
    assert len(plan.buckets) == 1


def test_gathered_and_added_integers_give_the_same_bits():
    merged = []
    for communicator in ("auto", "allreduce"):
        config = {"compressor": "uniform", "communicator": communicator, "default_rules": False}
        sim = grace.Simulation(2, SPECS, config)
        random = np.random.default_rng(0)
        for _ in range(2):
            given = [{"w": random.standard_normal((256, 256)).astype(np.float32)} for _ in range(2)]
            results = sim.step(given)
        merged.append(results[0]["w"])
    assert merged[0].tobytes() == merged[1].tobytes()


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
