"""Methods and options that change during a run, in real processes."""

from __future__ import annotations

import pytest

from tests.support.covering import ALL
from tests.support.launch import TENSORFLOW, TORCH, Launch
from tests.support.ranks import on, scenario

pytestmark = pytest.mark.distributed

TWO, TWO_TENSORFLOW = (Launch(worker, "horovodrun-gloo", 2) for worker in (TORCH, TENSORFLOW))
TORCHRUN = Launch(TORCH, "torchrun", 2)


@on(TWO)
def test_steps_without_any_compression_count_for_the_schedule(launch):
    ranks = scenario("dense_first", launch)
    assert len({result["weights"] for result in ranks}) == 1
    assert ranks[0]["steps"] == [1, 2, 3, 4]
    sent = ranks[0]["sent"]
    assert sent[0] == sent[1] > sent[2] == sent[3]


@on(TWO)
def test_a_scheduler_goes_on_with_the_options_of_all_steps_before(launch):
    for result in scenario("resumed_scheduler", launch):
        assert len(set(result["options"])) == 1, result
        assert "compress_ratio=0.5" in result["options"][0]
        assert "beta=0.5" in result["options"][0]
        assert result["error"].startswith("ConfigError")


@pytest.mark.slow
@on(TWO_TENSORFLOW)
def test_states_are_carried_over_where_the_first_step_of_a_stage_is_dropped_or_left_out(launch):
    for result in scenario("tf_first_steps", launch):
        assert result.pop("NaN without roll-back") == 0
        assert result.pop("skipped without roll-back") == 0
        assert result == {"dropped": pytest.approx(0.25), "left out": pytest.approx(0.25), "rows": ""}


# Four ranks matter to what is scheduled, which other tests cover, and not to the schedule.
# Under Horovod, PyTorch schedules by the same code.
LAUNCHES = TORCHRUN, TWO, Launch(TORCH, "mpirun", 4), TWO_TENSORFLOW
each_schedule = on(*LAUNCHES, usual={TORCHRUN})


def ask(name, launch):
    """Return the reports of every rank about a scenario that both frameworks have."""
    return scenario(f"tf_{name}" if launch.worker == TENSORFLOW else name, launch)


@each_schedule
def test_however_it_is_scheduled_the_run_is_the_same(launch):
    ranks = ask("schedules", launch)
    # By the configuration, by `change`, by a scheduler or callback, and continued from a file, on every rank.
    assert len({digest for result in ranks for digest in result["weights"].values()}) == 1, ranks
    sent = ranks[0]["sent"]
    assert len(sent) == 10
    # Stages of fixed size send the same bytes in every step. The uncompressed stage sends most, and every change shows.
    assert sent[0] == sent[1] < min(sent[8:]) <= max(sent[8:]) < sent[6] == sent[7]
    # On four ranks, "auto" adds 30 % of the elements by sparse_allreduce, whose bytes depend on them.
    assert sent[8] == sent[9] or launch.ranks == 4
    assert sent[4] == sent[5] not in (sent[0], sent[6], *sent[8:])
    assert ranks[0].get("traces", 1) == 1, "all stages are in one graph"


@each_schedule
def test_changes_that_differ_between_ranks_are_told_and_training_goes_on(launch):
    ranks = ask("changes_that_differ", launch)
    assert len({result["weights"] for result in ranks}) == 1
    for rank, result in enumerate(ranks):
        assert "MismatchError" in result["errors"][0]
        assert "compress_ratio is 0." in result["errors"][0]
        assert ("ConfigError" if rank else "MismatchError") in result["errors"][1]
        assert "compress_rate" in result["errors"][1]
        if launch.worker == TENSORFLOW:
            assert "traced before grace.change()" in result["errors"][2]
            assert "schedule" in result["errors"][3]
        else:
            assert result["ratio"] == 0.5


@each_schedule
def test_residuals_follow_the_learning_rate(launch):
    for ranks in zip(*(result.values() for result in ask("learning_rates", launch)), strict=True):
        assert len({result["moved"] for result in ranks}) == 1
        assert all(result["off"] < 1e-5 for result in ranks), ranks
        assert all("learning rate" in result.get("tape", "learning rate") for result in ranks), ranks


@on(*LAUNCHES, usual={TORCHRUN})
def test_weights_sync_after_local_steps(launch):
    ranks = ask("local_steps", launch)
    for name in ("none", "qsparse"):
        # After the third and the sixth step, the weights are equal. In between, every rank has its own.
        assert [len({result[name]["apart"][step] for result in ranks}) for step in range(7)] == [
            1 if step in (2, 5) else launch.ranks for step in range(7)
        ]
        assert all(result[name]["resumed"] for result in ranks), name
    assert all(result["none"]["off"] < 1e-6 for result in ranks)


