"""Memory of AdaComp: a residual, and the latest gradient beside it."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import memories
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import overwrites
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("adacomp")
@overwrites("residual")
@dataclass(frozen=True)
class AdaCompMemory(Memory):
    r"""Error feedback that shows the compressor the latest gradient beside the compensated one.

    Formula: x = e + g, \quad \text{send } C(x, g), \quad e \leftarrow x - C(x, g)

    The compressor reads g from `at.memory["gradient"]`. Between steps only e is kept, as in `residual`.

    Reference: Chen et al., "AdaComp: adaptive residual gradient compression for data-parallel distributed training",
    AAAI 2018, Algorithm 2.
    """

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"residual": ops.zeros(spec.numel, spec.work_dtype)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x, finite = at.ops.finite_sum(state["residual"], 1, grad, 1, at.out)
        return Compensated(x, {"gradient": grad}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return {"residual": compressor.residual_(x_, payload, at)}
