"""Units that change during a run, and units of a checkpoint: residuals are kept and stay with their tensors."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random

import numpy as np
import pytest

from grace.core.config.config import make_config
from grace.core.config.registry import compressors, memories
from grace.core.errors import ConfigError, IncompatibleError, MismatchError, StateError
from grace.core.methods.memory import holds_residual
from grace.core.session.simulation import Simulation, poll_all
from grace.testing.harness import FRAMEWORKS, host, same
from tests.support import covering
from tests.support.steps import (
    CUTS,
    LAYOUTS,
    LONG,
    METHODS,
    MIXED,
    SPECS,
    TYPICAL,
    assert_same,
    each,
    each_cut,
    gradients,
    on_host,
    simulate,
    states,
    step,
    step_at_rest,
)

# --- changes during a run ---------------------------------------------------------------------------------------


def residuals(sim):
    """Return the sum over ranks of each tensor's residual, per element, in units of the gradient."""
    total = {part.spec.name: np.zeros(part.spec.numel) for part in sim.plan.exchanged}
    ops = sim.runs[0]._ops("cpu")
    for run in sim.runs:
        for name, places in run.plan.places.items():
            for unit, start, piece in places:
                memory = run.units[unit.spec.name]["memory"]
                if "residual" in memory:
                    held = host(ops, memory["residual"]).astype(np.float64)[start : start + piece.numel]
                    total[name][piece.start : piece.stop] += held / unit.memory.residual_scale
    return total


def change(sim, **options):
    """Continue with another configuration, as `change` does with other methods."""
    sim.config = make_config({**sim.config.to_dict(), **options})
    plan = sim._plan_of(sim.config)
    sim.history.append(sim.config)
    for run in sim.runs:
        run.change(plan)


TOPK = {"compressor": "topk", "compress_ratio": 0.05, "default_rules": False}


