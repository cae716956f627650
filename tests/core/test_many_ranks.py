"""Every program on 64 simulated ranks: equal bits, right sums, nothing lost, and the bytes that were promised."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.values.config import Config, Method
from grace.core.values.registry import communicators, compressors, memories
from grace.testing.communicator_contract import residuals

SIZE, SHAPE = 64, (256, 256)
NUMEL = SHAPE[0] * SHAPE[1]
NODES = {"name": "hierarchical", "local_size": 8}
EXACT = {"name": "threshold", "threshold": 0.0}
TOPK = {"name": "topk", "compress_ratio": 0.02}

# The communicator, a compressor that it carries exactly, and payloads of topk that leave a rank (None: not flat).
PROGRAMS = {
    "allgather": ("allgather", "none", 63),
    "broadcast": ("broadcast", "none", 63),
    "allreduce": ("allreduce", "none", None),
    "two_shot": ({"name": "two_shot", "second": "none"}, EXACT, None),
    "two_shot, twice": ("two_shot", None, 2),
    "split": ("sparse_allreduce", EXACT, 3),
    "union": ({"name": "sparse_allreduce", "reduction": "union"}, EXACT, None),
    "tree": ({"name": "sparse_allreduce", "reduction": "tree"}, EXACT, 3),
    "nodes": (NODES, "none", None),
    "nodes, two_shot": ({**NODES, "between": "two_shot"}, None, None),
    "nodes, split": ({**NODES, "between": "sparse_allreduce"}, EXACT, None),
}
SHARES = {"allgather": SIZE - 1, "broadcast": SIZE - 1, "allreduce": 2 * (SIZE - 1) / SIZE, "alltoall": 1}


def simulated(communicator, compressor):
    compressor = compressors.make(compressor)
    memory = memories.make(compressor.default_memory)
    return grace.Simulation(
        SIZE, {"w": SHAPE}, Config(Method(compressor, memory, communicators.make(communicator)), default_rules=False)
    )


def gradients(step):
    return [{"w": np.random.default_rng((step, r)).standard_normal(SHAPE).astype(np.float32)} for r in range(SIZE)]


@pytest.mark.parametrize("name", [name for name, (_, exact, _) in PROGRAMS.items() if exact])
def test_what_is_sent_exactly_is_averaged(name):
    communicator, exact, _ = PROGRAMS[name]
    given = gradients(0)
    first, *others = simulated(communicator, exact).step(given)
    mean = sum(x["w"].astype(np.float64) for x in given) / SIZE
    assert np.abs(first["w"] - mean).max() <= 1e-6
    assert all((first["w"] == other["w"]).all() for other in others)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "allreduce"])
def test_nothing_is_lost_and_the_bytes_are_those_promised(name):
    communicator, _, payloads = PROGRAMS[name]
    sim = simulated(communicator, TOPK)
    total = np.zeros(SHAPE)
    for step in range(2):
        given = gradients(step)
        first, *others = sim.step(given, lr=0.1)
        assert all((first["w"] == other["w"]).all() for other in others)
        total += sum(x["w"].astype(np.float64) for x in given) / SIZE - first["w"]
    held = residuals(sim)["w"]
    assert np.abs(held - total).max() <= 1e-5 * np.abs(held).max()
    if payloads is not None:
        sent = [sim.stats(rank)["collectives"] for rank in range(SIZE)]
        mean = np.mean([sum(SHARES[kind] * count for kind, count in mine.items()) for mine in sent])
        # 8 bytes per entry, and headers of each of the 64 buffers.
        assert mean <= 1.03 * payloads * 8 * 0.02 * NUMEL + SIZE * 64
