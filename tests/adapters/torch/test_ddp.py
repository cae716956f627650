"""`grace.torch.register` with models in DistributedDataParallel, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.support.covering import rows
from tests.support.launch import ROOT, TORCH, Launch, command, environment
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

TWO, FOUR = (Launch(TORCH, "torchrun", ranks) for ranks in (2, 4))
both = on(TWO, FOUR)
# Models and the ways in which DDP passes their gradients; see `mixed_by_ddp`.
MIXED = {
    "dtypes": ["float32", "float32 bfloat16", "float32 float64 float16 float32"],
    "sparse": [False, True],
    "again": ["", "reentrant", "not reentrant"],
    "megabytes": [25, 0.001],
    "way": ["plain", "views", "static", "unused", "nested"],
    "method": ["none", "topk"],
}


def could_be_mixed(row):
    """Return whether plain DDP can train so."""
    reentrant = row["again"] == "reentrant" and row["way"] not in ("static", "plain", "views")
    return (
        not reentrant
        and not (row["way"] == "nested" and row["again"])
        and not (row["sparse"] and row["way"] == "views")
    )


@both
def test_a_registered_model_trains_as_with_a_wrapped_optimizer(launch):
    for rank in scenario("trained_by_ddp", launch):
        for label, result in rank.items():
            assert result["received"] == result["expected"], label


@both
def test_compressor_none_is_bit_identical_to_plain_ddp(launch):
    ranks = scenario("none_by_ddp", launch)
    assert launch.ranks == 2 or any("group [0, 2, 3]" in rank for rank in ranks)
    for rank in ranks:
        for label, weights in rank.items():
            assert same(weights), label


@both
def test_one_rank_of_each_group_says_what_is_sent(launch):
    for rank in scenario("announced_by_ddp", launch):
        assert launch.ranks == 2 or len(rank) > 1
        for group, found in rank.items():
            if not found["first"]:
                assert found["lines"] == [], group
                continue
            scheduled, before, after = found["lines"]
            size = len(json.loads(group)) or launch.ranks
            for line in found["lines"]:
                assert f" of 9 tensors, and each of {size} ranks sends " in line
                assert line.endswith(" exchange.report() lists them.")
            assert scheduled.startswith("grace: until step 7, topk compresses")
            assert before.startswith("grace: topk compresses")
            assert after.startswith("grace: from step 0, qsgd compresses")


@both
def test_buckets_of_all_kinds_are_exchanged_in_every_way_of_ddp(launch):
    tested = rows(MIXED, could_be_mixed)
    # One scenario has a time limit.
    for start in range(0, len(tested), 100):
        for rank in scenario("mixed_by_ddp", launch, tested[start : start + 100]):
            assert not [row for row in rank if row]


@pytest.mark.slow
@both
@pytest.mark.parametrize("way", ["static", "unused"])
def test_a_rank_waits_no_longer_than_its_limit_where_ddp_waits_too(launch, way):
    for rank, error in enumerate(scenario("waits_beside_ddp", launch, way)):
        # The late rank waits for those that have given up.
        assert error.startswith(f"WaitError: rank {rank} of {launch.ranks} "), error
        assert "the first step" in error


@both
def test_complex_parameters_train_as_by_plain_ddp(launch):
    for rank in scenario("complex_by_ddp", launch):
        for label, found in rank.items():
            assert found["off"] < 1e-6, label
            assert found["reasons"] == ["complex numbers stay dense"] * 4, label


@on(TWO)
def test_a_model_that_was_converted_after_it_was_registered_is_refused(launch):
    for rank in scenario("converted_by_ddp", launch):
        assert len(rank) == 6
        for label, error in rank.items():
            assert error.startswith("StepError: parameter '"), (label, error)
            expected = "' was torch.float32 on cpu when the model was registered, and is torch.bfloat16 on cpu now."
            assert expected in error, label


@both
def test_nothing_is_lost_with_accumulation_and_unused_parameters(launch):
    ranks = scenario("conserved_by_ddp", launch)
    for rank in ranks:
        for way, result in rank.items():
            assert result["worst"] < 2e-6, way
            assert result["held"] > 0, way
            assert result["applied"] == ranks[0][way]["applied"], way


@both
def test_replicas_agree_if_one_rank_does_not_use_a_parameter(launch):
    assert same(scenario("joint_by_ddp", launch))


@both
def test_ranks_with_fewer_batches_join(launch):
    ranks = scenario("joined_by_ddp", launch)
    for label in ranks[0]:
        assert same([rank[label] for rank in ranks]), label
    assert ranks[0]["none"] == ranks[0]["plain"]
    assert ranks[0]["topk"] != ranks[0]["plain"]


@on(TWO)
def test_two_models_share_a_backward_pass(launch):
    ranks = scenario("two_models_by_ddp", launch)
    assert same([value for rank in ranks for value in rank.values()])


@on(TWO)
def test_models_train_under_autocast(launch):
    ranks = scenario("autocast_by_ddp", launch)
    assert same(ranks)
    weights = {label: result["weights"] for label, result in ranks[0].items()}
    assert weights["none"] == weights["plain"] != weights["float32"]
    assert weights["topk"] != weights["none"]
    assert all(result["gradients"] == ["torch.float32"] for result in ranks[0].values())


@on(TWO)
def test_compiled_models_train_alike(launch):
    ranks = scenario("compiled_by_ddp", launch)
    assert same([value for rank in ranks for value in rank.values()])


@on(TWO, Launch(TORCH, "torchrun", 3))
def test_a_hook_that_is_there_is_wrapped(launch):
    ranks = scenario("wrapped_by_ddp", launch)
    for rank in ranks:
        assert len(rank["accumulated"]) == 20
        for label, found in rank["accumulated"].items():
            sent, dense = found["bytes"]
            assert found["lost"] < 1e-6, label
            # A float32 sum per element, though the parameters have 16 bits.
            assert dense == 4 * (60 + 2 * (216 * 40 + 40) + 1 + 410), label
            assert sent < 0.75 * dense or not label.endswith("topk"), label
            assert found["weights"] == ranks[0]["accumulated"][label]["weights"], label
            assert found["weights"] == found["plain"] or not label.endswith("none"), label
            assert found["weights"] != found["plain"] or not label.endswith("topk"), label
        assert same(rank["unchanged"])
        assert len(rank["of PyTorch"]) == 3
        for label, (plain, none, whole, difference) in rank["of PyTorch"].items():
            assert plain == none, label
            assert difference < 1e-3, (label, difference)
            assert whole == ranks[0]["of PyTorch"][label][2], label


@on(TWO)
def test_a_hook_that_cannot_be_wrapped_is_refused(launch):
    expected = {
        "waits": "the communication hook waits for its allreduce",
        "waits for its future": "the communication hook waits for its allreduce",
        "twice": "it starts several allreduces for a bucket",
        "gathers": "it starts the collective 'allgather'",
        "nothing": "it starts no allreduce",
        "maximum": "it reduces by another operation than SUM or AVG",
        "part": "it reduces 1 tensors of 1 elements for a bucket of",
        "powersgd": "it does more than to exchange the gradients of each step",
    }
    for rank in scenario("wrapped_by_ddp", launch):
        assert rank["refused"].keys() == expected.keys()
        for label, error in rank["refused"].items():
            assert error.startswith("ConfigError: grace.torch.register: the model has the communication hook '"), label
            assert f"and grace cannot wrap it: {expected[label]}" in error, label
        assert rank["later"].startswith("StepError: the communication hook waits for its allreduce")


@pytest.mark.slow
@on(Launch(TORCH, "torchrun", 3))
def test_a_model_is_found_in_what_holds_it(launch):
    for rank in scenario("held_by_wrappers", launch):
        assert len(rank["weights"]) == 7
        assert same(list(rank["weights"].values()))
        assert same(list(rank["names"].values()))
        assert "left.weight" in rank["names"]["model"]
        # The inner one is part of the outer one, whose gradients DDP passes.
        assert "0.module.left.weight" in rank["nested"]
        assert rank["several"].startswith("ConfigError: grace.torch.register: expected a model that is or holds one")
        assert "received Holder, which holds 2: one, other.inner. Register each" in rank["several"]
        assert rank["no module"].startswith("TypeError: grace.torch.register: expected a model (torch.nn.Module), rec")


@on(TWO)
def test_layers_computed_again_train_alike_and_models_are_freed(launch):
    ranks = scenario("checkpointed_by_ddp", launch)
    assert same([result["weights"] for rank in ranks for result in rank.values()])
    assert all(result["freed"] for rank in ranks for result in rank.values())


@both
def test_training_does_not_depend_on_the_loss_scale(launch):
    for rank in scenario("scaled_by_ddp", launch):
        assert rank["growing"]["scale"] == 64.0 * 2**4
        assert rank["growing"]["weights"] == rank["unscaled"]["weights"]
        assert rank["growing"]["states"] == rank["unscaled"]["states"]


@both
def test_a_step_that_the_loss_scaler_skips_changes_nothing(launch):
    ranks = scenario("scaled_by_ddp", launch)
    for label in ("overflow", "accumulated"):
        assert same([rank[label]["weights"] for rank in ranks])
        for rank in ranks:
            assert rank[label]["kept"] == [[False, False], [True, True], [False, False], [False, False]]
    for rank in ranks:
        assert rank["loaded"]
        assert rank["of some"].startswith("StepError: the GradScaler steps an optimizer of some parameters")


@both
def test_a_loss_scaler_that_was_not_passed_is_told(launch):
    for rank in scenario("scaled_by_ddp", launch):
        unused, used = rank["not passed"]
        assert unused == []
        (told,) = used
        assert "pass it as grad_scaler" in told
        assert rank["nothing to scale"] == [[], []]


@on(TWO)
def test_optimizers_memory_formats_checkpoints_and_schedules(launch):
    ranks = scenario("rare_by_ddp", launch)
    for rank in ranks:
        assert same(rank["sharded optimizer"])
        plain, channels_last = rank["memory formats"]
        assert max(abs(a - b) for a, b in zip(plain, channels_last, strict=True)) < 1e-6
        assert any(plain)
        assert same(rank["checkpoint"])
        assert same(rank["schedule"])
    assert same([rank["bfloat16"] for rank in ranks])


@on(TWO)
def test_bad_gradients_reach_all_ranks_and_failed_steps_are_dropped(launch):
    ranks = scenario("failed_by_ddp", launch)
    assert ranks[0]["failed"].startswith("ZeroDivisionError: for this test")
    assert ranks[1]["failed"].startswith("WaitError: ")
    assert same([rank["weights"] for rank in ranks])
    for rank in ranks:
        assert rank["nan"] == {"everywhere": True, "states kept": True}
        assert rank["refused"].startswith("StepError: step 3 has failed")
        assert "exchange.discard() on all ranks" in rank["refused"]
        assert rank["states kept"]


@both
def test_a_rank_that_waits_for_a_dense_reduction_says_so_and_ends(launch):
    *waiting, late = scenario("waits_by_ddp", launch)
    assert late == ""
    others = "rank 1" if launch.ranks == 2 else "one or more of the other 3 ranks"
    for rank, error in enumerate(waiting):
        assert error.startswith(
            f"WaitError: rank {rank} of {launch.ranks} has waited 1 s for {others}: step 2, the gradient of '"
        )
        assert "', which stays dense. Expected all ranks to make the same calls within 'timeout' = 1 s" in error


@on(TWO)
def test_a_parameter_that_ddp_does_not_exchange_is_refused_by_name(launch):
    ranks = scenario("unfrozen_by_ddp", launch)
    for label in ("topk", "none", "before register"):
        for rank in ranks:
            expected = "StepError: parameter 'left.weight' was frozen when the model was wrapped in Distributed"
            assert rank[label]["error"].startswith(expected), label
        assert same([rank[label]["weights"] for rank in ranks]), label
    assert [rank["ignored"] for rank in ranks] == ["", ""]


@on(TWO)
def test_frozen_parameters_that_differ_are_named(launch):
    for rank in scenario("unfrozen_by_ddp", launch):
        for label, what, step in (
            ("differing", "weights", "the first step"),
            ("differing later", "weights or shared states", "step 2"),
        ):
            expected = f"MismatchError: the {what} of rank 1 and rank 0 differ before {step}, in 'left.weight' and"
            assert rank[label].startswith(expected), label


@on(TWO)
def test_comparisons_of_replicas_wait_for_nobody_and_reach_all_ranks(launch):
    ranks = scenario("compared_by_ddp", launch)
    for rank in ranks:
        assert rank["late"] == ""
        for label in ("topk", "none"):
            expected = (
                "MismatchError: the weights or shared states of rank 1 and rank 0 differ before step 2, in 'left.we"
            )
            assert rank[label]["error"].startswith(expected), label
            # What was started in DDP's group could not be dropped.
            assert rank[label]["reduced"] == 0, label
        assert rank["steps"].startswith("MismatchError: ")
        assert "step of the loaded checkpoint" in rank["steps"]
    for label in ("topk", "none"):
        assert same([rank[label]["weights"] for rank in ranks]), label


@pytest.mark.slow
@on(TWO)
def test_saved_and_copied_models_have_no_hook_and_can_be_registered(launch):
    ranks = scenario("saved_by_ddp", launch)
    for way in ranks[0]:
        for kind in ("plain", "registered"):
            assert same([weights for rank in ranks for weights in rank[way][kind]]), (way, kind)
        assert ranks[0][way]["plain"] != ranks[0][way]["registered"], way
        assert not any(rank[way]["claimed"] for rank in ranks), way


@on(TWO)
def test_what_cannot_work_is_refused(launch):
    for number, rank in enumerate(scenario("refused_by_ddp", launch)):
        assert "grace.torch.register() exchanges the gradients of these parameters already" in rank["wrapped"]
        assert "expected whole parameters, received sharded ones (DTensor)" in rank["sharded"]
        by_grace, by_torch = rank["overlapped"]
        assert by_grace.startswith("ConfigError: grace.torch.register: the model has the communication hook 'hook_with")
        assert by_torch.startswith("RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called")
        assert rank["twice"].startswith("ConfigError: grace.torch.register: the model cannot be used, because it is")
        assert "use torch.autocast instead" in rank["mixed"]
        assert "because _apply_optimizer_in_backward() takes the place of its only" in rank["applied in backward"]
        assert "there is no argument 'grad_scalar'. Did you mean 'grad_scaler'?" in rank["typo"]
        assert rank["differing"].startswith("MismatchError: rank 1 and rank 0 were started differently")
        assert rank["on one rank"].startswith("MismatchError: " if number else "ConfigError: ")
        assert rank["sparse"].startswith("StepError: tensor '0.weight' has a sparse gradient")
        # Both ranks use row 1, and rank 0 alone row 3.
        first, third = rank["sparse and dense"]
        assert first == pytest.approx(2 * third)


def check_devices(weights):
    assert weights["none"] == weights["plain"]
    assert weights["topk"] == weights["optimizer"] != weights["plain"]


@on(TWO)
def test_a_device_is_named_by_the_model(launch):
    for rank in scenario("on_device", launch, "cpu"):
        check_devices(rank)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: torch.cuda.device_count() < 2")
def test_gradients_on_gpus_travel_by_nccl():
    program = [*command("torchrun", 2), sys.executable, "-m", "tests.adapters.torch.gpu_rank"]
    done = subprocess.run(program, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ran, weights = json.loads(done.stdout.splitlines()[-1])
    assert len(ran) >= 5
    check_devices(weights)