@each(lambda row: row["before"] != row["after"], before=list(LAYOUTS), after=list(LAYOUTS), framework=FRAMEWORKS)
def test_residuals_are_carried_from_any_cut_to_any_other(before, after, framework):
    specs = [spec for spec in MIXED if spec.name in ("matrix", "empty", "scalar", "double", "long")]
    sim = Simulation(2, specs, {**TOPK, **LAYOUTS[before]}, framework=framework)
    for number in range(2):
        step(sim, number)
    held = residuals(sim)
    assert all(np.count_nonzero(held[spec.name]) >= spec.numel // 2 for spec in specs if spec.numel > 1)
    change(sim, **LAYOUTS[after])
    assert {name: x.tobytes() for name, x in residuals(sim).items()} == {n: x.tobytes() for n, x in held.items()}
    assert set(sim.runs[0].state_dict()["tensors"]) == {unit.spec.name for unit in sim.plan.units}
    # The residuals are sent.
    change(sim, compressor="none", memory="none")
    merged = on_host(sim, sim.step([{n: x * 0 for n, x in mine.items()} for mine in gradients(sim, 3)]))[0]
    for spec in specs:
        assert np.allclose(merged[spec.name].reshape(-1), held[spec.name] / 2, rtol=1e-6, atol=1e-7), spec
    assert not any(x.any() for x in residuals(sim).values())


def test_another_method_does_not_begin_with_a_state_that_happens_to_fit():
    """Both keep a factor of the same shape, but not of the same meaning."""
    sim, fresh = (Simulation(2, {"a": (64, 48)}, {"compressor": name}) for name in ("powersgd", "gradzip"))
    step(sim, 0)
    sim.change(compressor="gradzip")
    for run, other in zip(sim.runs, fresh.runs, strict=True):
        made, expected = (e.state_dict()["tensors"]["a"]["compressor"] for e in (run, other))
        assert np.array_equal(made["q"], expected["q"])


WITHOUT_RESIDUAL = [name for name, memory in memories.ready() if not holds_residual(memory)]


@each(
    memory=WITHOUT_RESIDUAL,
    way=["allreduce", "allgather", "two_shot", "hierarchical"],
    cut=list(CUTS),
    scheduled=[False, True],
)
def test_a_method_without_a_residual_sends_the_one_before_once(memory, way, cut, scheduled):
    """Momentum spreads it over many steps, of which half of the rest is in each."""
    specs = [SPECS[0], SPECS[1], LONG]
    to = {"compressor": "none", "memory": memory, "communicator": {"name": way}}
    if memory == "momentum":
        to["momentum"] = 0.5
    if way == "hierarchical":
        to["communicator"]["local_size"] = 2
    schedule = [{"step": 2, **to}] if scheduled else []
    try:
        sim = Simulation(4, specs, {**TOPK, **CUTS[cut], "schedule": schedule, "communicator": "allgather"})
        for number in range(2):
            step(sim, number)
        before = residuals(sim)
        if not scheduled:
            sim.change(**to)
    except IncompatibleError:
        pytest.skip("the communicator does not serve the memory")
    assert {holds_residual(unit.memory) for unit in sim.plan.units} == {True}
    received = {spec.name: 0.0 for spec in specs}
    for _ in range(40):
        zeros = [{name: x * 0 for name, x in mine.items()} for mine in gradients(sim, 0)]
        for name, x in on_host(sim, sim.step(zeros))[0].items():
            received[name] = received[name] + x.astype(np.float64).reshape(-1)
    for name, held in before.items():
        assert np.abs(held).max() > 0.1
        assert np.allclose(received[name], held / 4, rtol=1e-5, atol=1e-6), name
    assert not any(x.any() for x in residuals(sim).values())


def drawn_change(rng):
    """Return a number of ranks, a configuration, changes by their steps, and the step of the save."""

    def method():
        compressor = rng.choice(list(METHODS))
        chosen = {"compressor": compressors.config_of(METHODS[compressor].compressor)}
        if rng.random() < 0.4:
            chosen["memory"] = rng.choice(["residual", *WITHOUT_RESIDUAL])
        if rng.random() < 0.5:
            chosen["communicator"] = rng.choice(
                ["allgather", "allreduce", "two_shot", {"name": "hierarchical", "local_size": 2}]
            )
        return chosen

    saved = rng.randint(1, 4)
    steps = sorted(rng.sample(range(saved + 1), rng.choice((1, 1, 2)) if saved else 1))
    config = {**method(), "default_rules": rng.random() < 0.3, "granularity": rng.choice(["layer", "bucket", "model"])}
    return rng.choice((1, 2, 3, 4)), config, {step: method() for step in steps}, saved


@pytest.mark.parametrize("number", range(1000 if covering.ALL else 60))
def test_a_new_run_of_the_changed_configuration_continues_bit_for_bit(number):
    rng = random.Random(f"change/{number}")
    for _ in range(100):
        size, config, changes, saved = drawn_change(rng)
        with contextlib.suppress(ConfigError, IncompatibleError):
            old, plain = changed(size, config, changes, saved, scheduled=rng.random() < 0.3)
            break
    new = Simulation(size, SPECS, plain)
    assert new.load_state_dict(copy.deepcopy(old.state_dict())) is True
    for more in range(2):
        assert_same(step(old, saved + more), step(new, saved + more))
        assert_same(states(old), states(new))
    # A run that carries nothing of an earlier method is loaded where one is carried.
    fresh = Simulation(size, SPECS, plain)
    step(fresh, 0)
    assert new.load_state_dict(fresh.state_dict()) is True
    assert_same(step(fresh, 1), step(new, 1))


def changed(size, config, changes, saved, *, scheduled):
    """Return a run whose method has changed, by calls or by a schedule, and its configuration at the end."""
    stages = [{"step": at, **method} for at, method in changes.items() if at] if scheduled else []
    sim = Simulation(size, SPECS, {**config, "schedule": stages})
    for number in range(saved + 1):
        if number in changes and not scheduled:
            sim.change(**changes[number])
        if number < saved:
            step(sim, number)
    return sim, next(stage for first, stage in reversed(sim.config.stages) if first <= saved)


@pytest.mark.parametrize("number", range(300 if covering.ALL else 30))
def test_what_a_change_has_left_is_kept_on_other_numbers_of_ranks(number):
    """The mean of all residuals is kept, also of those that the new method does not have."""
    rng = random.Random(f"other ranks/{number}")
    before, after = rng.choice([(2, 3), (3, 2), (4, 2), (2, 4), (1, 3), (4, 1)])
    to = rng.choice([{"compressor": "qsgd"}, {"compressor": "none"}, {"compressor": "qsgd", "memory": "diana"}])
    config = {**TOPK, "communicator": "allgather", **LAYOUTS[rng.choice(list(LAYOUTS))]}
    old = Simulation(before, MIXED, config)
    step(old, 0)
    old.change(**to, communicator="allgather")
    new = Simulation(after, MIXED, old.config)
    new.load_state_dict(old.state_dict()["ranks"])
    kept = residuals(new)
    for name, held in residuals(old).items():
        assert held.size == 1 or held.any() or not held.size
        assert np.allclose(held / before, kept[name] / after, rtol=1e-5, atol=1e-6), name
    step(new, 1)


@pytest.mark.parametrize(("before", "after"), [("layer", "model"), ("model", "layer")])
def test_residuals_are_carried_to_a_memory_of_other_units(before, after):
    """The memory efsignsgd keeps its residual in units of the weights; with lr 0.5 that is exact in binary."""
    sim = Simulation(2, MIXED, {**TOPK, "granularity": before})
    for number in range(2):
        step(sim, number)
    held = residuals(sim)
    for memory, granularity in (({"name": "efsignsgd", "lr": 0.5}, after), ("residual", before)):
        change(sim, memory=memory, granularity=granularity)
        assert {name: x.tobytes() for name, x in residuals(sim).items()} == {n: x.tobytes() for n, x in held.items()}


@each_cut
@pytest.mark.parametrize(
    "to",
    [
        {"compressor": "powersgd", "compress_rank": 2, "memory": "residual"},
        {"compressor": "dgc", "momentum": 0.0},
        {"compressor": "efsignsgd", "lr": 0.25},
        {"compressor": "onebit", "communicator": "broadcast"},
        {"compressor": "none"},
        {"compressor": "qsgd", "memory": "residual"},
    ],
    ids=lambda to: to["compressor"],
)
def test_a_schedule_loses_nothing_where_methods_are_cut_differently(to, cut):
    """Given gradients equal applied gradients plus residuals. Methods with a scale compress single tensors."""
    specs = [spec for spec in MIXED if spec.dtype in ("float32", "float64")]
    schedule = [{"step": 2, **to}, {"step": 4, "compressor": "topk", "compress_ratio": 0.05}]
    sim = Simulation(2, specs, {**TOPK, **CUTS[cut], "schedule": schedule})
    given = {spec.name: np.zeros(spec.numel) for spec in specs}
    received = {spec.name: np.zeros(spec.numel) for spec in specs}
    cuts = set()
    for number in range(6):
        cuts.add(tuple(unit.pieces for unit in sim.plan.units))
        mine = gradients(sim, number)
        merged = sim.step(mine)[0]
        held = residuals(sim)
        for name in given:
            given[name] += sum(g[name].astype(np.float64).reshape(-1) for g in mine) / 2
            received[name] += merged[name].astype(np.float64).reshape(-1)
            assert np.abs(given[name] - received[name] - held[name] / 2).max(initial=0.0) < 1e-4, (number, name)
    assert len(cuts) == 1 + (not compressors.make(to["compressor"]).joins)


def test_momentum_is_carried_like_the_residual():
    options = {"compressor": "dgc", "compress_ratio": 0.05, "default_rules": False, "granularity": "layer"}
    sim = Simulation(1, [SPECS[0], LONG], options)
    for number in range(2):
        step(sim, number)
    before = states(sim)[0]
    change(sim, **CUTS["small buckets"])
    after = states(sim)[0]
    for key, name in itertools.product(("momentum", "residual"), ("matrix", "long")):
        places = sim.plan.places[name]
        slices = [after[unit.spec.name, "memory", key][i : i + piece.numel] for unit, i, piece in places]
        assert same(np.concatenate(slices), before[name, "memory", key])


# --- checkpoints ------------------------------------------------------------------------------------------------


def load(sim, other):
    for run, new in zip(sim.runs, other.runs, strict=True):
        ops = run._ops("cpu")
        assert new.load_state_dict(
            run.state_dict(),
            lambda saved, current, ops=ops: ops.reshape(ops.concat([saved]), tuple(current.shape)),
        )


@each(chosen=TYPICAL, cut=list(CUTS))
def test_a_checkpoint_continues_bit_for_bit(chosen, cut):
    sim, fresh = (simulate(chosen, specs=MIXED, **CUTS[cut]) for _ in "ab")
    for number in range(2):
        step(sim, number)
    load(sim, fresh)
    for number in range(2, 4):
        assert_same(step(sim, number), step(fresh, number))
    assert_same(states(sim), states(fresh))


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b])
def test_a_checkpoint_of_other_cuts_is_refused_by_name(before, after):
    specs = [SPECS[0], SPECS[1], LONG]
    saved, other = (Simulation(2, specs, {**TOPK, **LAYOUTS[name]}) for name in (before, after))
    step(saved, 0)
    held, here = ({unit.spec.name for unit in sim.plan.units} for sim in (saved, other))
    names, fresh = held ^ here, states(other)
    if not names:
        # The options differ, but the units are the same.
        load(saved, other)
        assert_same(states(other), states(saved))
        return
    with pytest.raises(StateError, match=r"only on one side.*granularity, bucket_bytes and split_bytes") as refused:
        load(saved, other)
    assert any(name in str(refused.value) for name in names)
    assert_same(states(other), fresh)


