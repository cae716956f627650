"""The numerics of the TensorFlow adapter in real processes: every way to launch it, on 1, 2 and 4 ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from grace.core.registry import compressors
from tests.support import half_precision
from tests.support.launch import SUMMED, TENSORFLOW, run

pytestmark = pytest.mark.distributed

ALONE = ("python", 1)
# Starting, tracing and four ranks on few cores cost minutes: one launch runs all that two ranks can show, another what
# four may show otherwise, and the rest what depends on how they were started.
SCENARIOS: dict[tuple[str, int], list[str]] = {
    ALONE: ["every_compressor", "none_and_one_process"],
    ("horovodrun-gloo", 2): [
        "every_method",
        "none_and_one_process",
        "none_and_horovod",
        "simulation",
        "simulation_units",
        "constant_gradients",
        "reductions",
        "two_optimizers",
        "different_numbers_of_models",
        "hazard",
        "shapes",
        "dtypes",
        "resume",
        "resume_tape",
        "foreign_checkpoint",
        "partly_loaded",
    ],
    ("mpirun", 2): ["none_and_one_process", "none_and_horovod", "constant_gradients", "hazard"],
    ("horovodrun-gloo", 4): ["none_and_one_process", "process_sets"],
    ("mpirun", 4): [
        "every_compressor",
        "none_and_one_process",
        "none_and_horovod",
        "simulation_some",
        "simulation_units",
        "constant_gradients",
        "hazard",
        "resume_tape",
        "foreign_checkpoint",
        "partly_loaded",
        "process_sets",
    ],
}


@functools.cache
def _results(launcher: str, ranks: int) -> list[dict[str, Any]]:
    return run(launcher, ranks, SCENARIOS[launcher, ranks], worker=TENSORFLOW)


def scenario(name: str, launch: tuple[str, int]) -> list[Any]:
    """What every rank reported of a scenario; fails if one of them raised."""
    results = [rank[name] for rank in _results(*launch)]
    for rank, result in enumerate(results):
        assert "trace" not in result, f"rank {rank}: {result['trace']}"
    return results


def same(values: list[Any]) -> bool:
    """Whether all ranks report the same."""
    return all(value == values[0] for value in values)


def launches_of(*names: str) -> Any:
    """Parametrize with every launch that runs one of the scenarios, and that scenario."""
    cases = [(name, launch) for launch, chosen in SCENARIOS.items() for name in names if name in chosen]
    ids = [f"{launch[0]}-{launch[1]}" + (f"-{name}" if len(names) > 1 else "") for name, launch in cases]
    return pytest.mark.parametrize(("name", "launch"), cases, ids=ids)


@launches_of("every_method", "every_compressor")
def test_weights_are_identical_on_all_ranks_with_every_method(name, launch):
    ranks = scenario(name, launch)
    assert {label.split("/")[0] for label in ranks[0]} == set(compressors)
    for label, result in ranks[0].items():
        assert same([rank[label]["weights"] for rank in ranks]), label
        assert result["finite"], label
        assert result["moved"], label


@launches_of("every_method", "every_compressor")
def test_reported_bytes_are_the_bytes_handed_to_collectives(name, launch):
    for rank in scenario(name, launch):
        for label, result in rank.items():
            if launch[1] == 1:
                # One rank has nobody to send to; it reports what it would send.
                assert result["sent"] == 0, label
            elif label in ("fp16/allreduce", "bf16/allreduce") and launch[1] > 2:
                # Counted as one buffer, as every sum; it travels as slices and their sums.
                assert result["reported"] < result["sent"] < 2 * result["reported"], label
            else:
                assert result["sent"] == result["reported"], label
            if result["fixed"]:
                assert result["predicted"] == result["reported"], label


@launches_of("none_and_one_process")
def test_none_equals_one_process_on_the_joined_batch(name, launch):
    for rank in scenario(name, launch):
        for label, result in rank.items():
            assert result["moved"] > 0.005, label
            assert result["distance"] < 1e-6, label


@launches_of("none_and_horovod")
def test_none_equals_the_tape_of_horovod(name, launch):
    for rank in scenario(name, launch):
        for label, result in rank.items():
            assert result["size"] > 0.01, label
            # On more ranks Horovod may fuse other tensors together, which changes the order of summation.
            assert result["distance"] <= (1e-6 if launch[1] > 2 else 0.0), label


@launches_of("simulation", "simulation_some")
def test_real_exchange_equals_the_simulated_one(name, launch):
    for rank in scenario(name, launch):
        assert set(rank) == set(compressors) or name == "simulation_some"
        for label, result in rank.items():
            assert result["moved"], label
            # Gathered payloads and 16-bit floats are added in the order of the ranks; sums of more than two others
            # depend on the algorithm. Matrix products depend on the library, and NumPy has another.
            inexact = label in ("powersgd", "gradzip") or (label in SUMMED - {"fp16", "bf16"} and launch[1] > 2)
            assert result["worst"] <= 1e-4 * inexact, label


@pytest.mark.parametrize("launch", [("mpirun", 2), ("horovodrun-gloo", 3)])
def test_halves_are_added_in_float32_and_rounded_once(launch):
    ranks = [rank["half_sums"] for rank in run(*launch, ["half_sums"], worker=TENSORFLOW)]
    half_precision.check([rank["all"] for rank in ranks])
    if launch[1] > 2:
        # Ranks 0 and 2, whose numbers within their process set are others.
        half_precision.check([rank["set"] for rank in ranks[::2]])


@launches_of("simulation", "simulation_some")
def test_nan_and_inf_reach_all_ranks_and_no_residual(name, launch):
    for rank in scenario(name, launch):
        for label, result in rank.items():
            assert set(result["bad"]) == {"nan", "inf"}
            for bad in result["bad"].values():
                assert not bad["bad tensor finite"], label
                assert bad["others finite"], label
                assert bad["state kept"] or not result["guarded"], label


@launches_of("simulation_units")
def test_units_keep_the_promises(name, launch):
    """Tensors fused, cut, and as one model: as simulated, also where a gradient is not finite."""
    for rank in scenario(name, launch):
        assert {label.split("/")[0] for label in rank} == {"bucket", "model"}
        for label, result in rank.items():
            method = label.split("/")[1]
            assert result["moved"], label
            inexact = method == "powersgd" or (method in SUMMED and launch[1] > 2)
            assert result["worst"] <= (2e-2 if method == "fp16" else 1e-4) * inexact, label
            for bad in result["bad"].values():
                assert not bad["bad tensor finite"], label
                assert bad["as simulated"], label
                assert bad["state kept"] or not result["guarded"], label


@launches_of("constant_gradients")
def test_gradients_that_a_graph_knows_beforehand_are_exchanged_all_the_same(name, launch):
    ranks = scenario(name, launch)
    assert same(ranks)
    size = launch[1]
    of_even = len(range(0, size, 2)) / size
    for label, result in ranks[0].items():
        assert result["uniform"], label
        expected = [[of_even, of_even, step + (size - 1) / 2] for step in range(3)]
        assert result["merged"] == expected, label
    # Two equal tensors need two collectives of Horovod.
    assert ranks[0]["none"]["collectives"] == 3


@launches_of("reductions")
def test_sum_and_predivision(name, launch):
    for rank in scenario(name, launch):
        for label, result in rank.items():
            assert result["size"] > 0.1, label
            # A sum of more than two may come in another order.
            assert result["sum"] <= (1e-5 if launch[1] > 2 else 1e-6), label
            assert result["predivide"] <= 1e-6, label


@launches_of("process_sets")
def test_process_sets_train_apart(name, launch):
    ranks = scenario(name, launch)
    assert same([rank.pop("together") for rank in ranks])
    for label in ranks[0]:
        assert ranks[0][label] == ranks[2][label], label
        assert ranks[1][label] == ranks[3][label], label
        assert ranks[0][label] != ranks[1][label], label


@launches_of("two_optimizers")
def test_two_optimizers_and_a_tape_do_not_mix(name, launch):
    ranks = scenario(name, launch)
    assert same(ranks)
    assert len(set(ranks[0]["weights"])) == 3
    assert len(ranks[0]["collectives"]) == 3


@launches_of("different_numbers_of_models")
def test_models_built_on_some_ranks_only_matter_to_nobody_or_are_named_by_an_error(name, launch):
    ranks = scenario(name, launch)
    assert same(ranks)
    assert "Error" not in ranks[0]["named"]
    assert ranks[0]["numbered"].startswith("MismatchError")
    assert "dense/kernel" in ranks[0]["numbered"]


@launches_of("hazard")
def test_the_keras_optimizer_of_horovod_diverges_and_that_of_grace_does_not(name, launch):
    ranks = scenario(name, launch)
    assert same([rank["grace"] for rank in ranks])
    assert not same([rank["horovod"] for rank in ranks]), (
        "horovod.tensorflow.keras.DistributedOptimizer now synchronises under Keras 3: "
        "the warning about it in README.md can go, and this test with it."
    )


@launches_of("shapes")
def test_batches_of_any_size_use_one_trace_and_the_order_of_traces_does_not_matter(name, launch):
    ranks = scenario(name, launch)
    assert same(ranks)
    assert ranks[0]["traces of fit"] == 1
    assert ranks[0]["traces of steps"] == 1
    assert len(ranks[0]["collectives"]) > 1


@launches_of("dtypes")
def test_dtypes_empty_tensors_and_frozen_layers(name, launch):
    ranks = scenario(name, launch)
    assert set(compressors) < set(ranks[0])
    for label, result in ranks[0].items():
        assert same([rank[label]["merged"] for rank in ranks]), label
        assert result.get("moved", True), label
        assert result.get("finite", True), label
        assert result.get("dtypes", True), label
    assert ranks[0]["frozen"]["kept"]
    assert not ranks[0]["frozen"]["planned"]


@launches_of("resume", "resume_tape")
def test_resumed_run_is_bit_identical(name, launch):
    ranks = scenario(name, launch)
    assert same(ranks)
    for label, result in ranks[0].items():
        assert result["moved"] > 0.001, label
        # With more than two ranks a sum depends on where Horovod put it in a fused buffer.
        summed = label.split("/")[0] in SUMMED and launch[1] > 2
        assert result["equal"] or (summed and result["distance"] < 1e-4), (label, result["distance"])


@launches_of("foreign_checkpoint")
def test_checkpoint_of_another_rank_loads_with_a_message(name, launch):
    ranks = scenario(name, launch)
    assert same([rank["weights"] for rank in ranks])
    assert ranks[0]["messages"] == [[], []]
    assert ranks[0]["as with it"]
    assert not ranks[0]["as without a past"]
    for number, rank in enumerate(ranks[1:], 1):
        for messages in rank["messages"]:
            (message,) = messages
            assert f"rank 0 of {launch[1]} saved this checkpoint, and rank {number}" in message
            assert "residuals start from zero" in message
        assert rank["as without a past"]
        assert not rank["as with it"]
    assert all(rank["step"] == 4 for rank in ranks)


@launches_of("partly_loaded")
def test_checkpoint_that_only_some_ranks_load_is_noticed_by_all(name, launch):
    for rank in scenario(name, launch):
        for label, error in rank.items():
            assert "MismatchError: the ranks are not at the same step" in error, (label, error)
            assert "Let every rank load" in error, label
