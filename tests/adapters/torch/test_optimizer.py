"""The PyTorch adapter in real processes: every way to launch it, on 1, 2 and 4 ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support import half_precision
from tests.support.launch import SUMMED, methods, run

pytestmark = pytest.mark.distributed

ALONE = ("python", 1)
LAUNCHES = [ALONE, ("horovodrun-gloo", 2), ("mpirun", 2), ("horovodrun-gloo", 4), ("mpirun", 4)]
SEVERAL = [launch for launch in LAUNCHES if launch[1] > 1]
SCENARIOS = [
    "every_method",
    "none_and_horovod",
    "simulation",
    "units",
    "hook_order",
    "unused_parameters",
    "not_finite",
    "resume",
    "foreign_checkpoint",
    "gradient_buffers",
    "closures",
    "synchronized_twice",
    "contract_of_horovod",
    "mixed_precision",
    "accumulation",
    "reductions",
    "dtypes_and_layouts",
    "sparse_gradients",
    "overlap",
    "two_optimizers",
    "refusals",
    "statistics",
    "different_configurations",
]


@functools.cache
def _results(launcher: str, ranks: int) -> list[dict[str, Any]]:
    # One launch runs all scenarios, because starting four ranks costs more than most of them.
    several = ["partly_loaded"] if ranks > 1 else []
    return run(launcher, ranks, SCENARIOS + several + (["process_sets"] if ranks == 4 else []))


def scenario(name: str, launch: tuple[str, int]) -> list[Any]:
    """What every rank reported of a scenario; fails if one of them raised."""
    results = [rank[name] for rank in _results(*launch)]
    for rank, result in enumerate(results):
        assert "trace" not in result, f"rank {rank}: {result['trace']}"
    return results


def same(values: list[Any]) -> bool:
    """Whether all ranks report the same."""
    return all(value == values[0] for value in values)


each_launch = pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch[0]}-{launch[1]}")
several_ranks = pytest.mark.parametrize("launch", SEVERAL, ids=lambda launch: f"{launch[0]}-{launch[1]}")


@each_launch
def test_weights_are_identical_on_all_ranks_with_every_method_and_communicator(launch):
    ranks = scenario("every_method", launch)
    assert {label.split("/")[0] for label in ranks[0]} == set(methods(launch))
    for label in ranks[0]:
        assert same([rank[label]["weights"] for rank in ranks]), label
        assert ranks[0][label]["finite"], label


@each_launch
def test_reported_bytes_are_the_bytes_handed_to_collectives(launch):
    for rank in scenario("every_method", launch):
        for label, result in rank.items():
            assert result["reported"] == result["sent"], label
            if result["fixed"]:
                assert result["predicted"] == result["sent"], label


def test_horovodrun_over_mpi_works():
    ranks = run("horovodrun-mpi", 2, ["unused_parameters", "none_and_horovod"])
    assert same([rank["unused_parameters"] for rank in ranks])
    assert all(rank["none_and_horovod"]["plain"]["equal"] for rank in ranks)


@each_launch
def test_none_equals_plain_horovod(launch):
    for rank in scenario("none_and_horovod", launch):
        for label, result in rank.items():
            assert result["moved"] > 0.01, label
            # On more ranks Horovod may fuse other tensors together, which changes the order of summation.
            assert result["equal"] or (launch[1] > 2 and result["distance"] < 1e-5), label


@each_launch
def test_real_exchange_equals_the_simulated_one(launch):
    for rank in scenario("simulation", launch):
        for label, worst in rank.items():
            # Gathered payloads and 16-bit floats are added in the order of the ranks; sums of more than two others
            # depend on the algorithm. A decomposition may depend on where its operand lies in memory, seen with four
            # processes.
            inexact = (label in SUMMED - {"fp16", "bf16"} or label == "atomo") and launch[1] > 2
            assert worst <= 1e-4 * inexact, label


@pytest.mark.parametrize("launch", [("mpirun", 2), ("horovodrun-gloo", 3), ("horovodrun-gloo", 4)])
def test_halves_are_added_in_float32_and_rounded_once(launch):
    ranks = [rank["half_sums"] for rank in run(*launch, ["half_sums"])]
    half_precision.check([rank["all"] for rank in ranks])
    if launch[1] > 2:
        # Ranks 0 and 2, whose numbers within their process set are others.
        half_precision.check([rank["set"] for rank in ranks[::2]])


@each_launch
def test_every_granularity_and_communicator_keeps_the_promises(launch):
    ranks = scenario("units", launch)
    assert {label.split("/")[0] for label in ranks[0]} == {"layer", "bucket", "model"}
    assert {label.split("/")[2] for label in ranks[0]} == {"allreduce", "allgather", "broadcast"}
    for label, result in ranks[0].items():
        granularity, name, _ = label.split("/")
        for key in ("trained", "weights", "units"):
            assert same([rank[label][key] for rank in ranks]), (label, key)
        if name != "none" and name != "powersgd":
            layers = ranks[0][label.replace(granularity, "layer", 1)]["units"]
            assert {"layer": result["units"] == layers, "bucket": True, "model": result["units"] == 1}[granularity]
        for rank in ranks:
            mine = rank[label]
            assert mine["finite"] == [True, True, False, True], label
            assert mine["as simulated"], label
            assert mine["states finite"], label
            assert mine["reported"] == mine["sent"], label
            inexact = name in SUMMED and launch[1] > 2
            assert mine["worst"] <= (2e-2 if name == "fp16" else 1e-4) * inexact, label


@each_launch
def test_nothing_depends_on_the_order_of_the_hooks(launch):
    ranks = scenario("hook_order", launch)
    for label, (same_order, opposite_order) in ranks[0].items():
        assert same([rank[label] for rank in ranks])
        if launch[1] <= 2:
            assert same_order == opposite_order, label


@each_launch
def test_unused_parameters_do_not_hang_and_still_synchronise(launch):
    ranks = scenario("unused_parameters", launch)
    assert same(ranks)
    assert all(result["right moved"] for result in ranks[0].values())


@each_launch
def test_nan_and_inf_reach_all_ranks_and_no_residual(launch):
    for rank in scenario("not_finite", launch):
        assert {label.split("/")[0] for label in rank} == set(methods(launch))
        for label, result in rank.items():
            assert not result["bad tensor finite"], label
            assert result["others finite"], label
            assert result["state kept"], label
            assert result["next finite"], label


@each_launch
def test_resumed_run_is_bit_identical(launch):
    ranks = scenario("resume", launch)
    assert same(ranks)
    for label, result in ranks[0].items():
        # With more than two ranks a sum depends on where Horovod put it in a fused buffer, which differs from run to
        # run also without grace.
        summed = label in SUMMED and launch[1] > 2
        assert result["equal"] or (summed and result["distance"] < 1e-4), (label, result["distance"])


@several_ranks
def test_checkpoint_of_another_rank_loads_with_a_warning(launch):
    ranks = scenario("foreign_checkpoint", launch)
    assert ranks[0]["messages"] == []
    assert ranks[0]["residual"] > 0
    for rank in ranks[1:]:
        assert "residuals start from zero" in rank["messages"][0]
        assert rank["residual"] == 0
    for rank in ranks:
        assert rank["step"] == 3
        assert "no state of grace" in rank["without"][0]


@several_ranks
def test_checkpoint_that_only_some_ranks_load_is_noticed_by_all(launch):
    for rank in scenario("partly_loaded", launch):
        for label, error in rank.items():
            assert error.startswith("MismatchError"), (label, error)
            assert "Let every rank load" in error


@each_launch
def test_the_buffers_of_gradients_are_left_alone(launch):
    for result in scenario("gradient_buffers", launch):
        assert result["norms"] == pytest.approx([result["norms"][0]] * 3, rel=1e-6)
        assert result["size"] > 0
        assert result["lost"] < 1e-5


@each_launch
def test_closures_are_exchanged_and_lbfgs_is_refused(launch):
    ranks = scenario("closures", launch)
    assert same([rank["weights"] for rank in ranks])
    assert all(rank["equal"] for rank in ranks)
    assert "LBFGS" in ranks[0]["refused"]


@each_launch
def test_a_second_synchronize_exchanges_nothing(launch):
    ranks = scenario("synchronized_twice", launch)
    assert same(ranks)
    once, twice = ranks[0]["weights"]
    assert once == twice
    assert "load_state_dict() was called after backward()" in ranks[0]["refused"]


@each_launch
def test_contract_of_horovod_is_kept(launch):
    ranks = scenario("contract_of_horovod", launch)
    assert same(ranks)
    result = ranks[0]
    assert result["instance"]
    assert result["lr"] == 0.005
    assert result["zeroed"]
    assert result["cleared"]
    assert "zero_grad() was called after backward()" in result["early"]


@each_launch
def test_loss_scaler_skips_the_same_step_on_all_ranks_and_no_residual_moves(launch):
    ranks = scenario("mixed_precision", launch)
    assert same(ranks)
    assert [step["moved"] for step in ranks[0]["history"]] == [True, False, True]
    assert [step["residual moved"] for step in ranks[0]["history"]] == [True, False, True]
    assert [step["scale"] for step in ranks[0]["history"]] == [64.0, 32.0, 32.0]


@each_launch
def test_backward_passes_per_step_accumulate(launch):
    ranks = scenario("accumulation", launch)
    assert same([rank["weights"] for rank in ranks])
    assert all(rank["distance"] < 1e-9 for rank in ranks)


@each_launch
def test_sum_and_predivision(launch):
    for result in scenario("reductions", launch):
        assert result["size"] > 0
        assert result["sum"] <= 1e-6
        # Dense tensors go through Horovod, whose scaling by powers of two is exact.
        assert result["predivide"] <= 1e-6


@each_launch
def test_dtypes_layouts_and_frozen_parameters(launch):
    ranks = scenario("dtypes_and_layouts", launch)
    for label, result in ranks[0].items():
        if "weights" in result:
            assert same([rank[label]["weights"] for rank in ranks]), label
        assert result.get("moved", True), label
        assert result.get("finite", True), label
        assert result.get("dtype", True), label
    assert ranks[0]["frozen"] == {"kept": True, "planned": False}


@each_launch
def test_sparse_gradients_work_or_are_refused_by_name(launch):
    ranks = scenario("sparse_gradients", launch)
    assert same(ranks)
    assert "tensor 'weight' has a sparse gradient" in ranks[0]["refused"]
    assert "sparse_as_dense=True" in ranks[0]["refused"]


@each_launch
def test_sending_starts_during_the_backward_pass(launch):
    for result in scenario("overlap", launch):
        (sent_by_then,) = result["before the last gradient"]
        assert sent_by_then >= result["total"] // 2


@each_launch
def test_two_optimizers_do_not_mix(launch):
    ranks = scenario("two_optimizers", launch)
    assert same(ranks)
    first, second = ranks[0]["weights"]
    assert first != second


def test_arguments_that_cannot_be_honoured_are_refused_by_name():
    (result,) = scenario("refusals", ALONE)
    assert "'compression'" in result["compression"]
    assert "'groups'" in result["groups"]
    assert "'groups'" in result["num_groups"]
    assert "'op'" in result["op"]
    assert "Did you mean 'compress_ratio'?" in result["typo"]
    assert "'backward_passes'" in result["unknown argument"]
    assert "already wrapped" in result["wrapped"]
    assert "torch.optim.Optimizer" in result["not an optimizer"]
    assert "wrap it" in result["add_param_group"]
    assert "is not registered with Horovod" in result["process set"]


@several_ranks
def test_refusals_do_not_hang_other_ranks(launch):
    assert all(all(rank.values()) for rank in scenario("refusals", launch))


@pytest.mark.parametrize("launch", [s for s in SEVERAL if s[1] == 4], ids=lambda launch: launch[0])
def test_process_sets_train_apart(launch):
    ranks = scenario("process_sets", launch)
    assert same([rank.pop("together") for rank in ranks])
    for label in ranks[0]:
        assert ranks[0][label] == ranks[2][label], label
        assert ranks[1][label] == ranks[3][label] or label == "only even", label
        assert ranks[0][label] != ranks[1][label], label


@each_launch
def test_statistics_with_norms(launch):
    for result in scenario("statistics", launch):
        assert result["cheap"] == [None, None]
        assert 0 < result["relative_error"] < 1
        assert result["residual_norm"] > 0
        for word in ("left.weight", "topk", "residual", "allgather", "bytes"):
            assert word in result["report"]


@several_ranks
def test_ranks_that_differ_are_told_at_construction(launch):
    ranks = scenario("different_configurations", launch)
    for rank, result in enumerate(ranks):
        for label, word in {"ratio": "compress_ratio", "parameters": "head", "typo": "topkk"}.items():
            assert word in result[label]["refused"], (rank, label)
            assert result[label]["seconds"] < 30
        assert result["ratio"]["refused"].startswith("MismatchError")
        assert result["agreed"]["refused"] == ""