def test_a_checkpoint_of_other_tensors_between_the_same_ends_is_refused():
    """Otherwise residuals would be added to the gradients of other parameters."""
    shapes = {"a": (40,), "b": (10,), "c": (20,), "d": (40,)}
    for other in (
        {"a": (40,), "b": (20,), "c": (10,), "d": (40,)},
        {"a": (40,), "c": (20,), "b": (10,), "d": (40,)},
        {"a": (40,), "b": (10,), "e": (20,), "d": (40,)},
    ):
        sim, fresh = (Simulation(1, given, TOPK) for given in (shapes, other))
        assert [len(s.plan.units) for s in (sim, fresh)] == [1, 1]
        with pytest.raises(StateError, match="only on one side"):
            load(sim, fresh)


# --- tensors that do not train ------------------------------------------------------------------------------------


def kept(sim, tensor):
    """Return what the memories of all ranks hold for the elements of a tensor, as a checkpoint has it."""
    found = []
    ops = sim.runs[0]._ops("cpu")
    for run in sim.runs:
        saved = run.state_dict()["tensors"]
        for unit, start, piece in run.plan.places[tensor]:
            for field, value in sorted(saved[unit.spec.name]["memory"].items()):
                found.append((field, piece.start, host(ops, value)[start : start + piece.numel]))
    return found