@on(TORCHRUN, TWO, usual={TORCHRUN})
def test_outer_steps_of_real_ranks_are_those_of_a_simulation(launch):
    ranks = scenario("outer_steps", launch)
    for name in ranks[0]:
        for rank in ranks:
            assert rank[name]["off"] == rank[name]["resumed"] == [False] * 9, name
        # The last of the nine steps is a sync of all tensors, or of one fragment of them.
        assert len({rank[name]["weights"] for rank in ranks}) == (2 if name == "streaming" else 1)
        assert len({str([rank[name]["stats"][key] for key in ("steps", "rounds")]) for rank in ranks}) == 1
        assert all(0 < rank[name]["stats"]["utilisation"] < 1 for rank in ranks)
    assert ranks[0]["streaming"]["stats"]["rounds"] == 1 + 2


@on(TWO, *(Launch(TORCH, "torchrun", ranks) for ranks in (2, 3, 4)), usual={Launch(TORCH, "torchrun", 3)})
def test_ranks_that_are_out_send_a_header(launch):
    ranks = scenario("outer_participation", launch)
    for name in ranks[0]:
        for rank in ranks:
            assert not any([*rank[name]["off"], *rank[name]["resumed"]]), name
            assert all(real == simulated for real, simulated in rank[name]["sent"]), name
        counts = {sum(inside) for inside in zip(*(rank[name]["inside"] for rank in ranks), strict=True)}
        assert counts == {launch.ranks if name == "relevance" else -(-launch.ranks // 2)}, name
    for inside, sent in [x for r in ranks for x in zip(r["allgather"]["inside"], r["allgather"]["sent"], strict=True)]:
        assert (sent[0] == 16) == (not inside)
    assert {sent[0] == 16 for rank in ranks for sent in rank["relevance"]["sent"]} == {False, True}


@on(TORCHRUN, *(Launch(TORCH, "torchrun", ranks) for ranks in (3, 4)), usual={Launch(TORCH, "torchrun", 3)})
def test_outer_steps_beside_accumulation_clipping_and_schedules_are_those_of_plain_pytorch(launch):
    for rank in scenario("outer_by_hand", launch):
        assert set(rank) == {"accumulated and clipped", "momentum", "learning rate", "in part"}
        assert max(rank.values()) < 1e-6, rank


@on(TORCHRUN)
def test_states_of_the_inner_optimizer_and_buffers_sync_as_well(launch):
    for rank in scenario("outer_beside", launch):
        for name in ("periods", "average", "reset"):
            assert rank[name]["off"] < 1e-6, (name, rank[name]["off"])
            assert rank[name]["resumed"] == [True] * 3, name
        report = rank["periods"]["report"]
        assert "mean of the states exp_avg_sq every 2 syncs" in report
        assert "exp_avg_sq of 0.weight" in report
        assert "running_mean" not in report
        assert "1.running_mean" in rank["average"]["report"]
        assert [rank["adacomm"][key] for key in ("steps", "rounds", "every")] == [8, 2, 2]
        assert rank["variates"] < 1e-5
        errors = rank["errors"]
        assert "received SGD with momentum 0.5; use SGD without" in errors["momentum"]
        assert "Adam keeps exp_avg, exp_avg_sq; name these" in errors["unknown state"]
        assert "SGD keeps no arrays" in errors["no state"]
        assert "a copy of it cannot take one" in errors["no step"]


@on(TORCHRUN, Launch(TORCH, "torchrun", 4))
def test_a_model_in_ddp_or_fsdp_within_a_site_takes_outer_steps_between_sites(launch):
    ranks = scenario("registered_outer_steps", launch)
    for rank in ranks:
        for label in ("plain", "ddp", "fsdp") if launch.ranks == 2 else ("ddp", "fsdp"):
            assert rank[f"{label}, rounds"] == 7
            assert rank[f"{label}, resumed"], label
            for found, expected in zip(rank[label], rank["ddp"], strict=True):
                assert found == pytest.approx(expected, abs=1e-6), label
        errors = rank["errors"]
        assert "need outer, for example outer='diloco'" in errors["no outer"]
        assert "it exchanges gradients and cannot take outer steps" in errors["no optimizer"]
        assert "process_group names the ranks of a plain model or of outer steps" in errors["group"]
        assert "each hold a part of parameter" in errors["parts"]
        assert "each hold a part of the states of ZeroRedundancyOptimizer" in errors["ZeRO"]
        assert "each hold a part of the states of ZeroRedundancyOptimizer" in errors["ZeRO, wrapped"]


# Those beside a simulation, below, run the same lines.
@pytest.mark.slow
@on(TWO_TENSORFLOW)
def test_outer_steps_in_graphs_follow_the_recursion(launch):
    ranks = scenario("tf_outer_steps", launch)
    for rank in ranks:
        for name in ("none", "elastic"):
            assert max(rank[name]["off"]) < 1e-5, rank[name]["off"]
            assert rank[name]["resumed"], name
        assert rank["report"].startswith("outer steps: every 3 steps from step 2 on; SGD(lr=0.7, momentum=0.9, nest")
    assert ranks[0]["topk"]["resumed"]
    # Two steps of warm-up, and syncs after steps 5 and 8.
    apart = [len({rank["topk"]["apart"][step] for rank in ranks}) for step in range(8)]
    assert apart == [1, 1, 2, 2, 1, 2, 2, 1]
    assert len({rank["none"]["apart"][7] for rank in ranks}) == 2, "each rank keeps a share of its own weights"


# Each case is traced several times.
CASES = [
    "streaming",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("delayed", "dense", "adacomm", "changed")),
]


@on(TWO_TENSORFLOW, Launch(TENSORFLOW, "horovodrun-gloo", 4))
@pytest.mark.parametrize("name", CASES)
def test_outer_steps_in_graphs_are_those_of_a_simulation(launch, name):
    for rank in scenario("tf_outer_like_a_simulation", launch, name):
        assert max(rank["off"]) < 1e-5, [round(x, 6) for x in rank["off"]]
        assert rank["common"] < 1e-5
        assert set(rank["resumed"]) == {True}
        assert rank["rounds"] >= 2


@pytest.mark.slow
@on(TWO_TENSORFLOW)
def test_a_graph_adds_noise_and_asks_for_losses(launch):
    ranks = scenario("tf_outer_noise", launch)
    for rank in ranks:
        # The mean of normal numbers of all ranks, whose deviation is a half of the largest norm.
        assert rank["std"] == pytest.approx(0.05 / launch.ranks**0.5, rel=0.25)
        assert rank["weights"] == ranks[0]["weights"]
        assert "call optimizer.build(model.trainable_variables) first" in rank["told"][0]
        assert "follow the square root of the loss" in rank["told"][1]
        assert "none was noted since the last sync" in rank["told"][2]


@on(TWO_TENSORFLOW)
def test_what_no_graph_can_do_is_refused(launch):
    for errors in scenario("tf_outer_refusals", launch):
        assert "the states of Nadam cannot start again" in errors[0]
        assert "the optimizer has taken 1 steps; wrap it before" in errors[1]
        assert "received Adam with momentum 0.9; use SGD without" in errors[2]
        assert "begin with one number, and those of drawn differ" in errors[3]
        assert "backward_passes_per_step would have no effect" in errors[4]
        assert "it exchanges gradients and cannot take outer steps" in errors[5]


@on(TWO_TENSORFLOW)
def test_states_and_buffers_of_keras_sync_as_well(launch):
    for number, rank in enumerate(scenario("tf_outer_beside", launch)):
        for name in ("average", "periods", "growing", "fragments") if ALL else ("periods",):
            assert max(rank[name]["off"]) < 1e-5, (name, rank[name]["off"])
            assert rank[name]["resumed"], name
        without, given = rank["loop"]["told"]
        assert "optimizer.grace.note_buffers(model.non_trainable_weights)" in without
        assert given == ""
        assert rank["loop"]["buffer"] == [1.0] * 5, number
        assert "SGD keeps momentum; name these" in rank["unknown"]


@on(TORCHRUN)
def test_a_step_that_a_loss_scaler_skips_on_one_rank_is_an_inner_step(launch):
    ranks = scenario("outer_with_a_scaler", launch)
    for label in ranks[0]:
        assert len({rank[label]["weights"] for rank in ranks}) == 1
        assert [rank[label]["scale"] for rank in ranks] == [64.0, 32.0]
        assert all(rank[label]["steps"] == 6 and rank[label]["off"] < 1e-6 for rank in ranks), ranks


@on(TORCHRUN)
def test_a_change_on_its_way_can_be_dropped(launch):
    assert all(rank == {"equal": True, "steps": 12} for rank in scenario("outer_discarded", launch))


@on(TORCHRUN)
def test_the_outer_mean_is_that_of_pytorch(launch):
    ranks = scenario("outer_mean_of_pytorch", launch)
    assert len({rank["weights"] for rank in ranks}) == 1
    assert all(max(rank["apart"]) < 1e-6 for rank in ranks), ranks


@on(TWO)
def test_what_does_not_go_with_local_steps_is_refused(launch):
    for rank in scenario("local_refusals", launch):
        errors = rank["errors"]
        told = ("at least 1", "the mean as op", "backward_passes_per_step", "lr_correction", "gradient_as_bucket_view")
        told = (*told, "is the short form of outer", "local_steps is")
        assert len(errors) == len(told)
        assert all(word in error for word, error in zip(told, errors, strict=True)), errors
        assert [error.partition(":")[0] for error in errors] == ["ConfigError"] * 6 + ["MismatchError"]


@pytest.mark.slow
@on(TWO_TENSORFLOW)
def test_a_model_saved_after_changes_goes_on(launch):
    ranks = scenario("tf_changed_and_saved", launch)
    assert len({digest for rank in ranks for digest in rank["weights"]}) == 1, ranks
    assert all(rank["sent"] == [True, True] for rank in ranks), ranks


@on(TWO)
def test_ranks_that_begin_in_different_stages_are_told(launch):
    for rank in scenario("loaded_in_another_stage", launch):
        assert "MismatchError" in rank["error"], rank
