"""0/1 Adam: Adam whose ranks exchange momenta of one bit from the start, and later only in some steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grace.core.config.outer import make_outer
from grace.core.errors import ConfigError
from grace.core.ops.composites import ArrayOps
from grace.core.optim.adam import Adam
from grace.core.spec import Array, State

#: The steps between two syncs, by the number of steps since the freeze.
EVERY: Mapping[int, int] = {32_768: 2, 65_536: 4, 98_304: 8, 131_072: 16}


class Schedule:
    """The steps of 0/1 Adam whose gradients the second moment takes, and those at which the ranks sync.

    Steps count from 1; in a graph, they are 0-d arrays. Raises ConfigError for numbers that cannot work.
    """

    def __init__(self, every: int | Mapping[int, int], scaler: int, freeze_step: int | None, where: str) -> None:
        if freeze_step is None:
            raise ConfigError(f"{where}: expected freeze_step or total_steps, received neither; name one of them.")
        if scaler < 1:
            raise ConfigError(f"{where}: var_update_scaler must be at least 1, received {scaler!r}.")
        outer = make_outer({"every": every})
        assert outer is not None
        self._outer, self._scaler, self._freeze_step = outer, scaler, freeze_step

    def learns(self, step: Any, learn_at: Any) -> Any:
        """Return whether the second moment takes the gradient of a step, if `learn_at` is the next one to do so."""
        return (step == learn_at) & (step <= self._freeze_step)

    def next_learning(self, step: Any, learnt: Any) -> Any:
        """Return the step of the gradient after that of `step`, which is the `learnt`-th one in the second moment."""
        return step + 2 ** (learnt // self._scaler)

    def syncs(self, step: Any) -> Any:
        """Return whether the ranks sync after a step: after each one until the freeze, and less often after it."""
        return (step <= self._freeze_step) | self._outer.sends(step - self._freeze_step)

    def to_config(self) -> dict[str, Any]:
        """Return the arguments of an optimizer that set it, JSON-able."""
        return {"every": self._outer.to_config()["every"], "var_update_scaler": self._scaler}


@dataclass(frozen=True)
class ZeroOneAdam(Adam):
    r"""Adam whose ranks step on their own and exchange what they have moved, before it is divided by sqrt v.

    Formula: m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad u \leftarrow u + \eta m, \quad
    w \leftarrow w - \eta \, m / (\sqrt{\hat v} + \epsilon)

    and at a sync, with a the weights after the last one, and the sums over the steps since then:
    m \leftarrow \bar u / \sum \eta, \quad w \leftarrow a - \bar u / (\sqrt{\hat v} + \epsilon), \quad u \leftarrow 0

    eta is the learning rate divided by 1 - beta1^t. v takes the mean gradients of some steps only, and v-hat is divided
    by 1 - beta2^k after k of them. Elements whose v is zero keep their weights.

    Reference: Lu et al., "Maximizing communication efficiency for large-scale training via 0/1 Adam", ICLR 2023,
    Algorithm 1.
    """

    name = "ZeroOneAdam"

    def init(self, ops: ArrayOps, weights: Array) -> State:
        return {**super().init(ops, weights), "moved": ops.zeros(weights.shape[0], ops.dtype(weights))}

    def rate(self, lr: float, number: int) -> float:
        """Return eta, the learning rate of a step, corrected for the momentum's start at zero."""
        return lr / self._corrections(number)[0]

    def learn(self, ops: ArrayOps, weights: Array, gradient: Array, state: State) -> State:
        """Return the state with the second moment after a mean gradient of all ranks."""
        _, beta = self.betas
        gradient = self._decay(ops, weights, gradient)
        return {**state, "exp_avg_sq": ops.weighted_sum(state["exp_avg_sq"], beta, gradient * gradient, 1 - beta)}

    def advance(self, ops: ArrayOps, weights: Array, gradient: Array, state: State, rate: float, learnt: int) -> State:
        """Return the state after a step of this rank with eta = `rate`; u is `moved`."""
        momentum = self._follow(ops, state["exp_avg"], self._decay(ops, weights, gradient))
        if self.scaled:
            scale = self.scale(ops, state["exp_avg_sq"], self._corrections(learnt)[1])
            quotient = self._clamp(ops, momentum * scale)
            momentum = ops.where(scale > 0, quotient / ops.where(scale > 0, scale, 1.0), 0.0)
        return {**state, "exp_avg": momentum, "moved": ops.weighted_sum(state["moved"], 1, momentum, rate)}

    def sent(self, ops: ArrayOps, state: State, learnt: int) -> Array:
        """Return what this rank sends at a sync: u, and if it is `scaled`, what the weights have moved by it."""
        if not self.scaled:
            return state["moved"]
        return state["moved"] * self.scale(ops, state["exp_avg_sq"], self._corrections(learnt)[1])

    def alone(
        self, ops: ArrayOps, weights: Array, state: State, lr: float, rate: float, learnt: int
    ) -> tuple[Array, State]:
        """Return the weights and the state between two syncs; `anchor` has the weights after the last one."""
        # A copy, because the framework may write the new weights over the old ones.
        anchor = state["anchor"] if "anchor" in state else ops.copy(weights)
        scale = self.scale(ops, state["exp_avg_sq"], self._corrections(learnt)[1])
        share = self._share(lr)
        new = ops.weighted_sum(weights, share, state["exp_avg"] * scale, -rate)
        shrunk = anchor * ops.cast(share, ops.dtype(anchor)) if self._shrinks else anchor
        return new, {**state, "anchor": shrunk}

    def sync(
        self, ops: ArrayOps, weights: Array, merged: Array, state: State, lr: float, share: float, learnt: int
    ) -> tuple[Array, State]:
        """Return the weights and the state after a sync; `merged` is the mean of `sent`.

        `share` is 1 / (the sum of eta since the last sync), and 0 if that is.
        """
        rest = {key: x for key, x in state.items() if key != "anchor"}
        anchor = state.get("anchor", weights)
        scale = self.scale(ops, state["exp_avg_sq"], self._corrections(learnt)[1])
        # The mean of u, and what the weights move by it.
        mean = change = ops.where(scale > 0, merged, 0.0)
        if self.scaled:
            mean = change / ops.where(scale > 0, scale, 1.0)
        else:
            change = mean * scale
        momentum = mean * ops.cast(share, ops.dtype(merged))
        moved = ops.zeros(weights.shape[0], ops.dtype(merged))
        return ops.weighted_sum(anchor, self._share(lr), change, -1), {**rest, "exp_avg": momentum, "moved": moved}
