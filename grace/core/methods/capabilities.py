"""Capabilities of compressors and memories: what only some have. Such a method derives from the class as well.

A class that has a capability may lack it with some options; the docstrings say how an instance tells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from grace.core.methods.site import Proposal, Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, State, TensorSpec


class Negotiating(ABC):
    """Capability to negotiate: the ranks combine a value before they compress, such as a common scale."""

    @abstractmethod
    def proposed(self, spec: TensorSpec) -> tuple[Field, ...]:
        """Return the one field that `propose` returns, from static facts only; () if nothing is negotiated."""

    @abstractmethod
    def propose(self, x: Array, at: Site) -> Proposal:
        """Return what the ranks combine, flat; `at.negotiated` is the result. Called only if a field is proposed."""

    @property
    def proposal_shows(self) -> bool:
        """True if a proposal counts as infinite whenever an element of x does, so that no pass must look."""
        return False


class Selecting(ABC):
    """Capability to say which coordinates the payload carries; it carries nothing of the others (momentum masking)."""

    @property
    def selects(self) -> bool:
        """False if the options take the capability away."""
        return True

    @abstractmethod
    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        """Return x with the carried coordinates set to zero; consumes x. Called only if `selects` is True."""

    def fade_(self, x: Array, payload: Payload, at: Site, factor: float) -> Array:
        """Return x times the factor with the carried coordinates set to zero; consumes x."""
        return at.ops.scale_(self.erase_(x, payload, at), factor)


class Stateful(ABC):
    """Capability to keep a state across steps, equal on all ranks; base of `Learning` and `Tuning`, which change it."""

    @abstractmethod
    def init(self, spec: TensorSpec, ops: ArrayOps, key_seed: int) -> State:
        """Return arrays that live across steps, available as `at.state`; {} if there are none with these options."""

    @property
    def keeps_state(self) -> bool:
        """True if `init` returns any array with these options."""
        return True


class Learning(Stateful):
    """Capability to learn from what all ranks sent of a tensor."""

    @abstractmethod
    def learn(self, payloads: Sequence[Payload], at: Site) -> State:
        """Return the state for the next step, from the payloads of all ranks or their sum."""


class Tuning(Stateful):
    """Capability to tune a value across all tensors, such as a common threshold."""

    @abstractmethod
    def tally(self, payloads: Sequence[Payload], at: Site) -> tuple[Array, Array] | None:
        """Return two 0-d float64 arrays, equal on all ranks, for `retune`; None if nothing is tuned."""

    @abstractmethod
    def retune(self, state: State, first: Array, second: Array, at: Site) -> State:
        """Return the state for the next step, from the sums of `tally` over all tensors of equal compressors."""

    def volume(self, state: State) -> float | None:
        """Return what all tensors of equal compressors have sent, over what their options ask; None if unknown."""
        return None


def proposed_fields(compressor: object, spec: TensorSpec) -> tuple[Field, ...]:
    """Return the fields that the ranks negotiate before they compress; none unless the compressor negotiates."""
    return compressor.proposed(spec) if isinstance(compressor, Negotiating) else ()


def selects(compressor: object) -> bool:
    """Return whether the payload carries nothing of the coordinates left out, so that `erase_` may be called."""
    return isinstance(compressor, Selecting) and compressor.selects


def ratio_of(compressor: object) -> float | None:
    """Return the option `compress_ratio`, the share of the elements that a payload aims at; None without it."""
    return getattr(compressor, "compress_ratio", None)
