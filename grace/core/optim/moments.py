"""Base classes of optimizers with moments of the gradient, which are pure like memories and outer optimizers."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from grace.core.errors import ConfigError
from grace.core.methods.memory import wide_norm
from grace.core.observe.log import logger
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, State

if TYPE_CHECKING:
    from grace.core.ops.native import Native

#: How momenta are exchanged: one bit per element in both directions, with error feedback at both ends.
ONE_BIT = {"compressor": "efsignsgd", "memory": "residual", "communicator": "two_shot"}
#: Share of the steps in the warm-up: in the middle of what the paper on 1-bit Adam takes, 15 to 25 %.
WARM_UP = 0.2
#: How much of the larger of two norms the smaller one must be for the second moment to have settled.
SETTLED = 0.96


@dataclass(frozen=True)
class Moments(ABC):
    """Base of optimizers with a first and a second moment: a pure step per tensor, configured by its fields only.

    All arrays are flat and float32, or float64 for float64 weights. No method changes an array that it receives.
    `number` counts the steps of a tensor from 1; in a graph, it and learning rates are 0-d float64 arrays. The keys of
    states are those of PyTorch's Adam.
    """

    #: The optimizer as its users call it, for errors.
    name: ClassVar[str]

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for i, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise ConfigError(f"{self.name}: betas[{i}] must lie in [0, 1), received {beta!r}.")
        if not self.eps > 0:
            raise ConfigError(f"{self.name}: eps must be positive, received {self.eps!r}.")
        if not self.weight_decay >= 0:
            raise ConfigError(f"{self.name}: weight_decay must not be negative, received {self.weight_decay!r}.")

    def init(self, ops: ArrayOps, weights: Array) -> State:
        """Return the state before the first step."""
        n, dtype = weights.shape[0], ops.dtype(weights)
        return {"exp_avg": ops.zeros(n, dtype), "exp_avg_sq": ops.zeros(n, dtype)}

    @abstractmethod
    def step(
        self, ops: ArrayOps, weights: Array, gradient: Array, state: State, lr: float, number: int
    ) -> tuple[Array, State]:
        """Return the new weights and the new state after a step with the mean gradient of all ranks."""

    def _moments(self, ops: ArrayOps, gradient: Array, state: State) -> State:
        """Return the state with its moments after a gradient."""
        first, second = self.betas
        return {
            **state,
            "exp_avg": ops.weighted_sum(state["exp_avg"], first, gradient, 1 - first),
            "exp_avg_sq": ops.weighted_sum(state["exp_avg_sq"], second, gradient * gradient, 1 - second),
        }

    def _corrections(self, number: int) -> tuple[float, float]:
        """Return what both moments are divided by, because they start at zero."""
        first, second = self.betas
        return 1 - first**number, 1 - second**number

    def _root(self, ops: ArrayOps, second: Array, correction: float | None = None) -> Array:
        """Return sqrt(v / correction) + eps."""
        root = ops.sqrt(second)
        if correction is not None:
            root = root * ops.cast(correction**-0.5, ops.dtype(root))
        return root + ops.cast(self.eps, ops.dtype(root))


@dataclass(frozen=True)
class Freezing(Moments):
    """Base of those whose second moment can be frozen, so that the ranks can exchange momentum in few bits.

    After `freeze`, each rank sends its `momentum`, and `frozen_step` takes the merged one, in place of `step`.
    Elements whose second moment is zero at that time keep their weights, whatever is merged: a sign is never zero.

    If it is `scaled`, momenta are divided by sqrt(v) + eps before they are exchanged, and limited to what Adam's own
    quotients can be, max(1, (1 - beta1) / sqrt(1 - beta2)). Then one scale fits all elements of a tensor, also where a
    gradient comes that the frozen v has not seen. The papers exchange momenta as they are: a sign whose scale is the
    mean of all elements makes steps of any length where v is small.
    """

    scaled: bool = True

    @abstractmethod
    def freeze(self, ops: ArrayOps, state: State, number: int) -> State:
        """Return the state for `frozen_step` after `number` steps."""

    @abstractmethod
    def momentum(self, ops: ArrayOps, weights: Array, gradient: Array, state: State) -> Array:
        """Return what this rank sends: the common momentum with its own gradient added."""

    @property
    def _limit(self) -> float:
        first, second = self.betas
        return max(1.0, (1 - first) / math.sqrt(1 - second))

    def _clamp(self, ops: ArrayOps, quotient: Array) -> Array:
        """Return m / sqrt(v) within the limits that it has in Adam, whose v has seen all gradients."""
        # Numbers, because PyTorch takes four times as long with arrays.
        return ops.clip(quotient, -self._limit, self._limit)

    def _follow(self, ops: ArrayOps, momentum: Array, gradient: Array) -> Array:
        """Return the momentum after a gradient."""
        first, _ = self.betas
        return ops.weighted_sum(momentum, first, gradient, 1 - first)

    @abstractmethod
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
        """Return the new weights and the new state, which may hold the merged momentum itself, after a step with it.

        Kernels may write the new weights and the new momentum to `out`, which may be the weights and the momentum.
        """


@composite()
def limited_sum(ops: ArrayOps, x: Array, a: float, y: Array, b: float, z: Array, limit: float) -> Array:
    """Return a x + b (y z) within [-limit, limit]; NaN stays."""
    return ops.clip(ops.weighted_sum(x, a, y * z, b), -limit, limit)


@limited_sum.kernel()
def _(ops: Native, x: Array, a: float, y: Array, b: float, z: Array, limit: float) -> Array | None:
    dtype = ops.floating(x)
    if dtype is None or ops.floating(y) != dtype or ops.floating(z) != dtype:
        return None
    return ops.run("limited_sum", [x, y, z], (), [a, b, limit], outputs=[dtype], lengths=[ops.length(x)])[0]


@composite()
def masked_sum(
    ops: ArrayOps, x: Array, a: float, y: Array, b: float, z: Array, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Return a x + b k, and k, which is y where z > 0, and 0 elsewhere.

    Kernels may write them to `out`, which may be x and y.
    """
    kept = ops.where(z > 0, y, 0.0)
    return ops.weighted_sum(x, a, kept, b), kept


