"""A checkpoint of all ranks on another number of ranks: what they hold back is kept."""

from __future__ import annotations

import copy
import functools
import random
import warnings

import numpy as np
import pytest

import grace
from grace.core.config.registry import memories
from grace.core.errors import GraceError, GraceWarning, StateError
from grace.core.spec import TensorSpec
from grace.core.state.merge import shares
from grace.testing.communicator_contract import residuals
from grace.testing.harness import FRAMEWORKS, array, host, same
from tests.support.cases import CORRECTED_BY
from tests.support.steps import assert_same, each, states, step

SPECS = [
    TensorSpec("long", (3, 5000)),
    TensorSpec("matrix", (24, 40)),
    TensorSpec("vector", (131,)),
    TensorSpec("empty", (0, 4)),
    TensorSpec("half", (9, 16), "float16"),
    TensorSpec("double", (16, 90), "float64"),
]
TOPK = {"compressor": "topk", "compress_ratio": 0.1}
MEMORIES = {
    "residual": TOPK,
    "decaying": {**TOPK, "memory": "residual", "beta": 0.5},
    "lr_correction": {**TOPK, "memory": "residual", "lr_correction": True},
    "lowpass": {**TOPK, "memory": "lowpass"},
    "efsignsgd": {**TOPK, "memory": "efsignsgd"},
    "dgc": {"compressor": "dgc", "compress_ratio": 0.1, "momentum_masking": False},
    "variance": {**TOPK, "memory": "variance"},
    "shared_momentum": {"compressor": "efsignsgd", "memory": "shared_momentum"},
    "momentum": {"compressor": "signum"},
    "svrg": {"compressor": "lpc", "memory": "svrg"},
    "powersgd": {"compressor": "powersgd"},
    "diana": {"compressor": "qsgd", "memory": "diana"},
    "dore": {"compressor": "qsgd", "memory": "dore"},
}
WAYS = {
    "gathered": {"communicator": "allgather"},
    "auto": {"communicator": "auto"},
    "shots": {"communicator": "two_shot"},
    "nodes": {"communicator": {"name": "hierarchical", "local_size": 2}},
    "nodes with shots": {"communicator": {"name": "hierarchical", "local_size": 2, "between": "two_shot"}},
}
SIZES = {"4 to 2": (4, 2), "4 to 8": (4, 8), "4 to 3": (4, 3), "1 to 4": (1, 4), "6 to 4": (6, 4), "8 to 4": (8, 4)}
CUTS = {"layer": {"granularity": "layer"}, "bucket": {"bucket_bytes": 6000, "split_bytes": 20_000}, "default": {}}


def simulate(size, *options, **arguments):
    config = {"default_rules": False, "seed": 5}
    for each_of in options:
        config |= each_of
    return grace.Simulation(size, SPECS, config, **arguments)


def possible(row):
    """Return whether the configuration is valid, and whether the smaller run has several nodes or one rank."""
    before, after = SIZES[row["sizes"]]
    if row["way"].startswith("nodes") and any((size % 2 and size > 1) or size == 2 for size in (before, after)):
        return False
    return valid(row["memory"], row["way"])


@functools.cache
def valid(memory, way):
    try:
        simulate(4, MEMORIES[memory], WAYS[way])
    except GraceError:
        return False
    return True


def means(sim):
    """Return the mean over the ranks that have it of each state of memories: by memory, key and tensor."""
    found = {}
    for unit in sim.plan.units:
        for place, one in enumerate((unit, *unit.chain)):
            owners = range(len(sim.runs)) if one.owners is None else one.owners
            for rank in owners:
                memory = sim.runs[rank].units[one.spec.name]["memory"]
                for key, value in memory.items():
                    start, value = 0, host(sim._ops("cpu"), value).astype(np.float64)
                    if value.shape != (one.spec.numel,):
                        continue
                    for piece in one.pieces:
                        # Within nodes the first memory of a chain is another one, or none.
                        role = memories.name_of(one.memory), place > 0 and unit.memory == one.memory, key, piece.tensor
                        total = found.setdefault(role, np.zeros(max(s.numel for s in SPECS)))
                        total[piece.start : piece.stop] += value[start : start + piece.numel] / len(owners)
                        start += piece.numel
    return found


def assert_close(a, b, name):
    assert np.abs(a - b).max(initial=0) <= 1e-6 * max(1.0, np.abs(a).max(initial=0)), name


@pytest.mark.parametrize("memory", ["residual", "lowpass", "efsignsgd", "dgc", "shared_momentum"])
def test_what_owners_hold_goes_to_all_ranks_where_there_are_none(memory):
    check_kept(memory, "auto", "4 to 2", "default")


@each(possible, memory=list(MEMORIES), way=list(WAYS), sizes=list(SIZES), cut=list(CUTS))
def test_what_all_ranks_hold_is_kept(memory, way, sizes, cut):
    check_kept(memory, way, sizes, cut)


