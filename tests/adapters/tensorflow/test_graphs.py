"""TensorFlow graphs: one graph serves all steps, and a whole step in a graph gives NumPy's results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import grace
from grace.core.compressors.efsignsgd import EFSignSGD
from grace.core.compressors.randomk import RandomK
from grace.core.compressors.threshold import Threshold
from grace.core.compressors.topk import TopK
from grace.core.config.registry import communicators, compressors
from grace.core.errors import IncompatibleError
from grace.core.ops import get_ops
from grace.core.ops.native import Native
from grace.core.plan.plan import make_plans
from grace.core.plan.unit import offsets
from grace.core.session.simulation import SimulatedTransport
from grace.core.spec import Ranks, TensorSpec
from grace.core.state.carry import splice_units
from grace.core.state.run import Run
from grace.core.state.states import States
from grace.core.state.stored import narrow, widen
from grace.core.wire.codings import Coding
from grace.testing import traced
from grace.testing.harness import EPS, FRAMEWORKS, draw, exchange, host, payload_on_host, same
from tests.core import test_contracts
from tests.core.test_contracts import reordered
from tests.support import registered
from tests.support.covering import rest_slow
from tests.support.steps import CUTS, SPECS, TYPICAL, config, gradients, on_host, simulate, specs_in, states, step

pytestmark = pytest.mark.skipif("tensorflow" not in FRAMEWORKS, reason="TensorFlow is not installed")

# --- one method in a graph --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", registered.params([method.compressor for method in TYPICAL.values()]))
def test_one_graph_serves_all_steps_and_lengths(compressor):
    """A step number fixed in the graph would repeat the random numbers, and a fixed length would fail on other data."""
    spec, ops, component = TensorSpec("t", (24, 40)), get_ops("tensorflow"), traced(compressor)
    names = ("propose", "compress", "decompress")
    methods = [getattr(component, name) for name in names if hasattr(component, name)]
    graphs = 0
    for number in range(3):
        # Gradients with different shares of large values.
        x = draw(spec, number) * np.float32(10.0 ** -(2 * number))
        plain, ex = (exchange(c, ops, spec, [x], step=number) for c in (compressor, component))
        one, two = payload_on_host(ops, plain.payloads[0]), payload_on_host(ops, ex.payloads[0])
        assert all(same(one[name], two[name]) for name in one)
        decoded = [c.decompress(e.payloads[0], e.sites[0]) for c, e in ((compressor, plain), (component, ex))]
        assert same(*(host(ops, d) for d in decoded))
        counts = [count for method in methods for count in method.traces.values()]
        assert set(counts) == {1}
        assert graphs in (0, len(counts)), "another graph for another step"
        graphs = len(counts)


@dataclass(frozen=True)
class BranchesOnAValue(TopK):
    """Branches in Python on a value that only the graph knows."""

    def compress(self, x, at):
        return super().compress(x if x[0] > 0 else -x, at)


@dataclass(frozen=True)
class BranchesOnALength(Threshold):
    """Uses a length that depends on the data as a Python number."""

    def compress(self, x, at):
        payload = super().compress(x, at)
        if at.ops.length(payload["values"]) == 0:
            return {name: value[:0] for name, value in payload.items()}
        return payload


@dataclass(frozen=True)
class CountsTheSteps(RandomK):
    """Uses the step number as a Python number."""

    def compress(self, x, at):
        return super().compress(x, at) if int(at.key.step) % 2 else super().compress(-x, at)


@dataclass(frozen=True)
class DividesByANumber(EFSignSGD):
    """Lets the graph optimizer replace the division by a rounded reciprocal."""

    def compress(self, x, at):
        scale = at.ops.sum(at.ops.abs(x)) / max(1, at.spec.numel)
        return {**super().compress(x, at), "scale": at.ops.reshape(scale, (1,))}


@pytest.mark.parametrize("mutant", [BranchesOnAValue(), BranchesOnALength(0.01), CountsTheSteps()], ids=repr)
def test_code_that_cannot_be_traced_is_noticed(mutant):
    spec, ops = TensorSpec("t", (24, 40)), get_ops("tensorflow")
    exchange(mutant, ops, spec, [draw(spec, 0)])
    with pytest.raises(TypeError, match=r"symbolic|Symbolic"):
        exchange(traced(mutant), ops, spec, [draw(spec, 0)])


def test_bytes_that_differ_in_a_graph_are_noticed():
    contract = test_contracts.TestTracedCompressors()
    contract.reordered = lambda compressor, dtype: "float64" if dtype == "float64" else None
    contract.test_bytes_are_equal_in_every_framework(DividesByANumber())
    with pytest.raises(AssertionError):
        contract.test_bytes_are_equal_in_every_framework(traced(DividesByANumber()))


# --- a whole step in a graph ------------------------------------------------------------------------------------


class RunInVariables(Run):
    """A run of one plan, with states, step number and statistics in variables."""

    def __init__(self, plan, *given, track_norms, **options):
        import tensorflow as tf

        self._counter, self._plan = tf.Variable(tf.zeros([], tf.int64), trainable=False), plan
        super().__init__([(0, plan)], *given, **options)
        self.track_norms = track_norms

    @property
    def _states(self):
        return {"": States([(0, self._plan)], self._counter.read_value(), self._stage.read())}

    @_states.setter
    def _states(self, states):
        import tensorflow as tf

        from grace.tensorflow.stage import Stage, StateVariable

        def make(*names_and_value):
            *names, value = names_and_value
            return StateVariable("/".join(names), *names, tf.Variable(value, trainable=False))

        _, number, units = states[""]
        if not hasattr(self, "_stage"):
            self._stage = Stage(0, self._plan, units, make)
        self._stage.write(units)
        self._counter.assign(tf.cast(number, tf.int64))

    def commit(self, outcome, module=""):
        super().commit(outcome, module)
        self._stage.note(outcome.notes)

    def stats(self):
        self._last[""] = self._plan, self._stage.notes
        return super().stats()


class Graph:
    """A simulation whose steps are one graph, with states, step number, statistics and times in variables."""

    def __init__(self, chosen, size, track_times=False, specs=SPECS, track_norms=False, **options):
        import tensorflow as tf

        from grace.tensorflow.times import GraphTimes

        self.sim = grace.Simulation(size, specs, config(chosen, **options), framework="tensorflow")
        ops = get_ops("tensorflow")
        self.traces = 0
        self.plan = self.sim.plan
        self.runs = self.sim._runs = []
        for rank in range(size):
            times = GraphTimes()
            times.track = track_times
            transport = SimulatedTransport(rank, self.sim.network, ops)
            given = {"seed": 5, "rollback": self.sim.config.rollback, "times": times, "track_norms": track_norms}
            self.runs.append(RunInVariables(self.plan, lambda device: ops, transport, **given))
        self._run = tf.function(self._step, autograph=False)

    def _step(self, given):
        self.traces += 1
        return self.sim.step(given)

    def step(self, given):
        return self._run(given)


def poison(name, rank, x):
    if name == "matrix" and rank == 1:
        x[3, 5] = np.nan
    return x


def assert_close(chosen, expected, got):
    """Assert equal bits if payloads are equal in all frameworks, otherwise equality up to rounding."""
    for mine, theirs in zip(expected, got, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            name = key if isinstance(key, str) else key[0]
            spec = next(spec for spec in SPECS if spec.name == name)
            if reordered(chosen.compressor, spec.dtype) is None:
                assert same(mine[key], theirs[key]), key
                continue
            a, b = mine[key].astype(np.float64), theirs[key].astype(np.float64)
            if key[-1] == "basis":
                # Frameworks give singular vectors different signs.
                a, b = a.T @ a, b.T @ b
            assert np.array_equal(np.isnan(a), np.isnan(b)), key
            scale = np.abs(np.nan_to_num(a)).max(initial=0.0)
            assert np.abs(np.nan_to_num(a) - np.nan_to_num(b)).max(initial=0.0) <= 1e3 * EPS[spec.dtype] * scale, key


@pytest.mark.parametrize("compressor", registered.params([m.compressor for m in TYPICAL.values()]))
def test_steps_in_a_graph_are_those_of_numpy(compressor):
    check_steps(registered.default_method(compressor))


@pytest.mark.parametrize(
    ("name", "coding"), rest_slow([("3lc", "smallest"), ("qsgd", "rans"), ("strom", "huffman")], 1)
)
def test_coded_steps_in_a_graph_are_those_of_numpy(name, coding):
    """Bytes of fixed and of run-time length, and as many of them as in NumPy."""
    usual = registered.default_method(compressors.example(name))
    check_steps(dataclasses.replace(usual, communicator=communicators.make("allgather"), coding=Coding(coding)))


@pytest.mark.parametrize("name", rest_slow(["topk", "efsignsgd", "powersgd", "dgc"], 2))
def test_steps_without_roll_back_in_a_graph_are_those_of_numpy(name):
    check_steps(registered.default_method(compressors.example(name)), rollback=False)


def check_steps(chosen, **options):
    """Two ranks run some steps. The third step has a NaN on one rank."""
    specs = specs_in("tensorflow", chosen)
    reference, graph = (make(chosen, size=2, specs=specs, **options) for make in (simulate, Graph))
    for number in range(4):
        change = {"change": poison} if number == 2 else {}
        expected = step(reference, number, **change)
        got = on_host(graph, graph.step(gradients(graph, number, **change)))
        assert_close(chosen, expected, got)
        assert np.isnan(got[0]["matrix"]).any() == (number == 2)
        assert_close(chosen, states(reference), states(graph))
        assert [e.stats()["wire_bytes"] for e in graph.runs] == [e.stats()["wire_bytes"] for e in reference.runs]
        assert [int(run.step) for run in graph.runs] == [number + 1] * 2
    assert graph.traces == 1


@pytest.mark.parametrize("name", rest_slow(["threshold", "topk", "qsgd"], 1))
def test_statistics_of_tensors_in_a_graph_are_those_of_numpy(name):
    """Of tensors that are compressed as one, among them an empty one."""
    chosen = registered.default_method(compressors.example(name))
    reference = simulate(chosen, size=2, **CUTS["bucket"])
    graph = Graph(chosen, size=2, track_norms=True, **CUTS["bucket"])
    reference.track_norms = True
    for number in range(2):
        step(reference, number)
        graph.step(gradients(graph, number))
        for mine, theirs in zip(graph.runs, reference.runs, strict=True):
            found, expected = mine.stats()["tensors"], theirs.stats()["tensors"]
            for tensor, values in expected.items():
                assert found[tensor]["wire_bytes"] == values["wire_bytes"], tensor
                for key in ("relative_error", "residual_norm"):
                    # None without a residual.
                    expected_value = values[key] and pytest.approx(values[key], rel=1e-5)
                    assert found[tensor][key] == expected_value, (tensor, key)


def test_ranks_at_different_steps_are_told_by_the_graph():
    import tensorflow as tf

    graph = Graph(registered.default_method(compressors.make("topk")), 2)
    graph.runs[1]._counter.assign(7)
    with pytest.raises(tf.errors.InvalidArgumentError, match="MismatchError: the ranks are not at the same step"):
        graph.step(gradients(graph, 0))


def test_parted_replicas_of_ranks_at_other_steps_get_the_error_about_their_steps():
    """Their weights differ as well, because only some of them have loaded a checkpoint."""
    from grace.tensorflow import replicas

    # The digests of a weight and a state, the steps of the process, and the step.
    equal, other = [7, 8, 5, 40], [9, 8, 5, 40]
    assert replicas._explain(["w", "state"], 1, 0, np.array([equal, equal])) == b""
    assert b"MismatchError: the weights or shared states of rank 1 and rank 0 differ before step 40, in 'w'" in (
        replicas._explain(["w", "state"], 1, 1, np.array([equal, other]))
    )
    for taken in (1, 5):
        told = np.array([[7, 8, taken, 40], [9, 8, taken, 38]])
        assert replicas._explain(["w", "state"], 1, 1, told).startswith(
            b"MismatchError: the ranks are not at the same step (seen by rank 1)"
        )


def test_the_device_of_a_variable_decides_on_the_kernels():
    """TensorFlow's kernels run on the CPU only. On a GPU, the gradients stay on their device."""
    import keras
    import tensorflow as tf

    from grace.tensorflow.gradients import device_of

    assert [device_of(v) for v in (tf.Variable([1.0]), keras.Variable([1.0]))] == ["cpu", "cpu"]
    places = {"/job:localhost/replica:0/task:0/device:GPU:1": "gpu", "/device:XPU:0": "xpu", "": "cpu"}
    assert {place: device_of(SimpleNamespace(device=place)) for place in places} == places
    assert not isinstance(get_ops("tensorflow", "gpu"), Native)


