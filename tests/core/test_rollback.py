"""Without roll-back, a memory is kept once, and starts from zero when a step is dropped."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.compressors.topk import TopK
from grace.core.errors import StepError
from grace.core.memories.residual import Residual
from grace.core.spec import TensorSpec
from grace.testing.harness import FRAMEWORKS, host, same, unit_of
from tests.support.steps import assert_same, each_combination, gradients, simulate, states, step, step_at_rest

# TensorFlow's arrays are immutable.
IN_PLACE = [name for name in FRAMEWORKS if name != "tensorflow"]
# A sum in the kernel of the compressor, a sum alone, a memory that finishes, and one with two arrays.
METHODS = {
    "topk": {"compressor": "topk", "compress_ratio": 0.1},
    "efsignsgd": {"compressor": "efsignsgd"},
    "qsgd": {"compressor": "qsgd", "memory": "residual"},
    "powersgd": {"compressor": "powersgd", "compress_rank": 2},
    "dgc": {"compressor": "topk", "memory": "dgc", "compress_ratio": 0.1},
}
each_method = pytest.mark.parametrize("method", METHODS)


def made(method, framework="numpy", **options):
    config = {**METHODS[method], "default_rules": False, "granularity": "layer", "rollback": False, **options}
    return grace.Simulation(2, {"a": (32, 20), "b": (16, 12)}, config, framework=framework)


def after(number, method, framework="numpy", **options):
    """Return a simulation after a number of steps."""
    sim = made(method, framework, **options)
    for at in range(number):
        step(sim, at)
    return sim


def arrays_of(sim):
    """Return the live arrays of rank 0's memories, without the run's knowledge."""
    units = sim.run._states[""].units
    return [x for name in ("a", "b") for x in units[name]["memory"].values()]


def with_kernels(sim):
    if not sim.runs[0]._ops("cpu").runs_kernels:
        pytest.skip("there are no kernels")
    return sim


def poison(name, rank, x):
    if name == "matrix" and rank == 1:
        x[3, 5] = np.nan
    return x


@each_combination()
def test_steps_are_the_same_until_one_is_dropped(chosen):
    usual, without = simulate(chosen), simulate(chosen, rollback=False)
    for number in range(3):
        assert_same(step(usual, number), step(without, number))
        assert_same(states(usual), states(without))
    assert_same(step(usual, 3, change=poison), step(without, 3, change=poison))
    item = next(item for item in usual.plan.assignments if item.spec.name == "matrix")
    for old, new in zip(states(usual), states(without), strict=True):
        assert old.keys() == new.keys()
        for (name, kind, field), value in new.items():
            if name.startswith("matrix") and kind == "memory" and item.guarded:
                assert not value.any(), field
            else:
                assert same(value, old[name, kind, field]), (name, kind, field)
    for mine in step(without, 4):
        assert all(np.isfinite(x.astype(np.float64)).all() for x in mine.values())


@pytest.mark.parametrize("framework", FRAMEWORKS)
@each_method
def test_memories_start_from_zero_after_a_step_that_failed(method, framework):
    sim = after(2, method, framework)
    before = states(sim)
    given = gradients(sim, 2)
    # The other tensors have begun.
    given[1]["b"] = given[1]["a"]
    with pytest.raises(StepError, match="expected a gradient of shape"):
        sim.step(given)
    for old, new in zip(before, states(sim), strict=True):
        for key, value in new.items():
            assert not value.any() if key[1] == "memory" else same(value, old[key]), key
    assert [int(run.step) for run in sim.runs] == [2, 2]
    # The step number goes on, so that random numbers do.
    fresh = made(method, framework)
    fresh.load_state_dict({"ranks": [run.state_dict() for run in sim.runs]})
    assert_same(step(sim, 3), step(fresh, 3))


@pytest.mark.parametrize("framework", IN_PLACE)
@each_method
def test_kernels_write_over_the_old_state(method, framework):
    """From the first step on, so that no step needs more memory."""
    sim = with_kernels(made(method, framework))
    before = arrays_of(sim)
    for number in range(2):
        step(sim, number)
    ops = sim.runs[0]._ops("cpu")
    assert len(before) == (4 if method == "dgc" else 2)
    assert all(ops.is_same(old, new) for old, new in zip(before, arrays_of(sim), strict=True))


@pytest.mark.parametrize("framework", IN_PLACE)
@each_method
def test_with_roll_back_the_old_state_stays(method, framework):
    sim = after(1, method, framework, rollback=True)
    ops, before = sim.runs[0]._ops("cpu"), arrays_of(sim)
    copies = [host(ops, x) for x in before]
    step(sim, 1)
    assert all(same(host(ops, x), kept) for x, kept in zip(before, copies, strict=True))


# What gives the live arrays of a run away.
GIVES = {
    "state_dict": lambda run: [s["memory"] for s in run.state_dict()["tensors"].values()],
    "memories": lambda run: list(run.memories().values()),
    "snapshot": lambda run: [s["memory"] for s in run.units.values()],
}


@pytest.mark.parametrize("framework", IN_PLACE)
@pytest.mark.parametrize("gives", GIVES)
def test_what_was_given_away_is_not_written_over(gives, framework):
    sim = after(2, "topk", framework)
    ops = sim.runs[0]._ops("cpu")
    given = [x for held in GIVES[gives](sim.runs[0]) for x in held.values()]
    copies = [host(ops, x) for x in given]
    assert any(x.any() for x in copies)
    for number in (2, 3):
        step(sim, number)
    assert all(same(host(ops, x), kept) for x, kept in zip(given, copies, strict=True))


@pytest.mark.parametrize("framework", IN_PLACE)
def test_a_state_that_rested_is_not_written_over(framework):
    """The old arrays come back after such a step, and a checkpoint may still have them."""
    sim = after(2, "topk", framework)
    ops = sim.runs[0]._ops("cpu")
    given = [x for memory in GIVES["state_dict"](sim.runs[0]) for x in memory.values()]
    copies = [host(ops, x) for x in given]
    step_at_rest(sim, 2, *(item.spec.name for item in sim.plan.assignments))
    for number in (3, 4):
        step(sim, number)
    assert all(same(host(ops, x), kept) for x, kept in zip(given, copies, strict=True))


@each_method
def test_what_was_loaded_is_not_written_over(method):
    sim = after(2, method)
    saved = sim.state_dict()
    copies = states(sim)
    sim.load_state_dict(saved)
    for number in (2, 3):
        step(sim, number)
    other = made(method)
    other.load_state_dict(saved)
    assert_same(copies, states(other))


def test_a_memory_that_compensates_otherwise_is_not_written_over():
    class Shows(Residual):
        def compensate(self, grad, state, at):
            return super().compensate(grad, state, at)

    spec = TensorSpec("t", (9,))
    assert unit_of(TopK(), Residual(), spec).fused.overwritten == ("residual",)
    assert unit_of(TopK(), Shows(), spec).fused.overwritten == ()


def test_a_change_of_the_plan_carries_residuals_over():
    usual, without = after(2, "topk", rollback=True), after(2, "topk")
    for sim in (usual, without):
        sim.change(compressor="efsignsgd")
    for number in (2, 3):
        assert_same(step(usual, number), step(without, number))
    assert_same(states(usual), states(without))


def test_states_are_not_saved_in_the_middle_of_a_step():
    sim = after(1, "topk")
    run = sim.runs[0]
    run.current.ready("a", gradients(sim, 1)[0]["a"])
    with pytest.raises(StepError, match=r"state_dict\(\) was called while gradients are being exchanged"):
        run.state_dict()
    assert after(1, "topk", rollback=True).runs[0].state_dict()
