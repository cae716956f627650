"""PyTorch adapter: `DistributedOptimizer` exchanges compressed gradients over Horovod or torch.distributed."""

from __future__ import annotations

from grace.torch.exchange import Exchange
from grace.torch.optimizer import DistributedOptimizer
from grace.torch.scheduler import CompressionScheduler

__all__ = ["CompressionScheduler", "DistributedOptimizer", "Exchange"]
