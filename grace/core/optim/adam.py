"""Adam, and 1-bit Adam, which is Adam whose second moment is frozen after a warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.ops.composites import ArrayOps
from grace.core.optim.moments import Freezing, limited_sum, masked_sum
from grace.core.spec import Array, State


@dataclass(frozen=True)
class Adam(Freezing):
    r"""Adam, as `torch.optim.Adam` and `AdamW` have it.

    Formula: m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
    w \leftarrow w - \eta \, \hat m / (\sqrt{\hat v} + \epsilon)

    with m and v divided by 1 - beta^t. After the freeze, v stays, the state has 1 / (sqrt v + eps) in its place, and m
    is the merged momentum, times that factor if it is `scaled`. Weight decay adds to the gradient, or shrinks the
    weights if it is decoupled.

    Reference: Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015; Tang et al., "1-bit Adam", ICML
    2021, Algorithm 1.
    """

    name = "OneBitAdam"

    decoupled_weight_decay: bool = False

    def step(
        self, ops: ArrayOps, weights: Array, gradient: Array, state: State, lr: float, number: int
    ) -> tuple[Array, State]:
        state = self._moments(ops, self._decay(ops, weights, gradient), state)
        first, second = self._corrections(number)
        direction = state["exp_avg"] / self._root(ops, state["exp_avg_sq"], second)
        return ops.weighted_sum(weights, self._share(lr), direction, -lr / first), state

    def momentum(self, ops: ArrayOps, weights: Array, gradient: Array, state: State) -> Array:
        gradient = self._decay(ops, weights, gradient)
        if not self.scaled:
            return self._follow(ops, state["exp_avg"], gradient)
        first, _ = self.betas
        return limited_sum(ops, state["exp_avg"], first, gradient, 1 - first, state["scale"], self._limit)

    def freeze(self, ops: ArrayOps, state: State, number: int) -> State:
        _, second = self._corrections(number)
        momentum, scale = state["exp_avg"], self.scale(ops, state["exp_avg_sq"], second)
        return {"exp_avg": momentum * scale if self.scaled else momentum, "scale": scale}

    def scale(self, ops: ArrayOps, second: Array, correction: float) -> Array:
        """Return 1 / (sqrt(v / correction) + eps); 0 where v is."""
        one = ops.cast(1.0, ops.dtype(second))
        return ops.where(second > 0, one / self._root(ops, second, correction), 0.0)

    def frozen_step(
        self,
        ops: ArrayOps,
        weights: Array,
        momentum: Array,
        state: State,
        lr: float,
        number: int,
        out: tuple[Array, Array] | None = None,
    ) -> tuple[Array, State]:
        scale, share, (first, _) = state["scale"], self._share(lr), self._corrections(number)
        if self.scaled:
            new, momentum = masked_sum(ops, weights, share, momentum, -lr / first, scale, out)
        else:
            momentum = ops.where(scale > 0, momentum, 0.0)
            new = ops.weighted_sum(weights, share, momentum * scale, -lr / first)
        return new, {**state, "exp_avg": momentum}

    def _decay(self, ops: ArrayOps, weights: Array, gradient: Array) -> Array:
        """Return the gradient with the weight decay that is a part of it."""
        if self.decoupled_weight_decay or not self.weight_decay:
            return gradient
        return ops.weighted_sum(gradient, 1, weights, self.weight_decay)

    @property
    def _shrinks(self) -> bool:
        """True if weights decay apart from the gradient."""
        return self.decoupled_weight_decay and self.weight_decay > 0

    def _share(self, lr: float) -> float:
        """Return the share of the weights that decoupled weight decay leaves."""
        return 1 - lr * self.weight_decay if self._shrinks else 1
