"""SGD with momentum on the change of the weights: DiLoCo, SlowMo, block momentum, FedAvgM."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import outer_optimizers
from grace.core.errors import ConfigError
from grace.core.methods.outer import OuterOptimizer
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, State


@outer_optimizers.register("sgd")
@dataclass(frozen=True)
class SGD(OuterOptimizer):
    r"""SGD with momentum, whose gradient is the mean change of the weights.

    Formula: m \leftarrow \mu m + \bar d, \quad w = a - \eta \, m \quad \text{or} \quad w = a - \eta (\bar d + \mu m)
    \text{ with Nesterov's momentum}

    a are the weights after the last sync, d the mean of a - w over the ranks, eta is `lr` and mu is `momentum`. With lr
    1 and momentum 0, it is the mean of the weights. Momentum takes one buffer of the weights' size. DiLoCo has lr 0.7,
    momentum 0.9 and Nesterov's form. SlowMo, blockwise model-update filtering (BMUF) and FedAvgM are this recursion
    under other names, for a constant inner learning rate.

    Reference: Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023; Wang et al.,
    "SlowMo: improving communication-efficient distributed SGD with slow momentum", ICLR 2020; Chen and Huo, "Scalable
    training of deep learning machines by incremental block training", ICASSP 2016; Hsu, Qi and Brown, 2019.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"outer optimizer sgd: lr must be positive, received {self.lr!r}.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"outer optimizer sgd: momentum must lie in [0, 1), received {self.momentum!r}.")
        if self.nesterov and not self.momentum:
            raise ConfigError("outer optimizer sgd: nesterov needs momentum above 0, received 0; set momentum = 0.9.")

    def init(self, ops: ArrayOps, weights: Array) -> State:
        return {"momentum": ops.zeros(weights.shape[0], ops.dtype(weights))} if self.momentum else {}

    def step(self, ops: ArrayOps, anchor: Array, change: Array, state: State) -> tuple[Array, State]:
        if not self.momentum:
            return ops.weighted_sum(anchor, 1, change, -self.lr), state
        momentum = ops.weighted_sum(change, 1, state["momentum"], self.momentum)
        direction = ops.weighted_sum(change, 1, momentum, self.momentum) if self.nesterov else momentum
        return ops.weighted_sum(anchor, 1, direction, -self.lr), {"momentum": momentum}
