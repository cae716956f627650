"""States of another number of ranks in TensorFlow's variables: the same as a simulation merges."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.errors import GraceError, StateError
from grace.core.spec import Ranks
from grace.testing.harness import same
from tests.support import keras_alone

keras_alone.load()
tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

from grace.tensorflow.exchange import Exchange  # noqa: E402

SHAPES = {"w": (60, 50), "v": (131,)}
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "default_rules": False}
SCHEDULE = [{"step": 2, "compress_ratio": 0.2}]


def exchange_of(rank, size, monkeypatch, **options):
    """Return an exchange that takes itself for a rank of `size`, before its first step."""
    monkeypatch.setattr(Exchange, "_rank_of_ranks", lambda self: (rank, Ranks(size)))
    exchange = Exchange(options if "compressor" in options else {**TOPK, **options})
    exchange.kept = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]
    exchange.build(exchange.kept)
    return exchange


@pytest.mark.parametrize(
    ("options", "before", "after", "told"),
    [
        ({"compressor": "uniform", "default_rules": False}, 1, 2, "what a rank sends depends on their number"),
        ({"communicator": "two_shot"}, 2, 3, "what a rank sends depends on their number"),
        (
            {"compressor": "terngrad", "shared_scale": True, "default_rules": False},
            1,
            200,
            "holds at most 127 of them, received 200 ranks",
        ),
        ({"communicator": "allgather"}, 1, 2, None),
    ],
    ids=str,
)
def test_a_plan_for_other_ranks_is_refused_if_these_cannot_use_it(options, before, after, told, monkeypatch):
    """A sum of more integers than the plan expects would overflow into its neighbours."""
    exchange = exchange_of(0, before, monkeypatch, **options)
    exchange.ranks = Ranks(after)
    if told is None:
        exchange._check_ranks(exchange.run)
        return
    with pytest.raises(GraceError, match=told):
        exchange._check_ranks(exchange.run)


def trained(size, steps, **options):
    sim = grace.Simulation(size, SHAPES, {**TOPK, **options})
    for number in range(steps):
        rngs = [np.random.default_rng((number, rank)) for rank in range(size)]
        sim.step([{name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()} for rng in rngs])
    return sim


def in_variables(saved, exchange, monkeypatch, **options):
    """Return the states of a simulation as the exchanges of its ranks would save them."""
    states = []
    for mine in saved["ranks"]:
        rank = exchange_of(mine["rank"], mine["size"], monkeypatch, **options)
        stage = rank.run._after(mine["step"])
        for name, entry in mine["tensors"].items():
            if name in stage.variables:
                stage.write({name: {kind: entry[kind] for kind in ("memory", "compressor")}})
        states.append({**rank.state_dict(), "step": mine["step"]})
    return states


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"communicator": "two_shot"}, 2),
        ({"communicator": "auto"}, 2),
        ({"memory": "dore", "communicator": "two_shot"}, 2),
        ({"communicator": "two_shot", "schedule": SCHEDULE}, 1),
        ({"communicator": "two_shot", "schedule": SCHEDULE}, 3),
    ],
    ids=["shots", "auto", "dore", "first stage", "second stage"],
)
def test_variables_take_what_a_simulation_merges(options, steps, monkeypatch):
    saved = trained(4, steps, **options).state_dict()
    expected = grace.Simulation(2, SHAPES, {**TOPK, **options})
    expected.load_state_dict(saved)
    exchange = exchange_of(1, 2, monkeypatch, **options)
    states = in_variables(saved, exchange, monkeypatch, **options)
    monkeypatch.setattr(Exchange, "_rank_of_ranks", lambda self: (1, Ranks(2)))
    for variable in exchange.run.of_this_rank:
        variable.assign(tf.ones_like(variable))
    assert exchange.load_state_dict(states) is False
    stages = exchange.run
    assert stages.step == steps
    assert stages.origin.numpy().tolist() == [1, 2]
    held = stages.stage.read()
    found = 0
    for name, kinds in expected.runs[1].units.items():
        now = held[name]
        for kind, state in kinds.items():
            for key, value in state.items():
                found += bool(value.any())
                assert same(now[kind][key].numpy(), value), (name, kind, key)
    assert found
    # What the other rank owns is empty here.
    owned = {name for name, unit in expected.plan.stateful.items() if not unit.is_kept_by(1)}
    for name in owned:
        assert not any(x.numpy().any() for x in held[name]["memory"].values())
    before = {name: variable.numpy() for name, (*_, variable) in stages.states.items()}
    nan = [
        {**state, "tensors": {name: x * np.asarray(np.nan, x.dtype) for name, x in state["tensors"].items()}}
        for state in (states[3], exchange.state_dict())
    ]
    for wrong in (states[1:], [*states[:3], {**states[3], "tensors": {}}], [*states[:3], nan[0]], nan[1]):
        with pytest.raises(StateError):
            exchange.load_state_dict(wrong)
        assert all(same(variable.numpy(), before[name]) for name, (*_, variable) in stages.states.items())
