"""The Memory abstraction: what one rank remembers of a gradient between steps (error feedback)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.errors import ConfigError
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, Site, State, TensorSpec

# Under this key of a state in progress a memory may tell whether x is finite (a 0-d condition), where it knows anyway.
FINITE = "finite"


@dataclass(frozen=True)
class Memory(ABC):
    """What one rank remembers of a gradient between steps; its fields are its whole configuration.

    The state of the last good step is never changed: `compensate` and `update` return new states, and the engine
    keeps the old one until it knows that no rank saw NaN or infinity. Neither is the gradient: its buffer belongs to
    the framework, whose backward pass may still read it. Arrays that were handed over with a trailing underscore are
    the callee's to reuse.
    """

    @property
    def stateless(self) -> bool:
        """Nothing is remembered."""
        return False

    @property
    def feeds_back(self) -> bool:
        """What the compressor dropped is added to a later gradient."""
        return not self.stateless

    @property
    def shared(self) -> bool:
        """The state is equal on all ranks, so that each of them can take it over from any other's checkpoint."""
        return False

    @property
    def residual_scale(self) -> float:
        """The residual's unit in gradients: 1, or the learning rate where it is kept in units of the weights."""
        return 1.0

    @property
    def gain(self) -> float:
        """What the mean is multiplied by before `finish` sees it, together with the division by the number of ranks."""
        return 1.0

    @property
    def needs_lr(self) -> bool:
        """`Site.lr` is read; only optimizers know it, tapes do not."""
        return False

    @property
    def whole(self) -> bool:
        """Something depends on the tensor as a whole (a norm, its learning rate): it is neither cut nor fused then."""
        return self.needs_lr

    def check(self, compressor: Compressor) -> None:
        """Raise IncompatibleError if this memory cannot serve the compressor (default: any)."""
        return

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        """Zeroed buffers (default: none)."""
        return {}

    @abstractmethod
    def compensate(self, grad: Array, state: State, at: Site) -> tuple[Array, State]:
        """The array to compress, and a state in progress that `update` gets; reads grad and state.

        The state in progress may hold `FINITE`, which goes no further.

        Where anything is remembered the array is a new one, which `update` may consume.
        """

    @abstractmethod
    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        """The state once the payload is on its way; consumes x_, the array that was compressed."""

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        """Turn the merged (averaged) gradient into the one the optimizer sees (default: unchanged)."""
        return merged, state


def check_clipping(name: str, bound: float | None) -> None:
    """Raise ConfigError unless the bound is positive or None."""
    if bound is not None and not bound > 0:
        raise ConfigError(f"memory {name}: gradient_clipping is a norm, positive or null; received {bound!r}.")


def clipped(grad: Array, bound: float | None, at: Site) -> Array:
    """The gradient, its norm limited to bound / sqrt(number of ranks) before it joins what is remembered."""
    if bound is None:
        return grad
    ops, limit = at.ops, bound / math.sqrt(at.size)
    # In float64, because the norm of large float32 numbers overflows.
    norm = ops.norm(ops.cast(grad, "float64"))
    factor = ops.where(norm > limit, limit / ops.where(norm > limit, norm, 1.0), 1.0)
    return grad * ops.cast(factor, at.spec.work_dtype)