@masked_sum.kernel()
def _(
    ops: Native, x: Array, a: float, y: Array, b: float, z: Array, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None or ops.floating(y) != dtype or ops.floating(z) != dtype:
        return None
    lengths = [ops.length(x)] * 2
    total, kept = ops.run("masked_sum", [x, y, z], (), [a, b], outputs=[dtype, dtype], lengths=lengths, out=out)
    return total, kept


def trust_ratio(ops: ArrayOps, weights: Array, update: Array, low: float, high: float) -> Array:
    """Return |weights| / |update| within [low, high], as a 0-d float64 array; 1 if a norm is zero."""
    size, moved = wide_norm(ops, weights), wide_norm(ops, update)
    known = ops.bit_and(size > 0, moved > 0)
    return ops.where(known, ops.clip(size / ops.where(known, moved, 1.0), low, high), 1.0)


def freeze_step_of(freeze_step: int | None, total_steps: int | None, where: str) -> int | None:
    """Return the number of steps before the second moment is frozen; None if the rule of `horizon` is to find it.

    Raises ConfigError for numbers that are no warm-up.
    """
    if freeze_step is not None and total_steps is not None:
        raise ConfigError(
            f"{where}: total_steps = {total_steps} gives freeze_step itself, {WARM_UP:.0%} of it; leave one of the two "
            "out."
        )
    if total_steps is not None:
        if total_steps < 2:
            raise ConfigError(f"{where}: total_steps must be at least 2, received {total_steps!r}.")
        return math.ceil(WARM_UP * total_steps)
    if freeze_step is not None and freeze_step < 1:
        raise ConfigError(
            f"{where}: freeze_step must be at least 1, because the first moments come from the warm-up; received "
            f"{freeze_step!r}."
        )
    return freeze_step


def horizon(betas: tuple[float, float]) -> int:
    """Return 1 / (1 - beta2): the steps between two looks at |v|_1, the sum of all second moments."""
    return math.ceil(1 / (1 - betas[1]) - 1e-9)


def is_settled(before: float, now: float) -> bool:
    """Return whether |v|_1 is nearly what it was a `horizon` before, so that v can be frozen; `before` may be 0.

    Reference: Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
    ICML 2021, section 7.1 of its first version.
    """
    return (before > 0) & (now >= SETTLED * before) & (before >= SETTLED * now)


def tell_frozen(name: str, number: int) -> None:
    """Tell the user that an optimizer has frozen the second moment after a step."""
    logger().info(
        "grace: %s has frozen the second moment after step %d and exchanges momenta from now on.", name, number
    )


def signature_of(cls: type, base: type, options: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature of an optimizer class with all its arguments, for help(), documentation and errors.

    They are those of every `__init__` from `cls` up to `base`, and further `options` with their defaults.
    """
    given: dict[str, inspect.Parameter] = {}
    for kind in cls.__mro__:
        if kind is not base and issubclass(kind, base) and "__init__" in vars(kind):
            _, *arguments = inspect.signature(vars(kind)["__init__"]).parameters.values()
            given = {**{p.name: p for p in arguments}, **given}
    for name, default in options.items():
        given[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
    return inspect.Signature(sorted(given.values(), key=lambda p: p.kind))
