"""The mean of the weights: local SGD, federated averaging."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import outer_optimizers
from grace.core.methods.outer import OuterOptimizer
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, State


@outer_optimizers.register("average")
@dataclass(frozen=True)
class Average(OuterOptimizer):
    r"""Mean of the weights of all ranks.

    Formula: w = a - \bar d, \quad \bar d = \mathrm{mean}_r(a - w_r)

    a are the weights after the last sync. It keeps nothing.

    Reference: Stich, "Local SGD converges fast and communicates little", ICLR 2019, Algorithm 1; McMahan et al.,
    "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.
    """

    def step(self, ops: ArrayOps, anchor: Array, change: Array, state: State) -> tuple[Array, State]:
        return anchor - change, state
