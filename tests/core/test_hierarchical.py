"""The communicator hierarchical: dense within a node, compressed between nodes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import grace
from grace.core.communicators.hierarchical import Hierarchical
from grace.core.communicators.sparse_allreduce import SparseAllreduce
from grace.core.communicators.two_shot import TwoShot
from grace.core.config.config import Method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.guards.agreement import formats
from grace.core.methods.compressor import usual_communicator
from grace.core.ops import get_ops
from grace.core.plan.plan import make_plan
from grace.core.session.simulation import SimulatedTransport
from grace.core.spec import Ranks, TensorSpec
from grace.core.transport.transport import known_local_size
from grace.testing import CommunicatorContract
from grace.testing.communicator_contract import residuals
from grace.testing.harness import FRAMEWORKS
from tests.support import nodes
from tests.support.covering import ALL
from tests.support.steps import WithTypical, assert_same, gradient, gradients, in_a_graph, simulate, states, step

SPECS = [TensorSpec("long", (3, 2000)), TensorSpec("short", (131,)), TensorSpec("empty", (0, 4))]
SPECS += [TensorSpec("half", (30, 60), "float16"), TensorSpec("double", (16, 90), "float64")]


def method(compressor, memory=None, **options):
    compressor = compressors.make(compressor)
    memory = memories.make(memory or compressor.default_memory)
    return Method(compressor, memory, communicators.make({"name": "hierarchical", "local_size": 2, **options}))


class TestHierarchical(WithTypical, CommunicatorContract):
    @pytest.fixture(params=[Hierarchical(local_size=2), Hierarchical(TwoShot(), local_size=2)], ids=["usual", "shots"])
    def communicator(self, request):
        return request.param

    @pytest.fixture(params=[1, 2, 4, 6] if ALL else [1, 2, 4])
    def size(self, request):
        return request.param


@pytest.mark.parametrize("name", ["topk", "qsgd", "efsignsgd", "randomk", "fp16", "signsgd"])
def test_one_rank_per_node_is_the_exchange_between_nodes(name):
    usual = usual_communicator(compressors.example(name))
    plain = Method(*(getattr(method(name), kind) for kind in ("compressor", "memory")), communicators.make(usual))
    chosen = method(name, local_size=1, between=usual)
    alone, flat = (simulate(one, size=3, specs=SPECS) for one in (chosen, plain))
    for number in range(3):
        assert_same(step(alone, number), step(flat, number))
    assert_same(states(alone), states(flat))


@pytest.mark.parametrize("reduction", ["split", "union", "tree"])
@pytest.mark.parametrize("size", [1, 4])
def test_one_rank_per_node_may_add_sparse_payloads(size, reduction):
    between = SparseAllreduce(reduction)
    plain = Method(method("topk").compressor, method("topk").memory, between)
    alone, flat = (simulate(one, size=size) for one in (method("topk", local_size=1, between=between), plain))
    for number in range(3):
        assert_same(step(alone, number), step(flat, number))


@pytest.mark.parametrize("within", ["none", "fp16"])
def test_one_node_sends_means_without_compression_between_nodes(within):
    sim = simulate(method("topk", within=within, local_size=4), size=4, specs=SPECS[:2])
    merged = step(sim, 0)[0]
    for spec in SPECS[:2]:
        mean = sum(gradient(spec, 0, rank).astype(np.float64) for rank in range(4)) / 4
        assert np.abs(merged[spec.name] - mean).max() <= (2e-3 if within == "fp16" else 1e-6) * np.abs(mean).max()


@pytest.mark.parametrize("average", [True, False])
def test_nodes_exchange_what_a_rank_per_node_would(average):
    """Two ranks of a node count as one with the mean of their gradients, shard by shard."""
    chosen = method("qsgd", within="none", local_size=2)
    sim = simulate(chosen, size=4, specs=SPECS[:1], average=average)
    given = gradients(sim, 0)
    merged = sim.step(given)[0]["long"]
    total = sum(x["long"].astype(np.float64) for x in given) / (4 if average else 1)
    # A code of 8 bits per element, scaled by the norm of 512.
    assert 0 < np.abs(merged - total).max() <= np.abs(total).max() / 15


def test_a_vote_is_one_of_nodes_and_is_not_multiplied():
    sim = simulate(method("signsgd"), size=6, specs=SPECS[:1], average=False)
    given = [{"long": np.full((3, 2000), value, np.float32)} for value in (1, 1, -1, -1, -3, 1)]
    assert (sim.step(given)[0]["long"] == -1).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "options", [{}, {"within": "qsgd"}, {"between": "two_shot", "within": "fp16"}], ids=["usual", "qsgd", "shots"]
)
def test_frameworks_agree(framework, options):
    specs = SPECS[:2]
    numpy, other = (
        simulate(method("efsignsgd", **options), which, size=4, specs=specs) for which in ("numpy", framework)
    )
    for number in range(2):
        assert_same(step(numpy, number), step(other, number))
    assert_same(states(numpy), states(other))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"within": "qsgd"}, {"between": "two_shot", "within": "fp16"}], ids=["usual", "qsgd", "shots"]
)
def test_a_graph_gives_the_same(options):
    chosen, specs = method("efsignsgd", **options), SPECS[:2]
    assert_same(in_a_graph(chosen, 4, specs), step(simulate(chosen, size=4, specs=specs), 0))


def test_only_compressed_shards_leave_a_node(monkeypatch):
    """HiTopKComm: each rank sends its shard's payload to its peers on the other nodes, and nothing else."""
    left = dict.fromkeys(range(6), 0)
    original = SimulatedTransport.start

    def start(self, collective, name):
        if collective.kind == "alltoall":
            left[self.rank] += sum(x.size for rank, x in enumerate(collective.buffers) if rank // 2 != self.rank // 2)
        return original(self, collective, name)

    monkeypatch.setattr(SimulatedTransport, "start", start)
    sim = simulate(
        method({"name": "topk", "compress_ratio": 0.01}, between="allgather"),
        size=6,
        specs=[TensorSpec("w", (1000, 400))],
    )
    step(sim, 0)
    # 2,000 elements of 8 bytes in a shard, to two other nodes.
    assert all(2 * 16_000 <= sent <= 2 * 16_000 + 100 for sent in left.values())
    assert sim.runs[0].stats()["collectives"]["allreduce"] == 0


@pytest.mark.parametrize("options", [{"within": "qsgd"}, {"within": "qsgd", "between": "two_shot"}])
def test_a_bad_gradient_that_is_coded_within_the_node_is_announced(options):
    sim = simulate(method("topk", **options), size=4, specs=SPECS[:1], granularity="layer")
    step(sim, 0)
    before = states(sim)
    given = gradients(sim, 1)
    given[2]["long"][1, 7] = np.nan
    hit = [u for u in sim.plan.units if any(p.start <= 2007 < p.stop for p in u.pieces)]
    for merged in sim.step(given):
        for unit in hit:
            assert np.isnan(merged["long"].reshape(-1)[unit.pieces[0].start : unit.pieces[0].stop]).all()
    after = states(sim)
    names = {name for unit in hit for name in (unit.spec.name, *(other.spec.name for other in unit.chain))}
    assert_same(*([{k: x for k, x in rank.items() if k[0] in names} for rank in ranks] for ranks in (before, after)))


@pytest.mark.parametrize("name", ["topk", "efsignsgd"])
@pytest.mark.parametrize(
    "after", [{"communicator": "allgather"}, {"compress_ratio": 0.2}, {"between": "two_shot"}, {"granularity": "layer"}]
)
def test_a_change_keeps_what_the_owners_hold(name, after):
    if name != "topk" and "compress_ratio" in after:
        pytest.skip("efsignsgd has no ratio")
    options = {"compressor": name, "communicator": "hierarchical", "local_size": 2, "default_rules": False}
    sim = grace.Simulation(4, SPECS[:2], options)
    for number in range(3):
        step(sim, number)
    before = residuals(sim)
    assert all(np.abs(before[tensor]).max() > 0 for tensor in ("long", "short"))
    if "granularity" in after:
        config = grace.make_config({**sim.config.to_dict(), **after})
        holding = frozenset(item.spec.name for item in sim.plan.assignments)
        plan = make_plan(SPECS[:2], config, ranks=Ranks(4), holding=holding)
        assert name != "topk" or len(plan.units) > len(sim.plan.units)
        for run in sim.runs:
            run.change(plan)
    else:
        sim.change(**after)
    kept = residuals(sim)
    for tensor, x in before.items():
        assert np.allclose(kept[tensor], x, rtol=1e-5, atol=1e-6 * np.abs(x).max()), tensor
    total = {spec.name: sum(gradient(spec, 5, rank).astype(np.float64) for rank in range(4)) / 4 for spec in SPECS[:2]}
    applied, held = step(sim, 5)[0], residuals(sim)
    for tensor, x in kept.items():
        assert np.allclose(applied[tensor] + held[tensor], x + total[tensor], rtol=1e-4, atol=1e-5), tensor


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compressor": "powersgd"}, "it needs a whole tensor"),
        ({"compressor": "hardthreshold"}, "learns from the payloads"),
        ({"compressor": "sketchedsgd"}, "cannot compress empty tensors"),
        ({"compressor": "qsgd", "within": "topk"}, "needs error feedback, and within a node there is none"),
        ({"compressor": "qsgd", "between": "allreduce"}, "cannot be added"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(options, told):
    with pytest.raises(IncompatibleError, match=told):
        grace.make_config({**options, "communicator": "hierarchical"})


def test_nodes_must_be_known_and_equal():
    config = {"compressor": "topk", "communicator": "hierarchical"}
    with pytest.raises(ConfigError, match="unknown for these 4 ranks"):
        grace.Simulation(4, SPECS, config)
    for ranks in (Ranks(5, 2), Ranks(4, 3)):
        with pytest.raises(ConfigError, match="equally many ranks on every node"):
            make_plan(SPECS, grace.make_config(config), ranks=ranks)
    with pytest.raises(ConfigError, match="at least 1"):
        grace.make_config({**config, "local_size": 0})
    with pytest.raises(ConfigError, match="cannot be hierarchical itself"):
        grace.make_config({**config, "between": "hierarchical"})


def test_the_launcher_tells_the_nodes_and_the_option_wins():
    for known, named in itertools.product((1, 2, 4), (None, 1, 2, 4)):
        config = grace.make_config(
            compressor="topk",
            communicator={"name": "hierarchical", "local_size": named, "between": "allgather"},
            default_rules=False,
        )
        plan = make_plan(SPECS[:1], config, ranks=Ranks(4, known))
        owners = {unit.onward.owners for unit in plan.units if unit.onward}
        assert owners == ({(0, 2), (1, 3)} if (named or known) == 2 else set())


@pytest.mark.parametrize("size", nodes.FOUND)
def test_ranks_of_a_node_are_known_if_their_numbers_fit(size):
    for placed, found in nodes.FOUND[size].items():
        assert [known_local_size(rank, *nodes.told(placed, rank)) for rank in range(size)] == found, placed


def test_a_launcher_that_tells_only_a_part_tells_nothing(monkeypatch):
    transport = pytest.importorskip("grace.torch.distributed.transport")
    told = {"RANK": "3", "GROUP_RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert transport._local_size() == 2
    for name, value in told.items():
        monkeypatch.delenv(name)
        assert transport._local_size() == 0
        monkeypatch.setenv(name, value)


def test_ranks_that_divide_tensors_differently_are_noticed():
    config = grace.make_config(compressor="topk", communicator="hierarchical", default_rules=False)
    pairs, fours = (formats([make_plan(SPECS, config, ranks=Ranks(8, known))], get_ops) for known in (2, 4))
    assert pairs != fours
