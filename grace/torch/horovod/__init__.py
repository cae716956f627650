"""The part of the PyTorch adapter for Horovod."""

from __future__ import annotations

from grace.torch.horovod.elastic import TorchState
from grace.torch.horovod.transport import HorovodTransport

__all__ = ["HorovodTransport", "TorchState"]
