"""The updates of the papers behind the communicator two_shot, in NumPy and by the library."""

from __future__ import annotations

import numpy as np
import pytest

import grace

RANKS, STEPS, ETA = 3, 8, 0.1
SHAPE = (48, 64)


def sign(x):
    """C(x) = mean|x| sign(x); there are no zeros here."""
    return np.mean(np.abs(x.astype(np.float64))).astype(np.float32) * np.sign(x)


def top(ratio):
    def kept(x):
        out, chosen = np.zeros_like(x), np.argsort(-np.abs(x), kind="stable")[: max(1, int(ratio * x.size))]
        out[chosen] = x[chosen]
        return out

    return kept


def shards_of(simulation):
    """Return the parts of the flat tensor that the ranks own."""
    pieces = sorted((unit.pieces[0] for unit in simulation.plan.units), key=lambda piece: piece.start)
    assert [unit.pieces for unit in simulation.plan.units if len(unit.pieces) > 1] == []
    assert len(pieces) == RANKS
    return [slice(piece.start, piece.stop) for piece in pieces]


def gradients(step, x):
    """Return the gradients of |x - target|^2 / 2 with noise, one per rank."""
    target = np.random.default_rng(99).standard_normal(x.size)
    noise = [np.random.default_rng((step, rank)).standard_normal(x.size) for rank in range(RANKS)]
    return [(x - target + mine).astype(np.float32) for mine in noise]


@pytest.mark.parametrize(
    ("options", "compress"),
    [
        ({"compressor": "efsignsgd", "memory": "residual"}, sign),
        ({"compressor": "topk", "compress_ratio": 0.1}, top(0.1)),
    ],
    ids=["sign", "topk"],
)
def test_doublesqueeze(options, compress):
    """Algorithm 1: v_i = g_i + d_i, d_i = v_i - C(v_i); v = mean C(v_i) + d, d = v - C(v); x = x - eta C(v)."""
    check_both_ways(options, compress)


def check_both_ways(options, compress, scale=1.0):
    """Compare the library with the algorithms, whose errors are those of `scale` times the gradient."""
    simulation = grace.Simulation(
        RANKS, {"w": SHAPE}, {**options, "communicator": "two_shot", "granularity": "layer", "default_rules": False}
    )
    shards = shards_of(simulation)
    x, y = (np.zeros(SHAPE[0] * SHAPE[1]) for _ in "xy")
    worker, server = np.zeros((RANKS, x.size), np.float32), np.zeros(x.size, np.float32)
    for step in range(STEPS):
        given = gradients(step, x)
        applied = np.zeros(x.size, np.float32)
        for shard in shards:
            sent = []
            for rank in range(RANKS):
                v = np.float32(scale) * given[rank][shard] + worker[rank][shard]
                sent.append(compress(v))
                worker[rank][shard] = v - sent[-1]
            v = sum(sent) / np.float32(RANKS) + server[shard]
            applied[shard] = compress(v)
            server[shard] = v - applied[shard]
        merged = simulation.step([{"w": g.reshape(SHAPE)} for g in gradients(step, y)])[0]["w"].reshape(-1)
        assert np.allclose(scale * merged, applied, rtol=1e-4, atol=1e-5 * scale), step
        x, y = x - ETA / scale * applied, y - ETA * merged
    assert np.abs(worker).max() > 0.1 * scale
    assert np.abs(server).max() > 0.1 * scale


def ternary(ratio):
    """C(x) = mu sign(x) at the largest |x|, with mu their mean."""

    def kept(x):
        out = top(ratio)(x)
        chosen = out != 0
        out[chosen] = sign(out[chosen])
        return out

    return kept


def test_stc():
    """Sattler et al., 2019, Algorithm 2: sparse ternary compression of what goes up and of what comes down."""
    chain = {"name": "chain", "sparsifier": {"name": "topk", "compress_ratio": 0.1}, "quantizer": "efsignsgd"}
    check_both_ways({"compressor": chain, "memory": "residual"}, ternary(0.1))


def test_dist_ef_sgd():
    """Algorithm 2, with one block per shard: errors at both ends in units of the weights.

    p_i = eta g_i + e_i, e_i = p_i - C(p_i); p = mean C(p_i) + e, e = p - C(p); x = x - C(p).
    """
    check_both_ways({"compressor": "efsignsgd", "memory": "efsignsgd", "lr": ETA}, sign, scale=ETA)
