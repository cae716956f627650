"""Stages of a run: the ladder of a warm-up, and residuals when the method or its options change."""

from __future__ import annotations

import json

import numpy as np
import pytest

import grace
from grace.core.config.config import make_config
from grace.core.config.schedule import ladder
from grace.core.errors import ConfigError, StateError, StepError
from grace.core.methods.memory import Memory, holds_residual
from grace.core.ops import get_ops
from grace.core.spec import TensorSpec

SHAPE = (40, 50)


def gradients(step, ranks=2):
    return [
        {"w": np.random.default_rng((step, rank)).standard_normal(SHAPE).astype(np.float32)} for rank in range(ranks)
    ]


def residual(sim, rank):
    return sim.runs[rank].state_dict()["tensors"]["w"]["memory"]["residual"].astype(np.float64).reshape(SHAPE)


def test_ladder_is_that_of_the_paper():
    assert ladder(0.001, 100) == [(0, 0.25), (25, 0.0625), (50, 0.015625), (75, 0.00390625), (100, 0.001)]
    assert ladder(0.0625, 7) == [(0, 0.25), (7, 0.0625)]
    with pytest.raises(ConfigError, match="4 stages; expected at least 4 steps, received 3"):
        ladder(0.001, 3)
    with pytest.raises(ConfigError, match=r"0\.25"):
        ladder(0.3, 10)


def test_warm_up_of_the_configuration():
    config = make_config({"compressor": "topk", "compress_ratio": 0.01, "warmup_steps": 30})
    ratios = [(step, stage.method.compressor.compress_ratio) for step, stage in config.stages]
    assert ratios == ladder(0.01, 30)
    assert make_config(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match="compress_ratio"):
        make_config({"compressor": "onebit", "warmup_steps": 30})


def test_stages_change_options_or_parts():
    schedule = [
        {"step": 5, "compress_ratio": 0.1, "beta": 0.5},
        {"step": 6, "compressor": "qsgd", "quantum_num": 3},
        {"step": 9, "communicator": "broadcast"},
    ]
    config = make_config({"compressor": "topk", "compress_ratio": 0.5, "schedule": schedule, "seed": 4})
    parts = [stage.method for _, stage in config.stages]
    assert [step for step, _ in config.stages] == [0, 5, 6, 9]
    assert [getattr(p.compressor, "compress_ratio", None) for p in parts] == [0.5, 0.1, None, None]
    assert (parts[1].memory.beta, parts[2].compressor.quantum_num) == (0.5, 3)
    assert grace.communicators.name_of(parts[3].communicator) == "broadcast"
    assert all(stage.seed == 4 and not stage.schedule for _, stage in config.stages)
    assert make_config(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ([{"compress_ratio": 0.1}], "'step'"),
        ([{"step": 0, "compress_ratio": 0.1}], "above 0"),
        ([{"step": 5}, {"step": 5}], "in ascending order"),
        ([{"step": 5, "compress_rate": 0.1}], "compress_ratio"),
        ([{"step": 5, "compressor": "topq"}], "topk"),
        ({"step": 5}, "list of tables"),
    ],
)
def test_wrong_schedules_are_refused(schedule, told):
    with pytest.raises(ConfigError, match=told):
        make_config({"compressor": "topk", "schedule": schedule})


CHANGES = [
    {"compress_ratio": 0.2},
    {"compressor": "powersgd", "compress_rank": 2, "memory": "residual"},
    {"compressor": "onebit"},
    {"compressor": "dgc", "momentum": 0.0},
    {"compressor": "efsignsgd", "lr": 0.25},
    {"compressor": "none"},
    {"compressor": "qsgd", "memory": "residual"},
]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_no_residual_is_lost(change, framework):
    """Given gradients equal applied gradients plus residuals, for all pairs of methods."""
    schedule = [{"step": 4, **change}, {"step": 7, "compressor": "topk", "compress_ratio": 0.01}]
    config = {"compressor": "topk", "compress_ratio": 0.01, "schedule": schedule, "default_rules": False}
    sim = grace.Simulation(2, {"w": SHAPE}, config, framework=framework)
    given, received = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(10):
        mine = gradients(step)
        given += sum(g["w"].astype(np.float64) for g in mine) / 2
        if framework == "torch":
            torch = pytest.importorskip("torch")
            mine = [{"w": torch.from_numpy(g["w"])} for g in mine]
        received += np.asarray(sim.step(mine)[0]["w"], np.float64)
        item = sim.plan.assignments[0]
        held = 0.0
        if holds_residual(item.memory):
            kept = [np.asarray(e.state_dict()["tensors"]["w"]["memory"]["residual"]) for e in sim.runs]
            held = sum(k.astype(np.float64) for k in kept).reshape(SHAPE) / 2 / item.memory.residual_scale
        assert np.abs(given - received - held).max() < 1e-4, step


def test_a_stage_without_memory_sends_what_is_left_once():
    config = {"compressor": "topk", "compress_ratio": 0.01, "schedule": [{"step": 2, "compressor": "none"}]}
    sim = grace.Simulation(2, {"w": SHAPE}, config)
    for step in range(2):
        sim.step(gradients(step))
    left = (residual(sim, 0) + residual(sim, 1)) / 2
    assert np.abs(left).max() > 1
    mean = sum(g["w"].astype(np.float64) for g in gradients(2)) / 2
    assert np.allclose(sim.step(gradients(2))[0]["w"], mean + left, atol=1e-5)
    assert not residual(sim, 0).any()
    mean = sum(g["w"].astype(np.float64) for g in gradients(3)) / 2
    assert np.allclose(sim.step(gradients(3))[0]["w"], mean, atol=1e-5)


