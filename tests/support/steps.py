"""Simulated steps: fixed gradients of awkward tensors in, everything that can be observed out."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.config import Config, Parts
from grace.core.registry import compressors, memories
from grace.core.spec import TensorSpec
from grace.testing.harness import EPS, FRAMEWORKS, array, draw, host, same
from tests.support import registered

RANKS = 3
SPECS = [
    TensorSpec("matrix", (24, 40)),
    TensorSpec("vector", (131,)),
    TensorSpec("scalar", ()),
    TensorSpec("empty", (0, 4)),
    TensorSpec("half", (9, 16), "float16"),
    TensorSpec("brain", (9, 16), "bfloat16"),
    TensorSpec("double", (16, 9), "float64"),
]
# Long enough to be cut.
LONG = TensorSpec("long", (3, 5000))
MIXED = [*SPECS[:2], LONG, *SPECS[2:]]
# All fused, fused and cut, and all as one.
CUTS = {
    "bucket": {"granularity": "bucket"},
    "small buckets": {"granularity": "bucket", "bucket_bytes": 6000, "split_bytes": 20_000},
    "model": {"granularity": "model"},
}
LAYOUTS = {
    "layer": {"granularity": "layer"},
    **CUTS,
    "slices": {"granularity": "bucket", "bucket_bytes": 0, "split_bytes": 1},
    "whole tensors": {"granularity": "bucket", "bucket_bytes": 0, "split_bytes": 0},
    "fewer pieces": {"granularity": "bucket", "bucket_bytes": 40_000, "split_bytes": 40_000},
}
each_cut = pytest.mark.parametrize("cut", list(CUTS))
# Where steps are slow, those that differ most.
FEW_SPECS = {"tensorflow": [spec for spec in SPECS if spec.name in ("matrix", "empty", "double")]}
DEFAULTS = [registered.default_parts(c) for c in registered.all_compressors()]
every_default = pytest.mark.parametrize("chosen", [pytest.param(p, id=registered.name(p.compressor)) for p in DEFAULTS])
# The default of every registered name, without the extra configurations.
METHODS = [p for p in DEFAULTS if p.compressor in registered.default_compressors()]
every_method = pytest.mark.parametrize("chosen", [pytest.param(p, id=registered.name(p.compressor)) for p in METHODS])
every_combination = pytest.mark.parametrize("chosen", registered.params(registered.valid_parts()))


def in_frameworks(everything, few, frameworks=FRAMEWORKS):
    """Parameters `chosen` and `framework`; steps of eager TensorFlow take ten times as long, so only `few` there."""
    listed = [(f, few if f == "tensorflow" else everything) for f in frameworks]
    cases = [pytest.param(chosen, f, id=f"{name}-{f}") for f, named in listed for name, chosen in named.items()]
    return pytest.mark.parametrize(("chosen", "framework"), cases)


_EVERY = {registered.name(p.compressor): p for p in DEFAULTS}
_FEW = {registered.name(c): _EVERY[registered.name(c)] for c in registered.default_compressors()}
every_default_and_framework = in_frameworks(_EVERY, _FEW)
every_default_and_other_framework = in_frameworks(_EVERY, _FEW, FRAMEWORKS[1:])
# Tensors of TensorFlow cannot be changed.
every_default_and_mutable_framework = in_frameworks(_EVERY, {}, [f for f in FRAMEWORKS if f != "tensorflow"])
every_combination_and_framework = in_frameworks(
    {registered.name(p): p for p in registered.valid_parts()},
    {
        registered.name(p): p
        for p in registered.valid_parts()
        if memories.name_of(p.memory) == p.compressor.default_memory
    },
)


def config(chosen: Parts, granularity="layer", **options) -> Config:
    """Every tensor by itself, so that each of the awkward ones meets the method; other cuts: test_granularity.py."""
    return Config(chosen, default_rules=False, seed=5, granularity=granularity, **options)


def simulate(chosen, framework="numpy", size=RANKS, average=True, specs=SPECS, **options):
    return grace.Simulation(size, specs, config(chosen, **options), framework=framework, average=average)


def gradient(spec: TensorSpec, step: int, rank: int) -> np.ndarray:
    return np.reshape(draw(spec, 1000 * step + rank), spec.shape)


def gradients(sim, step, change=lambda name, rank, x: x):
    """Per rank the gradients of a step, as arrays of the framework; `change` may alter the NumPy ones."""
    result = []
    for rank, engine in enumerate(sim.engines):
        mine = {}
        for part in sim.plan.parts:
            spec, ops = part.spec, engine._ops(part.spec.device)
            x = change(spec.name, rank, gradient(spec, step, rank))
            mine[spec.name] = ops.reshape(array(ops, x, spec.dtype), spec.shape)
        result.append(mine)
    return result


def on_host(sim, merged):
    ops = sim.engines[0]._ops("cpu")
    return [{name: host(ops, x) for name, x in mine.items()} for mine in merged]


def step(sim, number, **changes):
    return on_host(sim, sim.step(gradients(sim, number, **changes), lr=0.1))


def states(sim):
    """Copies of all states: per rank and tensor, per part and field."""
    ops = sim.engines[0]._ops("cpu")
    return [
        {
            (name, kind, field): host(ops, value)
            for name, tensor in engine.state_dict()["tensors"].items()
            for kind in ("memory", "compressor")
            for field, value in tensor[kind].items()
        }
        for engine in sim.engines
    ]


def assert_same(a, b):
    assert len(a) == len(b)
    for mine, theirs in zip(a, b, strict=True):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not same(mine[name], theirs[name])] == []


def wire_eps(chosen: Parts, spec: TensorSpec) -> float:
    """How coarsely the payload, the gradient handed back and the sums in between are rounded."""
    compressor = chosen.compressor if chosen.compressor.unfit(spec) is None else compressors.make("none")
    fields = compressor.wire(spec)
    return 16 * max([EPS.get(f.dtype, 0.0) for f in fields if f.wire] + [EPS[spec.dtype], EPS[spec.work_dtype]])
