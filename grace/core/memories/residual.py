"""Error feedback: what was not sent is added to the next gradient."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.ops.base import ArrayOps
from grace.core.registry import memories
from grace.core.spec import Array, Payload, Site, State, TensorSpec


@memories.register("residual")
@dataclass(frozen=True)
class Residual(Memory):
    """x = beta e + gamma g; send C(x); e = x - C(x).

    Costs one buffer of the gradient's size (float32 for half-precision gradients). GRACE, equation 4; Stich et al.,
    "Sparsified SGD with memory", NeurIPS 2018.
    """

    beta: float = 1.0
    gamma: float = 1.0

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"residual": ops.zeros(spec.numel, spec.work_dtype)}

    def compensate(self, grad: Array, state: State, at: Site) -> tuple[Array, State]:
        if self.beta == 1 and self.gamma == 1:
            return state["residual"] + grad, {}
        return at.ops.add_(state["residual"] * self.beta, grad if self.gamma == 1 else grad * self.gamma), {}

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return {"residual": compressor.residual_(x_, payload, at)}
