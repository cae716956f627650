"""Horovod's elastic mode with models of Keras and exchanges of grace."""

from __future__ import annotations

import pytest

from tests.support.covering import rest_slow
from tests.support.elastic import check_survivors
from tests.support.launch import TENSORFLOW, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

TWO = Launch(TENSORFLOW, "horovodrun-gloo", 2)


@on(TWO)
@pytest.mark.parametrize("way", rest_slow(["fit", "apply", "tape"], 1))
def test_an_elastic_state_keeps_residuals_and_takes_new_ranks(way, launch):
    ranks = scenario("elastic", launch, way)
    for rank in ranks:
        assert rank["went on"]
        assert rank["restored"] == [True, 3]
        assert rank["step"] == 3
        assert rank["variables"] == 0
        before, now = rank["share"]
        assert abs(before) > 0.01
        assert now == pytest.approx(before, abs=1e-4)
        assert rank["synchronized"] == [3, 3, 3]
        assert rank["momentum"][1]
        assert rank["committed"] == (0 if way == "fit" else 3)
        # By this word, Horovod takes an error of a collective for its own.
        assert "HorovodAllreduce" in rank["names"]
        assert ("before elastic Horovod restarted" in rank["stale"]) == (way == "apply")
    assert ranks[0]["own"]
    assert ranks[0]["holds"]
    assert not ranks[1]["holds"]
    for key in ("momentum", "weights"):
        assert same([rank[key] for rank in ranks])
    first, *others = [text for text in ranks[0]["told"] if text.startswith("elastic mode")]
    assert "2 ranks before, 2 now" in first
    assert any("of 2 ranks, 1 have stayed and 1 are new. What the other 1 held back is lost" in text for text in others)


@on(TWO)
def test_a_new_rank_takes_the_earlier_weights_of_second_gradients(launch):
    ranks = scenario("elastic_second_gradients", launch)
    assert ranks[0]["after"] == ranks[0]["before"] != ranks[0]["weights"]
    for key in ("after", "weights"):
        assert same([rank[key] for rank in ranks])


@on(TWO)
def test_a_restore_takes_a_change_back(launch):
    ranks = scenario("elastic_change", launch)
    assert same(ranks)
    assert ranks[0]["ratio"] == 0.1
    assert ranks[0]["restored"]
    assert ranks[0]["step"] == 3


@on(TWO)
@pytest.mark.parametrize("name", rest_slow(["streaming", "0/1 Adam", "1-bit Adam"], 1))
def test_ranks_keep_what_they_have_of_their_own_between_two_syncs(name, launch):
    ranks = scenario("elastic_syncs", launch, name)
    for rank in ranks:
        kept = [rank[key] for key in ("restored", "stayed", "went on")]
        assert all(kept), "with the same ranks, nothing is lost"
    assert same([rank["weights"] for rank in ranks]), "a new rank begins with the weights of rank 0"
    # The last step of the optimizers is a sync, and with alpha each rank has weights of its own.
    assert same([rank["end"] for rank in ranks]) == (name != "streaming")


@pytest.mark.slow
@on(TWO)
def test_gradients_under_accumulation_stay_with_their_rank(launch):
    ranks = scenario("elastic_accumulation", launch)
    assert all(rank["own"] for rank in ranks)
    assert not same([rank["sums"] for rank in ranks])


@on(TWO)
def test_what_cannot_go_on_without_a_rank_is_refused(launch):
    for without, joint, local, process_set, empty in scenario("elastic_refusals", launch):
        assert "to grace.tensorflow.KerasState in their place" in without
        assert "every rank must keep a residual of its own" in joint
        assert "outer cannot have a number per rank as weight" in local
        assert "process_set is not supported in elastic mode" in process_set
        assert "expected a model with variables and an optimizer" in empty


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "comes_back", "ranks"),
    [
        *[("fit", False, 3), ("fit", True, 3), ("outer", True, 3), ("apply", True, 3), ("tape", False, 3)],
        *[("outer", False, 4), ("outer", True, 4)],
    ],
    ids=str,
)
def test_survivors_of_a_dead_rank_go_on(way, comes_back, ranks, tmp_path):
    latest = 9 if way == "outer" else 6
    check_survivors("tests/adapters/tensorflow/elastic_worker.py", [way], comes_back, tmp_path, latest, ranks)
