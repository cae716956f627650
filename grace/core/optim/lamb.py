"""LAMB, and 1-bit LAMB, whose second moment and scale per tensor are frozen after a warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.errors import ConfigError
from grace.core.ops.composites import ArrayOps
from grace.core.optim.moments import Freezing, Moments, trust_ratio
from grace.core.spec import Array, State


@dataclass(frozen=True)
class Lamb(Moments):
    r"""LAMB: Adam whose update of each tensor is as long as a share of the tensor.

    Formula: u = \hat m / (\sqrt{\hat v} + \epsilon) + \lambda w, \quad w \leftarrow w - \eta \, c \, u, \quad
    c = \|w\| / \|u\|

    lambda is `weight_decay`, and c is limited to [`min_coeff`, `max_coeff`]; it is 1 if a norm is zero.

    Reference: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020,
    Algorithm 2.
    """

    name = "Lamb"

    eps: float = 1e-6
    min_coeff: float = 0.01
    max_coeff: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_coeff <= self.max_coeff:
            raise ConfigError(
                f"{self.name}: expected 0 <= min_coeff <= max_coeff, received {self.min_coeff!r} and "
                f"{self.max_coeff!r}."
            )

    def step(
        self, ops: ArrayOps, weights: Array, gradient: Array, state: State, lr: float, number: int
    ) -> tuple[Array, State]:
        state = self._moments(ops, gradient, state)
        first, second = self._corrections(number)
        update = self._update(ops, weights, state["exp_avg"] / self._root(ops, state["exp_avg_sq"], second), first)
        ratio = trust_ratio(ops, weights, update, self.min_coeff, self.max_coeff)
        return weights - update * ops.cast(ratio * lr, ops.dtype(weights)), self._note_ratio(ops, state, ratio)

    def _update(self, ops: ArrayOps, weights: Array, direction: Array, correction: float) -> Array:
        """Return direction / correction with the weight decay."""
        return ops.weighted_sum(direction, 1 / correction, weights, self.weight_decay)

    def _note_ratio(self, ops: ArrayOps, state: State, ratio: Array) -> State:
        """Return the state after a step with this ratio."""
        return state


@dataclass(frozen=True)
class OneBitLamb(Lamb, Freezing):
    r"""LAMB whose ranks exchange momenta after a warm-up.

    Formula: w \leftarrow w - \eta \, \bar c \, f \, u, \quad
    f = \max_i \, (\sqrt{v_i} + \epsilon) / (\sqrt{\tilde v_i} + \epsilon)

    The warm-up is LAMB, and c-bar the moving average of its c, with `coeff_beta`. Afterwards v and c-bar stay, and
    v-tilde goes on with gradients that are computed of successive momenta. f follows how far v is from it: it is
    limited to [`factor_min`, `factor_max`], and changes by at most the share `factor_threshold` in a step.

    Reference: Li et al., "1-bit LAMB: communication efficient large-scale large-batch training with LAMB's convergence
    speed", HiPC 2022, Algorithm 1.
    """

    name = "OneBitLamb"

    coeff_beta: float = 0.9
    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.coeff_beta < 1:
            raise ConfigError(f"{self.name}: coeff_beta must lie in [0, 1), received {self.coeff_beta!r}.")
        if not 0 < self.factor_min <= 1 <= self.factor_max:
            raise ConfigError(
                f"{self.name}: expected 0 < factor_min <= 1 <= factor_max, received {self.factor_min!r} and "
                f"{self.factor_max!r}."
            )
        if not 0 < self.factor_threshold < 1:
            raise ConfigError(f"{self.name}: factor_threshold must lie in (0, 1), received {self.factor_threshold!r}.")

    def init(self, ops: ArrayOps, weights: Array) -> State:
        return {**super().init(ops, weights), "coefficient": ops.zeros(1, ops.dtype(weights))}

    def _note_ratio(self, ops: ArrayOps, state: State, ratio: Array) -> State:
        before = state["coefficient"]
        now = ops.full(1, ops.cast(ratio, ops.dtype(before)), ops.dtype(before))
        return {**state, "coefficient": ops.weighted_sum(before, self.coeff_beta, now, 1 - self.coeff_beta)}

    def freeze(self, ops: ArrayOps, state: State, number: int) -> State:
        _, second = self._corrections(number)
        dtype = ops.dtype(state["exp_avg"])
        # From now on, both second moments need no correction.
        frozen = state["exp_avg_sq"] * ops.cast(1 / second, dtype)
        coefficient = state["coefficient"] * ops.cast(1 / (1 - self.coeff_beta**number), dtype)
        return {
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": frozen,
            "fresh_sq": frozen,
            "coefficient": coefficient,
            "factor": ops.full(1, 1.0, dtype),
        }

    def momentum(self, ops: ArrayOps, weights: Array, gradient: Array, state: State) -> Array:
        momentum, frozen = self._follow(ops, state["exp_avg"], gradient), state["exp_avg_sq"]
        if not self.scaled:
            return momentum
        return self._clamp(ops, ops.where(frozen > 0, momentum / self._root(ops, frozen), 0.0))

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
        (first, second), dtype, frozen = self.betas, ops.dtype(weights), state["exp_avg_sq"]
        root = self._root(ops, frozen)
        momentum = momentum * root if self.scaled else momentum
        momentum = ops.where(frozen > 0, momentum, 0.0)
        gradient = ops.weighted_sum(momentum, 1 / (1 - first), state["exp_avg"], -first / (1 - first))
        fresh = ops.weighted_sum(state["fresh_sq"], second, gradient * gradient, 1 - second)
        ratios = ops.where(frozen > 0, root / self._root(ops, fresh), 0.0)
        last = state["factor"]
        factor = ops.full(1, ops.max(ratios), dtype)
        for bound, above in (
            (ops.full(1, self.factor_min, dtype), False),
            (ops.full(1, self.factor_max, dtype), True),
            (last * ops.cast(1 - self.factor_threshold, dtype), False),
            (last * ops.cast(1 + self.factor_threshold, dtype), True),
        ):
            beyond = factor > bound if above else factor < bound
            factor = ops.where(beyond, bound, factor)
        correction, _ = self._corrections(number)
        update = self._update(ops, weights, momentum / root, correction)
        new = weights - update * (state["coefficient"] * factor * ops.cast(lr, dtype))
        return new, {**state, "exp_avg": momentum, "fresh_sq": fresh, "factor": factor}
