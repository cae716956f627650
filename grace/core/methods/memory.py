"""Base class of memories, which keep a part of the gradient between steps (error feedback)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple, TypeAlias

from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec

# Requirements of a memory; see `Memory.needs`.
Need: TypeAlias = Literal["lr", "norm", "tensor", "no_momentum", "mean", "reference", "previous", "full"]


class Compensated(NamedTuple):
    """Array to compress, state in progress, and whether the array is finite (a 0-d condition), if that is known."""

    x: Array
    state: State
    finite: Array | None = None


@dataclass(frozen=True)
class Memory(ABC):
    """Base of memories: the state that one rank keeps of a gradient between steps, configured by its fields only.

    A memory never changes the state of the last good step: `compensate` and `update` return new states, and with
    roll-back the run keeps the old one until it knows that no rank saw NaN or infinity. The gradient is never
    changed either: its buffer belongs to the framework, whose backward pass may still read it. A callee may reuse
    arrays that it receives with a trailing underscore.
    """

    @property
    def feeds_back(self) -> bool | Literal["mean"]:
        """True if what the compressor dropped is added to a later gradient; "mean" if what the merged one lacks is.

        A memory of the latter kind also feeds back what communicators drop, so they give back nothing.
        """
        return True

    @property
    def across_ranks(self) -> Literal["apart", "equal", "joint"]:
        """Relation of the states of all ranks.

        They are "equal" if a rank can load the state from another rank's checkpoint. They are "joint" if they belong
        together because they follow the mean of what all ranks have sent, so that no rank can start from zero alone.
        Where every rank merges, `finish` follows the mean; where one rank owns it, `at_owner` does.
        """
        return "apart"

    @property
    def at_owner(self) -> Memory | None:
        """Memory that the owner of a mean must have if the ranks have this one; None if the owner has its own."""
        return None

    @property
    def residual_scale(self) -> float:
        """Unit of the residual in gradients: 1, or the learning rate if it is kept in units of the weights."""
        return 1.0

    @property
    def residual_dtype(self) -> Literal["bfloat16", "int8"] | None:
        """Number format of `residual` between steps, an option of some memories; None: the working dtype.

        Steps convert it: `compensate` reads and `update` returns the working dtype. `finish` gets it as it is stored.
        """
        return None

    @property
    def additive(self) -> tuple[str, ...]:
        """Keys of the state that are sent sooner or later, as gradients are. It matters where ranks add gradients up.

        A checkpoint of another number of ranks is merged so that the sum over all ranks of these keys is kept, and the
        mean of all others. Where ranks take the mean of gradients, the mean of all keys is kept.
        """
        return ("residual",)

    @cached_property
    def gain(self) -> float:
        """Factor on the mean before `finish` gets it, applied with the division by the number of ranks."""
        return 1.0

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """Requirements of the memory beside a gradient and its state (default: none).

        "lr" is `Site.lr`, which optimizers know and tapes do not; its tensors are not joined. "norm" is `Site.norm`,
        the norm of this rank's gradients of all these tensors together, so none of them is compressed before the last
        one is ready. "tensor" is the tensor as a whole, for instance its norm; it is then neither cut nor joined.
        "no_momentum" is an optimizer without momentum, because the memory holds it. "mean" is the merged gradient,
        which `finish` gets, so that the new state is known only then. "reference" is `Site.reference`, a second
        gradient of the same batch at the weights of the last full round, or with "previous" at those of the step
        before. With "full", full rounds send what is compressed in other rounds as it is.
        """
        return ()

    @property
    def period(self) -> int:
        """Number of steps from one full round to the next on average, for a memory that needs "reference".

        In a full round, ranks pass the gradient of all their data. The ranks draw these rounds from the shared seed.
        """
        return 0

    @property
    def pace(self) -> float:
        """The number p of a memory that learns a state `shift` of its gradients; 0 without it.

        The result is the mean of (new shift) + (1 - p) C(x) over the ranks. So p is the share of what is sent that
        joins the shift, or 1 if the result is the mean of the new shifts.
        """
        return 0.0

    def check(self, compressor: Compressor) -> None:
        """Raise IncompatibleError if this memory cannot serve the compressor (default: it can)."""
        return

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        """Return the state before the first step: flat buffers of zeros (default: none)."""
        return {}

    @abstractmethod
    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        """Return the array to compress and a state in progress for `update`; only reads grad and state.

        If the memory keeps anything, the array is a new one, which `update` may consume.
        """

    @abstractmethod
    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        """Return the state after the payload was sent; consumes x_, the array that was compressed."""

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        """Return the gradient for the optimizer, made of the merged one, and the new state; called for the need "mean".

        The state keeps copies: the merged gradient may lie where the optimizer will change it.
        """
        return merged, state


class Merging(ABC):
    """Capability of a memory to merge the payloads of all ranks itself, in place of their mean."""

    @abstractmethod
    def for_ranks(self, size: int) -> Memory:
        """Return the memory for a number of ranks; raises IncompatibleError if it cannot serve so many."""

    @abstractmethod
    def merge(self, payloads: Sequence[Payload], compressor: Compressor, state: State, at: Site) -> tuple[Array, State]:
        """Return the gradient for the optimizer, made of the payloads of all ranks, and the new state."""


def needs_of(needs: Mapping[Need, object]) -> tuple[Need, ...]:
    """Return the needs whose value is true."""
    return tuple(need for need, wanted in needs.items() if wanted)


@cache
def keeps_nothing(memory: Memory) -> bool:
    """Return whether a memory has no state."""
    return not memory.init(TensorSpec("", (1,)), get_ops("numpy"))


@cache
def holds_residual(memory: Memory) -> bool:
    """Return whether the state of a memory has a residual, which a change of the plan must not lose."""
    return "residual" in memory.init(TensorSpec("", (1,)), get_ops("numpy"))


def check_clipping(name: str, bound: float | None) -> None:
    """Raise ConfigError unless the bound is positive or None."""
    if bound is not None and not bound > 0:
        raise ConfigError(f"memory {name}: gradient_clipping must be a positive norm or null, received {bound!r}.")


def clip(grad: Array, bound: float | None, at: Site, norm: Array | None = None) -> Array:
    """Return the gradient with its norm limited to bound / sqrt(number of ranks), before it joins the state.

    `norm` is that of all gradients with this bound; without it, each is limited by its own.
    """
    if bound is None:
        return grad
    ops, limit = at.ops, bound / math.sqrt(at.size)
    norm = wide_norm(ops, grad) if norm is None else norm
    factor = ops.where(norm > limit, limit / ops.where(norm > limit, norm, 1.0), 1.0)
    return grad * ops.cast(factor, at.spec.work_dtype)


def fallen_by(last: Array, at: Site) -> tuple[Array, Array]:
    """Return the quotient of the last learning rate and this one, and the new last one: float64 arrays of one element.

    A learning rate of zero applies nothing, and the first step has no earlier rate: then the quotient is 1.
    """
    ops, lr = at.ops, at.ops.full(1, at.lr, "float64")
    known = ops.bit_and(lr > 0, last > 0)
    return ops.where(known, last / ops.where(known, lr, 1.0), 1.0), ops.where(lr > 0, lr, last)


def wide_norm(ops: ArrayOps, grad: Array) -> Array:
    """Return the norm as a 0-d float64 array, because that of large float32 numbers overflows."""
    return ops.norm(ops.cast(grad, "float64"))
