"""Adam on the change of the weights: FedAdam."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import outer_optimizers
from grace.core.errors import ConfigError
from grace.core.methods.outer import OuterOptimizer
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, State


@outer_optimizers.register("adam")
@dataclass(frozen=True)
class Adam(OuterOptimizer):
    r"""Adam, whose gradient is the mean change of the weights.

    Formula: m \leftarrow \beta_1 m + (1 - \beta_1) \bar d, \quad v \leftarrow \beta_2 v + (1 - \beta_2) \bar d^2, \quad
    w = a - \eta \, m / (\sqrt v + \epsilon)

    a are the weights after the last sync, d the mean of a - w over the ranks, eta is `lr` and epsilon is `eps`, which
    the paper calls tau. As there, the first moments are not corrected for their start at zero. It takes two buffers of
    the weights' size.

    Reference: Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2 (FedAdam).
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"outer optimizer adam: {name} must be positive, received {getattr(self, name)!r}.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"outer optimizer adam: {name} must lie in [0, 1), received {getattr(self, name)!r}.")

    def init(self, ops: ArrayOps, weights: Array) -> State:
        n, dtype = weights.shape[0], ops.dtype(weights)
        return {"first": ops.zeros(n, dtype), "second": ops.zeros(n, dtype)}

    def step(self, ops: ArrayOps, anchor: Array, change: Array, state: State) -> tuple[Array, State]:
        first = ops.weighted_sum(state["first"], self.beta1, change, 1 - self.beta1)
        second = ops.weighted_sum(state["second"], self.beta2, change * change, 1 - self.beta2)
        direction = first / (ops.sqrt(second) + ops.cast(self.eps, ops.dtype(second)))
        return ops.weighted_sum(anchor, 1, direction, -self.lr), {"first": first, "second": second}
