"""Memory of PowerSGD: error feedback against the aggregate."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import memories
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import overwrites
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("powersgd")
@overwrites("residual")
@dataclass(frozen=True)
class PowerSGDMemory(Memory):
    r"""Error feedback against the merged gradient of all ranks, for PowerSGD.

    Formula: x_i = e_i + g_i, \quad \text{send } C(x_i), \quad e_i \leftarrow x_i - \mathrm{mean}_j \, C(x_j)

    The residual is the difference from what the optimizer applied on all ranks. Its mean over the ranks equals that of
    the memory `residual`; the differences between the ranks remain in it.

    Reference: Vogels et al., "PowerSGD", NeurIPS 2019, Algorithm 2.
    """

    needs = ("mean",)
    feeds_back = "mean"

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"residual": ops.zeros(spec.numel, spec.work_dtype)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x, finite = at.ops.finite_sum(state["residual"], 1, grad, 1, at.out)
        return Compensated(x, {}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return {"residual": x_}

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        return merged, {"residual": at.ops.sub_(state["residual"], merged)}
