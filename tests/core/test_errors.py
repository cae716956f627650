"""Wrong calls, unannounced payloads and wrong checkpoints raise clear errors and leave no half-changed state."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

import grace
from grace.core.compressors.topk import TopK
from grace.core.config.registry import compressors, memories
from grace.core.errors import (
    ConfigError,
    GraceError,
    IncompatibleError,
    MismatchError,
    PayloadError,
    StateError,
    StepError,
    nearest,
)
from grace.core.methods.memory import Merging
from grace.core.spec import TensorSpec
from grace.testing.harness import FRAMEWORKS, array, draw, host, same
from tests.mutants import methods
from tests.support.covering import ALL
from tests.support.steps import each

SHAPE = (20, 30)


def simulation(size=2, **config):
    tensors = config.pop("tensors", {"a": SHAPE, "b": SHAPE})
    layers = {"compressor": "topk", "default_rules": False, "granularity": "layer"}
    return grace.Simulation(size, tensors, {**layers, **config})


def gradient():
    return np.ones(SHAPE, np.float32)


def copy(saved, current):
    return saved.copy()


# --- steps ------------------------------------------------------------------------------------------------------


def test_a_tensor_that_is_not_in_the_plan():
    with pytest.raises(StepError, match="no tensor 'c'"):
        simulation().runs[0].current.ready("c", gradient())


def test_a_gradient_of_another_shape():
    with pytest.raises(StepError, match=r"'a'.*\(20, 30\).*\(30, 20\)"):
        simulation().runs[0].current.ready("a", gradient().T)


def test_a_second_gradient_within_a_step():
    run = simulation().runs[0]
    run.current.ready("a", gradient())
    with pytest.raises(StepError, match="'a' got a second gradient before step 0"):
        run.current.ready("a", gradient())


@pytest.mark.parametrize("given", [[], ["a"]])
def test_a_missing_gradient_is_named(given):
    run = simulation().runs[0]
    for name in given:
        run.current.ready(name, gradient())
    missing = "b" if given else "b, a"
    with pytest.raises(StepError, match=f"no gradient for {missing}.*zeros"):
        run.finish()


def test_a_step_can_go_on_after_the_missing_gradient_came():
    sim = simulation(size=1)
    run = sim.runs[0]
    run.current.ready("a", gradient())
    with pytest.raises(StepError):
        run.finish()
    run.current.ready("b", gradient())
    assert set(run.finish()) == {"a", "b"}
    assert run.step == 1


def test_a_rank_that_would_hang_is_named_by_the_simulation():
    sim = simulation(size=3)
    for rank in (0, 2):
        for name in ("a", "b"):
            sim.runs[rank].current.ready(name, gradient())
    with pytest.raises(StepError, match=r"would hang: ranks \[1\]"):
        sim.runs[0].finish()


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None])
def test_a_simulation_of_no_ranks(size):
    with pytest.raises(ConfigError, match=f"at least 1 rank, received {size!r}"):
        simulation(size=size)


@pytest.mark.parametrize("shape", [5000, (-1,), (3, -2), (2.0,), (None, 3), ("a",), "ab"], ids=repr)
def test_a_shape_that_is_no_sequence_of_whole_numbers(shape):
    with pytest.raises(ConfigError, match=r"tensor 'w': expected a shape of whole numbers from 0 on, such as"):
        grace.Simulation(1, {"w": shape}, {"compressor": "topk"})


@pytest.mark.parametrize("compressor", list(compressors))
def test_integers_of_numpy_in_shapes_are_whole_numbers(compressor):
    config = {"compressor": compressor, **compressors.required(compressor), "default_rules": False}
    merged = []
    for size, shape, vector in ((2, (24, 40), (5000,)), (np.int64(2), np.array([24, 40]), [np.int32(5000)])):
        sim = grace.Simulation(size, {"matrix": shape, "vector": vector}, config)
        given = {"matrix": np.ones((24, 40), np.float32), "vector": np.linspace(-1, 1, 5000, dtype=np.float32)}
        merged.append(sim.step([given, given], lr=0.1))
        assert type(sim.size) is int
        assert all(type(n) is int for item in sim.plan.assignments for n in item.spec.shape)
    for one, other in zip(*merged, strict=True):
        assert [same(one[name], other[name]) for name in one] == [True, True]


# --- payloads ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mutant(monkeypatch):
    list(compressors)
    monkeypatch.setattr(compressors, "_classes", {**compressors._classes})

    def make(cls, **fields):
        grace.register_compressor("mutant")(cls)
        return {"compressor": {"name": "mutant", **fields}}

    return make


@pytest.mark.parametrize("communicator", ["allgather", "broadcast"])
def test_a_payload_that_was_not_announced(mutant, communicator):
    sim = simulation(**mutant(methods.SendsWiderIndices), communicator=communicator)
    with pytest.raises(PayloadError, match=r"'b', field 'indices'.*int32.*int64"):
        sim.step([{"a": gradient(), "b": gradient()} for _ in range(2)])


def test_a_proposal_that_was_not_announced(mutant):
    sim = simulation(**mutant(methods.AnnouncesAShorterProposal))
    with pytest.raises(PayloadError, match=r"'a'.*proposed\(\) announced.*propose\(\) returned"):
        sim.step([{"a": gradient(), "b": gradient()} for _ in range(2)])


def test_a_missing_field_is_named(mutant):
    @dataclass(frozen=True)
    class Forgetful(TopK):
        def compress(self, x, at):
            return {"values": super().compress(x, at)["values"]}

    sim = simulation(size=1, memory="none", **mutant(Forgetful))
    with pytest.raises(PayloadError, match=r"\['values'\].*\['indices', 'values'\]"):
        sim.step([{"a": gradient(), "b": gradient()}])


# --- checkpoints ------------------------------------------------------------------------------------------------


def saved(sim, rank=0):
    return sim.runs[rank].state_dict()


def trained(**config):
    sim = simulation(**config)
    rng = np.random.default_rng(0)
    sim.step([{name: rng.standard_normal(SHAPE, np.float32) for name in ("a", "b")} for _ in sim.runs])
    return sim


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"tensors": {"a": SHAPE}}, "b is only on one side"),
        ({"tensors": {"a": SHAPE, "b": SHAPE, "c": SHAPE, "d": SHAPE}}, "c, d are only on one side"),
        ({"tensors": {"a": SHAPE, "b": (30, 20, 1, 2)}}, "'b'.*expected.*1200.*received.*600"),
        ({"memory": "none"}, "'b'.*'none'.*'residual'"),
        ({"compressor": "threshold", "threshold": 0.01}, "'b'.*'threshold'.*'topk'"),
    ],
    ids=["fewer tensors", "more tensors", "shape", "memory", "compressor"],
)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(config, told):
    target = simulation(**config).runs[0]
    before = {name: dict(target.units[name]["memory"]) for name in target.units}
    with pytest.raises(StateError, match=told):
        target.load_state_dict(saved(trained()), copy)
    assert target.step == 0
    for name, fields in before.items():
        after = target.units[name]["memory"]
        assert fields.keys() == after.keys()
        assert all(after[key] is value for key, value in fields.items())


def test_a_checkpoint_of_another_version_is_refused():
    state = {**saved(trained()), "version": 99}
    with pytest.raises(StateError, match="version 3, received 99"):
        simulation().runs[0].load_state_dict(state, copy)


@pytest.mark.parametrize("compressor", ["topk", "powersgd"])
def test_a_checkpoint_of_another_rank_or_size_keeps_what_all_ranks_share(compressor):
    sim = trained(size=2, compressor=compressor)
    for target, state in (
        (simulation(size=2, compressor=compressor).runs[1], saved(sim, 0)),
        (simulation(size=3, compressor=compressor).runs[0], saved(sim, 0)),
    ):
        assert target.load_state_dict(state, copy) is False
        assert target.step == 1
        for name in target.plan.stateful:
            states = target.units[name]
            assert not any(x.any() for x in states["memory"].values()), "another rank's residual is not ours"
            for key, value in states["compressor"].items():
                assert np.array_equal(value, state["tensors"][name]["compressor"][key])
    assert sim.run.units["a"]["memory"]["residual"].any()


def test_a_memory_that_all_ranks_share_is_taken_over_from_any_of_them():
    """Otherwise ranks would add different control variates to one mean, and their weights would diverge."""
    options = {"compressor": "lpc", "memory": "svrg", "period": 2, "default_rules": False}
    sim, fresh = (grace.Simulation(2, {"a": (40, 30)}, options) for _ in "ab")
    drawn = [{"a": np.random.default_rng(rank).standard_normal((40, 30)).astype(np.float32)} for rank in range(2)]
    for _ in range(3):
        sim.step(drawn)
    state = saved(sim, 0)
    assert any(np.any(value) for value in state["tensors"]["a"]["memory"].values())
    assert [run.load_state_dict(state, copy) for run in fresh.runs] == [True, False]
    ours, theirs = (run.units["a"]["memory"] for run in fresh.runs)
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
    went_on = fresh.step(drawn)[0]["a"]
    assert all(np.array_equal(went_on, mine["a"]) for mine in sim.step(drawn))


def test_a_reset_starts_over():
    """As when a checkpoint holds no state of grace."""
    sim, fresh = trained(compressor="powersgd"), simulation(compressor="powersgd")
    for run in sim.runs:
        run.reset()
    for rank in range(len(sim.runs)):
        mine, expected = saved(sim, rank), saved(fresh, rank)
        assert mine["step"] == 0
        for name, states in expected["tensors"].items():
            for kind in ("memory", "compressor"):
                assert states[kind].keys() == mine["tensors"][name][kind].keys()
                assert all(np.array_equal(mine["tensors"][name][kind][key], x) for key, x in states[kind].items())


@pytest.mark.parametrize("compressor", ["topk", "threshold", "powersgd", "randomk"])
def test_ranks_at_different_steps_are_stopped(compressor):
    """One rank loaded a checkpoint, the other did not. So their random numbers no longer agree."""
    # With a bucket per tensor, payloads of the first arrive while the second is compressed.
    options = {"size": 2, "compressor": compressor, **compressors.required(compressor), "bucket_bytes": 0}
    sim, old = trained(**options), simulation(**options)
    sim.runs[1].load_state_dict(saved(old, 1), copy)
    before = [saved(sim, rank)["tensors"] for rank in range(2)]
    with pytest.raises(MismatchError, match=r"not at the same step.*a rank called the join\(\)"):
        sim.step([{"a": gradient(), "b": gradient()} for _ in range(2)])
    for rank, tensors in enumerate(before):
        after = saved(sim, rank)["tensors"]
        for name, states in tensors.items():
            for key, value in states["memory"].items():
                assert np.array_equal(value, after[name]["memory"][key]), f"rank {rank} committed {name}/{key}"


@pytest.mark.parametrize("key", ["version", "step", "rank", "size", "tensors"])
def test_what_is_no_checkpoint_is_refused(key):
    state = saved(trained())
    del state[key]
    with pytest.raises(StateError, match=f"{key} missing"):
        simulation().runs[0].load_state_dict(state, copy)


METHODS_WITH_STATE = {
    "topk": {},
    "powersgd": {},
    "dgc": {},
    "gradiveq": {"slice_size": 30, "components": 2},
    "lpc": {"memory": "svrg"},
    "threshold": {"threshold": 0.01, "memory": "residual", "lr_correction": True},
    "hardthreshold": {"compress_ratio": 0.1},
    "scheduled": {"compressor": "topk", "schedule": [{"step": 2, "compressor": "qsgd"}]},
}
WRONG = [None, True, -2, 2**63, 1.0, "1", b"1", [], {}, {1: 2}, [0.5], object(), np.zeros(3), np.zeros(SHAPE, "f2")]


def places(value, path=()):
    """Yield the path of every entry of a nested mapping."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def edited(state, path, change):
    """Return a copy of a nested mapping in which `change` was applied to the mapping that holds the path's end."""
    made = dict(state)
    if len(path) == 1:
        change(made)
    else:
        made[path[0]] = edited(state[path[0]], path[1:], change)
    return made


