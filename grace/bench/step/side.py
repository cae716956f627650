"""A side of `grace bench step`: a communication library in a framework, and the training that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

SEED = 1234


class Training(Protocol):
    """One model and optimizer, ready to train."""

    def step(self) -> None:
        """Run forward pass, backward pass, exchange and update."""

    def reported_bytes(self) -> int | None:
        """Return the bytes that the method reports as sent by a rank in a step, over all hops; None for a baseline."""

    def gradient_bytes(self) -> int:
        """Return the size of all gradients in bytes."""

    def kept_bytes(self) -> int:
        """Return the bytes that the rank's memories keep between steps; 0 for a baseline."""


class Side(Protocol):
    """One communication library in one framework, initialized."""

    def train(self, method: str, launcher: str, options: Mapping[str, Any]) -> Training:
        """Make a model and an optimizer for the method. `options` belong to grace's configuration."""

    def barrier(self) -> None:
        """Wait for all ranks."""
