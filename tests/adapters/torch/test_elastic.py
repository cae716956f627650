"""Horovod's elastic state with optimizers of grace."""

from __future__ import annotations

import pytest

from tests.support.elastic import check_survivors
from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, scenario

pytestmark = pytest.mark.distributed


@on(Launch(TORCH, "horovodrun-gloo", 2))
def test_an_elastic_state_keeps_residuals_and_takes_new_ranks(launch):
    ranks = scenario("elastic", launch)
    for rank in ranks:
        without, joint, local, flying = rank["refused"]
        assert "pass the optimizer to grace.torch.horovod.TorchState" in without
        assert "every rank must keep a residual of its own" in joint
        assert "outer cannot have a number per rank as weight" in local
        assert "nobody knows then how many of the others have contributed" in flying
        assert rank["went on"]
        assert rank["restored"] == [True, 3]
        assert rank["step"] == 3
        assert rank["stayed"]
        assert rank["synchronized"] == [3, 3]
    assert ranks[0]["own"]
    assert not ranks[0]["nothing"]
    assert ranks[1]["nothing"]
    for key in ("momentum", "weights"):
        assert ranks[0][key] == ranks[1][key]
    first, *others = [text for text in ranks[0]["told"] if text.startswith("elastic mode")]
    assert "2 ranks before, 2 now" in first
    assert any("of 2 ranks, 1 have stayed and 1 are new. What the other 1 held back is lost" in text for text in others)


@on(Launch(TORCH, "horovodrun-gloo", 2), Launch(TORCH, "horovodrun-gloo", 3))
def test_ranks_keep_what_they_have_of_their_own_between_two_syncs(launch):
    ranks = scenario("elastic_syncs", launch)
    for name, first in ranks[0].items():
        for rank in ranks:
            kept = [rank[name][key] for key in ("restored", "stayed", "went on")]
            assert all(kept), f"{name}: with the same ranks, nothing is lost"
        assert ranks[1][name]["weights"] == first["weights"], "a new rank latest with the weights of rank 0"
        syncs = name not in ("streaming", "local SGD")
        assert len({rank[name]["end"] for rank in ranks}) == (1 if syncs else len(ranks)), name


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True], ids=["gone", "back"])
@pytest.mark.parametrize(("kind", "latest"), [("gradients", 6), ("outer", 9), ("0/1 Adam", 8)])
def test_survivors_of_a_dead_rank_go_on(kind, latest, comes_back, tmp_path):
    check_survivors("tests/adapters/torch/elastic_worker.py", [kind], comes_back, tmp_path, latest)
