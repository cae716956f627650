"""Elastic averaging: ranks keep weights of their own, which a common centre holds together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grace.core.config.registry import outer_optimizers
from grace.core.errors import ConfigError
from grace.core.methods.outer import OuterOptimizer
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, State


@outer_optimizers.register("elastic")
@dataclass(frozen=True)
class Elastic(OuterOptimizer):
    r"""Centre that moves towards the mean of the ranks, which keep weights of their own and move towards the centre.

    Formula: a' = a - \beta \, \bar d, \quad w_r \leftarrow w_r + \alpha \, (a - w_r)

    a is the centre, d the mean of a - w over the ranks, beta is `lr` and alpha is `pull`. The paper has beta 0.9 and
    alpha beta / ranks. All ranks have the centre, and it is the model in the end: `common_weights` of the exchange. It
    keeps nothing.

    Reference: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015, equations 5 and
    6.
    """

    agrees: ClassVar[bool] = False

    lr: float = 0.9
    pull: float = 0.225

    def __post_init__(self) -> None:
        for name in ("lr", "pull"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"outer optimizer elastic: {name} must lie in (0, 1], received {getattr(self, name)!r}."
                )

    def step(self, ops: ArrayOps, anchor: Array, change: Array, state: State) -> tuple[Array, State]:
        return ops.weighted_sum(anchor, 1, change, -self.lr), state

    def own(self, ops: ArrayOps, anchor: Array, new: Array, weights: Array) -> Array:
        return ops.weighted_sum(weights, 1 - self.pull, anchor, self.pull)
