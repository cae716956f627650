"""The communicator auto: what moves the fewest bytes of what delivers the mean of what the ranks have sent."""

from __future__ import annotations

import re

import numpy as np
import pytest

import grace
from grace.core.config.config import Method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.errors import ConfigError
from grace.core.methods.communicator import Communicator
from grace.core.plan.plan import make_plan
from grace.core.spec import Ranks, TensorSpec
from tests.support import registered
from tests.support.steps import simulate

SPECS = [TensorSpec("w", (256, 256))]


def chosen(size, **options):
    plan = make_plan(SPECS, grace.make_config(default_rules=False, **options), ranks=Ranks(size))
    (item,) = plan.assignments
    return communicators.name_of(item.communicator), item.reason, plan


@pytest.mark.parametrize("name", ["qsgd", "eightbit", "lpc", "kashin", "blockwise"])
def test_what_loses_little_trades_shards_from_three_ranks_on(name):
    assert [chosen(size, compressor=name)[0] for size in (1, 2, 3, 8)] == ["allgather"] * 2 + ["two_shot"] * 2
    assert chosen(1, compressor=name)[1] == ""


@pytest.mark.parametrize("name", ["topk", "efsignsgd", "terngrad", "dgc", "sidco", "sbc", "fedqcs", "sketchml"])
def test_what_loses_much_is_gathered_on_any_number_of_ranks(name):
    """A user who goes from two ranks to three gets the same method."""
    assert {chosen(size, compressor=name)[0] for size in (1, 2, 3, 4, 8)} == {"allgather"}
    assert "not by two_shot: the mean would be compressed again" in chosen(3, compressor=name)[1]


def test_the_error_of_the_method_decides_and_not_its_name():
    """The same quantizers with other numbers of bits, and the relative errors of normal values."""
    for name, option, fine, coarse in (("eden", "bits", 3, 2), ("qsgd", "quantum_num", 7, 3), ("mucsc", "bits", 4, 2)):
        by = {value: chosen(4, compressor=name, **{option: value}) for value in (fine, coarse)}
        assert (by[fine][0], by[coarse][0]) == ("two_shot", "allgather"), name
    assert chosen(4, compressor="eden", bits=2)[1].endswith("with a relative error of 0.14")


@pytest.mark.parametrize(
    ("size", "options", "why"),
    [
        # 655 of 65,536 elements, 8 bytes each.
        (2, {"compressor": "qsgd"}, "allgather: 66,048 bytes per rank, by two_shot as many"),
        (2, {"compressor": "topk"}, "allgather: 5,240 bytes per rank, by sparse_allreduce (union) at most 7,876 bytes"),
        (8, {"compressor": "qsgd"}, "two_shot: 115,584 bytes per rank, by allgather 462,336 bytes"),
        (8, {"compressor": "topk"}, "allgather: 36,680 bytes per rank, by sparse_allreduce (union) at most 41,377"),
        # Sums of more than half of the elements come back without indices.
        (8, {"compressor": "topk", "compress_ratio": 0.1}, "sparse_allreduce (union): at most 275,359 bytes per rank"),
        (
            8,
            {"compressor": "sidco"},
            "allgather: about 36,680 bytes per rank, by sparse_allreduce (union) at most about",
        ),
        (8, {"compressor": "inceptionn"}, "two_shot: 1.75 payloads per rank, by allgather 7 payloads"),
        (8, {"compressor": "topk", "index_coding": "golomb"}, "allgather: 7 payloads per rank; not by two_shot"),
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
    assert {chosen(size, compressor=name, **grace.compressors.required(name))[0] for size in (1, 2, 8)} == {"allreduce"}


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
        ({"compressor": "threshold", "threshold": 0.01}, "the mean of all ranks is smaller"),
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
    assert chosen(8, compressor="topk", communicator="two_shot")[:2] == ("two_shot", "")


def bytes_moved(config, communicator, size, rng):
    """Return the bytes that leave a rank in a step of normal values, with rings for allreduce and allgather."""
    specs = {spec.name: spec.shape for spec in SPECS}
    sim = grace.Simulation(size, specs, {**config, "communicator": communicator, "default_rules": False})
    sim.step([{"w": rng.standard_normal((256, 256)).astype(np.float32)} for _ in range(size)], lr=0.1)
    kinds = [run.stats()["collectives"] for run in sim.runs]
    ring = 2 * (size - 1) / size
    return np.mean([k["alltoall"] + (size - 1) * k["allgather"] + ring * k["allreduce"] for k in kinds])


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("name", ["qsgd", "eden", "lpc"])
def test_two_shot_moves_fewer_bytes_than_allgather(name, size):
    """Counted by the transports, with what an allgather forwards."""
    by = {c: bytes_moved({"compressor": name}, c, size, np.random.default_rng(0)) for c in ("auto", "allgather")}
    assert by["auto"] <= 1.1 * 2 / size * by["allgather"]


@pytest.mark.parametrize(("size", "ratio"), [(3, 0.3), (8, 0.1), (8, 0.3), (60, 0.01)])
def test_a_union_moves_at_most_what_is_counted(size, ratio):
    """It is taken where it surely moves less than allgather, and gives the same mean."""
    config = {"compressor": "topk", "compress_ratio": ratio}
    name, reason, _ = chosen(size, **config)
    assert name == "sparse_allreduce"
    most, gathered = (int(text.replace(",", "")) for text in re.findall(r"([\d,]+) bytes", reason))
    random = np.random.default_rng(0)
    # The header of each buffer is not counted.
    headers = 200 * size
    assert bytes_moved(config, "auto", size, random) <= most + headers
    assert bytes_moved(config, "allgather", size, random) == pytest.approx(gathered, abs=headers)
    assert most < gathered


@pytest.mark.parametrize("size", [3, 4])
def test_a_union_gives_the_mean_of_allgather(size):
    config = {"compressor": "topk", "compress_ratio": 0.4, "default_rules": False}
    sims = [grace.Simulation(size, {"w": (256, 256)}, {**config, "communicator": c}) for c in ("auto", "allgather")]
    random = np.random.default_rng(0)
    for _ in range(3):
        given = [{"w": random.standard_normal((256, 256)).astype(np.float32)} for _ in range(size)]
        ours, theirs = (sim.step(given) for sim in sims)
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine["w"], other["w"], rtol=1e-6, atol=1e-7)


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


def test_a_communicator_without_a_route_is_refused_when_the_plan_is_made():
    chosen = Method(compressors.make("topk"), memories.make("residual"), Communicator())
    with pytest.raises(ConfigError, match=r"has no route: define route\(units, ranks, checksum\)"):
        simulate(chosen, size=2)