def test_stages_with_equal_parts_change_nothing():
    plain = {"compressor": "topk", "compress_ratio": 0.01}
    sims = [grace.Simulation(2, {"w": SHAPE}, {**plain, "schedule": s}) for s in ([], [{"step": 3}, {"step": 5}])]
    for step in range(8):
        merged = [sim.step(gradients(step))[0]["w"] for sim in sims]
        assert np.array_equal(*merged)


def test_a_checkpoint_continues_in_its_stage():
    config = {"compressor": "topk", "compress_ratio": 0.5, "schedule": [{"step": 3, "compress_ratio": 0.01}]}
    config["schedule"].append({"step": 6, "compressor": "powersgd", "compress_rank": 2})
    first, second = (grace.Simulation(2, {"w": SHAPE}, config) for _ in "ab")
    for step in range(4):
        first.step(gradients(step))
    for mine, other in zip(first.runs, second.runs, strict=True):
        other.load_state_dict(mine.state_dict(), lambda saved, current: saved.copy())
    assert second.plan.assignments[0].compressor.compress_ratio == 0.01
    for step in range(4, 9):
        assert np.array_equal(first.step(gradients(step))[0]["w"], second.step(gradients(step))[0]["w"])
    second.runs[0].reset()
    assert second.plan.assignments[0].compressor.compress_ratio == 0.5


@pytest.mark.parametrize("step", [2, 4])
def test_a_checkpoint_that_is_refused_changes_nothing(step):
    """The checkpoint's step may belong to the same stage or to another one."""
    config = {"compressor": "topk", "compress_ratio": 0.5, "schedule": [{"step": 3, "compressor": "powersgd"}]}
    sim, other = (grace.Simulation(2, {"w": SHAPE}, c) for c in (config, {"compressor": "onebit"}))
    sim.step(gradients(0))
    held, run = residual(sim, 0), sim.runs[0]
    with pytest.raises(StateError, match="configuration"):
        run.load_state_dict({**other.runs[0].state_dict(), "step": step}, lambda saved, current: saved.copy())
    assert (run.step, grace.compressors.name_of(run.plan.assignments[0].compressor)) == (1, "topk")
    assert np.array_equal(residual(sim, 0), held)


def test_changes_by_hand():
    sim = grace.Simulation(2, {"w": SHAPE}, {"compressor": "topk", "compress_ratio": 0.01})
    sim.step(gradients(0))
    held = residual(sim, 0)
    sim.change(compress_ratio=0.1)
    assert np.array_equal(residual(sim, 0), held)
    sim.step(gradients(1))
    assert sim.runs[0].stats()["tensors"]["w"]["wire_bytes"] == 200 * 8
    with pytest.raises(ConfigError, match="compress_ratio"):
        sim.change(compress_rate=0.1)
    assert sim.config.method.compressor.compress_ratio == 0.1
    sim.runs[0].current.ready("w", gradients(2)[0]["w"])
    with pytest.raises(StepError, match="being exchanged"):
        sim.change(compress_ratio=0.2)
    assert sim.config.method.compressor.compress_ratio == 0.1


@pytest.mark.parametrize("later", [{"compressor": "topk"}, {"threshold": 0.5}], ids=str)
def test_statistics_of_the_last_step_of_a_stage_do_not_read_states_of_the_next_one(later):
    """The volume of a tuned threshold is in its states, which another method does not have."""
    tuned = {"compressor": "hardthreshold", "compress_ratio": 0.05, "schedule": [{"step": 2, **later}]}
    sim = grace.Simulation(2, {"w": SHAPE}, tuned)
    for step, known in enumerate([True, False, False]):
        sim.step(gradients(step))
        found = sim.stats()["tensors"]["w"]
        assert (found["volume"] is not None) == known, step
        assert step == 2 or found["compressor"] == "hardthreshold"


def test_a_change_in_the_middle_of_a_step_of_any_rank_changes_none():
    sim = grace.Simulation(2, {"w": SHAPE}, {"compressor": "topk", "compress_ratio": 0.01})
    sim.runs[1].current.ready("w", gradients(0)[1]["w"])
    with pytest.raises(StepError, match="being exchanged"):
        sim.change(compress_ratio=0.2)
    assert {run.plan.assignments[0].compressor.compress_ratio for run in sim.runs} == {0.01}


def test_a_schedule_is_not_changed_by_hand():
    sim = grace.Simulation(1, {"w": SHAPE}, {"compressor": "topk", "schedule": [{"step": 3, "compress_ratio": 0.5}]})
    with pytest.raises(ConfigError, match="schedule"):
        sim.change(compress_ratio=0.2)


def test_tensors_that_a_later_method_cannot_take_still_get_their_residual():
    """PowerSGD does not compress vectors. The residual that topk kept of a vector must not be lost."""
    config = {"compressor": "topk", "compress_ratio": 0.01, "schedule": [{"step": 1, "compressor": "powersgd"}]}
    sim = grace.Simulation(1, [TensorSpec("w", (70000,))], config)
    x = np.random.default_rng(0).standard_normal(70000).astype(np.float32)
    first = sim.step([{"w": x}])[0]["w"]
    second = sim.step([{"w": np.zeros_like(x)}])[0]["w"]
    assert np.array_equal(first + second, x)


def test_every_memory_that_feeds_back_names_its_residual():
    for name in grace.memories:
        memory = grace.memories.make(name)
        assert isinstance(memory, Memory)
        assert not memory.feeds_back or "residual" in memory.init(TensorSpec("w", (3,)), get_ops("numpy"))
