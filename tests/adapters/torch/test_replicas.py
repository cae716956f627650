"""Replicas that part are noticed within a few steps, on every rank, with the name of the tensor."""

from __future__ import annotations

import pytest

from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

two_ranks = on(Launch(TORCH, "horovodrun-gloo", 2), Launch(TORCH, "torchrun", 2))


@two_ranks
def test_a_replica_that_parts_is_named(launch):
    ranks = scenario("drifting_replicas", launch)
    assert same(ranks)
    errors = ranks[0]
    assert errors.pop("off") == "", "without the option nothing is noticed"
    assert errors.pop("residual") == "", "residuals may differ"
    for label, error in errors.items():
        place = {
            "state": "q of the compressor of left.weight",
            "svrg": "snapshot of the memory of left.weight",
        }.get(label, "head.bias")
        began = "MismatchError: the weights or shared states of rank 1 and rank 0 differ"
        assert error.startswith(f"{began} before step 4, in '{place}' and "), (label, error)
        assert "Load the last good checkpoint" in error


@two_ranks
def test_equal_replicas_train_on_and_send_a_digest(launch):
    ranks = scenario("compared_replicas", launch)
    assert same(ranks)
    assert len(set(ranks[0]["weights"])) == 1
    # Before the steps 0, 2 and 4. The call by hand comes later.
    assert ranks[0]["sent"] == [[], [["replicas", 8]] * 3]
