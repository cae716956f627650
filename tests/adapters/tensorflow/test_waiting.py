"""Ranks of TensorFlow that wait for others say so and end, in real processes."""

from __future__ import annotations

import pytest

from tests.support.launch import TENSORFLOW, Launch
from tests.support.ranks import on, scenario

pytestmark = pytest.mark.distributed


@on(Launch(TENSORFLOW, "horovodrun-gloo", 2))
def test_a_rank_that_waits_says_for_what_and_ends(launch, tmp_path):
    first, second = scenario("waits", launch, str(tmp_path))
    for text, rank, other, what in (
        (second["wrap"], 1, 0, "grace.tensorflow.DistributedOptimizer()"),
        (first["broadcast"], 0, 1, "BroadcastGlobalVariablesCallback"),
        (first["metrics"], 0, 1, "MetricAverageCallback"),
        (first["change"], 0, 1, "optimizer.grace.change()"),
    ):
        assert f"WaitError: rank {rank} of 2 has waited 1 s for rank {other}: {what} (collective 'grace.0." in text
    for rank in (first, second):
        # The real function would have ended the process.
        assert "for rank 1: step 1, the gradient of 'w'; Horovod's warning" in rank["step"]
        assert rank["merged"] == 3.0
        assert rank["under way"] is None
