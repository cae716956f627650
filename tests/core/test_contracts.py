"""Every registered compressor and memory fulfils its contract, with default and with extra configurations."""

from __future__ import annotations

import inspect
from functools import cache

import pytest

from grace.core.config.registry import communicators, compressors, memories
from grace.core.ops import get_ops
from grace.core.session.simulation import SimulatedTransport
from grace.testing import (
    CommunicatorContract,
    CompressorContract,
    MemoryContract,
    OpsContract,
    Traced,
    TransportContract,
    traced,
    traced_ops,
)
from grace.testing.harness import FRAMEWORKS
from tests.mutants.communicators import ranks_of
from tests.support import covering, registered, steps

# Methods whose payloads may differ between frameworks, with the reason: for all gradients, and for float64 only.
REORDERED = {
    "atomo": "the signs of singular vectors are those of each framework; test_atomo.py compares mode entry",
    "truncatedsvd": "the signs of singular vectors are those of each framework",
    **dict.fromkeys(
        ("acpsgd", "gradiveq", "gradzip", "powersgd"),
        "a matrix product is summed in the order of each framework's BLAS",
    ),
}
# Gradients for which a payload is not unique: with equal singular values, the singular vectors are any basis.
TIED = {"atomo": ("huge and tiny",), "truncatedsvd": ("huge and tiny",)}
REORDERED_FLOAT64 = dict.fromkeys(
    (
        *("adacomp", "adaptive", "alq", "chain", "efsignsgd", "fedqcs", "gaussiank", "hgc", "mstopk"),
        *("nuqsgd", "onebit", "qsgd", "qsparse", "redsync", "sbc", "sdagc", "sidco", "terngrad", "vqsgd", "wangni"),
    ),
    "the sum in the scale is rounded once for float32, but nothing is wider than float64",
)


def reordered(compressor, dtype):
    name = compressors.name_of(compressor)
    return REORDERED.get(name) or (REORDERED_FLOAT64.get(name) if dtype == "float64" else None)


def of_ops(contract):
    """Return the promises that use array operations of a framework."""
    names = [name for name in dir(contract) if name.startswith("test_")]
    return [name for name in names if "ops" in inspect.signature(getattr(contract, name)).parameters]


# On NumPy, every promise is tested with every method. Other frameworks and graphs run the same code of a method, whose
# bytes golden files and tests of whole steps compare with NumPy's. So there, every promise meets one method of WAYS.
# Extra configurations have golden files and their papers' tests. Under --all, every promise has all of these.
WAYS = [*FRAMEWORKS[1:], *(["graph"] if "tensorflow" in FRAMEWORKS else [])]
PARTS = registered.by_name(registered.all_compressors() if covering.ALL else registered.default_compressors())
EXTRAS = registered.by_name(registered.extra_compressors())
ELSEWHERE = [
    row
    for way in WAYS
    for row in covering.rows(
        {"promise": of_ops(CompressorContract), "name": list(PARTS if covering.ALL else steps.WAYS), "way": [way]},
        # In graphs, a separate test covers the extra configurations, on fewer tensors.
        lambda row: row["way"] != "graph" or row["name"] not in EXTRAS,
    )
]


def elsewhere(promise, way):
    """Return the methods for which a promise is tested in this way."""
    return [PARTS[row["name"]] for row in ELSEWHERE if (row["promise"], row["way"]) == (promise, way)]


@cache
def in_graphs(component):
    """Return the same object for all promises, so that a graph is traced once."""
    return traced(component)


class TestCompressors(CompressorContract):
    def pytest_generate_tests(self, metafunc):
        chosen = list(PARTS.values())
        if "ops" not in metafunc.fixturenames:
            metafunc.parametrize("compressor", registered.params(chosen))
            return
        ways = {"numpy": chosen, **{way: elsewhere(metafunc.definition.name, way) for way in FRAMEWORKS[1:]}}
        cases = [pytest.param(c, way, id=f"{way}-{registered.name(c)}") for way, some in ways.items() for c in some]
        metafunc.parametrize(("compressor", "ops"), cases, indirect=["ops"])

    @pytest.fixture
    def ops(self, request):
        return get_ops(request.param)

    def test_bytes_are_equal_in_every_framework(self, compressor):
        if not covering.ALL:
            # Golden files have TensorFlow.
            self.frameworks = tuple(framework for framework in self.frameworks if framework != "tensorflow")
        super().test_bytes_are_equal_in_every_framework(compressor)

    def reordered(self, compressor, dtype):
        return reordered(compressor, dtype)

    def rounding(self, compressor):
        # The singular vectors of close singular values are less exact than the values.
        return 256 if isinstance(compressor, compressors.get("atomo")) else super().rounding(compressor)

    def tied(self, compressor, case):
        return any(isinstance(compressor, compressors.get(name)) and case in cases for name, cases in TIED.items())


class TestTallMatrices(CompressorContract):
    """Columns of onebit have means of their own from 64 rows on."""

    shape = (64, 9)
    shapes = ((64, 9), (70, 3), (65, 2, 3), (64, 0), (200,))
    few_shapes = ((70, 3), (64, 9))

    @pytest.fixture(params=[{}, {"threshold": 0.5}], ids=str)
    def compressor(self, request):
        return compressors.make({"name": "onebit", **request.param})

    def reordered(self, compressor, dtype):
        return reordered(compressor, dtype)


