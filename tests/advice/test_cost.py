"""The cost of an exchange: bytes beside those of a simulation, and times that are positive and grow."""

import dataclasses
import itertools
import time

import pytest

from grace import Simulation
from grace.advice import cost
from grace.advice.model import Round
from grace.advice.passes import Clock, assumed, clock_of, measured
from grace.bench.frameworks import set_up
from grace.core.communicators.hierarchical import Hierarchical
from grace.core.config.config import make_config
from grace.core.errors import ConfigError
from grace.core.session import simulation as simulated
from grace.core.spec import Ranks, TensorSpec
from grace.core.transport.collectives import copies

SPECS = [TensorSpec("a", (512, 256)), TensorSpec("a.bias", (512,)), TensorSpec("b", (300, 100))]
READY = assumed(SPECS, 1.5).ready
NONE = cost.Codec(cost.Cost(0.0, 0.0), cost.Cost(0.0, 0.0), 4.0, 0.0)


def leaving(buckets, ranks):
    """Return the bytes that leave a rank of a ring."""
    return sum(float(copies(r.kind, ranks)) * r.nbytes for bucket in buckets for r in bucket.rounds)


@pytest.mark.parametrize("name", ["none", "fp16", "qsgd", "blockwise", "powersgd", "signsgd"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bytes_of_the_buckets_are_those_that_a_simulation_counts(name, ranks):
    import numpy as np

    config = make_config({"compressor": name})
    simulation = Simulation(ranks, SPECS, config)
    draws = np.random.default_rng(0)
    gradients = [{s.name: draws.standard_normal(s.shape, np.float32) for s in SPECS} for _ in range(ranks)]
    simulation.step(gradients)
    # Each communicator has its law from what a rank hands in.
    handed = simulation.stats()["wire_bytes"]
    found = cost.buckets(SPECS, config, Ranks(ranks, 1), NONE, READY)
    # Headers, padding, and what fp16 hands over for its sums of halves are not in the model.
    passed = sum(r.nbytes for bucket in found for r in bucket.rounds)
    assert passed == pytest.approx(handed, rel=0.03)
    assert leaving(found, ranks) > 0


def test_a_proposal_has_a_round_of_its_own():
    found = cost.buckets(SPECS, make_config({"compressor": "powersgd"}), Ranks(2), NONE, READY)
    # Rank 4, and float32: P has the rows of both matrices, and Q their columns. The bias goes as it is.
    assert sorted([(r.kind, r.nbytes) for r in bucket.rounds] for bucket in found) == [
        [("allreduce", 4 * 512)],
        [("allreduce", 4 * 4 * (512 + 300)), ("allreduce", 4 * 4 * (256 + 100))],
    ]


def test_a_communicator_that_the_configuration_names_carries_the_buckets():
    named = make_config({"compressor": "qsgd", "communicator": "allgather", "default_rules": False})
    for ranks in (2, 8):
        found = cost.buckets(SPECS, named, Ranks(ranks, 1), NONE, READY)
        assert {r.kind for bucket in found for r in bucket.rounds} == {"allgather"}
        payloads = sum(r.nbytes for bucket in found for r in bucket.rounds)
        assert leaving(found, ranks) == pytest.approx((ranks - 1) * payloads)
    # By itself, qsgd takes two_shot on many ranks.
    alone = cost.buckets(SPECS, make_config({"compressor": "qsgd", "default_rules": False}), Ranks(8, 1), NONE, READY)
    assert {r.kind for bucket in alone for r in bucket.rounds} == {"alltoall", "allgather"}


def test_floats_of_16_bits_are_swapped_by_two_ranks_and_added_in_slices_by_more():
    fp16 = make_config({"compressor": "fp16", "default_rules": False})
    kinds = {n: [r.kind for r in cost.buckets(SPECS, fp16, Ranks(n), NONE, READY)[0].rounds] for n in (2, 4)}
    assert kinds == {2: ["allgather"], 4: ["alltoall", "allgather"]}


def test_ddp_passes_gradients_on_bucket_by_bucket_and_reduces_each_large_dense_tensor():
    weights = [TensorSpec(f"w{i}", (1024, 1024)) for i in range(4)]
    specs = [x for w in weights for x in (w, TensorSpec(f"{w.name}.bias", (1024,)), TensorSpec(f"{w.name}.s", (8, 8)))]
    ready = assumed(specs, 1.5).ready
    found = cost.buckets(specs, make_config({"compressor": "qsgd"}), Ranks(2), NONE, ready)
    # The last weight fills DDP's first bucket, and all others come with the last of them.
    first = ready["w3"]
    vectors, one, rest = (bucket for bucket in found if bucket.rounds[0].kind == "allreduce")
    compressed = [bucket.ready for bucket in found if bucket.rounds[0].kind != "allreduce"]
    assert sorted(compressed) == [first, *[pytest.approx(1.0)] * (len(compressed) - 1)]
    # The biases travel together, and DDP reduces the small matrices one by one.
    assert [(b.ready, b.rounds) for b in (vectors, one, rest)] == [
        (pytest.approx(1.0), (Round("allreduce", 4 * 4096.0),)),
        (first, (Round("allreduce", 256.0),)),
        (pytest.approx(1.0), (Round("allreduce", 3 * 256.0, count=3),)),
    ]
    # Without a compressed tensor, the bucket is reduced as a whole.
    plain = cost.dense_buckets(specs, {spec.name for spec in specs}, ready)
    assert [bucket.rounds[0].count for bucket in plain] == [1, 1]


def test_a_codec_does_not_count_what_the_simulated_network_sums(monkeypatch):
    plain, slept = simulated.reduce, []

    def slowly(*given):
        slept.append(time.sleep(0.05))
        return plain(*given)

    monkeypatch.setattr(simulated, "reduce", slowly)
    codecs = cost.Codecs(set_up("numpy", "cpu", 1, True), (1 << 10, 1 << 12))
    found = codecs.of(make_config({"compressor": "none", "default_rules": False}), Ranks(2))
    assert slept
    assert found.whole.seconds(1, 1 << 12) < 0.05


def test_buckets_become_ready_in_reverse_order_of_the_tensors():
    found = cost.buckets(SPECS, make_config({"compressor": "qsgd", "bucket_bytes": 4096}), Ranks(2), NONE, READY)
    times = [bucket.ready for bucket in found]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1.0)
    specs = [TensorSpec(f"w{i}", (1024, 1024)) for i in range(20)]
    plain = cost.ddp_buckets(specs, assumed(specs, 1.5).ready)
    sizes = [bucket.rounds[0].nbytes for bucket in plain]
    # The first tensor fills DDP's small bucket, and seven the others.
    assert sizes == [4 * 2**20, 28 * 2**20, 28 * 2**20, 20 * 2**20]
    assert plain[-1].ready == pytest.approx(1.0)


def test_passes_are_measured_with_the_gradients_in_the_order_in_which_they_come():
    torch = pytest.importorskip("torch")
    first, last = torch.nn.Linear(256, 256), torch.nn.Linear(256, 1)
    first.bias.requires_grad_(False)
    model = torch.nn.Sequential(first, *(torch.nn.Linear(256, 256) for _ in range(8)), last)
    model.unused = torch.nn.Parameter(torch.zeros(3))
    x = torch.randn(256, 256)
    found = measured(model, lambda: model(x).mean())
    assert set(found.ready) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert 0 < found.ready["9.weight"] < found.ready["0.weight"] <= found.backward
    # A parameter without a gradient is settled when the pass ends.
    assert found.ready["unused"] == pytest.approx(found.backward, rel=0.2)
    assert all(p.grad is None for p in model.parameters())
    twice = found.scaled(2 * found.compute)
    assert twice.compute == pytest.approx(2 * found.compute)
    assert twice.ready["9.weight"] == pytest.approx(2 * found.ready["9.weight"])


def test_passes_have_the_clock_of_the_device():
    torch = pytest.importorskip("torch")
    model, moments = torch.nn.Linear(3, 1), itertools.count()
    # Forward pass, gradients of weight and bias, end: each moment is 2 s after the one before.
    clock = Clock(lambda: next(moments), lambda begin, end: 2.0 * (end - begin))
    found = measured(model, lambda: model(torch.ones(1, 3)).sum(), clock=clock)
    assert (found.forward, found.backward) == (2.0, 6.0)
    assert sorted(found.ready.values()) == [2.0, 4.0]


def test_the_clock_of_a_gpu_is_that_of_its_events(monkeypatch):
    torch = pytest.importorskip("torch")
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            log.append(stream)

        def synchronize(self):
            log.append("waited")

        def elapsed_time(self, end):
            return 1500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    now, between = clock_of(torch.device("cuda", 1))
    assert between(now(), now()) == 1.5
    assert log == ["stream of cuda:1", "stream of cuda:1", "waited"]


def test_costs_are_measured_once_and_extrapolated_beyond_eight_ranks():
    codecs = cost.Codecs(set_up("numpy", "cpu", 1, True), sizes=(1 << 12, 1 << 16))
    config = make_config({"compressor": "topk"})
    found = codecs.of(config, Ranks(2))
    assert codecs.of(config, Ranks(2)) is found
    assert found.before.fixed + found.before.element > 0
    assert found.after.fixed + found.after.element > 0
    assert found.bytes == pytest.approx(0.08, rel=0.2)
    # Four of five parts of the energy lie outside the largest percent of normal values.
    assert 0.7 < found.error < 1
    four, many = codecs.of(config, Ranks(4)), codecs.of(config, Ranks(4096))
    # A rank merges the payloads of all.
    assert many.after.seconds(1, 1 << 16) >= four.after.seconds(1, 1 << 16)


@pytest.mark.parametrize(("name", "factors"), [("fp16", (2, 2)), ("qsgd", (4, 2)), ("topk", (4, 4))])
def test_only_work_that_depends_on_the_ranks_grows_with_them(name, factors, monkeypatch):
    codecs = cost.Codecs(set_up("numpy", "cpu", 1, True))
    # Twice the cost on twice the ranks.
    costs = {n: cost.Cost(float(n), n / 10) for n in cost.RANKS}
    monkeypatch.setattr(codecs, "_measured", lambda config, n: cost.Codec(costs[n], costs[n], 1.0, 0.0))
    found = codecs.of(make_config({"compressor": name}), Ranks(16))
    assert found.after == pytest.approx((4.0 * factors[0], 0.4 * factors[1]))


def by_nodes(name, **options):
    nodes = {"name": "hierarchical", **options}
    return make_config({"compressor": name, "default_rules": False, "communicator": nodes})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("none", {}),
        ("fp16", {}),
        ("qsgd", {}),
        ("qsgd", {"within": "fp16"}),
        ("blockwise", {"between": "two_shot"}),
        ("topk", {}),
        ("topk", {"within": {"name": "qsgd", "quantum_num": 127}}),
    ],
)
@pytest.mark.parametrize(("nodes", "local_size"), [(2, 2), (3, 2), (2, 4)])
def test_hierarchical_sends_what_a_simulation_sends_within_and_between_nodes(name, options, nodes, local_size):
    import numpy as np

    size = nodes * local_size
    simulation = Simulation(size, SPECS, by_nodes(name, local_size=local_size, **options))
    sent = {"node": 0, "nodes": 0}

    def counting(start, rank):
        def start_and_count(collective, name):
            assert collective.kind == "alltoall"
            for other, x in enumerate(collective.buffers):
                if other != rank:
                    sent["node" if other // local_size == rank // local_size else "nodes"] += x.nbytes
            return start(collective, name)

        return start_and_count

    for rank, run in enumerate(simulation.runs):
        run.transport.start = counting(run.transport.start, rank)
    draws = np.random.default_rng(0)
    simulation.step([{s.name: draws.standard_normal(s.shape, np.float32) for s in SPECS} for _ in range(size)])

    found = cost.buckets(SPECS, by_nodes(name, **options), Ranks(size, local_size), NONE, READY)
    members = {"node": local_size, "nodes": nodes}
    for scope, nbytes in sent.items():
        rounds = [r for bucket in found for r in bucket.rounds if r.scope == scope]
        predicted = sum(float(copies(r.kind, members[scope])) * r.nbytes for r in rounds)
        assert 0.97 * predicted <= nbytes / size <= 1.04 * predicted
    assert {r.scope for bucket in found for r in bucket.rounds} == {"node", "nodes"}


def test_on_one_node_only_what_compresses_within_it_travels():
    (dense, *_), (rounded, *_) = (
        cost.buckets(SPECS, by_nodes("qsgd", **options), Ranks(4, 4), NONE, READY)
        for options in ({}, {"within": "fp16"})
    )
    (there,), (halves,) = dense.rounds, rounded.rounds
    assert (there.kind, there.scope) == (halves.kind, halves.scope) == ("allreduce", "all")
    assert there.nbytes == 2 * halves.nbytes == 4 * (512 * 256 + 512 + 300 * 100)


def test_with_one_rank_per_node_hierarchical_is_what_it_has_between_nodes():
    alone = make_config({"compressor": "topk", "communicator": "allgather", "default_rules": False})
    found = cost.buckets(SPECS, by_nodes("topk", between="allgather"), Ranks(8, 1), NONE, READY)
    assert found == cost.buckets(SPECS, alone, Ranks(8, 1), NONE, READY)


def test_a_rank_has_a_share_of_the_work_of_its_node(monkeypatch):
    codecs, config = cost.Codecs(set_up("numpy", "cpu", 1, True)), by_nodes("qsgd")
    nodes = cost.Codec(cost.Cost(1.0, 4.0), cost.Cost(2.0, 8.0), 1.0, 0.1)
    pairs = cost.Codec(cost.Cost(0.5, 1.0), cost.Cost(4.0, 7.0), 4.0, 0.2)

    def measured(made, ranks):
        if isinstance(made.method.communicator, Hierarchical):
            assert (made.method.communicator.local_size, ranks) == (2, 4)
            return pairs
        return nodes

    monkeypatch.setattr(codecs, "_measured", measured)
    # Within a node, a rank takes 4 - 3 seconds and 7 - 12 / 2 per element.
    assert codecs.of(config, Ranks(32, 8)) == cost.Codec(pairs.before, cost.Cost(1.0 + 3.0, 1.0 + 12 / 8), 1.0, 0.2)
    assert codecs.of(config, Ranks(8, 8)).after == cost.Cost(1.0, 1.0)
    assert codecs.of(config, Ranks(4, 1)) == nodes
    # A unit counts once, however many shards it has, and each element too.
    for options in ({}, {"between": "two_shot"}):
        config = dataclasses.replace(by_nodes("qsgd", **options), granularity="layer")
        codec, large = NONE._replace(before=cost.Cost(1.0, 1e-6)), [SPECS[0], SPECS[2]]
        found = cost.buckets(large, config, Ranks(16, 4), codec, READY)
        assert sum(bucket.before for bucket in found) == pytest.approx(2 + 1e-6 * sum(s.numel for s in large))


def test_what_has_no_law_or_other_nodes_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="expected local_size 4, the ranks on a node here, received 2"):
        cost.buckets(SPECS, by_nodes("qsgd", local_size=2), Ranks(8, 4), NONE, READY)
    monkeypatch.delitem(cost.LAWS, "allgather")
    for config in (make_config({"compressor": "topk"}), by_nodes("topk", between="allgather")):
        with pytest.raises(ConfigError, match="cost model does not know the communicator allgather"):
            cost.buckets(SPECS, config, Ranks(4, 2), NONE, READY)
