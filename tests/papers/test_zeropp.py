"""ZeRO++: gradients are quantized for each of two hops, within the node and between nodes."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.methods.site import Site
from grace.core.ops import get_ops
from grace.core.session.simulation import SimulatedTransport
from grace.core.spec import Key

RANKS, LOCAL, SHAPE = 8, 4, (64, 128)
NUMEL = SHAPE[0] * SHAPE[1]
# Four bits per element, as in the paper.
QUANTIZER = {"name": "qsgd", "quantum_num": 7}
OPS = get_ops("numpy")


def simulation(between):
    way = {"name": "hierarchical", "local_size": LOCAL, "within": QUANTIZER, "between": between}
    config = {"compressor": QUANTIZER, "communicator": way, "granularity": "layer", "default_rules": False}
    return grace.Simulation(RANKS, {"w": SHAPE}, config)


def gradients(step):
    return [np.random.default_rng((step, rank)).standard_normal(NUMEL).astype(np.float32) for rank in range(RANKS)]


def mean_of_quantized(unit, seed, step, xs, ranks=None):
    """Return the mean of what the quantizer makes of xs, which are those of these ranks (default: in order)."""
    sites = [Site(OPS, unit.spec, Key(seed, step), rank) for rank in (range(len(xs)) if ranks is None else ranks)]
    payloads = [unit.compressor.compress(x, site) for x, site in zip(xs, sites, strict=True)]
    return unit.compressor.merge(payloads, sites[0]) * np.float32(1 / len(xs))


@pytest.mark.parametrize("between", ["allgather", "two_shot"])
def test_zero_plus_plus(between):
    """Wang et al., 2023, section 3.3: m_j = mean over nodes of Q(mean within the node of Q(x_j)), by two all-to-alls.

    Each rank of a node owns a part j. ZeRO's ranks need no other part. Here all need the mean, so the owner passes it
    on, quantized once more within the node, and with `two_shot` also between nodes.
    """
    sim = simulation(between)
    seed = sim.config.seed
    for step in range(3):
        given, expected = gradients(step), np.zeros(NUMEL, np.float32)
        for unit in sim.plan.units:
            ((_, start, stop),) = unit.pieces
            of_unit, onward = Key.derive(seed, unit.spec.name), unit.onward
            nodes = [range(first, first + LOCAL) for first in range(0, RANKS, LOCAL)]
            means = [
                mean_of_quantized(unit, of_unit, step, [given[rank][start:stop] for rank in node], node)
                for node in nodes
            ]
            mean = mean_of_quantized(onward, Key.derive(seed, onward.spec.name), step, means)
            for other in onward.chain:
                mean = mean_of_quantized(other, Key.derive(seed, other.spec.name), step, [mean])
            expected[start:stop] = mean_of_quantized(unit, Key.derive(of_unit, "mean"), step, [mean])
        for merged in sim.step([{"w": x.reshape(SHAPE)} for x in given]):
            assert np.array_equal(merged["w"].reshape(-1), expected), step
        mean = sum(x.astype(np.float64) for x in given) / RANKS
        assert 0 < np.abs(expected - mean).max() <= 4 * np.abs(given).max() / 7


def test_what_leaves_a_rank_is_quantized(monkeypatch):
    """A quarter of 16-bit gradients, once per node between nodes, and once per rank to each other rank of the node."""
    sent = {"node": 0, "others": 0}
    original = SimulatedTransport.start

    def start(self, collective, name):
        for rank, x in enumerate(collective.buffers if collective.kind == "alltoall" else ()):
            if rank != self.rank:
                sent["node" if rank // LOCAL == self.rank // LOCAL else "others"] += x.nbytes
        return original(self, collective, name)

    monkeypatch.setattr(SimulatedTransport, "start", start)
    simulation("allgather").step([{"w": x.reshape(SHAPE)} for x in gradients(0)])
    # Four bits per element, a scale per 512 elements, and headers.
    payload = NUMEL / 2 + NUMEL / 512 * 4
    assert payload <= sent["others"] / (RANKS // LOCAL) <= 1.05 * payload
    # There and back.
    assert payload <= sent["node"] / RANKS / (2 * (LOCAL - 1) / LOCAL) <= 1.05 * payload