MEMORIES = registered.by_name(registered.all_memories())
MEMORIES_ELSEWHERE = [
    row
    for way in WAYS
    for row in covering.rows({"promise": of_ops(MemoryContract), "name": list(MEMORIES), "way": [way]})
]


def memories_elsewhere(promise, way):
    """Return the memories for which a promise is tested in this way."""
    return [MEMORIES[row["name"]] for row in MEMORIES_ELSEWHERE if (row["promise"], row["way"]) == (promise, way)]


class TestMemories(MemoryContract):
    way = "numpy"

    def pytest_generate_tests(self, metafunc):
        chosen = list(MEMORIES.values())
        if "ops" not in metafunc.fixturenames:
            metafunc.parametrize("memory", registered.params(chosen))
            return
        ways = {"numpy": chosen, **{w: memories_elsewhere(metafunc.definition.name, w) for w in FRAMEWORKS[1:]}}
        cases = [pytest.param(m, way, id=f"{way}-{registered.name(m)}") for way, some in ways.items() for m in some]
        metafunc.parametrize(("memory", "ops"), cases, indirect=["ops"])

    @pytest.fixture
    def ops(self, request):
        self.way = request.param
        return get_ops(request.param)

    def served(self, memory):
        served = list(super().served(memory))
        if covering.ALL:
            return served
        if self.way == "numpy":
            typical = [c for c in served if compressors.name_of(c) in steps.TYPICAL]
            return typical or served
        # One, and another one than the memory before.
        return [served[list(MEMORIES).index(registered.name(memory)) % len(served)]]


class TestOps(OpsContract):
    pass


class TestReferenceOps(OpsContract):
    """The operations where there are no kernels, and those of TensorFlow on GPUs."""

    @pytest.fixture(params=FRAMEWORKS)
    def ops(self, request):
        return get_ops(request.param, native=False)


class TestTracedCompressors(Traced, TestCompressors):
    test_bytes_are_equal_in_every_framework = CompressorContract.test_bytes_are_equal_in_every_framework
    # They run no array operation, or those of NumPy only.
    test_configuration_survives_json = None
    test_unfit_gives_a_reason_or_none = None
    test_nothing_is_used_after_it_was_consumed = None

    def pytest_generate_tests(self, metafunc):
        everywhere = "ops" not in metafunc.fixturenames
        # test_graphs.py has every method in a graph.
        chosen = registered.default_compressors() if covering.ALL else [PARTS[name] for name in steps.WAYS]
        chosen = chosen if everywhere else elsewhere(metafunc.definition.name, "graph")
        metafunc.parametrize("compressor", registered.params([in_graphs(c) for c in chosen]))


class OneTensor(TestTracedCompressors):
    """A contract on one tensor: differences of extra configurations in a graph do not depend on the tensor."""

    shapes = few_shapes = ((24, 40),)
    dtypes = ("float32",)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", registered.params(registered.extra_compressors()))
def test_extra_configurations_keep_promises_in_graphs(compressor):
    pytest.importorskip("tensorflow")
    contract, component = OneTensor(), traced(compressor)
    contract.test_bytes_are_equal_in_every_framework(component)
    contract.test_kept_plus_residual_is_the_gradient(component, get_ops("tensorflow"))


class TestTracedMemories(Traced, TestMemories):
    way = "graph"
    # They run no array operation, or those of NumPy only.
    test_configuration_survives_json = None
    test_incompatible_compressors_are_told_what_serves_them = None
    test_nothing_is_used_after_it_was_consumed = None

    def pytest_generate_tests(self, metafunc):
        chosen = memories_elsewhere(metafunc.definition.name, "graph")
        metafunc.parametrize("memory", registered.params([in_graphs(m) for m in chosen]))


class TestTracedOps(OpsContract):
    # The output of a graph is never the same object as its input.
    test_cast_to_its_own_dtype_is_no_copy = None

    @pytest.fixture
    def ops(self):
        pytest.importorskip("tensorflow")
        return traced_ops()


def test_every_registered_part_is_under_test():
    assert {compressors.name_of(c) for c in registered.all_compressors()} == set(compressors)
    assert {memories.name_of(m) for m in registered.all_memories()} == set(memories)


def test_every_reordered_part_exists():
    assert set(REORDERED) | set(REORDERED_FLOAT64) | set(TIED) <= set(compressors)


class TestCommunicators(steps.WithTypical, CommunicatorContract):
    # A plan resolves auto. tests/core/test_hierarchical.py says how many ranks a node has.
    @pytest.fixture(params=sorted(set(communicators) - {"auto", "hierarchical"}))
    def communicator(self, request):
        return communicators.make(request.param)

    @pytest.fixture(params=[1, 2, 3, 5] if covering.ALL else [1, 2, 3])
    def size(self, request):
        return request.param


class TestSimulatedTransport(TransportContract):
    @pytest.fixture(params=[1, 2, 5])
    def transports(self, request):
        return ranks_of(SimulatedTransport, request.param)
