"""Memory of LPC-SVRG: a control variate that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("svrg", About(tests=[{"period": 2}]))
@dataclass(frozen=True)
class SVRG(Memory):
    r"""Control variate that all ranks share: compresses the difference from an earlier merged gradient.

    Formula: x = g - c, \quad \text{send } C(x), \quad \bar g = \mathrm{mean}(C(x)) + c

    c takes the merged gradient of each step divisible by `period`. It starts at zero and is equal on all ranks, because
    the merged gradients are. It costs no bytes, and the mean keeps its expectation for every c. The closer g stays to
    c, the smaller are x and the quantizer's error. What the compressor drops is not fed back.
    Full SVRG also computes the gradient at the weights of the snapshot on the same batch, g - g(snapshot) + c, and
    takes the gradient over all data as c. This memory does neither: c is the merged gradient of one step. So it does
    not reduce the noise of the batches, only that of the compression, and only where the mean gradient is large
    compared with that noise. It takes one buffer of the gradient's size.

    Reference: Yu, Wu and Huang, "Exploring fast and communication-efficient algorithms in large-scale distributed
    networks", AISTATS 2019; Johnson and Zhang, "Accelerating stochastic gradient descent using predictive variance
    reduction", NIPS 2013.
    """

    period: int = 100

    feeds_back = False
    across_ranks = "equal"

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError(f"memory svrg: period (in steps) must be at least 1, received {self.period!r}.")

    def check(self, compressor: Compressor) -> None:
        if not compressor.averages:
            raise IncompatibleError(
                f"memory 'svrg' needs the mean of the payloads, but {compressor} gives a vote. "
                "Valid memories: none, momentum."
            )

    needs = ("mean",)

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"snapshot": ops.zeros(spec.numel, spec.work_dtype)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x = at.ops.weighted_sum(grad, 1, state["snapshot"], -1)
        return Compensated(x, {"snapshot": state["snapshot"]})

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return state

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        ops = at.ops
        snapshot = state["snapshot"]
        total = ops.weighted_sum(merged, 1, snapshot, 1)
        due = ops.full(1, at.key.step % self.period, "int64")[0] == 0
        # A copy, because the optimizer may change the gradient that it receives.
        return total, {"snapshot": ops.choose(due, lambda: ops.copy(total), lambda: snapshot)}
