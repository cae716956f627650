"""Optimizers to which something was done before they were wrapped."""

from __future__ import annotations

import pytest

from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

HOROVOD, TORCHRUN = Launch(TORCH, "horovodrun-gloo", 2), Launch(TORCH, "torchrun", 2)


@on(TORCHRUN)
def test_every_scheduler_of_pytorch_has_a_case(launch):
    result, *_ = scenario("known_schedulers", launch)
    assert result["cases"] == result["known"]


@on(TORCHRUN, HOROVOD, Launch(TORCH, "torchrun", 4), usual={TORCHRUN})
def test_a_scheduler_works_before_the_optimizer_is_wrapped_as_after(launch):
    ranks = scenario("schedulers", launch)
    for label in ranks[0]:
        assert same([way["weights"] for rank in ranks for way in rank[label]]), label
        for before, after in (rank[label] for rank in ranks):
            steps = len(before["rates"])
            assert before["rates"] == after["rates"], label
            assert len(set(before["rates"])) > 1 or "ConstantLR" in label, label
            assert before["told"] == after["told"] == [], label
            assert before["exchanges"] == after["exchanges"] == steps // (2 if "local" in label else 1), label


@on(HOROVOD, TORCHRUN)
def test_what_was_replaced_on_the_plain_optimizer_still_works(launch):
    ranks = scenario("prepared", launch)
    for label in ("gradients", "local"):
        step = ["zero_grad", "step", "before", "after"]
        for rank in ranks:
            assert rank[label]["calls"] == [*step, *step, "state_dict", "load_state_dict"], label
            assert same(rank[label]["weights"]), label
            assert rank[f"{label}, again"].startswith("ConfigError: "), label
            assert "already wrapped" in rank[f"{label}, again"], label
            assert rank[f"{label}, states"] == {"momentum": [1.0] * 10, "shared": True}, label
        assert same([rank[label]["weights"] for rank in ranks]), label
