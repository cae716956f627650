"""Gradients that are exchanged, and what is left of them if nobody applies them."""

from __future__ import annotations

import pytest

from tests.support.covering import ALL
from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

HOROVOD = Launch(TORCH, "horovodrun-gloo", 2)
TWO, FOUR = (Launch(TORCH, "torchrun", ranks) for ranks in (2, 4))


@pytest.mark.slow
@on(TWO, HOROVOD, usual={TWO})
def test_gradients_that_are_dropped_leave_nothing_behind(launch):
    ranks = scenario("dropped_passes", launch)
    for label in ranks[0]:
        assert same([rank[label]["weights"] for rank in ranks]), label
        assert ranks[0][label]["equal"], label


@pytest.mark.slow
@on(TWO, FOUR)
def test_what_is_kept_is_applied_or_held_whatever_else_is_dropped(launch):
    for worst in scenario("conserved_whatever_is_dropped", launch, 400 if ALL else 10):
        assert max(worst) < 1e-6, worst


@on(TWO)
def test_gradients_of_zeros_that_are_kept_are_not_taken_for_dropped_ones(launch):
    assert max(scenario("zeros_kept", launch)) < 1e-6


@on(TWO)
def test_an_optimizer_that_applies_what_was_not_exchanged_is_told(launch):
    for rank in scenario("told_of_gradients", launch):
        (past,), (unseen,) = (rank.pop(label) for label in ("past", "unseen"))
        assert "has applied gradients of a registered model that were not exchanged" in past
        assert "compute gradients that nobody applies in no_sync(), of the DDP model or" in unseen
        assert not any(rank.values()), rank