@pytest.mark.parametrize("memory", ["residual", "dgc"])
@each_cut
def test_a_resting_tensor_keeps_its_residual_and_moves_nothing(cut, memory):
    options = {**TOPK, "memory": memory, **CUTS[cut]}
    sim = Simulation(2, [SPECS[0], SPECS[1], LONG], options)
    step(sim, 0)
    before = kept(sim, "matrix")
    for number in (1, 2):
        merged = step_at_rest(sim, number, "matrix")
        assert all((mine["matrix"] == 0).all() and mine["vector"].any() for mine in merged)
        assert all(same(a[2], b[2]) for a, b in zip(before, kept(sim, "matrix"), strict=True))
    # Neither another plan nor a snapshot loses it.
    change(sim, bucket_bytes=0)
    snapshots = [run.savepoint for run in sim.runs]
    step_at_rest(sim, 3, "matrix")
    for run, snapshot in zip(sim.runs, snapshots, strict=True):
        run.put_back(snapshot)
    assert residuals(sim)["matrix"].any()
    # The pieces differ, not their elements.
    first, last = (
        np.concatenate([x for field, _, x in held if field == "residual"]) for held in (before, kept(sim, "matrix"))
    )
    assert same(first, last)


@pytest.mark.parametrize("communicator", ["allgather", "two_shot", "allreduce"])
def test_ranks_that_freeze_other_tensors_are_stopped(communicator):
    compressor = "randomk" if communicator == "allreduce" else "topk"
    options = {"compressor": compressor, "memory": "residual", "communicator": communicator, "default_rules": False}
    sim = Simulation(3, [SPECS[0], SPECS[1]], options)
    step(sim, 0)
    for rank, (run, mine) in enumerate(zip(sim.runs, gradients(sim, 1), strict=True)):
        for name, x in mine.items():
            run.current.rest(name) if (rank, name) == (1, "vector") else run.current.ready(name, x)
    poll_all(sim.runs)
    with pytest.raises(MismatchError, match="only some of them froze a parameter"):
        [run.finish() for run in sim.runs]
