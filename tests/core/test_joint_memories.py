"""Memories that follow the mean of what all ranks have sent: dore over two_shot, diana where every rank merges."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import grace
from grace.core.config.registry import communicators
from grace.core.errors import GraceWarning, IncompatibleError, StateError
from grace.core.spec import TensorSpec
from grace.testing.communicator_contract import residuals
from grace.testing.harness import same
from tests.support.steps import CUTS, assert_same, each, each_cut, gradient, gradients, states, step, step_at_rest

SPECS = [TensorSpec("long", (3, 2000)), TensorSpec("short", (131,)), TensorSpec("double", (16, 90), "float64")]
LOSSY = {"compressor": "qsgd", "quantum_num": 7, "default_rules": False}
# The ranks send their differences exactly, so the gradients that the owner decodes are those that were given.
EXACT = {"compressor": "threshold", "threshold": 0.0, "second": "topk", "default_rules": False}
DORE = {"memory": "dore", "communicator": "two_shot"}
DIANA = {"memory": "diana", "communicator": "allgather"}


def change(sim, **options):
    """Continue with another configuration, as `change` does with other methods."""
    sim.config = grace.make_config({**sim.config.to_dict(), **options})
    plan = sim._plan_of(sim.config)
    sim.history.append(sim.config)
    for run in sim.runs:
        run.change(plan)


def memory_of(sim, rank, name):
    return sim.runs[rank].units[name]["memory"]


def assert_followed(sim, moved=True):
    """Assert that what ranks keep has the mean that its owner, or every rank, keeps; `moved` says that it is not 0."""
    for unit in sim.plan.units:
        name, dtype = unit.spec.name, unit.spec.work_dtype
        everyone = [memory_of(sim, rank, name) for rank in range(len(sim.runs))]
        if unit.onward is None:
            key, means = "shift", [mine["mean_shift"] for mine in everyone]
        else:
            key, means = "reference", [memory_of(sim, unit.onward.owners[0], unit.onward.spec.name)["reference"]]
        expected = np.mean([mine[key].astype(np.float64) for mine in everyone], axis=0)
        assert expected.any() == moved, name
        for mean in means:
            assert same(mean, means[0])
            assert np.allclose(mean, expected, atol=1e-6 if dtype == "float32" else 1e-13), name


@each(options={"dore": {**LOSSY, **DORE}, "diana": {**LOSSY, **DIANA}}, size=[1, 2, 3, 5], cut=["layer", *CUTS])
def test_the_mean_follows_what_all_ranks_keep(options, size, cut):
    sim = grace.Simulation(size, SPECS, {**options, **CUTS.get(cut, {"granularity": "layer"})})
    for number in range(4):
        first, *others = step(sim, number)
        for other in others:
            assert_same([first], [other])
        assert_followed(sim)
    # It stays as it was where a gradient is bad.
    before = states(sim)
    step(sim, 4, change=lambda name, rank, x: x * np.nan if rank == size - 1 else x)
    assert_same(before, states(sim))


@each(size=[1, 2, 3, 5], cut=["layer", *CUTS])
def test_dore_loses_nothing(size, cut):
    """Applied plus what the owners hold back is what they decoded, here what was given."""
    sim = grace.Simulation(size, SPECS, {**EXACT, **DORE, **CUTS.get(cut, {"granularity": "layer"})})
    check_nothing_lost(sim, {})


def check_nothing_lost(sim, changes, steps=6):
    """Compare applied plus held with given after each step; `changes` by the step before which they are made."""
    size = len(sim.runs)
    total = {spec.name: np.zeros(spec.shape) for spec in SPECS}
    for number in range(steps):
        if number in changes:
            changes[number](sim)
        merged = step(sim, number)[0]
        held = residuals(sim)
        for spec in SPECS:
            given = sum(gradient(spec, number, rank).astype(np.float64) for rank in range(size)) / size
            total[spec.name] += given - merged[spec.name]
            assert np.abs(held[spec.name] - total[spec.name]).max() <= 1e-4, (number, spec.name)
    assert all(np.abs(x).max() > 0.5 for x in residuals(sim).values())


@pytest.mark.parametrize(
    "changed",
    [
        lambda sim: sim.change(alpha=0.5),
        lambda sim: sim.change(second={"name": "topk", "compress_ratio": 0.2}),
        lambda sim: change(sim, bucket_bytes=3000, split_bytes=8192),
        lambda sim: sim.change(memory="none"),
        lambda sim: sim.change(compressor="topk", compress_ratio=0.05),
        lambda sim: sim.change(compressor="topk", compress_ratio=0.05, communicator="allgather"),
    ],
    ids=["alpha", "second", "cuts", "no memory", "residual", "gathered"],
)
def test_a_change_loses_nothing(changed):
    """The ranks send what the owners held, or the same owners go on with it."""
    back = {**EXACT, **DORE}
    del back["default_rules"]
    sim = grace.Simulation(3, SPECS, {**EXACT, **DORE})
    check_nothing_lost(sim, {2: changed, 4: lambda sim: sim.change(**back)})
    assert_followed(sim)


def test_what_owners_held_is_sent_once_after_a_change():
    sim = grace.Simulation(3, SPECS, {**EXACT, **DORE})
    step(sim, 0)
    held = residuals(sim)
    change(sim, bucket_bytes=3000, split_bytes=8192, communicator={"name": "two_shot", "second": "none"})
    merged = sim.step([{spec.name: np.zeros(spec.shape, spec.dtype) for spec in SPECS} for _ in range(3)])[0]
    for name, x in held.items():
        assert np.abs(x).max() > 0.5
        assert np.allclose(merged[name], x, atol=1e-5), name
    assert not any(x.any() for x in residuals(sim).values())


@each_cut
def test_shifts_are_carried_to_other_units(cut):
    sim = grace.Simulation(2, SPECS, {**LOSSY, **DIANA, "granularity": "layer"})
    for number in range(3):
        step(sim, number)

    def whole(key):
        return {
            name: np.concatenate([memory_of(sim, 1, u.spec.name)[key][i : i + p.numel] for u, i, p in places])
            for name, places in sim.plan.places.items()
        }

    before = {key: whole(key) for key in ("shift", "mean_shift")}
    change(sim, **CUTS[cut], compressor={"name": "topk", "compress_ratio": 0.1})
    for key, tensors in before.items():
        assert all(same(x, whole(key)[name]) for name, x in tensors.items())
    assert_followed(sim)


@pytest.mark.parametrize(("before", "after"), [(DORE, DIANA), (DIANA, DORE)], ids=["to diana", "to dore"])
def test_shifts_without_their_mean_start_again(before, after):
    sim = grace.Simulation(3, SPECS, {**LOSSY, **before})
    for number in range(2):
        step(sim, number)
    assert_followed(sim)
    sim.change(**after)
    assert_followed(sim, moved=False)
    step(sim, 2)
    assert_followed(sim)


def test_other_owners_start_again():
    sim = grace.Simulation(3, SPECS[:1], {**LOSSY, **DORE})
    step(sim, 0)
    assert_followed(sim)
    change(sim, bucket_bytes=3000, split_bytes=4096)
    assert_followed(sim, moved=False)
    step(sim, 1)
    assert_followed(sim)


@pytest.mark.parametrize("way", [DORE, DIANA], ids=["dore", "diana"])
def test_a_resting_tensor_keeps_what_the_ranks_know_of_it(way):
    sim = grace.Simulation(2, SPECS, {**LOSSY, **way})
    for number in range(2):
        step(sim, number)
    before = states(sim)
    merged = step_at_rest(sim, 2, "long")
    assert all((mine["long"] == 0).all() and mine["short"].any() for mine in merged)
    for old, new in zip(before, states(sim), strict=True):
        assert all(same(old[key], new[key]) for key in old if "long" in key[0])
    assert_followed(sim)


@pytest.mark.parametrize("way", [DORE, DIANA], ids=["dore", "diana"])
def test_no_rank_starts_from_zero_alone(way):
    """Otherwise its gradient would lack what the mean of all ranks holds for it, for ever."""
    sim, other = (grace.Simulation(2, SPECS, {**LOSSY, **way}) for _ in "ab")
    step(sim, 0)
    saved = sim.state_dict()
    before = states(other)
    with pytest.raises(StateError, match=r"no rank can start from zero alone\. Let every rank load its own file"):
        other.runs[1].load_state_dict(copy.deepcopy(saved["ranks"][0]), lambda saved, current: saved)
    assert_same(before, states(other))
    # With another number of ranks, all of them start from zero if they load one state.
    more = grace.Simulation(3, SPECS, {**LOSSY, **way})
    with pytest.warns(GraceWarning, match="residuals start from zero"):
        assert more.load_state_dict({"ranks": [saved["ranks"][0]] * 3}) is False
    assert_followed(more, moved=False)
    assert more.run.step == 1


@pytest.mark.parametrize("way", [DORE, DIANA], ids=["dore", "diana"])
@pytest.mark.parametrize("sizes", [(2, 3), (4, 2), (3, 1), (7, 3)])
def test_other_ranks_follow_the_same_mean(way, sizes):
    sim, other = (grace.Simulation(size, SPECS, {**LOSSY, **way}) for size in sizes)
    for number in range(3):
        step(sim, number)
    assert other.load_state_dict(sim.state_dict()) is False
    assert_followed(other)
    step(other, 3)
    assert_followed(other)


@pytest.mark.parametrize("way", [DORE, {**DIANA, "communicator": "auto"}], ids=["dore", "diana"])
def test_nodes_take_the_place_of_ranks(way):
    """Between nodes, the ranks with the same shard keep what ranks keep elsewhere."""
    between = {"name": "hierarchical", "local_size": 2, "between": way["communicator"]}
    nodes = grace.Simulation(6, SPECS, {**LOSSY, **way, "communicator": between})
    for number in range(4):
        first, *others = step(nodes, number)
        for other in others:
            assert_same([first], [other])
    for unit in nodes.plan.units:
        inner = unit.onward
        kept = [memory_of(nodes, rank, inner.spec.name) for rank in inner.owners]
        if not inner.spec.numel:
            continue
        if inner.onward is None:
            mean = kept[0]["mean_shift"]
            expected = np.mean([mine["shift"].astype(np.float64) for mine in kept], axis=0)
        else:
            mean = memory_of(nodes, inner.onward.owners[0], inner.onward.spec.name)["reference"]
            expected = np.mean([mine["reference"].astype(np.float64) for mine in kept], axis=0)
        assert expected.any()
        assert np.allclose(mean, expected, atol=1e-6), unit.spec.name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory": "dore"}, r"Dore.* needs one rank that owns each mean.*Valid communicators: two_shot"),
        ({"memory": "dore", "communicator": "hierarchical", "local_size": 2}, "needs one rank that owns each mean"),
        ({"memory": "dore_mean", "communicator": "allgather"}, "needs one rank that owns each mean"),
        ({"memory": "dore_mean", "communicator": "two_shot"}, "No communicator can: choose another memory"),
        ({"memory": "diana", "communicator": "two_shot"}, "compresses it again"),
        ({"memory": "diana", "communicator": "sparse_allreduce", "compressor": "topk"}, "drops a part of it"),
        ({**DORE, "shard_memory": "residual"}, "leave shard_memory out"),
        ({**DORE, "second": "signsgd"}, "gives a vote"),
        ({"memory": "diana", "compressor": "signsgd"}, "gives a vote"),
        ({"memory": "shared_momentum", "compressor": "signum"}, "gives a vote"),
    ],
)
def test_what_does_not_work_together_is_refused_by_name(options, told):
    with pytest.raises(IncompatibleError, match=told):
        grace.Simulation(4, SPECS, {"compressor": "qsgd", "default_rules": False, **options})


def test_an_optimizer_may_change_a_momentum_in_place():
    options = {"compressor": "efsignsgd", "memory": "shared_momentum", "granularity": "layer", "default_rules": False}
    sim, other = (grace.Simulation(2, SPECS, options) for _ in "ab")
    for number in range(3):
        first, second = step(sim, number), step(other, number)
        assert_same(first, second)
        merged = sim.step(gradients(sim, number + 10), lr=0.1)
        for mine in merged:
            for x in mine.values():
                x *= 0
        step(other, number + 10)
        assert_same(states(sim), states(other))


@pytest.mark.parametrize("size", [2, 4])
def test_auto_keeps_diana_where_every_rank_merges(size):
    sim = grace.Simulation(size, SPECS, {**LOSSY, "memory": "diana"})
    assert {type(unit.communicator) for unit in sim.plan.units} == {communicators.get("allgather")}
