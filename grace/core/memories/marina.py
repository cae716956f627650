"""Memory of MARINA: compresses what the gradient of a batch has changed since the step before."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError
from grace.core.memories.diana import check_mean
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("marina", About(tests=[{"period": 2}]))
@dataclass(frozen=True)
class Marina(Memory):
    r"""Estimate of the mean gradient, equal on all ranks: compresses what it has changed since the step before.

    Formula: x_i = g_i(w) - g_i(w'), \quad \text{send } C(x_i), \quad
    \bar g \leftarrow \bar g + \mathrm{mean}_i\, C(x_i)

    Full round: \text{send } g_i, \quad \bar g \leftarrow \mathrm{mean}_i\, g_i

    g_i(w) and g_i(w') are gradients of the same batch at the weights of this step and of the one before, so a step
    computes twice. Step 0 is a full round, and each later step is one with probability 1 / `period`, which the ranks
    draw from the shared seed. In a full round, a rank passes the gradient of all its data, or of a large batch, and
    sends it as it is. C should be unbiased. The paper takes for 1 / `period` the share of the bytes that C sends. The
    more slowly the gradients change, the smaller are x and the error of C. The memory takes one buffer of the
    gradient's size, which is equal on all ranks. If it starts again in the middle of a run, it compresses the gradients
    themselves in the first step.

    Reference: Gorbunov, Burlachenko, Li and Richtarik, "MARINA: faster non-convex distributed learning with
    compression", ICML 2021, Algorithm 1, and with batches Algorithm 3 (VR-MARINA).
    """

    period: int = 20

    needs = ("reference", "previous", "full", "mean")
    feeds_back = False
    across_ranks = "equal"

    def __post_init__(self) -> None:
        check_period("marina", self.period)

    def check(self, compressor: Compressor) -> None:
        check_mean("marina", compressor)

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"estimate": ops.zeros(spec.numel, spec.work_dtype), "known": ops.zeros(1, spec.work_dtype)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        return Compensated(difference(grad, at.reference, state["known"], at), state)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return state

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        ops, before = at.ops, state["estimate"]
        if at.reference is not None:
            change = merged
            merged = ops.choose(state["known"][0] > 0, lambda: ops.weighted_sum(before, 1, change, 1), lambda: change)
        # A copy, because the optimizer may change the gradient that it receives.
        return merged, {"estimate": ops.copy(merged), "known": ops.full(1, 1, at.spec.work_dtype)}


def check_period(name: str, period: int) -> None:
    """Raise ConfigError unless the average number of steps between full rounds is positive."""
    if period < 1:
        raise ConfigError(
            f"memory {name}: period, the average number of steps from one full round to the next, must be at least 1, "
            f"received {period!r}."
        )


def difference(grad: Array, reference: Array | None, known: Array, at: Site) -> Array:
    """Return a new array: a gradient less the one at other weights, if there is one and what it adds to is known."""
    ops = at.ops
    if reference is None:
        return ops.copy(grad)
    return ops.choose(known[0] > 0, lambda: ops.weighted_sum(grad, 1, reference, -1), lambda: ops.copy(grad))
