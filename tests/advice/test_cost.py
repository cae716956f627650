"""The cost of an exchange: bytes beside those of a simulation, and times that are positive and grow."""

import pytest

from grace import Simulation
from grace.advice import cost
from grace.advice.passes import assumed, measured
from grace.bench.frameworks import set_up
from grace.core.config.config import make_config
from grace.core.errors import ConfigError
from grace.core.spec import TensorSpec
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
    found = cost.buckets(SPECS, config, ranks, NONE, READY)
    # Headers, padding, and what fp16 hands over for its sums of halves are not in the model.
    passed = sum(r.nbytes for bucket in found for r in bucket.rounds)
    assert passed == pytest.approx(handed, rel=0.03)
    assert leaving(found, ranks) > 0


def test_a_proposal_has_a_round_of_its_own():
    found = cost.buckets(SPECS, make_config({"compressor": "powersgd"}), 2, NONE, READY)
    # Rank 4, and float32: P has the rows of both matrices, and Q their columns. The bias goes as it is.
    assert sorted([(r.kind, r.nbytes) for r in bucket.rounds] for bucket in found) == [
        [("allreduce", 4 * 512)],
        [("allreduce", 4 * 4 * (512 + 300)), ("allreduce", 4 * 4 * (256 + 100))],
    ]


def test_a_communicator_that_the_configuration_names_carries_the_buckets():
    named = make_config({"compressor": "qsgd", "communicator": "allgather", "default_rules": False})
    for ranks in (2, 8):
        found = cost.buckets(SPECS, named, ranks, NONE, READY)
        assert {r.kind for bucket in found for r in bucket.rounds} == {"allgather"}
        payloads = sum(r.nbytes for bucket in found for r in bucket.rounds)
        assert leaving(found, ranks) == pytest.approx((ranks - 1) * payloads)
    # By itself, qsgd takes two_shot on many ranks.
    alone = cost.buckets(SPECS, make_config({"compressor": "qsgd", "default_rules": False}), 8, NONE, READY)
    assert {r.kind for bucket in alone for r in bucket.rounds} == {"alltoall", "allgather"}


def test_buckets_become_ready_in_reverse_order_of_the_tensors():
    found = cost.buckets(SPECS, make_config({"compressor": "qsgd", "bucket_bytes": 4096}), 2, NONE, READY)
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


def test_costs_are_measured_once_and_extrapolated_beyond_eight_ranks():
    codecs = cost.Codecs(set_up("numpy", "cpu", 1, True), sizes=(1 << 12, 1 << 16))
    config = make_config({"compressor": "topk"})
    found = codecs.of(config, 2)
    assert codecs.of(config, 2) is found
    assert found.before.fixed + found.before.element > 0
    assert found.after.fixed + found.after.element > 0
    assert found.bytes == pytest.approx(0.08, rel=0.2)
    # Four of five parts of the energy lie outside the largest percent of normal values.
    assert 0.7 < found.error < 1
    four, many = codecs.of(config, 4), codecs.of(config, 4096)
    # A rank merges the payloads of all.
    assert many.after.seconds(1, 1 << 16) >= four.after.seconds(1, 1 << 16)


def test_a_communicator_without_a_law_is_refused():
    config = make_config({"compressor": "qsgd", "communicator": {"name": "hierarchical", "local_size": 2}})
    with pytest.raises(ConfigError, match="cost model does not know"):
        cost.buckets(SPECS, config, 4, NONE, READY)
