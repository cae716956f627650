"""PyTorch adapter: `DistributedOptimizer` and `register` exchange compressed gradients."""

from __future__ import annotations

from grace.core.session.scheduler import CompressionScheduler
from grace.torch import optim as optim
from grace.torch import trainers as trainers
from grace.torch.exchange import Exchange
from grace.torch.optimizer import DistributedOptimizer
from grace.torch.register import register

__all__ = ["CompressionScheduler", "DistributedOptimizer", "Exchange", "register"]
