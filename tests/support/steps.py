"""Simulated steps on fixed gradients of unusual tensors, with everything that tests can observe."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.config.config import Config, Method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.session.simulation import poll_all
from grace.core.spec import TensorSpec
from grace.testing.harness import EPS, array, draw, host, same
from tests.support import covering, registered

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
# Long enough to be split.
LONG = TensorSpec("long", (3, 5000))
MIXED = [*SPECS[:2], LONG, *SPECS[2:]]
# All fused, fused and split, and all as one unit.
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


# One method per path through a step: gathered, summed, of run-time length, with a proposal, with states, by shape.
WAYS = ("none", "fp16", "topk", "randomk", "threshold", "terngrad", "efsignsgd", "powersgd")
# With the parts that a user gets who names only the compressor: every method, and extra configurations.
METHODS = registered.by_name([registered.default_method(c) for c in registered.default_compressors()], "compressor")
EXTRAS = registered.by_name([registered.default_method(c) for c in registered.extra_compressors()], "compressor")
# What tests of whole steps use: all of these under `--all`, else those of WAYS, votes, and methods whose fields depend
# on the number of ranks or on the step. Contracts, golden bytes and papers have all methods.
_FEW = (*WAYS, "signsgd", "dgc", "hardthreshold", "homomorphic", "gradiveq")
TYPICAL = METHODS | EXTRAS if covering.ALL else {name: METHODS[name] for name in _FEW}


class WithTypical:
    """Let a contract of communicators meet the methods of TYPICAL, and all of them under `--all`."""

    def served(self, communicator, size):
        methods = list(super().served(communicator, size))
        typical = [m for m in methods if covering.ALL or compressors.name_of(m.compressor) in TYPICAL]
        return typical or methods


PARTS = {"compressor": list(compressors), "memory": list(memories), "communicator": list(communicators)}
COMBINATIONS = {tuple(registered.name(parts).split("-")): parts for parts in registered.valid_methods()}


def each(valid=lambda row: True, **factors):
    """Parametrize a test so that it meets every value of each factor, and under `--all` every pair of values.

    A factor is a list of values, or a dict of them by the names that reports and `valid` see.
    """
    values = {factor: v if isinstance(v, dict) else {x: x for x in v} for factor, v in factors.items()}
    rows = covering.rows({factor: list(v) for factor, v in values.items()}, valid)
    cases = [pytest.param(*(values[f][row[f]] for f in values), id="-".join(map(str, row.values()))) for row in rows]
    return pytest.mark.parametrize(list(values), cases)


each_cut = each(cut=list(CUTS))


def each_combination(**factors):
    """Parametrize a test by compressors, memories, communicators and the factors; `chosen` are the first three."""

    def valid(row):
        return combination(row) in COMBINATIONS

    few = {**PARTS, "compressor": [name for name in PARTS["compressor"] if covering.ALL or name in TYPICAL]}
    cases = [
        pytest.param(COMBINATIONS[combination(row)], *(row[f] for f in factors), id="-".join(map(str, row.values())))
        for row in covering.rows({**few, **factors}, valid)
    ]
    return pytest.mark.parametrize(("chosen", *factors), cases)


def combination(row):
    return tuple(row[kind] for kind in PARTS)


def specs_in(framework, chosen):
    """Return the tensors for steps in a framework.

    In TensorFlow, which is slow, these are the matrix and, with the methods of WAYS, another one in turn. The contract
    of compressors has an empty tensor, a scalar and other dtypes in graphs.
    """
    if framework != "tensorflow" or covering.ALL:
        return SPECS
    matrix, *others = SPECS
    name = compressors.name_of(chosen.compressor)
    return [matrix, others[WAYS.index(name) % len(others)]] if name in WAYS else [matrix]


def config(chosen: Method, granularity="layer", **options) -> Config:
    """Return a configuration in which every tensor is a unit. test_granularity.py tests other granularities."""
    return Config(chosen, default_rules=False, seed=5, granularity=granularity, **options)


def simulate(chosen, framework="numpy", size=RANKS, average=True, specs=SPECS, **options):
    return grace.Simulation(size, specs, config(chosen, **options), framework=framework, average=average)


def gradient(spec: TensorSpec, step: int, rank: int) -> np.ndarray:
    return np.reshape(draw(spec, 1000 * step + rank), spec.shape)


def gradients(sim, step, change=lambda name, rank, x: x):
    """Return the gradients of a step for each rank, as arrays of the framework. `change` may alter the NumPy arrays."""
    result = []
    for rank, run in enumerate(sim.runs):
        mine = {}
        for item in sim.plan.assignments:
            spec, ops = item.spec, run._ops(item.spec.device)
            x = change(spec.name, rank, gradient(spec, step, rank))
            mine[spec.name] = ops.reshape(array(ops, x, spec.dtype), spec.shape)
        result.append(mine)
    return result


def on_host(sim, merged):
    ops = sim.runs[0]._ops("cpu")
    return [{name: host(ops, x) for name, x in mine.items()} for mine in merged]


def step(sim, number, **changes):
    second = gradients(sim, number + 500) if sim.plan.period and not sim.full_round else None
    return on_host(sim, sim.step(gradients(sim, number, **changes), 0.1, second))


def step_at_rest(sim, number, *tensors):
    """Take a step in which some tensors do not train."""
    for run, mine in zip(sim.runs, gradients(sim, number), strict=True):
        for name, x in mine.items():
            run.current.rest(name, 0.1) if name in tensors else run.current.ready(name, x, 0.1)
    poll_all(sim.runs)
    return on_host(sim, [run.finish() for run in sim.runs])


def go_to_step(run, step):
    """Go on as if this were the number of the next step."""
    run.discard({module: now._replace(step=step) for module, now in run.states.items()})


def states(sim):
    """Return copies of all states: by rank, unit, component and field."""
    ops = sim.runs[0]._ops("cpu")
    return [
        {
            (name, kind, field): host(ops, value)
            for name, tensor in run.state_dict()["tensors"].items()
            for kind in ("memory", "compressor")
            for field, value in tensor[kind].items()
        }
        for run in sim.runs
    ]


def assert_same(a, b):
    assert len(a) == len(b)
    for mine, theirs in zip(a, b, strict=True):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not same(mine[name], theirs[name])] == []


def wire_eps(chosen: Method, spec: TensorSpec) -> float:
    """Return the largest relative rounding error of payload, returned gradient and sums."""
    compressor = chosen.compressor if chosen.compressor.unfit(spec) is None else compressors.make("none")
    fields = compressor.wire(spec)
    return 16 * max([EPS.get(f.dtype, 0.0) for f in fields if f.wire] + [EPS[spec.dtype], EPS[spec.work_dtype]])


def in_a_graph(chosen, size, specs, **options):
    """Return the results of the first step of all ranks, run by one graph of TensorFlow."""
    tf = pytest.importorskip("tensorflow")
    given = gradients(simulate(chosen, size=size, specs=specs, **options), 0)

    @tf.function
    def run(mine):
        return simulate(chosen, "tensorflow", size=size, specs=specs, **options).step(mine, lr=0.1)

    merged = run([{name: tf.constant(x) for name, x in rank.items()} for rank in given])
    return [{name: x.numpy() for name, x in rank.items()} for rank in merged]
