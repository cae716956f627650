"""The registry is complete, has no duplicate names, and accepts methods from outside."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import numpy as np
import pytest

import grace
import grace.core.compressors
import grace.core.memories
from grace.core.config.registry import Registry, communicators, compressors, memories
from grace.core.errors import ConfigError, GraceWarning
from grace.core.methods.capabilities import Negotiating
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Proposal
from grace.core.spec import Field
from grace.testing import CompressorContract
from tests.core.test_contract_mutants import run
from tests.support.launch import ROOT


@dataclass(frozen=True)
class MaxScale(Compressor, Negotiating):
    """A method from outside grace: int8 levels relative to the largest magnitude of all ranks, summed by allreduce."""

    levels: int = 31
    extremes: tuple[float, ...] = (-1.0, 1.0)

    summable = True
    default_memory = "residual"

    def wire(self, spec):
        return Field("codes", "int32", spec.numel), Field("scale", "float32", 1, wire=False)

    def proposed(self, spec):
        return (Field("scale", spec.work_dtype, 1),)

    def propose(self, x, at):
        return Proposal(at.ops.reshape(at.ops.max(at.ops.abs(x)), (1,)), "max")

    def compress(self, x, at):
        scale = at.ops.cast(at.negotiated, "float32")
        wide = at.ops.cast(scale, at.spec.work_dtype)
        codes = at.ops.quantize(x, wide, self.levels, at.private_key)
        return {"codes": at.ops.cast(codes, "int32"), "scale": scale}

    def decompress(self, payload, at):
        return at.ops.dequantize(payload["codes"], payload["scale"], self.levels, at.spec.work_dtype)

    def merge(self, payloads, at):
        codes = payloads[0]["codes"]
        for payload in payloads[1:]:
            codes = codes + payload["codes"]
        return self.decompress({**payloads[0], "codes": codes}, at)


@pytest.fixture
def outside(monkeypatch):
    """Provide an entry point of another distribution, and registries that have loaded nothing yet."""

    class Entry:
        name = "maxscale"

        def load(self):
            return MaxScale

    groups = []

    def entry_points(group):
        groups.append(group)
        return [Entry()] if group == "grace.compressors" else []

    monkeypatch.setattr("grace.core.config.registry.entry_points", entry_points)
    return groups


@pytest.mark.parametrize(
    ("registry", "package"), [(compressors, grace.core.compressors), (memories, grace.core.memories)]
)
def test_every_module_registers_something(registry, package):
    """Without the decorator, a method has no name."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = {module.name for module in found if not module.ispkg}
    assert {registry.get(name).__module__ for name in registry} == modules


def test_names_are_those_that_configurations_use():
    assert {"allgather", "allreduce", "auto", "broadcast", "hierarchical", "sparse_allreduce", "two_shot"} == set(
        communicators
    )
    assert {"none", "residual", "dgc", "efsignsgd", "powersgd"} <= set(memories)
    assert {"none", "fp16", "topk", "randomk", "threshold", "dgc", "qsgd", "terngrad", "signsgd"} <= set(compressors)
    assert list(compressors) == sorted(compressors)
    assert "topk" in compressors
    assert "no such" not in compressors


def test_every_part_is_a_frozen_dataclass_with_working_defaults():
    for registry in (compressors, memories, communicators):
        for name in registry:
            part = registry.example(name)
            assert registry.name_of(part) == name
            assert hash(part) == hash(registry.example(name))
            assert registry.make(part) is part
            assert registry.make(registry.config_of(part)) == part
            assert registry.get(name).__doc__, f"{name} says nothing about itself"


def test_a_name_is_never_taken_twice():
    registry: Registry = Registry("compressor", "no such group", "grace.core.compressors")
    registry.register("mine")(MaxScale)
    with pytest.raises(ConfigError, match=r"'mine' is taken by .*MaxScale"):
        registry.register("mine")(MaxScale)
    with pytest.raises(ConfigError, match=r"'topk' is taken by grace\.core\.compressors\.topk\.TopK"):
        grace.register_compressor("topk")(MaxScale)
    assert compressors.get("topk").__name__ == "TopK"


def test_unregistered_parts_are_told_how_to_register():
    with pytest.raises(ConfigError, match=r"MaxScale is not registered.*@grace\.register_compressor"):
        compressors.name_of(MaxScale())
    with pytest.raises(ConfigError, match="not registered"):
        grace.make_config(compressor=MaxScale())


def test_entry_points_bring_parts_from_outside(outside):
    registry: Registry = Registry("compressor", "compressors", "grace.core.memories")
    assert "maxscale" in registry
    assert registry.make({"name": "maxscale", "levels": 7}) == MaxScale(7)
    assert outside == ["grace.compressors"]


def test_entry_points_are_read_only_when_a_name_is_asked_for(outside):
    Registry("compressor", "compressors", "grace.core.memories")
    assert outside == []


def test_an_entry_point_that_registers_itself_at_import_is_no_conflict(outside):
    registry: Registry = Registry("compressor", "compressors", "grace.core.memories")
    registry.register("maxscale")(MaxScale)
    assert list(registry) == ["maxscale"]


