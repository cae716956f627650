"""LANS: LAMB with normalized gradients and Nesterov's momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace.core.methods.memory import wide_norm
from grace.core.ops.composites import ArrayOps
from grace.core.optim.moments import Moments, trust_ratio
from grace.core.spec import Array, State


@dataclass(frozen=True)
class Lans(Moments):
    r"""LANS: LAMB on gradients of norm 1 per tensor, with Nesterov's momentum; with compressed gradients, CLAN.

    Formula: g \leftarrow g / \|g\|, \quad r = \hat m / (\sqrt{\hat v} + \epsilon) + \lambda w, \quad
    c = g / (\sqrt{\hat v} + \epsilon) + \lambda w, \quad
    w \leftarrow w - \eta \|w\| (\beta_1 r / \|r\| + (1 - \beta_1) c / \|c\|)

    lambda is `weight_decay`. If a norm is zero, the ratio of norms is 1.

    Reference: Zheng et al., "Accelerated large batch optimization of BERT pretraining in 54 minutes", 2020,
    Algorithm 2; Zhong et al., "Compressed communication for distributed training: adaptive methods and system", 2021
    (CLAN).
    """

    name = "Lans"

    eps: float = 1e-6

    def step(
        self, ops: ArrayOps, weights: Array, gradient: Array, state: State, lr: float, number: int
    ) -> tuple[Array, State]:
        dtype, size = ops.dtype(weights), wide_norm(ops, gradient)
        scale = ops.where(size > 0, 1 / ops.where(size > 0, size, 1.0), 0.0)
        gradient = gradient * ops.cast(scale, dtype)
        state = self._moments(ops, gradient, state)
        first, second = self._corrections(number)
        root, new = self._root(ops, state["exp_avg_sq"], second), weights
        beta, _ = self.betas
        for direction, share, correction in ((state["exp_avg"], beta, first), (gradient, 1 - beta, 1.0)):
            update = ops.weighted_sum(direction / root, 1 / correction, weights, self.weight_decay)
            ratio = trust_ratio(ops, weights, update, 0.0, math.inf)
            new = new - update * ops.cast(ratio * (lr * share), dtype)
        return new, state
