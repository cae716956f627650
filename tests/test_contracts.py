"""Every registered part, as it comes and in extra configurations, under the contract of its kind."""

from __future__ import annotations

import pytest

from grace.core.registry import compressors, memories
from grace.testing import CompressorContract, MemoryContract, OpsContract
from tests import parts

# Payloads that need not be the same bytes in every framework, and why: for all gradients, and for those of float64.
REORDERED = {"powersgd": "a matrix product is summed in the order of each framework's BLAS"}
REORDERED_FLOAT64 = dict.fromkeys(
    ("efsignsgd", "onebit", "qsgd", "terngrad"),
    "the sum in the scale is rounded once for float32, but nothing is wider than float64",
)


def reordered(compressor, dtype):
    name = compressors.name_of(compressor)
    return REORDERED.get(name) or (REORDERED_FLOAT64.get(name) if dtype == "float64" else None)


class TestCompressors(CompressorContract):
    @pytest.fixture(params=parts.params(parts.all_compressors()))
    def compressor(self, request):
        return request.param

    def reordered(self, compressor, dtype):
        return reordered(compressor, dtype)


class TestMemories(MemoryContract):
    @pytest.fixture(params=parts.params(parts.all_memories()))
    def memory(self, request):
        return request.param


class TestOps(OpsContract):
    pass


def test_every_registered_part_is_under_test():
    assert {compressors.name_of(c) for c in parts.all_compressors()} == set(compressors)
    assert {memories.name_of(m) for m in parts.all_memories()} == set(memories)


def test_every_reordered_part_exists():
    assert set(REORDERED) | set(REORDERED_FLOAT64) <= set(compressors)
