"""Contract tests for compressors, memories, communicators, transports and array operations, inside and outside grace.

They need pytest, but no framework. Example:

class TestMine(grace.testing.CompressorContract):
    @pytest.fixture(params=[my_package.Mine(), my_package.Mine(bits=2)], ids=repr)
    def compressor(self, request):
        return request.param

With the mixin `Traced` before a contract, the tests run in TensorFlow graphs.
"""

from __future__ import annotations

from grace.testing.communicator_contract import CommunicatorContract
from grace.testing.contracts import CompressorContract
from grace.testing.memory_contract import MemoryContract
from grace.testing.ops_contract import OpsContract
from grace.testing.poison import PoisonOps
from grace.testing.traced import Traced, traced, traced_ops
from grace.testing.transport_contract import TransportContract

__all__ = [
    "CommunicatorContract",
    "CompressorContract",
    "MemoryContract",
    "OpsContract",
    "PoisonOps",
    "Traced",
    "TransportContract",
    "traced",
    "traced_ops",
]
