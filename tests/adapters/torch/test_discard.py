"""Steps that fail or are dropped, and the rollback, in real processes."""

from __future__ import annotations

import pytest

from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

TWO, TORCHRUN = (Launch(TORCH, launcher, 2) for launcher in ("horovodrun-gloo", "torchrun"))
# Steps of torch.distributed are dropped by the tests of DDP and FSDP2, too.
each_library = on(TWO, TORCHRUN, usual={TWO})


@each_library
def test_training_goes_on_after_a_dropped_step_as_if_it_had_never_begun(launch):
    ranks = scenario("discarded", launch)
    for label in ranks[0]:
        assert same([rank[label]["weights"] for rank in ranks]), label
        assert all(rank[label]["equal"] for rank in ranks), label


@each_library
def test_a_step_that_failed_is_refused_with_the_way_back(launch):
    ranks = scenario("discarded", launch)
    for label in ranks[0]:
        failed = [rank for rank in ranks if rank[label]["errors"]["attempt"]]
        assert len(failed) == {"merge": 2, "merge, one rank": 1, "compress": 1, "proposal": 1}.get(
            label, 2 * ("wait" in label or label == "negotiated")
        ), label
        for rank in ranks:
            errors = dict(rank[label]["errors"])
            told = errors.pop("attempt").partition(":")[0]
            assert told in ("", "ZeroDivisionError", "WaitError"), label
            for text in errors.values():
                assert text.startswith("StepError: "), label
                assert "optimizer.grace.discard() on all ranks" in text, label


@on(TORCHRUN, TWO, Launch(TORCH, "torchrun", 4), Launch(TORCH, "mpirun", 4), usual={TORCHRUN})
def test_ranks_connect_after_some_have_timed_out_in_discard(launch):
    ranks = scenario("lone_discards", launch)
    for label in {label for rank in ranks for label in rank}:
        group = [rank[label] for rank in ranks if label in rank]
        assert same([rank["weights"] for rank in group]), label
        assert all(rank["equal"] for rank in group), label
        assert [len(rank["errors"]) // 2 for rank in group] == [1, *[0] * (len(group) - 2), 3], label
        for rank in group:
            for alone, after in zip(rank["errors"][::2], rank["errors"][1::2], strict=True):
                assert alone.startswith("WaitError: "), label
                assert "discard()" in alone, label
                assert after.startswith("StepError: "), label
                assert "discard() on all ranks" in after, label


@each_library
def test_a_step_can_be_dropped_with_every_argument(launch):
    ranks = scenario("discarded_with_options", launch)
    for label in ranks[0]:
        assert same([rank[label]["weights"] for rank in ranks]), label
        assert all(rank[label]["equal"] for rank in ranks), label


@each_library
def test_a_step_of_scaled_gradients_can_be_dropped_at_every_point(launch):
    ranks = scenario("discarded_with_a_scaler", launch)
    for label in ranks[0]:
        assert same([rank[label]["weights"] for rank in ranks]), label
        for rank in ranks:
            assert rank[label]["equal"], label
            assert rank[label]["error"].startswith("ZeroDivisionError" if "error" in label else ""), label
            assert bool(rank[label]["error"]) == ("error" in label), label


@each_library
def test_residuals_start_from_zero_after_a_dropped_step_without_roll_back(launch):
    ranks = scenario("discarded_without_rollback", launch)
    for label in ranks[0]:
        assert same([rank[label]["weights"] for rank in ranks]), label
        for rank in ranks:
            *kept, dropped, fourth, fifth = rank[label]["norms"]
            assert len(kept) == (3 if label == "discard" else 2)
            assert all(all(norms) for norms in (*kept, fourth, fifth)), label
            assert not any(dropped), label
            assert rank[label]["moved"] == [True, True, False, True, True], label


@each_library
def test_a_checkpoint_brings_ranks_together_that_an_error_parted(launch):
    ranks = scenario("parted", launch)
    assert same(ranks)
    assert ranks[0]["discarded"].startswith("MismatchError: the steps under way were dropped, but the ranks are not")
    assert "received [3, 2]" in ranks[0]["discarded"]
    assert ranks[0]["equal"]


@each_library
def test_a_rank_that_waits_says_for_what_and_ends(launch):
    ranks = scenario("waits", launch)
    assert same([rank.pop("weights") for rank in ranks])
    transport = "all ranks to make their transport, as " if launch == TORCHRUN else ""
    # The first case ends with discard(), after which the ranks first compare themselves.
    next_step = "the first step after discard() (collective '"
    for label, waiting, words in (
        *(
            ()
            if launch == TORCHRUN
            else (
                ("change", 0, "rank 0 of 2 has waited 1 s for rank 1: optimizer.grace.change()"),
                ("change", 1, "rank 1 of 2 has waited 1 s for rank 0: step 1, the gradient of '"),
            )
        ),
        ("one more step", 0, f"has waited 1 s for rank 1: {next_step}"),
        ("one more dense step", 0, f"has waited 1 s for rank 1: {next_step}"),
        ("order", 0, f"has waited 1 s for rank 1: {next_step}"),
        ("order", 1, f"has waited 1 s for rank 0: {next_step}"),
        ("wrap", 1, f"has waited 1 s for rank 0: {transport}grace.torch.DistributedOptimizer()"),
    ):
        result = ranks[waiting][label]
        assert result["error"].startswith("WaitError: rank "), label
        assert words in result["error"], label
        assert 1 <= result["seconds"] < 20, label
        # It said so before it ended.
        assert label == "wrap" or len(result["told"]) == 1, label
    assert not any(ranks[1][label]["error"] for label in ("one more step", "one more dense step"))
    assert ranks[0]["wrap"]["error"] == ""
    if launch == TORCHRUN:
        # Headers tell what each rank started: one header the whole step, or a single collective.
        for rank, result in enumerate(ranks):
            began = "allgather" if rank == 0 else "a step from "
            assert result["change"]["error"].startswith(f"MismatchError: rank {rank} started {began}")
            assert "/change'" in result["change"]["error"]
            assert result["change"]["seconds"] < 2