def check_kept(memory, way, sizes, cut):
    before, after = SIZES[sizes]
    old, new = (simulate(n, MEMORIES[memory], WAYS[way], CUTS[cut]) for n in (before, after))
    for number in range(3):
        step(old, number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert new.load_state_dict(old.state_dict()) is False
    assert new.run.step == 3
    held, kept = residuals(old), residuals(new)
    for name, x in held.items():
        assert_close(x, kept[name], name)
    earlier, now = means(old), means(new)
    if {role[:3] for role in earlier} == {role[:3] for role in now}:
        for role, x in earlier.items():
            assert_close(x, now[role], role)
    assert any(x.any() for x in now.values())
    # What is equal on all ranks is equal again, and the run goes on.
    new.check_replicas()
    first, *others = step(new, 3)
    for other in others:
        assert_same([first], [other])


@each(
    possible,
    memory=["residual", "lowpass", "efsignsgd", "variance", "dore"],
    way=list(WAYS),
    sizes=["4 to 2", "4 to 8", "4 to 3", "8 to 4"],
)
def test_without_gradients_all_of_it_arrives(memory, way, sizes):
    before, after = SIZES[sizes]
    exact = {"compressor": "topk", "compress_ratio": 1.0} if memory == "dore" else {"compress_ratio": 0.25}
    old, new = (simulate(n, MEMORIES[memory], WAYS[way], exact) for n in (before, after))
    for number in range(2):
        step(old, number)
    new.load_state_dict(old.state_dict())
    held = residuals(old)
    arrived = {name: np.zeros(x.shape) for name, x in held.items()}
    for _ in range(8):
        for name, x in step(new, 2, change=lambda name, rank, x: np.zeros_like(x))[0].items():
            arrived[name] += x.astype(np.float64)
    left = residuals(new)
    for spec in SPECS:
        tolerance = 2e-3 if spec.dtype == "float16" else 1e-5
        assert np.abs(arrived[spec.name] + left[spec.name] - held[spec.name]).max(initial=0) <= tolerance, spec.name


@each(
    framework=[name for name in FRAMEWORKS if name != "numpy"],
    chosen={"nodes": ("residual", "nodes with shots"), "dgc": ("dgc", "gathered"), "dore": ("dore", "shots")},
)
def test_every_framework_merges_the_same_bits(framework, chosen):
    memory, way = chosen
    old, expected = (simulate(n, MEMORIES[memory], WAYS[way]) for n in (8, 4))
    new = simulate(4, MEMORIES[memory], WAYS[way], framework=framework)
    step(old, 0)
    expected.load_state_dict(old.state_dict())
    ops = new._ops("cpu")
    saved = [
        {
            **mine,
            "tensors": {
                name: {**entry, "memory": {key: array(ops, x, str(x.dtype)) for key, x in entry["memory"].items()}}
                for name, entry in mine["tensors"].items()
            },
        }
        for mine in old.state_dict()["ranks"]
    ]
    new.load_state_dict(saved)
    assert_same(states(expected), states(new))


@pytest.mark.parametrize("memory", ["residual", "dgc", "shared_momentum", "diana"])
@pytest.mark.parametrize("way", ["gathered", "auto"])
def test_where_gradients_are_added_up_the_sum_is_kept(memory, way):
    old, new = (simulate(n, MEMORIES[memory], WAYS[way], average=False) for n in (4, 3))
    for number in range(2):
        step(old, number)
    new.load_state_dict(old.state_dict())
    held, kept = residuals(old), residuals(new)
    for name, x in held.items():
        assert_close(4 * x, 3 * kept[name], name)
    now = means(new)
    for (name, onward, key, tensor), x in means(old).items():
        # A shift belongs to one rank's gradients, however many ranks there are.
        factor = 4 / 3 if key in ("momentum", "residual") else 1
        assert_close(x * factor, now[name, onward, key, tensor], (name, key))


@pytest.mark.parametrize("memory", ["dgc", "lr_correction", "dore"])
@pytest.mark.parametrize("way", ["auto", "shots", "nodes with shots"])
def test_as_many_ranks_go_on_bit_for_bit(memory, way):
    if memory == "dore" and way == "auto":
        way = "shots"
    old, new = (simulate(4, MEMORIES[memory], WAYS[way]) for _ in "ab")
    for number in range(2):
        step(old, number)
    saved = old.state_dict()["ranks"]
    random.Random(1).shuffle(saved)
    for rank in range(4):
        assert new._load(new.runs[rank], rank, saved) == (True, "")
    assert_same(states(old), states(new))
    assert_same(step(old, 2), step(new, 2))


@pytest.mark.parametrize("way", [WAYS["shots"], {"communicator": CORRECTED_BY["shots"]}], ids=["ranks", "both ends"])
def test_a_number_of_a_unit_is_kept_where_all_agree(way):
    old, new = (simulate(n, MEMORIES["lr_correction"], way) for n in (4, 3))
    step(old, 0)
    new.load_state_dict(old.state_dict())
    rates = [memory["lr"] for mine in new.state_dict()["ranks"] for memory in _memories(mine) if "lr" in memory]
    assert rates
    assert all(rate == 0.1 for rate in rates)
    saved = old.state_dict()
    for mine in saved["ranks"]:
        mine["tensors"] = {
            name: {**entry, "memory": {k: x * (1 + i) if k == "lr" else x for k, x in entry["memory"].items()}}
            for i, (name, entry) in enumerate(mine["tensors"].items())
        }
    with pytest.warns(GraceWarning, match=r"4 ranks saved .* 3 load it.*'lr' of the memory 'residual' \(tensor"):
        new.load_state_dict(saved)
    for name, x in residuals(old).items():
        assert_close(x, residuals(new)[name], name)


def _memories(state):
    return [entry["memory"] for entry in state["tensors"].values()]


def test_a_run_without_a_place_for_residuals_says_so():
    """Within one node, hierarchical compresses by another method, without error feedback."""
    old, new = (simulate(n, TOPK, WAYS["nodes"]) for n in (4, 2))
    step(old, 0)
    with pytest.warns(GraceWarning, match=r"starts from zero: 'residual' of the memory 'residual' \(tensor"):
        assert new.load_state_dict(old.state_dict()) is False
    step(new, 1)


def test_stages_and_changes_are_kept_apart():
    schedule = {"schedule": [{"step": 2, "compressor": "qsgd"}, {"step": 4, "compressor": "topk"}]}
    for steps in (1, 2, 3, 5):
        old, new = (simulate(n, TOPK, schedule, WAYS["auto"]) for n in (4, 2))
        for number in range(steps):
            step(old, number)
        new.load_state_dict(old.state_dict())
        for name, x in residuals(old).items():
            assert_close(x, residuals(new)[name], name)
        step(new, steps)
    old, new = (simulate(n, TOPK, WAYS["auto"]) for n in (4, 2))
    step(old, 0)
    for sim in (old, new):
        sim.change(compressor="qsgd")
    new.load_state_dict(old.state_dict())
    for name, x in residuals(old).items():
        assert x.any() or not x.size
        assert_close(x, residuals(new)[name], name)


def test_wrong_lists_are_refused_and_nothing_of_them_is_loaded():
    old, new = (simulate(n, TOPK, WAYS["auto"]) for n in (4, 2))
    step(old, 0)
    saved = old.state_dict()["ranks"]
    before = states(new)
    damaged = copy.deepcopy(saved)
    entry = next(iter(damaged[3]["tensors"].values()))
    entry["memory"]["residual"] = entry["memory"]["residual"][:-1]
    other = grace.Simulation(4, SPECS[:2], {**TOPK, "default_rules": False})
    for wrong, told in {
        "missing": (saved[:3], r"the states of the ranks 0 to 3, each once, received ranks 0 of 4, 1 of 4, 2 of 4; "),
        "twice": ([*saved[:3], saved[0]], r"received ranks 0 of 4, 1 of 4, 2 of 4, 0 of 4"),
        "other run": ([*saved[:3], {**saved[3], "size": 5}], "expected the states of all ranks of one run"),
        # A list of so many ranks has no place in memory.
        "damaged size": ([{**mine, "size": 2**62} for mine in saved], "the ranks 0 to 4611686018427387903, each once"),
        "other step": ([*saved[:3], {**saved[3], "step": 7}], "at the steps 1, 7"),
        "version": ([*saved[:3], {**saved[3], "version": 2}], "version 3, received 2"),
        "damaged": (damaged, "expected states"),
        "other tensors": (other.state_dict()["ranks"], "units of compression differ"),
        "one of other tensors": (
            [*saved[:3], {**saved[3], "tensors": {}}],
            "only on one side, rank 3 of 4 or rank 0",
        ),
    }.values():
        with pytest.raises(StateError, match=told):
            new.load_state_dict(wrong)
        assert new.run.step == 0
        assert_same(states(new), before)
    assert new.load_state_dict(saved) is False


@pytest.mark.parametrize(("count", "before"), [(2, 4), (8, 4), (3, 4), (4, 3), (5, 7), (1, 6), (4, 4)])
def test_shares_keep_the_mean(count, before):
    table = np.zeros((count, before))
    for rank in range(count):
        for old, weight in shares(rank, count, before):
            assert weight > 0
            table[rank, old] += weight
    assert np.allclose(table.sum(axis=1), 1)
    assert np.allclose(table.sum(axis=0), count / before)
    if count == before:
        assert same(table, np.eye(count))
