"""Every adapter's exchange keeps the same promises; see `tests.support.promises`."""

from __future__ import annotations

import pytest

import grace
from tests.support.launch import MPI, TENSORFLOW, TORCH, Launch
from tests.support.promises import PROMISES, TENSORS, Run, gradients, joined, kept
from tests.support.ranks import on, scenario

NONE_BROKEN = {promise.__name__: "" for promise in PROMISES}


def test_a_simulation_keeps_its_promises():
    def make(config):
        sim = grace.Simulation(2, TENSORS, config)
        return Run(sim, lambda number: joined(sim.step([gradients(number, rank) for rank in range(2)])[0]))

    assert kept(make) == NONE_BROKEN


def test_a_broken_promise_is_told():
    class Silent(grace.Simulation):
        def report(self):
            return ""

    def make(config):
        sim = Silent(2, TENSORS, config)
        return Run(sim, lambda number: joined(sim.step([gradients(number, rank) for rank in range(2)])[0]))

    assert [name for name, error in kept(make).items() if error] == ["plan_and_report"]


@pytest.mark.distributed
@on(
    Launch(MPI, "mpirun", 2),
    Launch(TORCH, "horovodrun-gloo", 2),
    Launch(TORCH, "torchrun", 2),
    Launch(TENSORFLOW, "horovodrun-gloo", 2),
)
def test_an_adapter_keeps_its_promises(launch):
    assert scenario("promises", launch) == [NONE_BROKEN] * 2


@pytest.mark.distributed
@on(Launch(TORCH, "torchrun", 2))
def test_a_plain_model_keeps_its_promises(launch):
    assert scenario("promises_of_a_model", launch) == [NONE_BROKEN] * 2
