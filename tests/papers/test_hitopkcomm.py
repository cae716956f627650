"""HiTopKComm: top-k between nodes, of shards of the dense mean within each node."""

from __future__ import annotations

import numpy as np
import pytest

import grace

RANKS, LOCAL, STEPS, RATIO, SHAPE = 8, 4, 6, 0.05, (64, 128)
NUMEL = SHAPE[0] * SHAPE[1]


def top(x):
    """Return x with only its largest elements."""
    kept, chosen = np.zeros_like(x), np.argsort(-np.abs(x), kind="stable")[: int(RATIO * x.size)]
    kept[chosen] = x[chosen]
    return kept


@pytest.mark.parametrize("average", [True, False])
def test_hitopkcomm(average):
    """Shi et al., 2021: reduce-scatter within the node, top-k of each shard, allgather between and within nodes.

    Of shard j, its owner in a node has m = mean of g within the node, v = m + e, e = v - TopK(v). The result is the
    mean of TopK(v) over the nodes.
    """
    way = {"name": "hierarchical", "local_size": LOCAL, "between": "allgather"}
    config = {"compressor": "topk", "compress_ratio": RATIO, "communicator": way, "granularity": "layer"}
    sim = grace.Simulation(RANKS, {"w": SHAPE}, config, default_rules=False, average=average)
    shards = [slice(start, start + NUMEL // LOCAL) for start in range(0, NUMEL, NUMEL // LOCAL)]
    assert sorted((p.start, p.stop) for unit in sim.plan.units for p in unit.pieces) == [
        (shard.start, shard.stop) for shard in shards
    ]
    nodes = [slice(first, first + LOCAL) for first in range(0, RANKS, LOCAL)]
    error = np.zeros((len(nodes), NUMEL), np.float32)
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        given = (rng.standard_normal((1, NUMEL)) + rng.standard_normal((RANKS, NUMEL))).astype(np.float32)
        expected = np.zeros(NUMEL, np.float32)
        for shard in shards:
            for node, ranks in enumerate(nodes):
                v = given[ranks, shard].mean(axis=0) + error[node, shard]
                sent = top(v)
                error[node, shard] = v - sent
                expected[shard] += sent / (len(nodes) if average else 1 / LOCAL)
        for merged in sim.step([{"w": x.reshape(SHAPE)} for x in given]):
            assert np.allclose(merged["w"].reshape(-1), expected, rtol=1e-5, atol=1e-6), step
    assert np.abs(error).max() > 1
    # One residual per node: each rank keeps that of its shard, and none for the others.
    for rank, run in enumerate(sim.runs):
        kept = {name: tensor["memory"] for name, tensor in run.state_dict()["tensors"].items() if tensor["memory"]}
        ((name, memory),) = kept.items()
        (piece,) = sim.plan.stateful[name].pieces
        expected = error[rank // LOCAL, piece.start : piece.stop]
        assert np.allclose(memory["residual"], expected, rtol=1e-5, atol=1e-6), rank
