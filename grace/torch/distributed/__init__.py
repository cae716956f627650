"""The part of the PyTorch adapter for torch.distributed."""

from __future__ import annotations

from grace.torch.distributed.checkpoint import ExchangeState
from grace.torch.distributed.transport import ProcessGroupTransport

__all__ = ["ExchangeState", "ProcessGroupTransport"]