@pytest.mark.parametrize(("saved_by", "allowed"), [((1, 2), True), ((0, 2), False), ((0, 3), True), ((-1, 0), True)])
def test_no_rank_starts_from_zero_alone_in_a_graph(saved_by, allowed):
    """With another number of ranks, all of them start from zero."""
    import tensorflow as tf

    from grace.tensorflow.run import VariableRun

    dore = grace.make_config(compressor="qsgd", memory="dore", communicator="two_shot", default_rules=False)
    stages = make_plans([TensorSpec("w", (64,))], dore, ranks=Ranks(2))
    run = VariableRun(stages, lambda name, x: tf.Variable(x, trainable=False), seed=0, rank=1, ranks=Ranks(2))
    run.origin.assign(saved_by)
    step = tf.function(run.belong_to_this_rank)
    if allowed:
        step()
        assert run.origin.numpy().tolist() == [1, 2]
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="no rank can start from zero alone"):
        step()


def test_more_ranks_than_a_method_can_add_are_refused():
    import tensorflow as tf

    from grace.tensorflow.run import VariableRun

    uniform = grace.make_config(compressor="uniform", bits=24, default_rules=False)
    stages = make_plans([TensorSpec("w", (64,))], uniform, ranks=Ranks(257))
    with pytest.raises(IncompatibleError, match="at most 256 ranks"):
        VariableRun(stages, lambda name, x: tf.Variable(x, trainable=False), seed=0, rank=0, ranks=Ranks(257))