BROKEN = {
    "no module": ("no_such_module:Part", r"ModuleNotFoundError: No module named 'no_such_module'"),
    "no class": ("json:Part", "AttributeError: module 'json' has no attribute 'Part'"),
    "a function": ("json:dumps", "expected a class, received <function dumps"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_entry_point_stops_only_those_who_ask_for_it(fault, monkeypatch):
    value, why = BROKEN[fault]
    entry = EntryPoint("broken", value, "grace.compressors")
    monkeypatch.setattr("grace.core.config.registry.entry_points", lambda group: [entry])
    registry: Registry = Registry("compressor", "compressors", "grace.core.memories")
    told = rf"the entry point 'broken = {value}' of an unknown package, in the group grace.compressors, .*: {why}"
    with pytest.warns(GraceWarning, match=told):
        assert list(registry) == []
    for _ in range(2):
        with pytest.raises(ConfigError, match=told):
            registry.make("broken")
    with pytest.raises(ConfigError, match="unknown compressor 'other'"):
        registry.make("other")


@pytest.fixture
def registered(monkeypatch):
    list(compressors)
    monkeypatch.setattr(compressors, "_classes", {**compressors._classes})
    grace.register_compressor("maxscale")(MaxScale)


@pytest.mark.usefixtures("registered")
def test_an_outside_compressor_runs_like_any_other():
    """An outside method with a proposal, a sum of integers and error feedback runs two steps on three ranks."""
    config = {"compressor": "maxscale", "levels": 15, "default_rules": False}
    shapes = {"w": (20, 30), "v": (11,)}
    sim = grace.Simulation(3, shapes, config, framework="torch")
    reference = grace.Simulation(3, shapes, config)
    import torch

    rng = np.random.default_rng(0)
    for _ in range(2):
        given = [{name: rng.standard_normal(s, np.float32) for name, s in shapes.items()} for _ in range(3)]
        merged = sim.step([{name: torch.from_numpy(x.copy()) for name, x in mine.items()} for mine in given])
        expected = reference.step([{name: x.copy() for name, x in mine.items()} for mine in given])
        for name in shapes:
            assert all(torch.equal(mine[name], merged[0][name]) for mine in merged)
            assert np.array_equal(merged[0][name].numpy(), expected[0][name])
            # One level is max|x| / 15. With two steps of error feedback, no element is off by more than two levels.
            mean = np.mean([mine[name] for mine in given], axis=0)
            largest = max(np.abs(mine[name]).max() for mine in given)
            assert np.abs(expected[0][name] - mean).max() < 2 * (largest + 1) / 15
    assert grace.make_config(compressor="maxscale", extremes=[0, 1]).method.compressor.extremes == (0, 1)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("test", [name for name in dir(CompressorContract) if name.startswith("test_")])
def test_an_outside_compressor_passes_the_contract(test):
    from grace.core.ops import get_ops

    run(CompressorContract, test, {"compressor": MaxScale(15)}, ops=get_ops("numpy"))


def test_the_class_decorator_returns_the_class():
    registry: Registry = Registry("memory", "no such group", "grace.core.memories")
    assert registry.register("another")(MaxScale) is MaxScale


PACKAGE = """
import dataclasses
import grace
from grace.core.communicators.broadcast import Broadcast
from grace.core.plan.unit import layout_of
from grace.core.transport.collectives import broadcast

@dataclasses.dataclass(frozen=True)
class OneByOne(Broadcast):
    '''Each rank in turn sends its buffer to all others.'''

    def route(self, units, ranks, checksum=False):
        layout = layout_of(units, checksum)

        def run(bucket):
            mine = layout.encode(bucket.ops, bucket.payloads, bucket.flags, bucket.stamp)
            arrived = []
            for root in range(bucket.size):
                arrived += yield [broadcast(mine, root)]
            return layout.decode(bucket.ops, bucket.ops.concat(arrived), bucket.size, bucket.stamp)

        return grace.Route(layout.nbytes, layout.fixed, run)
"""

USE = """
import numpy as np
import grace
simulation = grace.Simulation(3, {"weight": (64, 32)}, {"compressor": "topk", "communicator": "one_by_one"})
usual = grace.Simulation(3, {"weight": (64, 32)}, {"compressor": "topk", "communicator": "allgather"})
rng = np.random.default_rng(0)
gradients = [{"weight": rng.standard_normal((64, 32)).astype(np.float32)} for _ in range(3)]
merged, expected = simulation.step(gradients), usual.step(gradients)
assert all((mine["weight"] == expected[0]["weight"]).all() for mine in merged)
assert [kind for kind, count in simulation.stats()["collectives"].items() if count] == ["broadcast"]
print(simulation.report())
try:
    grace.make_config(compressor="topk", communicator="allreduce")
except ValueError as error:
    print(error)
"""


@pytest.mark.processes
def test_an_installed_package_brings_a_communicator(tmp_path):
    """The interpreter finds the package by its metadata, as pip writes it; nothing imports it."""
    (tmp_path / "one_by_one.py").write_text(PACKAGE)
    metadata = tmp_path / "one_by_one-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: one-by-one\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[grace.communicators]\none_by_one = one_by_one:OneByOne\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", USE], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report, _, refusal = done.stdout.partition("Valid communicators: ")
    assert "one_by_one" in report
    assert "one_by_one" in refusal


def test_names_that_differ_in_hyphens_only_are_told_apart():
    """Grace has no such names, but two other packages may."""
    registry = Registry("compressor", "compressors", "tests.none")
    registry._loaded = True
    for name in ("top_k", "Topk"):
        registry.register(name)(type(name, (MaxScale,), {}))
    assert registry.registered_name("top_k") == "top_k"
    assert registry.registered_name("Topk") == "Topk"
    with pytest.raises(ConfigError, match=r"compressor 'TOPK' may be 'Topk' or 'top_k'; write one of them exactly"):
        registry.get("TOPK")
    assert "TOPK" in registry
    assert "topj" not in registry
    assert 5 not in registry
