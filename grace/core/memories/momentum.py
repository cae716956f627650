"""Memory of Signum: momentum before compression."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory, Need, needs_of
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("momentum", About(tests=[{"momentum": 0.5}]))
@dataclass(frozen=True)
class Momentum(Memory):
    r"""Momentum before compression, without error feedback.

    Formula: m \leftarrow \beta m + (1 - \beta) g, \quad \text{send } C(m)

    beta is `momentum`. Every rank averages its own gradients, and m starts at zero. Set the optimizer's own momentum to
    0. The memory takes one buffer of the gradient's size (float32 for half-precision gradients).

    Reference: Bernstein et al., "signSGD: compressed optimisation for non-convex problems", ICML 2018, Algorithm 2.
    """

    momentum: float = 0.9

    feeds_back = False
    additive = ("momentum",)

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"memory momentum: momentum must lie in [0, 1), received {self.momentum!r}.")

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        return needs_of({"no_momentum": self.momentum})

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"momentum": ops.zeros(spec.numel, spec.work_dtype)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x, finite = at.ops.finite_sum(state["momentum"], self.momentum, grad, 1 - self.momentum)
        return Compensated(x, {}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return {"momentum": x_}
