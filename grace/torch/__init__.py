"""PyTorch adapter: `DistributedOptimizer` and `register` exchange compressed gradients."""

from __future__ import annotations

from grace.torch import trainers as trainers
from grace.torch.exchange import Exchange
from grace.torch.optimizer import DistributedOptimizer
from grace.torch.register import register
from grace.torch.scheduler import CompressionScheduler

__all__ = ["CompressionScheduler", "DistributedOptimizer", "Exchange", "register"]
