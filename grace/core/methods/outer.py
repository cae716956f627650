"""Base class of outer optimizers, which make new weights of the changes of all ranks since their last sync."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, State


@dataclass(frozen=True)
class OuterOptimizer(ABC):
    """Base of outer optimizers: a pure step per tensor, configured by its fields only.

    All arrays are flat and float32, or float64 for float64 weights. They are equal on all ranks, and so are the
    results. No method changes an array that it receives.
    """

    #: True if all ranks go on with the new weights; False if they keep weights of their own, as `own` says.
    agrees: ClassVar[bool] = True

    def init(self, ops: ArrayOps, weights: Array) -> State:
        """Return the state before the first sync (default: none)."""
        return {}

    @abstractmethod
    def step(self, ops: ArrayOps, anchor: Array, change: Array, state: State) -> tuple[Array, State]:
        """Return the weights after a sync and the new state.

        `anchor` has the weights after the last sync, and `change` the mean over the ranks of (anchor - weights now), so
        that anchor - change is the mean of the weights.
        """

    def own(self, ops: ArrayOps, anchor: Array, new: Array, weights: Array) -> Array:
        """Return the weights with which a rank goes on, from those of `step`, those before, and the rank's own.

        Unlike the others, the rank's own differ from those of other ranks. Only called if not `agrees`.
        """
        return new
