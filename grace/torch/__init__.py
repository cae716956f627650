"""PyTorch adapter: `DistributedOptimizer` wraps Horovod's and compresses what travels."""

from __future__ import annotations

from grace.torch.optimizer import DistributedOptimizer, Exchange
from grace.torch.transport import HorovodTransport

__all__ = ["DistributedOptimizer", "Exchange", "HorovodTransport"]
