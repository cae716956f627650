"""No memory."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import memories
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.spec import Array, Payload, State


@memories.register("none")
@dataclass(frozen=True)
class NoMemory(Memory):
    """No memory: what the compressor drops is lost.

    Formula: x = g
    """

    feeds_back = False

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        return Compensated(grad, state)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return state
