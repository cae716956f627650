"""Ranks that go on among others, as in elastic Horovod: what the survivors hold back keeps its share."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.session.simulation import SimulatedTransport, _Network
from grace.core.spec import Ranks, TensorSpec
from grace.core.state.carry import iterate_chain
from tests.support.steps import assert_same, each, go_to_step, step

SPECS = [TensorSpec("long", (3, 5000)), TensorSpec("matrix", (24, 40)), TensorSpec("double", (16, 90), "float64")]
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "default_rules": False}
MEMORIES = ["residual", "lowpass", "efsignsgd"]
# Which ranks of how many stay, and how many there are then.
MOVES = {"one is gone": ([0, 1, 3], 4, 3), "one comes": ([0, 1], 2, 3), "one for another": ([0, 2], 3, 3)}


def shares(runs, size):
    """Return what these ranks of `size` hold back of the mean, by tensor."""
    total = {spec.name: np.zeros(spec.numel) for spec in SPECS}
    for run in runs:
        states = run.units
        for unit in run.plan.units:
            parts = [(unit, unit.memory.residual_scale, size)]
            parts += [(onward, scale, len(onward.owners)) for onward, scale in iterate_chain(unit)]
            for part, scale, count in parts:
                held, at = states[part.spec.name]["memory"].get("residual"), 0
                for piece in part.pieces if held is not None else ():
                    total[piece.tensor][piece.start : piece.stop] += held[at : at + piece.numel] / scale / count
                    at += piece.numel
    return total


def moved(sim, stay, size):
    """Return a simulation of `size` ranks that continues the engines of those that stay; the others are new."""
    new = grace.Simulation(size, sim._specs, sim.config, average=sim.run._average)
    network, before = _Network(size), len(sim.runs)
    for rank, old in enumerate(stay):
        run = sim.runs[old]
        run.transport = SimulatedTransport(rank, network, run._ops("cpu"))
        run.move(new._plans_for(Ranks(size)), before)
        new._runs[rank] = run
    for run in new.runs[len(stay) :]:
        run.transport = SimulatedTransport(run.transport.rank, network, run._ops("cpu"))
        go_to_step(run, sim.run.step)
    return new


@each(memory=MEMORIES, communicator=["allgather", "auto", "two_shot"], move=MOVES, average=[True, False])
def test_survivors_keep_what_they_hold_back(memory, communicator, move, average):
    stay, before, after = move
    config = {**TOPK, "memory": memory, "communicator": communicator}
    sim = grace.Simulation(before, SPECS, config, average=average)
    for number in range(3):
        step(sim, number)
    # A sum is that many times the mean.
    expected = shares([sim.runs[rank] for rank in stay], before if average else 1)
    if not average:
        owners = shares([sim.runs[rank] for rank in stay], float("inf"))
        expected = {name: x + (before - 1) * owners[name] for name, x in expected.items()}
    new = moved(sim, stay, after)
    found = shares(new.runs, after if average else 1)
    for name, x in expected.items():
        assert np.abs(x).max() > 0.1
        assert np.abs(found[name] - x).max() <= 1e-5, name
    for run in new.runs:
        assert run.step == 3
    first, *others = step(new, 3)
    for other in others:
        assert_same([first], [other])


def test_owners_under_another_number_give_up_what_they_hold():
    """With as many ranks, the units are the same and the owners are others."""
    sim = grace.Simulation(3, SPECS, {**TOPK, "communicator": "two_shot"})
    for number in range(2):
        step(sim, number)
    new = moved(sim, [0, 2], 3)
    for run in new.runs:
        for unit in run.plan.units:
            memory = run.units[unit.onward.spec.name]["memory"]
            assert not any(x.any() for x in memory.values())


def test_a_step_under_way_is_dropped():
    sim = grace.Simulation(3, SPECS, {**TOPK, "communicator": "two_shot"})
    step(sim, 0)
    sim.run.current.ready("matrix", np.zeros((24, 40), np.float32))
    new = moved(sim, [0, 1], 2)
    new.run.check_idle("change")
    step(new, 1)
    with pytest.raises(grace.core.errors.StepError):
        sim.runs[2].finish()