def test_a_stored_residual_of_one_tensor_of_a_unit_returns():
    """Its integers share blocks, and scales, with those of the other tensor."""
    import tensorflow as tf

    memory = {"name": "residual", "residual_dtype": "int8"}
    chosen = grace.make_config(compressor="topk", memory=memory, granularity="bucket", default_rules=False)
    ((_, plan),) = make_plans([TensorSpec("v", (30,)), TensorSpec("w", (40,))], chosen, ranks=Ranks(2))
    ((name, unit),) = plan.stateful.items()
    ops = get_ops("tensorflow")

    def stored(values):
        return {name: {"memory": narrow(unit, {"residual": tf.constant(values, tf.float32)}, ops)}}

    before, after = (np.random.default_rng(n).standard_normal(70) * size for n, size in enumerate((1, 10)))
    states = stored(after)
    splice_units(plan, states, stored(before), {"w"}, lambda device: ops)
    found = widen(unit, states[name]["memory"], ops)["residual"].numpy()
    places = {piece.tensor: slice(start, start + piece.numel) for piece, start in offsets(unit)}
    for tensor, expected in (("v", after), ("w", before)):
        assert np.abs(found - expected)[places[tensor]].max() <= np.abs(after).max() / 127
    assert np.abs(found - after)[places["w"]].max() > 1
