"""Advice on a running exchange, and the compressor "auto", with a clock of the test; see also tests/adapters/mpi."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import types

import numpy as np
import pytest

import grace
from grace.advice import accuracy, advise, auto, forecast, launched, watch
from grace.advice.advise import Figures, best_of
from grace.advice.auto import Auto
from grace.advice.candidates import LOW, Risk, candidates, changes, risk_of
from grace.advice.launched import Launched
from grace.advice.model import Link, Machine, Overhead, Round
from grace.advice.watch import Watch
from grace.bench.variants import parse_variants
from grace.core.communicators.hierarchical import Hierarchical
from grace.core.communicators.reduce_scatter import ReduceScatter
from grace.core.config.recommended import Optimizer
from grace.core.config.registry import compressors
from grace.core.errors import ConfigError, StepError
from grace.core.plan.plan import Modules
from grace.core.spec import Ranks
from grace.core.transport.transport import Done

FAST, SLOW = Link(1.25e9, 2e-5), Link(12.5e6, 2e-5)
TENSORS = {"a": (256, 256), "b": (600, 200), "c": (40,)}
CODEC = {"fixed": 1e-5, "element": 1e-9, "error": 0.001}
SEEN = {
    "period": 0.0205,
    "band": [0.02, 0.021],
    "exposed": 0.0005,
    "waits": False,
    "ready": {"c": 0.0, "b": 0.004, "a": 0.008},
    "optimizers": [],
}
ADAM, SGD = Optimizer("AdamW", 0.9, True), Optimizer("SGD", 0.9, False)


@pytest.fixture(autouse=True)
def no_overhead(monkeypatch):
    """Give simulations a transport, as other exchanges have one, which takes no time of the processor."""
    monkeypatch.setattr(grace.Simulation, "transport", types.SimpleNamespace(lanes=None), raising=False)
    monkeypatch.setattr(advise, "OVERHEAD", Overhead())


class Job:
    """Training in a simulation whose steps take the time that the figures say for a link, unless `extra` says more."""

    def __init__(self, monkeypatch, link=FAST):
        self.now, self.link, self.extra = 0.0, link, {}
        self.simulation = grace.Simulation(2, TENSORS, {"compressor": "none"})
        for module in (watch, auto):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(auto, "measure", self.measure)
        monkeypatch.setattr(auto, "measure_link", lambda exchange: self.link)
        monkeypatch.setattr(Auto, "_link_seems_other", lambda auto, period: auto._figures.link != self.link)
        # What auto knows, and what is true.
        self.figures, self.true = self.measured(), self.measured()
        self.auto = self.simulation.advisor = Auto(self.simulation)
        self.methods, self.sums, self.rng = [], {}, np.random.default_rng(0)

    def measured(self, **more):
        seen = {**SEEN, "codecs": {label: CODEC for label in changes() if label != "none"}}
        return Figures(self.simulation, [{**seen, **more}], self.link)

    def measure(self, watching, most):
        assert most == LOW
        assert watching.complete
        return self.figures

    @property
    def label(self):
        now = self.simulation.config
        return next(label for label, made in candidates(now).items() if made.method == now.method)

    def train(self, count, exchanges=True):
        for _ in range(count):
            self.simulation.step_begins()
            self.methods.append(self.label)
            begin, rest = self.now, self.true.compute - max(self.true.ready.values())
            for name, ready in self.true.ready.items():
                self.now = begin + ready
                self.auto.note_gradient(name, np.zeros(TENSORS[name], np.float32))
            self.now = begin + self.true.seconds(self.label, self.link) - rest
            self.auto.end()
            # What a step takes longer than the figures say is no exchange.
            self.now += rest + self.extra.get(self.label, 0.0)
            if exchanges:
                self.exchange()

    def exchange(self):
        gradients = [
            {name: self.rng.normal(size=shape).astype(np.float32) for name, shape in TENSORS.items()} for _ in range(2)
        ]
        merged = self.simulation.step(gradients)[1]
        for name in TENSORS:
            each = merged[name].astype(np.float64) - np.mean([g[name] for g in gradients], 0, np.float64)
            self.sums[name] = self.sums.get(name, 0.0) + each


def test_auto_changes_within_50_steps_of_a_fall_of_the_link_and_loses_nothing(monkeypatch):
    # A method with error feedback, which the study does not call safe, so that something could be lost.
    safe = {"none": {"compressor": "none"}, "topk": {"compressor": "topk"}}
    monkeypatch.setattr(advise, "risk_of", lambda change, *_: Risk(3 * (change not in safe.values()), "for this test"))
    job = Job(monkeypatch)
    job.train(40)
    assert set(job.methods) == {"none"}
    assert job.simulation.advisor.stats()["step_seconds"]["none"] == pytest.approx(0.0205)
    job.link = SLOW
    job.train(50)
    assert job.methods.index("topk") - 40 <= 50
    assert job.methods[-1] == "topk"
    held = {name: np.abs(x).max() for name, x in job.sums.items()}
    assert held["a"] > 1
    job.link = FAST
    job.train(150)
    # Returned to no compression, which has sent the residuals.
    assert job.methods[-1] == "none"
    assert all(np.abs(x).max() < 1e-6 * len(job.methods) for x in job.sums.values())
    stats = job.auto.stats()
    assert (stats["compressor"], stats["link"]) == ("none", {"bytes_per_s": 1.25e9, "latency_s": 2e-5})
    assert json.loads(json.dumps(stats)) == stats


def test_auto_returns_to_no_compression_if_that_was_faster(monkeypatch):
    job = Job(monkeypatch, SLOW)
    job.figures.period = job.figures.seconds("none", SLOW)
    first = job.figures.advice().best
    assert first != "none"
    job.extra = {first: 1.0}
    job.train(40)
    assert [method for method, _ in itertools.groupby(job.methods)] == ["none", first, "none"]
    assert job.auto.stats()["why"].startswith(f"steps with {first} took 10")


@pytest.mark.parametrize(("cold", "gain", "spread"), [(1.1, 1.0, 0.0), (1.0, 1.1, 0.05), (1.0, 1.1, 0.2)])
def test_auto_measures_no_compression_again_if_a_choice_gains_little(cold, gain, spread, monkeypatch):
    """The first steps of a job may be slower than later ones, which must not look like a gain, and so may others."""
    job = Job(monkeypatch, SLOW)
    job.figures.period = job.figures.seconds("none", SLOW)
    dense = job.figures.period / cold
    varied = itertools.cycle([1 - spread / 2, 1.0, 1 + spread / 2])
    monkeypatch.setattr(
        job.true, "seconds", lambda label, link: dense / (1 if label == "none" else gain) * next(varied)
    )
    while job.label == "none":
        job.train(1, exchanges=False)
    chosen = job.label
    job.train(60, exchanges=False)
    taken = [method for method, _ in itertools.groupby(job.methods)]
    assert taken == ["none", chosen, "none", *([chosen] if gain > 1 + spread else [])]
    assert job.auto.stats()["step_seconds"] == pytest.approx({chosen: dense / gain, "none": dense})


def test_longer_steps_over_the_same_link_are_no_reason_to_change(monkeypatch):
    job = Job(monkeypatch)
    job.train(30)
    compute = job.figures.compute
    job.extra = {"none": 0.03}
    job.train(40)
    assert set(job.methods) == {"none"}
    # The steps were a little shorter than predicted.
    assert job.figures.compute == pytest.approx(compute + 0.03, rel=0.01)


def test_a_link_that_only_seems_slow_is_no_reason_to_change(monkeypatch):
    job = Job(monkeypatch)
    job.train(30)
    # A noisy moment: the next look finds a slow link, and later ones the true one.
    found = iter([SLOW])
    monkeypatch.setattr(auto, "measure_link", lambda exchange: next(found, FAST))
    monkeypatch.setattr(Auto, "_link_seems_other", lambda auto, period: next(looks))
    looks = itertools.chain([True], itertools.repeat(False))
    job.extra = dict.fromkeys(changes(), 0.006)
    job.train(20)
    assert job.figures.link == SLOW
    assert set(job.methods) == {"none"}
    looks = itertools.repeat(True)
    job.train(100)
    assert job.figures.link == FAST
    assert set(job.methods) == {"none"}


def test_a_link_that_falls_during_a_comparison_is_noticed_in_the_next_one(monkeypatch):
    job = Job(monkeypatch)
    job.train(30)
    # The steps of the comparison were still fast, while the link that it measures is slow already.
    monkeypatch.setattr(auto, "measure_link", lambda exchange: SLOW)
    monkeypatch.setattr(Auto, "_link_seems_other", lambda auto, period: auto._figures.link != SLOW)
    while job.figures.link == FAST:
        job.train(1)
    assert job.label == "none"
    job.link = SLOW
    job.train(50)
    assert job.label != "none"


def test_a_smaller_batch_leaves_less_time_to_hide_an_exchange(monkeypatch):
    job = Job(monkeypatch, Link(6.25e8, 2e-5))
    job.train(40, exchanges=False)
    assert set(job.methods) == {"none"}
    # A tenth of the batch: the same exchange is now a third of the step.
    less = {name: ready / 10 for name, ready in job.true.ready.items()}
    job.true = job.measured(period=0.00205, exposed=0.00005, ready=less)
    job.train(60, exchanges=False)
    assert job.label != "none"
    assert job.true.seconds(job.label, job.link) < 0.97 * job.true.seconds("none", job.link)
    # A large one hides it again, so that a gentler method is as fast.
    job.true = job.measured()
    job.train(100, exchanges=False)
    assert job.label in ("none", "fp16")


def test_a_link_that_has_changed_by_less_than_half_counts_if_steps_have(monkeypatch):
    job = Job(monkeypatch, Link(1.25e6, 2e-5))
    job.train(40, exchanges=False)
    assert job.label != "none"
    job.link = Link(1.9 * 1.25e6, 2e-5)
    job.train(40, exchanges=False)
    assert job.figures.link == job.link


def test_a_link_whose_times_vary_costs_fewer_and_fewer_trials(monkeypatch):
    job = Job(monkeypatch, SLOW)
    job.train(60, exchanges=False)
    chosen = job.label
    assert chosen != "none"
    # Every second look finds a fast link.
    monkeypatch.setattr(Auto, "_link_seems_other", lambda auto, period: True)
    monkeypatch.setattr(auto, "measure_link", lambda exchange: next(found))
    found = itertools.cycle([FAST, SLOW])
    job.methods.clear()
    job.train(3000, exchanges=False)
    trials = [method for method, _ in itertools.groupby(job.methods)].count("none")
    assert 2 <= trials <= 5
    assert job.label == chosen


def test_change_ends_auto(monkeypatch):
    job = Job(monkeypatch)
    job.simulation._change({"compressor": "fp16"}, auto=True)
    assert job.simulation.config.auto
    assert job.simulation.stats()["auto"]["compressor"] == "none"
    job.simulation.change(compressor="qsgd")
    assert not job.simulation.config.auto
    assert job.simulation.advisor is None
    assert "auto" not in job.simulation.stats()


def test_the_buckets_of_a_plan_are_ready_with_their_tensors_and_carry_what_is_announced():
    codec, ready = {"fixed": 1.0, "element": 0.01}, {"w": 3.0, "b": 5.0}
    tensors = {"w": (512, 512), "b": (2048, 2)}
    for way, copies in (("allgather", 3.0), ("two_shot", 1.5)):
        plan = grace.Simulation(4, tensors, {"compressor": "signsgd", "communicator": way}).plan
        (bucket,) = forecast.buckets_of(plan, ready, codec, Ranks(4))
        units = plan.buckets[0].units
        assert (bucket.ready, bucket.before) == (5.0, bucket.after)
        assert 2 * bucket.before == pytest.approx(len(units) + 0.01 * (512 * 512 + 4096))
        sent = sum(
            nbytes * (3.0 if kind == "allgather" else 1.0)
            for kind, nbytes, *_ in map(dataclasses.astuple, bucket.rounds)
        )
        assert sent == pytest.approx(copies * plan.buckets[0].nbytes)
    # What stays with the library travels in its buckets.
    plan = dataclasses.replace(plan, buckets=(), delegated=plan.exchanged, exchanged=())
    # DDP's first bucket has 1 MiB, which the first tensor fills.
    first, second = forecast.buckets_of(plan, ready, codec, Ranks(4))
    assert (first.ready, first.before, first.rounds) == (3.0, 0.0, (Round("allreduce", 4 * 512 * 512),))
    assert (second.ready, second.before, second.rounds) == (5.0, 0.0, (Round("allreduce", 4 * 4096),))
    # Beside what is compressed, it reduces each tensor alone.
    tensors = {"w": (512, 128), "b": (64,), "c": (32,)}
    plan = grace.Simulation(4, tensors, {"compressor": "signsgd"}).plan
    rest, dense = (tuple(item for item in plan.exchanged if item.dense is kind) for kind in (False, True))
    buckets = tuple(bucket for bucket in plan.buckets if not bucket.units[0].dense)
    plan = dataclasses.replace(plan, buckets=buckets, delegated=dense, exchanged=rest)
    *_, last = forecast.buckets_of(plan, {"w": 1.0, "b": 2.0, "c": 3.0}, codec, Ranks(4))
    assert last.rounds == (Round("allreduce", 4 * (64 + 32), count=2),)


def test_what_the_transport_takes_during_the_pass_is_no_part_of_compute(monkeypatch):
    monkeypatch.setattr(advise, "OVERHEAD", Overhead(handling=1e-9, waking=1.0))
    specs = {"a": (1024, 1024), "b": (1024, 1024)}
    seen = {"period": 0.1, "band": [0.1, 0.1], "exposed": 0.02, "waits": False, "ready": {"b": 0.03, "a": 0.07}}
    simulation = grace.Simulation(2, specs, {"compressor": "none"})
    figures = Figures(simulation, [{**seen, "codecs": {}, "optimizers": []}], FAST)
    # The first bucket, of 4 MiB, is handled before the second one is ready.
    taken = 4 * 1024 * 1024 * 1e-9
    assert figures.compute == pytest.approx(0.08 - taken)
    assert figures.ready == pytest.approx({"b": 0.03, "a": 0.07 - taken})
    # The measured link has the rest.
    assert figures.seconds("none", FAST) < 0.2


def test_a_hierarchical_exchange_counts_within_and_between_nodes(monkeypatch):
    codec, ready = {"fixed": 1.0, "element": 0.01}, {"w": 3.0}
    nodes = {"name": "hierarchical", "local_size": 2, "between": "allgather"}
    plan = grace.Simulation(6, {"w": (512, 512)}, {"compressor": "qsgd", "communicator": nodes}).plan
    (bucket,) = forecast.buckets_of(plan, ready, codec, Ranks(6))
    there, between, back = bucket.rounds
    # Each of two ranks has half, and each of three nodes 8 bits per element of it.
    assert (there, back) == (Round("alltoall", 2 * 512 * 512, "node"), Round("allgather", 2 * 512 * 512, "node"))
    assert (between.kind, between.scope) == ("allgather", "nodes")
    assert between.nbytes == pytest.approx(512 * 512 / 2, rel=0.01)
    assert 2 * bucket.before == pytest.approx(1.0 + 0.01 * 512 * 512 / 2)
    # A communicator that has no law counts as two_shot.
    monkeypatch.delitem(forecast.LAWS, "allgather")
    (bucket,) = forecast.buckets_of(plan, ready, codec, Ranks(6))
    assert [each.kind for each in bucket.rounds] == ["alltoall", "allgather"]


def test_the_link_within_a_node_is_measured_where_nodes_are_known(monkeypatch):
    now, sent = [0.0], set()

    class Alltoall:
        """Nodes of two ranks, whose link carries 1e9 bytes per second and takes 10 us for a message."""

        def alltoall(self, buffers, name):
            sent.update(rank for rank, x in enumerate(buffers) if len(x))
            now[0] += 1e-5 + buffers[2].nbytes / 1e9
            return Done(buffers[2])

    monkeypatch.setattr(advise.time, "perf_counter", lambda: now[0])
    simulation = grace.Simulation(4, TENSORS, {"compressor": "none"})
    monkeypatch.setattr(simulation, "transport", Alltoall(), raising=False)
    monkeypatch.setattr(simulation, "rank", 3)
    monkeypatch.setattr(simulation, "everyone", lambda mine, *_: [mine])
    for ranks in (Ranks(4), Ranks(4, 1), Ranks(4, 4)):
        simulation.ranks = ranks
        assert advise.measure_inside(simulation) is None
    simulation.ranks = Ranks(4, 2)
    inside = advise.measure_inside(simulation)
    assert dataclasses.astuple(inside) == pytest.approx((1e9, 1e-5))
    assert sent == {2, 3}
    figures = Job(monkeypatch).figures
    assert figures.machine(SLOW) == Machine(2, SLOW)
    figures.inside, figures._exchange = inside, simulation
    figures.ranks = 4
    assert figures.machine(SLOW) == Machine(4, SLOW, 2, inside)


def test_on_several_nodes_quantizers_also_travel_by_hierarchical(monkeypatch):
    job = Job(monkeypatch, SLOW)
    codecs = {label: CODEC for label in changes(nodes=True) if label != "none"}
    for ranks, expected in ((Ranks(8), False), (Ranks(8, 8), False), (Ranks(8, 1), False), (Ranks(8, 4), True)):
        job.simulation.ranks = ranks
        assert advise.has_nodes(job.simulation) is expected
    figures = job.measured(codecs=codecs, period=1.0, exposed=0.98)
    figures.inside, figures.ranks = Link(1e10, 0.0), 8
    advice = figures.advice()
    rows = {row.label: row for row in advice.rows}
    assert set(rows) == {*changes(), "qsgd by nodes", "blockwise by nodes", "8 local steps"}
    assert rows["qsgd by nodes"].grade == rows["qsgd"].grade
    # Of the gradients, a quarter of each byte leaves a node instead of each byte of four ranks.
    assert rows["qsgd by nodes"].seconds < rows["qsgd"].seconds
    assert advice.best.endswith(" by nodes")
    assert grace.make_config(advice.config).method.communicator == Hierarchical()


def test_modules_of_fsdp_are_reduced_and_gathered_as_it_does(monkeypatch):
    tensors, ready = {"w": (512, 512), "b": (2048, 2)}, {"w": 3.0, "b": 5.0}
    plan = grace.Simulation(4, tensors, {"compressor": "none"}).plan
    plan = dataclasses.replace(plan, buckets=(), delegated=plan.exchanged, exchanged=())
    modules = Modules({"w": "first", "b": "second"}, ReduceScatter())
    # A ring: a rank sends all parts but its own.
    first, second = forecast.buckets_of(plan, ready, {}, Ranks(4), modules)
    assert (first.ready, first.rounds) == (3.0, (Round("allgather", 512 * 512),))
    assert (second.ready, second.rounds) == (5.0, (Round("allgather", 4096),))
    # Gloo adds as in an allreduce, and the pass waits for it. So do replicas.
    sums = Round("allreduce", 4 * 512 * 512), Round("allreduce", 4 * 4096)
    (both,) = forecast.buckets_of(plan, ready, {}, Ranks(4), modules, waits=True)
    assert (both.ready, both.rounds) == (5.0, sums)
    replicas = forecast.buckets_of(plan, ready, {}, Ranks(4), modules._replace(communicator=None))
    assert [bucket.rounds for bucket in replicas] == [(each,) for each in sums]

    job, seconds = Job(monkeypatch, SLOW), Machine(2, SLOW).seconds("allgather", 1e5)
    assert job.figures.advice().rows[-1].label == "8 local steps"
    monkeypatch.setattr(job.simulation, "gathers", lambda: [(2 * 10**5, 2), (10**9, 1)])
    less = job.figures.advice().row("less sharding")
    assert less.seconds == pytest.approx(job.figures.advice().row("none").seconds - seconds)
    assert less.reason.startswith("reshard_after_forward=False trains as before, with 100.0 KB more")
    monkeypatch.setattr(job.simulation, "gathers", lambda: [(2 * 10**5, 1)])
    none = job.figures.seconds("none", SLOW)
    assert job.figures.advice().row("less sharding").seconds == pytest.approx(none - seconds)
    assert job.figures.advice().row("less sharding").reason.startswith("DDP")
    # Without nodes there is no sharding within them.
    rows = [row.label for row in job.figures.advice().rows]
    assert rows[-1] == "less sharding"
    # It is no method, so it cannot be the best one.
    assert best_of([less, advise.Row("none", 9.0, 0, 0, "", 0.0, {"compressor": "none"})]) == "none"


def test_a_model_may_be_sharded_within_nodes(monkeypatch):
    inside, dense = Link(1e9, 0.0), 4 * sum(map(np.prod, TENSORS.values()))
    for waits in (False, True):
        job = Job(monkeypatch, SLOW)
        job.simulation.ranks = Ranks(8, 4)
        figures = job.measured(waits=waits, period=1.0, exposed=0.98)
        modules = Modules(dict.fromkeys(TENSORS, "all"), ReduceScatter())
        monkeypatch.setattr(job.simulation, "_modules_for", lambda ranks, modules=modules: modules)
        # What stays with the library, as in FSDP.
        plan = figures._plans["none"]
        figures._plans["none"] = dataclasses.replace(plan, buckets=(), delegated=plan.exchanged, exchanged=())
        figures.inside, figures.ranks = inside, 8
        monkeypatch.setattr(job.simulation, "gathers", lambda: [(8 * 10**5, 2)])
        machine = Machine(8, SLOW, 4, inside)
        whole = [("allreduce", dense), ("allreduce", dense, "node")]
        everywhere, here = whole if waits else [("allgather", dense / 8), ("allgather", dense / 4, "node")]
        saved = machine.seconds(*everywhere) - machine.seconds(*here)
        saved -= machine.seconds("allreduce", dense / 4, "nodes")
        saved += 2 * (machine.seconds("allgather", 1e5) - machine.seconds("allgather", 2e5, "node"))
        assert saved > 0
        advice = figures.advice()
        row = advice.row("hybrid sharding")
        assert row.seconds == pytest.approx(advice.row("none").seconds - saved)
        assert "mesh=init_device_mesh(..., (2, 4)))" in row.reason
        # A quarter of the parameters instead of an eighth.
        assert "with 100.0 KB more of parameters" in row.reason
        assert not row.changes


def test_what_a_pass_has_waited_for_belongs_to_the_exchange(monkeypatch):
    job, now = Job(monkeypatch), itertools.count()
    monkeypatch.setattr(watch.time, "perf_counter", lambda: float(next(now)))
    watching = Watch(job.simulation, 1)
    for _ in range(2):
        # The times are 0, 1, 2, 3, 4.
        watching.begin()
        watching.note_gradient("b", np.ones((300, 200), np.float32), np.ones((300, 200), np.float32))
        watching.resume()
        watching.note_gradient("a", np.ones((256, 256), np.float32))
        watching.end()
    seen = watching.figures({})
    assert (seen["period"], seen["exposed"], seen["waits"]) == (5.0, 2.0, True)
    assert seen["ready"] == {"b": 1.0, "a": 2.0}
    # Of 2 s, the link explains less.
    period = job.figures.period
    slow = job.measured(waits=True, exposed=period)
    assert slow.seconds("none", FAST) == pytest.approx(period)
    assert job.measured(exposed=period).seconds("none", FAST) < period


def test_the_gentlest_of_equal_rows_is_the_best_and_risky_ones_are_not(monkeypatch):
    job = Job(monkeypatch, SLOW)
    rows = {row.label: row for row in job.figures.advice().rows}
    same = functools.partial(advise.Row, nbytes=0, reason="", error=None, changes={"compressor": "none"})
    assert best_of([same("none", 1.02, grade=0), same("fp16", 1.0, grade=0), same("topk", 0.1, grade=3)]) == "none"
    assert best_of([same("none", 1.04, grade=0), same("fp16", 1.0, grade=0)]) == "fp16"
    assert next(iter(rows)) == "none"
    assert rows["8 local steps"].seconds < rows["fp16"].seconds


def test_the_risk_follows_optimizer_error_and_evidence():
    def risk(name, error, optimizers, **options):
        return risk_of({**compressors.required(name), **options, "compressor": name}, error, optimizers)

    assert risk("none", 0.0, []).grade == 0
    assert risk("fp16", 0.0, [ADAM]).grade == 0
    # Numbers below 6e-8 are zero in it.
    assert "too small for fp16" in risk("fp16", 1.0, [ADAM]).reason
    assert risk("qsgd", 0.001, [ADAM]).grade == 1
    assert risk("qsgd", 0.5, [ADAM]).grade == 2
    assert "docs/adam.md" in risk("topk", 0.5, [ADAM]).reason
    assert [risk("topk", 0.5, [optimizer]).grade for optimizer in (ADAM, SGD)] == [3, 2]
    for name in ("powersgd", "eden", "randomk"):
        assert risk(name, 0.5, [SGD]).grade == 2
    # The evidence is of one setting. It holds for those that lose less.
    assert risk("blockwise", 0.001, [ADAM], format="int8").grade == 1
    assert risk("qsgd", 0.001, [ADAM], quantum_num=1000).grade == 1
    assert risk("qsgd", 0.001, [ADAM], communicator="allgather").grade == 1
    stronger = risk("qsgd", 0.001, [ADAM], quantum_num=7)
    assert (stronger.grade, "loses more than the recommended setting" in stronger.reason) == (2, True)


def test_methods_are_compared_in_their_settings_from_the_gentlest_on():
    found = changes()
    assert [label for label in found if label.startswith("topk")] == ["topk:compress_ratio=0.1", "topk"]
    families = {label.partition(":")[0] for label in found}
    assert {"none", "fp16", "qsgd", "blockwise", "eden", "topk", "randomk", "powersgd"} <= families
    sent = []
    for change in found.values():
        # A label is what the option --compressors reads.
        config = grace.make_config(change)
        sent.append(grace.Simulation(2, {"x": (512, 512)}, config).plan.wire_bytes)
    assert found == {label: variant.config() for label, variant in zip(found, parse_variants(list(found)), strict=True)}
    # Within a method, the bytes fall.
    for name in families:
        nbytes = [n for label, n in zip(found, sent, strict=True) if label.partition(":")[0] == name]
        assert nbytes == sorted(nbytes, reverse=True)
        assert len(set(nbytes)) == len(nbytes)


def test_auto_measures_only_what_it_may_take(monkeypatch):
    measured = []
    job = Job(monkeypatch)
    monkeypatch.setattr(advise, "measure_link", lambda exchange: FAST)
    monkeypatch.setattr(advise, "measure_inside", lambda exchange: None)
    monkeypatch.setattr(job.simulation, "everyone", lambda mine, *_: [mine])
    watching = types.SimpleNamespace(
        exchange=job.simulation,
        figures=lambda configs: measured.append(set(configs)) or {**SEEN, "codecs": dict.fromkeys(configs, CODEC)},
    )
    assert set(advise.measure(watching)._plans) == set(changes())
    assert set(advise.measure(watching, LOW)._plans) == {"none", *measured[1]}
    assert measured == [set(changes()) - {"none"}, {"fp16", "qsgd", "blockwise:format=int8", "blockwise"}]


def test_advice_says_in_words_that_a_method_always_or_never_pays(monkeypatch):
    none, fp16 = (row for row in Job(monkeypatch).figures.advice().rows if row.label in ("none", "fp16"))
    for even, words in ((None, "always"), (0.0, "never"), (125e6, "1 Gbit/s")):
        rows = (none, dataclasses.replace(fp16, break_even=even))
        table = advise.Advice(rows, "none", 0.02, (0.02, 0.02), 2, FAST, {}).table
        line = next(line for line in table.splitlines() if line.startswith("fp16"))
        assert f" {words} " in line
        assert "always" not in next(line for line in table.splitlines() if line.startswith("none "))


def test_advice_says_whether_it_pays_and_can_be_written(monkeypatch):
    for link, begins in ((FAST, "Compression does not pay"), (SLOW, "Compression pays")):
        job = Job(monkeypatch, link)
        advice = job.measured(
            period=job.figures.seconds("none", link), exposed=job.figures.seconds("none", link) - 0.02
        ).advice()
        assert advice.sentence.startswith(begins)
        assert str(advice).startswith(advice.sentence)
        assert {"none", "fp16", "qsgd", "8 local steps"} <= {row.label for row in advice.rows}
        assert json.loads(json.dumps(advice.to_dict()))["config"] == advice.config
        assert grace.make_config(advice.config).method == grace.make_config({"compressor": advice.best}).method
    # The accuracy of predictions is a part of every output.
    assert advice.to_dict()["accuracy"] == accuracy.ACCURACY._asdict()
    assert f"Predictions calibrated on 2 ranks missed {accuracy.ACCURACY.cells} measured steps" in str(advice)
    # So is the band of each prediction, which is that of what-if.
    row = advice.row("blockwise:format=int8")
    found = next(each for each in advice.to_dict()["rows"] if each["label"] == row.label)
    assert found["band"] == row.band == accuracy.ACCURACY.band(row.seconds)
    line = next(line for line in advice.table.splitlines() if line.startswith(row.label))
    assert "{:.4g} to {:.4g} ms".format(*(1e3 * each for each in row.band)) in line
    assert found["changes"] == {"compressor": "blockwise", "format": "int8"}
    chosen = dataclasses.replace(advice, best=row.label)
    assert chosen.toml == 'format = "int8"\ncompressor = "blockwise"\n'
    reason = {"reason": "no gradient was seen that could be compressed"}
    left_out = job.measured(codecs={"fp16": CODEC, "qsgd": reason}).advice()
    assert "Left out: qsgd, because no gradient was seen" in str(left_out)


@pytest.mark.parametrize(
    ("seconds", "steps"), [(0.1, [2, 3, 20]), (1.0, [2, 3, 20]), (1.3, [2, 20]), (2.0, [2, 13]), (60.0, [2, 1])]
)
def test_a_launched_job_counts_fewer_steps_if_they_are_slow(seconds, steps, monkeypatch, tmp_path):
    simulation = grace.Simulation(2, TENSORS, {"compressor": "none"})
    seen: list[int] = []
    ended: list[str] = []
    monkeypatch.setenv("GRACE_ADVISE", str(tmp_path))
    monkeypatch.setattr(launched, "measure", lambda watching: 1 / 0)
    monkeypatch.setattr(launched, "fail", lambda rank, error: ended.append(type(error).__name__))
    watching = Launched(simulation)
    # The first step takes long, as one that compiles does.
    watching.begin(0.0)
    now = 100.0
    while not ended:
        while not watching.complete:
            watching.begin(now)
            now += seconds
        seen.append(watching.steps)
        watching.decide()
    assert ended == ["ZeroDivisionError"]
    assert seen == steps


def test_codecs_are_measured_on_gradients_of_the_job():
    simulation = grace.Simulation(2, {**TENSORS, "large": (1200, 1000)}, {"compressor": "none"})
    watching = Watch(simulation, 2)
    rng = np.random.default_rng(0)
    for _ in range(3):
        watching.begin()
        for name, shape in {**TENSORS, "large": (1200, 1000)}.items():
            watching.note_gradient(name, rng.normal(size=shape).astype(np.float32))
        watching.end()
    assert watching.complete
    made = {label: grace.make_config(change) for label, change in changes().items() if label in ("qsgd", "topk")}
    seen = watching.figures(made)
    assert set(seen["ready"]) == {*TENSORS, "large"}
    # Of normal numbers, the largest 1 % have about a tenth of the energy.
    assert 0.85 < seen["codecs"]["topk"]["error"] < 0.95
    assert 0 < seen["codecs"]["qsgd"]["error"] < 0.001
    assert seen["codecs"]["qsgd"]["element"] > 0


def test_no_more_candidates_are_measured_after_a_while(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now[0])
    watching = Watch(grace.Simulation(2, TENSORS, {"compressor": "none"}), 1)
    for now[0] in (0.0, 1.0):
        watching.begin()
    monkeypatch.setattr(watching, "_codec", lambda config: now.__setitem__(0, now[0] + 14.0) or CODEC)
    codecs = watching.figures(dict.fromkeys(["a", "b", "c", "d"]))["codecs"]
    assert codecs == {
        **dict.fromkeys(["a", "b", "c"], CODEC),
        "d": {"reason": "the methods before it took 30 s to measure"},
    }


def test_a_codec_is_timed_when_the_device_has_nothing_left_to_do(monkeypatch):
    log: list[str] = []
    monkeypatch.setattr(watch.time, "perf_counter", lambda: float(log.append("clock") or len(log)))
    step = types.SimpleNamespace(
        ranks=2,
        receive=lambda gradients, number: log.append("others"),
        run=lambda x, number, arrived: types.SimpleNamespace(gradient=log.append("mine") or x),
    )
    ops = types.SimpleNamespace(copy=lambda x: x, norm=lambda x: float(log.append("wait") or 0))
    assert watch._timed(step, np.ones(4), ops) == 3
    assert log[:6] == ["others", "wait", "clock", "mine", "wait", "clock"]


@pytest.mark.parametrize(
    ("ranks", "method", "measured", "merged"),
    [
        (2, {"compressor": "topk"}, {2}, 2),
        (3, {"compressor": "topk"}, {3}, 3),
        # The cost goes on as from 2 payloads to 4.
        (8, {"compressor": "topk"}, {2, 4}, 8),
        (8, {"compressor": "topk", "communicator": {"name": "hierarchical", "local_size": 2}}, {4}, 4),
        # Sums, and shards.
        (8, {"compressor": "powersgd"}, {2}, 2),
        (8, {"compressor": "qsgd"}, {2}, 2),
    ],
)
def test_codecs_merge_as_many_payloads_as_in_the_job(ranks, method, measured, merged, monkeypatch):
    simulation = grace.Simulation(ranks, {"a": (256, 256)}, {"compressor": "none"})
    watching = Watch(simulation, 1)
    watching._samples["a"] = np.ones(256 * 256, np.float32)
    timed = []

    def took(step, x, ops):
        timed.append(step.ranks)
        return x.size * (1.0 + step.ranks)

    monkeypatch.setattr(watch, "_timed", took)
    codec = watching._codec(grace.make_config(method))
    assert set(timed) == measured
    assert codec["fixed"] == pytest.approx(1024 * (1.0 + merged))


def test_auto_is_short_for_none_with_auto_and_refused_where_it_cannot_work():
    made = grace.make_config(compressor="auto")
    assert made == grace.make_config(compressor="none", auto=True)
    assert grace.make_config(made.to_dict()) == made
    with pytest.raises(ConfigError, match="auto chooses the compressor of exchanged gradients"):
        grace.make_config(compressor="auto", outer={"every": 4})
    with pytest.raises(ConfigError, match="Simulation: the compressor 'auto' measures steps"):
        grace.Simulation(2, TENSORS, {"compressor": "auto"})
    simulation = grace.Simulation(2, TENSORS, {"compressor": "none"})
    with pytest.raises(StepError, match=r"Simulation.advise: expected an exchange of gradients by DDP"):
        simulation.advise()
    with pytest.raises(ConfigError, match="expected at least 1 step, received 0"):
        simulation.advise(steps=0)
