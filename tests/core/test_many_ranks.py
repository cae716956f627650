"""Every program on 64 simulated ranks: equal bits, right sums, nothing lost, and the bytes that were promised."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.config.config import Config, Method
from grace.core.config.registry import communicators, compressors, memories
from grace.testing.communicator_contract import residuals
from tests.support.covering import rest_slow

SIZE, SHAPE = 64, (256, 256)
NUMEL = SHAPE[0] * SHAPE[1]
NODES = {"name": "hierarchical", "local_size": 8}
EXACT = {"name": "threshold", "threshold": 0.0}
TOPK = {"name": "topk", "compress_ratio": 0.02}

# The bytes of a payload of topk, and of the tensor; the share that goes to other ranks, of all and of eight.
PAYLOAD, DENSE = 8 * int(0.02 * NUMEL), 4 * NUMEL
OTHERS, OF_EIGHT = 63 / 64, 7 / 8
# The communicator, a compressor that it carries exactly, and the most bytes that leave a rank with topk, on average.
PROGRAMS = {
    "allgather": ("allgather", "none", 63 * PAYLOAD),
    "broadcast": ("broadcast", "none", 63 * PAYLOAD),
    "allreduce": ("allreduce", "none", None),
    "two_shot": ({"name": "two_shot", "second": "none"}, EXACT, OTHERS * (PAYLOAD + DENSE)),
    "two_shot, twice": ("two_shot", None, OTHERS * 2 * PAYLOAD),
    "split": ("sparse_allreduce", EXACT, OTHERS * 3 * PAYLOAD),
    # Three quarters of the elements are chosen by at least one rank. So the sums travel without indices.
    "union": ({"name": "sparse_allreduce", "reduction": "union"}, EXACT, OTHERS * (PAYLOAD + DENSE)),
    # Each rank but the first one sends its entries once, and all get the result.
    "tree": ({"name": "sparse_allreduce", "reduction": "tree"}, EXACT, OTHERS * 2 * PAYLOAD),
    # Eight nodes of eight ranks: the tensor there and back within the node, and an eighth of a payload between nodes.
    "nodes": (NODES, "none", OF_EIGHT * 2 * DENSE + 7 * PAYLOAD / 8),
    "nodes, two_shot": ({**NODES, "between": "two_shot"}, None, OF_EIGHT * (2 * DENSE + 2 * PAYLOAD / 8)),
    "nodes, split": ({**NODES, "between": "sparse_allreduce"}, EXACT, OF_EIGHT * (2 * DENSE + 3 * PAYLOAD / 8)),
}
# Their entries meet at other ranks, and how many remain depends on the data.
BOUNDED = ("split", "tree", "nodes, split")


def simulated(communicator, compressor):
    compressor = compressors.make(compressor)
    memory = memories.make(compressor.default_memory)
    return grace.Simulation(
        SIZE, {"w": SHAPE}, Config(Method(compressor, memory, communicators.make(communicator)), default_rules=False)
    )


def gradients(step):
    return [{"w": np.random.default_rng((step, r)).standard_normal(SHAPE).astype(np.float32)} for r in range(SIZE)]


def check_prediction(sim):
    """The plan says how many bytes a rank passes to collectives, on average, unless the data decide."""
    predicted = sum(bucket.nbytes for bucket in sim.plan.buckets)
    sent = [run.stats()["wire_bytes"] for run in sim.runs]
    if all(bucket.route.fixed for bucket in sim.plan.buckets):
        assert abs(np.mean(sent) - predicted) <= len(sim.plan.buckets)
    else:
        # It leaves out entries of run-time number.
        assert predicted < np.mean(sent)


# One rank more or less is the same code: tests of the communicators have all programs on few ranks.
ORDINARY = ("two_shot", "tree", "nodes, two_shot", "nodes, split")


def programs(chosen):
    """Return the names of programs, of which most run under `--all` only."""
    return rest_slow(sorted(chosen, key=lambda name: name not in ORDINARY), len(set(chosen) & set(ORDINARY)))


@pytest.mark.parametrize("name", programs([name for name, (_, exact, _) in PROGRAMS.items() if exact]))
def test_what_is_sent_exactly_is_averaged(name):
    communicator, exact, _ = PROGRAMS[name]
    given, sim = gradients(0), simulated(communicator, exact)
    first, *others = sim.step(given)
    mean = sum(x["w"].astype(np.float64) for x in given) / SIZE
    assert np.abs(first["w"] - mean).max() <= 1e-6
    assert all((first["w"] == other["w"]).all() for other in others)
    check_prediction(sim)


@pytest.mark.parametrize("name", programs([name for name in PROGRAMS if name != "allreduce"]))
def test_nothing_is_lost_and_the_bytes_are_those_promised(name, crossed):
    communicator, _, most = PROGRAMS[name]
    sim = simulated(communicator, TOPK)
    total = np.zeros(SHAPE)
    for step in range(2):
        crossed.clear()
        given = gradients(step)
        first, *others = sim.step(given, lr=0.1)
        assert all((first["w"] == other["w"]).all() for other in others)
        total += sum(x["w"].astype(np.float64) for x in given) / SIZE - first["w"]
    held = residuals(sim)["w"]
    assert np.abs(held - total).max() <= 1e-5 * np.abs(held).max()
    # Beside them, headers of each of the 64 buffers.
    sent = 4 * sum(crossed.values()) / SIZE
    assert sent <= 1.03 * most + SIZE * 64
    assert name in BOUNDED or sent >= 0.97 * most
    check_prediction(sim)
