"""The reduce-scatter of sharded parameters: every rank gets the mean of its own parts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from grace.core.communicators.reduce_scatter import ReduceScatter
from grace.core.config.config import Config, Method, make_config
from grace.core.config.registry import compressors, memories
from grace.core.errors import IncompatibleError
from grace.core.plan.plan import Modules, make_plan
from grace.core.session.simulation import Simulation, poll_all
from grace.core.spec import Ranks, TensorSpec
from grace.core.wire.codings import Coding
from grace.testing import CommunicatorContract
from tests.support.steps import WithTypical

SPECS = [TensorSpec("a", (7, 300)), TensorSpec("b", (5,)), TensorSpec("c", (4, 2000)), TensorSpec("d", (1,))]


def rows(spec, ranks):
    """Return the number of elements of each rank if whole rows are dealt out, as FSDP does."""
    return -(-spec.shape[0] // ranks) * spec.numel // max(spec.shape[0], 1)


def communicator_for(specs, ranks):
    return ReduceScatter(tuple((spec.name, rows(spec, ranks)) for spec in specs))


class Joined(Simulation):
    """A simulation that returns on every rank what all ranks got together."""

    def step(self, gradients, lr=None):
        merged = super().step(gradients, lr)
        joined = {}
        for spec in self._specs:
            parts = [mine[spec.name].reshape(-1) for mine in merged if spec.name in mine]
            joined[spec.name] = np.concatenate(parts).reshape(spec.shape)
        return [joined] * self.size


class TestReduceScatter(WithTypical, CommunicatorContract):
    @pytest.fixture
    def communicator(self):
        return ReduceScatter()

    def simulation(self, method, size):
        method = dataclasses.replace(method, communicator=communicator_for(self.specs, size))
        return Joined(size, self.specs, Config(method, default_rules=False, bucket_bytes=6000, split_bytes=6000))


def exact(ranks, specs=SPECS, compressor="none"):
    method = Method(compressors.make(compressor), memories.make("none"), communicator_for(specs, ranks))
    return Simulation(ranks, specs, Config(method, default_rules=False))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_gets_its_own_rows_only(ranks):
    simulation = exact(ranks)
    given = [
        {s.name: np.random.default_rng(r).standard_normal(s.shape).astype("f4") for s in SPECS} for r in range(ranks)
    ]
    for rank, merged in enumerate(simulation.step(given)):
        for spec in SPECS:
            mean = np.mean([mine[spec.name] for mine in given], axis=0).reshape(-1)
            mine = mean[rank * rows(spec, ranks) : (rank + 1) * rows(spec, ranks)]
            assert (spec.name in merged) == (len(mine) > 0)
            if len(mine):
                np.testing.assert_allclose(merged[spec.name].reshape(-1), mine, rtol=1e-6, atol=1e-7)


def test_gradients_come_in_parts_and_means_go_to_their_places():
    ranks = 3
    one, other = exact(ranks), exact(ranks)
    given = [
        {s.name: np.random.default_rng(r).standard_normal(s.shape).astype("f4") for s in SPECS} for r in range(ranks)
    ]
    merged = one.step(given)
    into = [{name: np.full_like(x.reshape(-1), np.nan) for name, x in mine.items()} for mine in merged]
    for run, mine in zip(other.runs, given, strict=True):
        for name, x in mine.items():
            # The parts need not be those of the ranks.
            run.current.ready_in_parts(name, np.array_split(x.reshape(-1), min(4, x.size)))
    poll_all(other.runs)
    for run, places, mine in zip(other.runs, into, merged, strict=True):
        run.finish(places)
        assert all(np.array_equal(places[name], x.reshape(-1)) for name, x in mine.items())


def test_parts_travel_coded():
    given = [
        {s.name: np.random.default_rng(r).standard_normal(s.shape).astype("f4") ** 3 for s in SPECS} for r in (0, 1)
    ]
    sent, merged = [], []
    for coding in (Coding(), Coding("huffman")):
        method = Method(compressors.make("terngrad"), memories.make("none"), communicator_for(SPECS, 2), coding)
        simulation = Simulation(2, SPECS, Config(method, default_rules=False))
        merged.append(simulation.step(given))
        sent.append(sum(run.stats()["wire_bytes"] for run in simulation.runs))
    for one, two in zip(*merged, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in one)
    assert sent[1] < 0.9 * sent[0]


def plan_of(compressor, **options):
    config = make_config({"compressor": compressor, "default_rules": False, **options})
    modules = Modules({"a": "first", "b": "first", "c": "", "d": ""}, communicator_for(SPECS, 2))
    return make_plan(SPECS, config, ranks=Ranks(2), modules=modules)


def test_modules_share_no_bucket():
    plan = plan_of("topk")
    assert [sorted({p.tensor for unit in bucket.units for p in unit.pieces}) for bucket in plan.buckets] == [
        ["c", "d"],
        ["a", "b"],
    ]
    assert [(unit.spec.name, unit.merged_by) for unit in plan.only({"a", "b"}).units] == [
        ("b[0:3] to a[0:1200], 2 pieces", 0),
        ("b[3:5] to a[1200:2100], 2 pieces", 1),
    ]
    assert "reduce_scatter" in plan.report()


def test_tensors_are_cut_between_ranks_only():
    units = plan_of("qsgd", split_bytes=100).only({"c", "d"}).units
    assert [unit.spec.name for unit in units] == ["d[0:1]", "c[0:4000]", "c[4000:8000]"]


def test_a_bucket_takes_tensors_until_it_is_full():
    for limit, buckets in (0, 4), (20, 3), (10**6, 2):
        assert len(plan_of("topk", bucket_bytes=limit).buckets) == buckets


def test_tensors_are_delegated_together():
    modules = Modules({"a": "first", "b": "first", "c": "", "d": ""}, communicator_for(SPECS, 2))
    for rules, delegated in ([], 4), ([{"match": "c", "compressor": "topk"}], 0):
        config = make_config({"compressor": "none", "rules": rules})
        plan = make_plan(SPECS, config, ranks=Ranks(2), modules=modules, delegate=lambda item: item.dense)
        assert len(plan.delegated) == delegated


def test_methods_that_need_more_than_parts_are_refused():
    for config in (
        {"compressor": "powersgd"},
        {"compressor": "hardthreshold"},
        {"compressor": "qsgd", "memory": "diana"},
        {"compressor": "topk", "memory": "dgc", "gradient_clipping": 1.0},
        {"compressor": "topk", "memory": "residual", "lr_correction": True},
    ):
        with pytest.raises(IncompatibleError, match="sharded over the ranks"):
            make_plan(
                SPECS,
                make_config({**config, "default_rules": False}),
                ranks=Ranks(2),
                modules=Modules(dict.fromkeys("abcd", ""), communicator_for(SPECS, 2)),
            )


@pytest.mark.parametrize("brought", [True, False])
def test_the_norm_of_all_modules_is_not_known(brought):
    """Modules are exchanged one after another, with shards and with replicas of them."""
    memory = {"name": "dgc", "gradient_clipping": 1.0, "clipping_norm": "all"}
    with pytest.raises(IncompatibleError, match="the modules of a sharded model"):
        make_plan(
            SPECS,
            make_config({"compressor": "topk", "memory": memory, "default_rules": False}),
            ranks=Ranks(2),
            modules=Modules(dict.fromkeys("abcd", ""), communicator_for(SPECS, 2) if brought else None),
        )
