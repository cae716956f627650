"""Every registered part, as it comes and in extra configurations, under the contract of its kind."""

from __future__ import annotations

import inspect

import pytest

from grace.core.ops import get_ops
from grace.core.registry import compressors, memories
from grace.testing import CompressorContract, MemoryContract, OpsContract, Traced, traced, traced_ops
from tests.support import registered

# Payloads that need not be the same bytes in every framework, and why: for all gradients, and for those of float64.
REORDERED = {
    "atomo": "the signs of singular vectors are those of each framework; test_atomo.py compares mode entry",
    **dict.fromkeys(
        ("gradiveq", "gradzip", "powersgd"), "a matrix product is summed in the order of each framework's BLAS"
    ),
}
# Gradients of which a method sends a part that is not unique: with equal singular values, the vectors are any basis.
TIED = {"atomo": ("huge and tiny",)}
REORDERED_FLOAT64 = dict.fromkeys(
    ("adaptive", "chain", "efsignsgd", "onebit", "qsgd", "qsparse", "terngrad", "wangni"),
    "the sum in the scale is rounded once for float32, but nothing is wider than float64",
)


def reordered(compressor, dtype):
    name = compressors.name_of(compressor)
    return REORDERED.get(name) or (REORDERED_FLOAT64.get(name) if dtype == "float64" else None)


class TestCompressors(CompressorContract):
    @pytest.fixture(params=registered.params(registered.all_compressors()))
    def compressor(self, request):
        return request.param

    def reordered(self, compressor, dtype):
        return reordered(compressor, dtype)

    def rounding(self, compressor):
        # Vectors of close singular values are less sure than the values.
        return 256 if isinstance(compressor, compressors.get("atomo")) else super().rounding(compressor)

    def tied(self, compressor, case):
        return any(isinstance(compressor, compressors.get(name)) and case in cases for name, cases in TIED.items())


class TestMemories(MemoryContract):
    @pytest.fixture(params=registered.params(registered.all_memories()))
    def memory(self, request):
        return request.param


class TestOps(OpsContract):
    pass


class TestTracedCompressors(Traced, TestCompressors):
    @pytest.fixture(params=registered.params([traced(c) for c in registered.default_compressors()]))
    def compressor(self, request):
        return request.param


class FewTensors(TestTracedCompressors):
    """What extra configurations may do otherwise in a graph does not depend on the tensor."""

    shapes = few_shapes = ((24, 40), (0,))
    dtypes = ("float32",)


@pytest.mark.parametrize("compressor", registered.params(registered.extra_compressors()))
@pytest.mark.parametrize(
    "promise",
    [
        FewTensors.test_bytes_are_equal_in_every_framework,
        FewTensors.test_kept_plus_residual_is_the_gradient,
    ],
)
def test_extra_configurations_keep_promises_in_graphs(promise, compressor):
    pytest.importorskip("tensorflow")
    more = {"ops": get_ops("tensorflow")} if "ops" in inspect.signature(promise).parameters else {}
    promise(FewTensors(), traced(compressor), **more)


class TestTracedMemories(Traced, TestMemories):
    @pytest.fixture(params=registered.params([traced(m) for m in registered.all_memories()]))
    def memory(self, request):
        return request.param


class TestTracedOps(OpsContract):
    # What comes out of a graph is never the object that went in.
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
