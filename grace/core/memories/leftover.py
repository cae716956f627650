"""Memory that sends the residual of an earlier stage of the schedule once."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory
from grace.core.ops.composites import ArrayOps
from grace.core.values.registry import memories
from grace.core.values.spec import Array, Payload, Site, State, TensorSpec


@memories.register("leftover")
@dataclass(frozen=True)
class Leftover(Memory):
    r"""Residual of an earlier stage: added to one gradient, then dropped.

    Formula: x = e + g, \quad \text{send } C(x), \quad e \leftarrow 0

    grace uses it where a stage of the schedule has no memory and the stage before it had error feedback.
    """

    feeds_back = False
    holds_residual = True

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"residual": ops.zeros(spec.numel, spec.work_dtype)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x, finite = at.ops.finite_sum(state["residual"], 1, grad, 1)
        return Compensated(x, {}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return {"residual": at.ops.zeros(at.spec.numel, at.spec.work_dtype)}
