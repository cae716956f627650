"""Methods and options that change in mid-run, in real processes."""

from __future__ import annotations

import pytest

from tests.support.launch import TENSORFLOW, TORCH, run

pytestmark = pytest.mark.distributed

LAUNCHES = [("horovodrun-gloo", 2), ("mpirun", 4)]


def test_steps_without_any_compression_count_for_the_schedule():
    ranks = [rank["dense_first"] for rank in run("horovodrun-gloo", 2, ["dense_first"])]
    assert len({result["weights"] for result in ranks}) == 1
    assert ranks[0]["steps"] == [1, 2, 3, 4]
    sent = ranks[0]["sent"]
    assert sent[0] == sent[1] > sent[2] == sent[3]


def test_a_scheduler_goes_on_with_the_options_of_all_steps_before():
    for rank in run("horovodrun-gloo", 2, ["resumed_scheduler"]):
        result = rank["resumed_scheduler"]
        assert len(set(result["options"])) == 1, result
        assert "compress_ratio=0.5" in result["options"][0]
        assert "beta=0.5" in result["options"][0]
        assert result["error"].startswith("ConfigError")


def test_states_are_carried_over_where_the_first_step_of_a_stage_is_dropped_or_left_out():
    for rank in run("horovodrun-gloo", 2, ["tf_first_steps"], TENSORFLOW):
        assert rank["tf_first_steps"] == {"dropped": pytest.approx(0.25), "left out": pytest.approx(0.25), "rows": ""}


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_however_it_is_scheduled_the_run_is_the_same(framework, launch):
    prefix, worker = ("tf_", TENSORFLOW) if framework == "tensorflow" else ("", TORCH)
    names = [f"{prefix}{name}" for name in ("schedules", "changes_that_differ", "learning_rates", "local_steps")]
    ranks = run(*launch, names, worker)
    for rank in ranks:
        assert all("trace" not in result for result in rank.values()), rank
    schedules = [rank[names[0]] for rank in ranks]
    # By the configuration, by hand, by a scheduler or callback, and continued from a file, on every rank.
    assert len({digest for result in schedules for digest in result["weights"].values()}) == 1, schedules
    sent = schedules[0]["sent"]
    assert len(sent) == 10
    # Stages of fixed size send the same in every step; the uncompressed one sends most, and every change shows.
    assert sent[0] == sent[1] < sent[8] == sent[9] < sent[6] == sent[7]
    assert sent[4] == sent[5] not in (sent[0], sent[6], sent[8])
    assert schedules[0].get("traces", 1) == 1, "all stages are in one graph"
    differ = [rank[names[1]] for rank in ranks]
    assert len({result["weights"] for result in differ}) == 1
    for rank, result in enumerate(differ):
        assert "MismatchError" in result["errors"][0]
        assert "compress_ratio is 0." in result["errors"][0]
        assert ("ConfigError" if rank else "MismatchError") in result["errors"][1]
        assert "compress_rate" in result["errors"][1]
        if framework == "tensorflow":
            assert "traced before grace.change()" in result["errors"][2]
            assert "schedule" in result["errors"][3]
        else:
            assert result["ratio"] == 0.5
    rates = [rank[names[2]] for rank in ranks]
    assert len({result["moved"] for result in rates}) == 1
    assert all(result["off"] < 1e-5 for result in rates), rates
    assert all("learning rate" in result.get("tape", "learning rate") for result in rates), rates
    local = [rank[names[3]] for rank in ranks]
    for name in ("none", "qsparse"):
        # After the third and the sixth step the weights have met; in between every rank has its own.
        assert [len({result[name]["apart"][step] for result in local}) for step in range(7)] == [
            1 if step in (2, 5) else launch[1] for step in range(7)
        ]
        assert all(result[name]["resumed"] for result in local), name
    assert all(result["none"]["off"] < 1e-6 for result in local)


def test_what_does_not_go_with_local_steps_is_refused():
    for rank in run("horovodrun-gloo", 2, ["local_refusals"]):
        errors = rank["local_refusals"]["errors"]
        told = ("at least 1", "op=hvd.Average", "backward_passes_per_step", "lr_correction", "local_steps is")
        assert len(errors) == len(told)
        assert all(word in error for word, error in zip(told, errors, strict=True)), errors
        assert [error.partition(":")[0] for error in errors] == ["ConfigError"] * 4 + ["MismatchError"]


def test_a_model_saved_after_changes_goes_on():
    ranks = [rank["tf_changed_and_saved"] for rank in run("horovodrun-gloo", 2, ["tf_changed_and_saved"], TENSORFLOW)]
    assert all("trace" not in rank for rank in ranks), ranks
    assert len({digest for rank in ranks for digest in rank["weights"]}) == 1, ranks
    assert all(rank["sent"] == [True, True] for rank in ranks), ranks


def test_ranks_that_begin_in_different_stages_are_told():
    for rank in run("horovodrun-gloo", 2, ["loaded_in_another_stage"]):
        assert "MismatchError" in rank["loaded_in_another_stage"]["error"], rank
