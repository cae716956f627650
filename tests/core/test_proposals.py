"""Proposals, on which ranks agree before they compress: a sum, a maximum, or the choice of a rotating leader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from grace.core.communicators.allreduce import Allreduce
from grace.core.config.config import Config, Method
from grace.core.errors import PayloadError
from grace.core.memories.none import NoMemory
from grace.core.memories.residual import Residual
from grace.core.methods.capabilities import Negotiating
from grace.core.methods.compressor import Compressor, Sparsifier
from grace.core.methods.site import Proposal
from grace.core.session.simulation import Simulation
from grace.core.spec import Field, TensorSpec
from grace.testing.harness import array, host
from tests.support.registered import every_framework

K = 4
SPECS = [TensorSpec("a", (30,)), TensorSpec("b", (5, 8))]


@dataclass(frozen=True)
class LeaderTopK(Sparsifier, Negotiating):
    """All ranks send the coordinates of one rank's largest elements. The ranks take turns."""

    summable = True

    def wire(self, spec):
        return Field("values", spec.work_dtype, K), Field("indices", "int32", K, wire=False)

    def proposed(self, spec):
        return (Field("indices", "int32", K),)

    def propose(self, x, at):
        return Proposal(at.ops.top_indices(x, K), "leader")

    def compress(self, x, at):
        return {"values": at.ops.gather(x, at.negotiated), "indices": at.negotiated}


@dataclass(frozen=True)
class SharedScale(Compressor, Negotiating):
    """Integers that share a scale, the largest magnitude of all ranks, so that they can be added."""

    summable = True

    def wire(self, spec):
        return Field("codes", "int32", spec.numel), Field("scale", spec.work_dtype, 1, wire=False)

    def proposed(self, spec):
        return (Field("scale", spec.work_dtype, 1),)

    def propose(self, x, at):
        return Proposal(at.ops.reshape(at.ops.max(at.ops.abs(x)), (1,)), "max")

    def compress(self, x, at):
        return {"codes": at.ops.cast(at.ops.floor(x / at.negotiated * 1000 + 0.5), "int32"), "scale": at.negotiated}

    def decompress(self, payload, at):
        return at.ops.cast(payload["codes"], at.spec.work_dtype) * payload["scale"] / 1000


@dataclass(frozen=True)
class Forgetful(LeaderTopK):
    """A compressor that announces a longer proposal than it makes."""

    def proposed(self, spec):
        return (Field("indices", "int32", K + 1),)


def simulate(compressor, memory, framework, **options):
    config = Config(Method(compressor, memory, Allreduce()), default_rules=False, granularity="layer", **options)
    return Simulation(3, SPECS, config, framework=framework)


def gradients(sim, step):
    rng = np.random.default_rng(step)
    ops = sim.runs[0]._ops("cpu")
    drawn = [{s.name: rng.standard_normal(s.shape).astype(np.float32) for s in SPECS} for _ in sim.runs]
    return drawn, [{n: ops.reshape(array(ops, x, "float32"), x.shape) for n, x in mine.items()} for mine in drawn]


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@every_framework
def test_the_leader_rotates_and_all_ranks_follow_it(framework, bucket_bytes):
    sim = simulate(LeaderTopK(), NoMemory(), framework, bucket_bytes=bucket_bytes)
    ops = sim.runs[0]._ops("cpu")
    for step in range(4):
        drawn, given = gradients(sim, step)
        merged = sim.step(given)
        for spec in SPECS:
            flat = [g[spec.name].reshape(-1) for g in drawn]
            chosen = np.argsort(-np.abs(flat[step % 3]))[:K]
            expected = np.zeros(spec.numel, np.float32)
            expected[chosen] = sum(f[chosen] for f in flat) / 3
            for mine in merged:
                assert np.allclose(host(ops, mine[spec.name]).reshape(-1), expected, rtol=1e-6, atol=0)


@every_framework
def test_a_maximum_is_that_of_all_ranks(framework):
    sim = simulate(SharedScale(), Residual(), framework)
    ops = sim.runs[0]._ops("cpu")
    drawn, given = gradients(sim, 0)
    merged = sim.step(given)
    for spec in SPECS:
        flat = [g[spec.name].reshape(-1) for g in drawn]
        scale = max(np.abs(f).max() for f in flat)
        codes = sum(np.floor(f / scale * np.float32(1000) + np.float32(0.5)) for f in flat)
        for mine in merged:
            assert np.allclose(host(ops, mine[spec.name]).reshape(-1), codes * scale / 3000, rtol=1e-5, atol=1e-7)


def test_a_proposal_that_was_not_announced_so_is_refused():
    sim = simulate(Forgetful(), NoMemory(), "numpy")
    with pytest.raises(PayloadError, match="make the two agree"):
        sim.step(gradients(sim, 0)[1])