def edits(state):
    """Yield descriptions and checkpoints with one wrong entry: missing, of another type, or beside one too many."""
    yield from ((f"all is {value!r}", value) for value in WRONG)
    for path in places(state):
        yield f"no {path}", edited(state, path, lambda at, key=path[-1]: at.pop(key))
        for wrong in WRONG:
            yield f"{path} is {wrong!r}", edited(state, path, lambda at, k=path[-1], v=wrong: at.update({k: v}))
        if path[-1] not in ("tensors", "components"):
            yield f"7 beside {path}", edited(state, path, lambda at: at.update({7: None}))


def contents(run):
    state = run.state_dict()
    arrays = {path: at for path in places(state["tensors"]) if hasattr(at := entry(state["tensors"], path), "dtype")}
    return state["step"], {path: (at.dtype.str, at.tobytes()) for path, at in arrays.items()}


def entry(state, path):
    return entry(state[path[0]], path[1:]) if path else state


@pytest.mark.parametrize("name", METHODS_WITH_STATE)
def test_an_edited_checkpoint_is_refused_or_loaded_and_nothing_in_between(name):
    options = {"compressor": name, **METHODS_WITH_STATE[name]}
    sim = simulation(**options)
    drawn = [{key: np.full(SHAPE, 1.0 + rank, np.float32) for key in "ab"} for rank in range(2)]
    sim.step(drawn, lr=0.1)
    state, run = saved(sim), simulation(**options).runs[0]
    before, refused = contents(run), []
    for what, wrong in edits(state):
        try:
            run.load_state_dict(wrong, lambda found, current: np.array(found, current.dtype))
        except StateError as error:
            refused.append(str(error))
            assert contents(run) == before, what
        else:
            now = contents(run)
            assert {path: dtype for path, (dtype, _) in now[1].items()} == {p: d for p, (d, _) in before[1].items()}
            run.reset()
    assert len(refused) > 100
    assert [text for text in refused if not re.search("expected|differ", text)] == []


