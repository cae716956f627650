"""Base class of outer optimizers, which make new weights of what all ranks have moved since their last meeting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, State


@dataclass(frozen=True)
class OuterOptimizer(ABC):
    """Base of outer optimizers: a pure step per tensor, configured by its fields only.

    All arrays are flat and float32, or float64 for float64 weights. They are equal on all ranks, and so are the
    results. No method changes an array that it receives.
    """

    def init(self, ops: ArrayOps, weights: Array) -> State:
        """Return the state before the first meeting (default: none)."""
        return {}

    @abstractmethod
    def step(self, ops: ArrayOps, anchor: Array, change: Array, state: State) -> tuple[Array, State]:
        """Return the weights after a meeting and the new state.

        `anchor` has the weights after the last meeting, and `change` the mean over the ranks of (anchor - weights now),
        so that anchor - change is the mean of the weights.
        """
