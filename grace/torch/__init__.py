"""PyTorch adapter: `DistributedOptimizer` exchanges compressed gradients over Horovod."""

from __future__ import annotations

from grace.torch.exchange import Exchange
from grace.torch.optimizer import DistributedOptimizer
from grace.torch.scheduler import CompressionScheduler
from grace.torch.transport import HorovodTransport

__all__ = ["CompressionScheduler", "DistributedOptimizer", "Exchange", "HorovodTransport"]