def test_a_checkpoint_of_another_dtype_is_refused():
    """A snapshot in half precision on one rank made replicas differ."""
    sim = trained(compressor="lpc", memory="svrg")
    state = saved(sim)
    half = state["tensors"]["a"]["memory"]["snapshot"].astype(np.float16)
    state = edited(state, ("tensors", "a", "memory", "snapshot"), lambda at: at.update(snapshot=half))
    with pytest.raises(StateError, match=r"'a'.*expected.*float32 \(600,\).*received.*float16 \(600,\)"):
        sim.runs[0].load_state_dict(state, lambda found, current: np.array(found, current.dtype))


def test_loading_a_checkpoint_drops_a_step_that_was_under_way():
    sim = trained(size=1)
    run = sim.runs[0]
    state = saved(sim)
    run.current.ready("a", gradient())
    assert run.load_state_dict(state, copy) is True
    run.current.ready("a", gradient())
    run.current.ready("b", gradient())
    assert set(run.finish()) == {"a", "b"}


STATEFUL = {
    **{name: {"compressor": name, **compressors.required(name)} for name in compressors},
    # What keeps something of each rank starts again on other ranks.
    **{
        f"memory {name}": {"compressor": "topk", "memory": name}
        for name, each in memories.ready()
        if not isinstance(each, Merging)
    },
    "memory dore": {"compressor": "qsgd", "memory": "dore", "communicator": "two_shot"},
    "memory powersgd": {"compressor": "powersgd"},
    "lr_correction": {"compressor": "topk", "lr_correction": True},
    "two_shot": {"compressor": "topk", "communicator": "two_shot"},
}


