"""Contract tests for parts of grace, also those that live elsewhere; needs pytest, but no framework.

import grace.testing, pytest, my_package

class TestMine(grace.testing.CompressorContract):
    @pytest.fixture(params=[my_package.Mine(), my_package.Mine(bits=2)], ids=repr)
    def compressor(self, request):
        return request.param

`Traced` before a contract runs it in graphs of TensorFlow.
"""

from __future__ import annotations

from grace.testing.contracts import CompressorContract
from grace.testing.memory_contract import MemoryContract
from grace.testing.ops_contract import OpsContract
from grace.testing.poison import PoisonOps
from grace.testing.traced import Traced, traced, traced_ops

__all__ = ["CompressorContract", "MemoryContract", "OpsContract", "PoisonOps", "Traced", "traced", "traced_ops"]
