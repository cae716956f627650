"""Runs: steps that change nothing until they are committed, and models that are exchanged module by module."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.errors import StateError
from grace.core.observe.timeline import ModuleTimes
from grace.core.ops import get_ops
from grace.core.plan.plan import Modules, make_plans
from grace.core.session.simulation import SimulatedTransport, _Network, poll_all
from grace.core.spec import Ranks, TensorSpec
from grace.core.state.run import Run
from grace.testing.harness import same
from tests.support.steps import assert_same, gradients, states, step

SHAPES = {"a": (32, 20), "b": (16, 12)}
LAYERS = {"default_rules": False, "granularity": "layer"}
CONFIG = {**LAYERS, "compressor": "topk", "compress_ratio": 0.1}


def copy(saved, current):
    return np.array(saved, current.dtype)


@pytest.mark.parametrize(
    "config", [CONFIG, {**LAYERS, "compressor": "powersgd"}, {**CONFIG, "communicator": "two_shot"}], ids=str
)
def test_a_step_changes_nothing_until_it_is_committed(config):
    sim = grace.Simulation(2, SHAPES, config)
    step(sim, 0)
    before, kept = states(sim), [run.states for run in sim.runs]
    for run, mine in zip(sim.runs, gradients(sim, 1), strict=True):
        for name, x in mine.items():
            run.current.ready(name, x)
    poll_all(sim.runs)
    for run in sim.runs:
        next(run.current.complete())
    outcomes = [run.current.finish() for run in sim.runs]
    assert_same(before, states(sim))
    assert all(run.states is old for run, old in zip(sim.runs, kept, strict=True))
    for run in sim.runs:
        run.discard()
    assert_same(before, states(sim))
    # The same step again gives the same results.
    again = step(sim, 1)
    assert all(
        same(outcome.merged[name], mine[name]) for outcome, mine in zip(outcomes, again, strict=True) for name in mine
    )


def by_module(ranks=2, schedule=None):
    """Return runs of a model with the modules "first" and "second", which have a tensor each."""
    specs = [TensorSpec(name, shape) for name, shape in SHAPES.items()]
    config = grace.make_config({**CONFIG, **({"schedule": schedule} if schedule else {})})
    modules = {"first": ["a"], "second": ["b"]}
    of = Modules({tensor: module for module, tensors in modules.items() for tensor in tensors})
    stages, network, ops = make_plans(specs, config, ranks=Ranks(ranks), modules=of), _Network(ranks), get_ops("numpy")
    return [
        Run(
            stages,
            lambda device: ops,
            SimulatedTransport(rank, network, ops),
            seed=config.seed,
            modules=modules,
            times=ModuleTimes(),
        )
        for rank in range(ranks)
    ]


def take(runs, module, tensor, number):
    """Take a step of one module; return the gradients that rank 0 got."""
    for rank, run in enumerate(runs):
        x = np.random.default_rng((number, rank, ord(tensor))).standard_normal(SHAPES[tensor]).astype(np.float32)
        run.current_of(module).ready(tensor, x)
    merged = [run.finish(module=module) for run in runs]
    assert all(same(merged[0][tensor], other[tensor]) for other in merged)
    return merged[0][tensor]


def test_each_module_counts_its_own_steps():
    runs, alone = by_module(), grace.Simulation(2, {"a": SHAPES["a"]}, CONFIG)
    for number in range(3):
        merged = take(runs, "first", "a", number)
        given = [
            {"a": np.random.default_rng((number, rank, ord("a"))).standard_normal(SHAPES["a"]).astype(np.float32)}
            for rank in range(2)
        ]
        # It has its own random numbers and residuals.
        assert same(merged, alone.step(given)[0]["a"])
    take(runs, "second", "b", 0)
    assert (runs[0].step, runs[0].completed) == (3, 3)
    state = runs[0].state_dict()
    assert (state["step"], state["modules"]) == (3, {"first": 3, "second": 1})
    stats = runs[0].stats()
    assert stats["step"] == 3
    assert set(stats["tensors"]) == {"a", "b"}
    assert stats["wire_bytes"] == sum(bucket["wire_bytes"] for bucket in stats["buckets"].values()) > 0


def test_a_dropped_step_of_a_module_leaves_no_moments_in_the_statistics():
    runs = by_module()
    for rank, x in enumerate(gradients(grace.Simulation(2, SHAPES, CONFIG), 0)):
        runs[rank].current_of("first").ready("a", x["a"])
    runs[0].current_of("first").poll()
    for run in runs:
        run.discard()
        run.transport._network.drop()
    take(runs, "second", "b", 0)
    first, second = runs[0].stats()["buckets"].values()
    if first["tensors"] == ["b"]:
        first, second = second, first
    assert first["ready"] is None
    assert second["merge"] is not None


def test_modules_go_on_from_a_checkpoint():
    runs = by_module()
    take(runs, "first", "a", 0)
    take(runs, "first", "a", 1)
    take(runs, "second", "b", 0)
    saved, fresh = [run.state_dict() for run in runs], by_module()
    assert all(run.load_state_dict(state, copy) for run, state in zip(fresh, saved, strict=True))
    for module, tensor in (("first", "a"), ("second", "b")):
        assert same(take(runs, module, tensor, 5), take(fresh, module, tensor, 5))
    with pytest.raises(StateError, match="the modules differ: 'second' only on one side"):
        fresh[0].load_state_dict({**saved[0], "modules": {"first": 2}}, copy)
    # States of two ranks among three.
    more = by_module(3)
    for run in more:
        assert run.merge_state_dicts(saved, by_module()[0].plan, copy) == []
        assert run.state_dict()["modules"] == {"first": 2, "second": 1}
    take(more, "first", "a", 6)


def test_modules_change_and_return_to_a_savepoint_together():
    runs = by_module()
    take(runs, "first", "a", 0)
    take(runs, "second", "b", 0)
    before, states_before = [run.savepoint for run in runs], [run.state_dict() for run in runs]
    take(runs, "first", "a", 1)
    for run, savepoint in zip(runs, before, strict=True):
        run.discard(savepoint)
        assert run.state_dict()["modules"] == {"first": 1, "second": 1}
    assert all(
        same(old["tensors"][name]["memory"]["residual"], run.state_dict()["tensors"][name]["memory"]["residual"])
        for old, run in zip(states_before, runs, strict=True)
        for name in "ab"
    )
    specs, modules = [TensorSpec(name, shape) for name, shape in SHAPES.items()], Modules({"a": "first", "b": "second"})
    config = grace.make_config({**LAYERS, "compressor": "efsignsgd"})
    ((_, plan),) = make_plans(specs, config, ranks=Ranks(2), prefix="grace.change1", modules=modules)
    for run in runs:
        run.change(plan)
        assert all(run.units[name]["memory"]["residual"].any() for name in "ab")
        assert {type(item.compressor).__name__ for item in run.plan.exchanged} == {"EFSignSGD"}


def test_modules_reach_a_stage_of_the_schedule_one_by_one():
    runs = by_module(schedule=[{"step": 1, "compress_ratio": 0.5}])
    take(runs, "first", "a", 0)
    ratios = {item.spec.name: item.compressor.compress_ratio for item in runs[0].plan.exchanged}
    assert ratios == {"a": 0.5, "b": 0.1}
    assert [first for first, _ in runs[0].stages] == [0, 1]
    take(runs, "second", "b", 0)
    assert {item.compressor.compress_ratio for item in runs[0].plan.exchanged} == {0.5}
