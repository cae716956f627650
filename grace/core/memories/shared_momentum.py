"""Memory of 1-bit Adam and GMC: momentum of the merged result, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError
from grace.core.memories.diana import check_mean
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory, Need, fallen_by, needs_of
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register(
    "shared_momentum", About(tests=[{"momentum": 0.5}, {"momentum": 0.5, "dampening": 0.0, "lr_correction": True}])
)
@dataclass(frozen=True)
class SharedMomentum(Memory):
    r"""Momentum that all ranks share, with error feedback, for 1-bit Adam and GMC.

    Formula: x = e + \beta \bar m + (1 - \tau) g, \quad \text{send } C(x), \quad e \leftarrow x - C(x), \quad
    \bar m \leftarrow \mathrm{mean}(C(x))

    beta is `momentum`, and tau `dampening`; without it, tau is beta, as in Adam. With 0 it is the momentum of SGD and
    of GMC. Every rank adds its gradient to the last merged momentum, which is equal on all ranks, and the optimizer
    receives the new one: the residual is in its units. Set the optimizer's own momentum to 0; the page on Adam has an
    Adam that takes the momentum from here. The memory takes two buffers of the gradient's size.

    If the learning rate changes, this is the momentum of PyTorch's SGD, whose steps are lr times it. GMC takes the last
    change of the weights in place of it, - (w_t - w_{t-1}) / lr: with `lr_correction`, bar m is first scaled by (last
    learning rate / this one), so that a step still moves by what momentum has left of the last move.

    Reference: Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
    ICML 2021, Algorithm 1; Zhao et al., "Global momentum compression for sparse communication in distributed learning",
    2019.
    """

    momentum: float = 0.9
    dampening: float | None = None
    lr_correction: bool = False

    additive = ("momentum", "residual")

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"memory shared_momentum: momentum must lie in [0, 1), received {self.momentum!r}.")
        if self.dampening is not None and not 0 <= self.dampening < 1:
            raise ConfigError(
                f"memory shared_momentum: dampening must lie in [0, 1) or be null, received {self.dampening!r}."
            )

    def check(self, compressor: Compressor) -> None:
        check_mean("shared_momentum", compressor)

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        return needs_of({"mean": True, "lr": self.lr_correction, "no_momentum": self.momentum})

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        state = {name: ops.zeros(spec.numel, spec.work_dtype) for name in ("momentum", "residual")}
        return {**state, "lr": ops.zeros(1, "float64")} if self.lr_correction else state

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        ops, dampening = at.ops, self.momentum if self.dampening is None else self.dampening
        momentum, rest = state["momentum"], {"momentum": state["momentum"]}
        if self.lr_correction:
            factor, rest["lr"] = fallen_by(state["lr"], at)
            momentum = momentum * ops.cast(factor, at.spec.work_dtype)
        momentum = ops.weighted_sum(momentum, self.momentum, grad, 1 - dampening)
        x, finite = ops.finite_sum(momentum, 1, state["residual"], 1)
        return Compensated(x, rest, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return {**state, "residual": compressor.residual_(x_, payload, at)}

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        # A copy, because the optimizer may change the gradient that it receives.
        return merged, {**state, "momentum": at.ops.copy(merged)}