# TensorFlow is slow, and its adapter has a path of its own.
@each(
    lambda row: ALL or row["framework"] != "tensorflow" or row["config"] in ("topk", "two_shot", "lr_correction"),
    config=STATEFUL,
    framework=FRAMEWORKS,
)
def test_states_with_nan_or_infinity_are_refused_and_name_the_tensor(config, framework):
    tensors, options = {"a": SHAPE, "b": (700,)}, {"default_rules": False, "granularity": "layer", **config}
    try:
        sim, other = (grace.Simulation(n, tensors, options, framework=framework) for n in (2, 3))
    except IncompatibleError:
        pytest.skip("no such method")
    ops = sim.run._ops("cpu")
    gradients = {
        name: ops.reshape(array(ops, draw(TensorSpec(name, s), 1), "float32"), s) for name, s in tensors.items()
    }
    sim.step([gradients, gradients], 0.1)
    good = [run.state_dict() for run in sim.runs]
    assert sim.load_state_dict({"ranks": good}) is True
    other.load_state_dict(good)
    for name, entry in good[0]["tensors"].items():
        for kind, key in [("memory", key) for key in entry["memory"]] + [
            ("compressor", k) for k in entry["compressor"]
        ]:
            value = entry[kind][key]
            bad = host(ops, value).copy()
            if bad.dtype.kind != "f" or not bad.size:
                continue
            bad.flat[-1] = np.nan if kind == "memory" else -np.inf
            states = {**entry[kind], key: ops.reshape(array(ops, bad, ops.dtype(value)), tuple(value.shape))}
            wrong = [{**good[0], "tensors": {**good[0]["tensors"], name: {**entry, kind: states}}}, good[1]]
            for run, load in ((sim, {"ranks": wrong}), (sim, wrong), (other, wrong)):
                with pytest.raises(StateError, match=f"tensor '{re.escape(name)}', '{key}': expected finite numbers"):
                    run.load_state_dict(load)


# --- the errors themselves --------------------------------------------------------------------------------------


def test_all_errors_can_be_caught_at_once():
    for error in (ConfigError, IncompatibleError, PayloadError, StepError, StateError, MismatchError):
        assert issubclass(error, GraceError)
        assert error.__doc__


def test_the_nearest_name_is_offered_only_if_it_is_near():
    assert nearest("topkk", ["topk", "qsgd"]) == " Did you mean 'topk'? Valid names: qsgd, topk."
    assert nearest("xyz", ["topk", "qsgd"]) == " Valid names: qsgd, topk."
