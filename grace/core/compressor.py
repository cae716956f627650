"""The Compressor abstraction: a pure map between a flat gradient and a payload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, Proposal, Site, State, TensorSpec


@dataclass(frozen=True)
class Compressor(ABC):
    """A pure map between a flat gradient and a payload; its fields are its whole configuration.

    A new method defines `wire`, `compress` and `decompress`; a sparsifier also `erase_`. Gradients come flat, in
    `spec.work_dtype`, finite, and are only read. What decompress needs must have travelled, be static, follow from
    the shared key, or be a field with `wire=False`: decoding another rank's payload is the normal case.
    The properties below may be overridden by plain class attributes.
    """

    @property
    def summable(self) -> bool:
        """payload(a) + payload(b) decodes to a + b, so payloads may travel by allreduce."""
        return False

    @property
    def unbiased(self) -> bool:
        """The mean over random keys of decompress(compress(x)) is x."""
        return False

    @property
    def fixed_size(self) -> bool:
        """No field of the payload has a length that depends on the data."""
        return True

    @property
    def averages(self) -> bool:
        """False if merge() is scale-free (a vote), so that the sum must not be divided by the number of ranks."""
        return True

    @property
    def sparsifies(self) -> bool:
        """The payload carries some coordinates exactly and nothing of the others; `erase_` is defined."""
        return False

    @property
    def selects(self) -> bool:
        """The payload says nothing of the coordinates that it left out, and `erase_` is defined (momentum masking)."""
        return self.sparsifies

    @property
    def carries_nonfinite(self) -> bool:
        """NaN and infinity pass through the payload as they are."""
        return False

    @property
    def checks(self) -> bool:
        """`compress_checked` is defined: NaN and infinity are found in the pass that compresses."""
        return False

    @property
    def flat(self) -> bool:
        """Nothing depends on the tensor's shape but its length, so that tensors may be cut, and laid end to end."""
        return True

    @property
    def linear_in(self) -> tuple[str, ...]:
        """Fields to which what the payload carries is proportional: a power of two may be multiplied in there."""
        return ()

    @property
    def default_memory(self) -> str:
        """Name of the memory used unless the user names one."""
        return "none"

    @property
    def default_communicator(self) -> str:
        """Name of the communicator used unless the user names one."""
        return "allreduce" if self.summable else "allgather"

    @property
    def harmed_by_feedback(self) -> str | None:
        """Why error feedback does this method no good (GRACE, Table I and section V-B); None where it does."""
        if not self.averages:
            return "the vote of the ranks is no mean of their signs"
        if self.unbiased and not self.carries_nonfinite:
            return "its errors cancel by themselves, and fed back they add to its variance"
        return None

    def contraction(self, spec: TensorSpec) -> float | None:
        """delta with E|x - C(x)|^2 <= (1 - delta) |x|^2 for every x; None if the error can exceed |x|."""
        return None

    def unfit(self, spec: TensorSpec) -> str | None:
        """Why this tensor cannot be compressed by this method and stays dense; None if it can."""
        return None

    @abstractmethod
    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        """Fields of the payload, from static facts only."""

    @abstractmethod
    def compress(self, x: Array, at: Site) -> Payload:
        """Payload of the flat gradient x; never changes x."""

    @abstractmethod
    def decompress(self, payload: Payload, at: Site) -> Array:
        """Dense flat gradient carried by one payload; the same however often it is asked."""

    def compress_checked(self, x: Array, at: Site) -> tuple[Payload, Array]:
        """The payload, which may be anything if x is not finite, and whether x is (0-d bool). Only where `checks`."""
        raise TypeError(
            f"{type(self).__name__} does not look for NaN; compress_checked is defined only where checks is True"
        )

    def init(self, spec: TensorSpec, ops: ArrayOps, key_seed: int) -> State:
        """Arrays that live across steps, found later in `at.state` (default: none)."""
        return {}

    def check_ranks(self, size: int) -> None:
        """Raise IncompatibleError if payloads of so many ranks cannot be merged (default: any number)."""
        return

    def agreement(self, spec: TensorSpec) -> tuple[Field, ...]:
        """What `agree` proposes, from static facts only; at most one field (default: nothing)."""
        return ()

    def agree(self, x: Array, at: Site) -> Proposal | None:
        """What ranks settle before compressing, flat; found afterwards in `at.agreed` (default: nothing)."""
        return None

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        """Sum of what the payloads carry (default: add decompressed ones in the order of the ranks)."""
        total = self.decompress(payloads[0], at)
        for payload in payloads[1:]:
            total = at.ops.weighted_sum(total, 1, self.decompress(payload, at), 1)
        return total

    def learn(self, payloads: Sequence[Payload], at: Site) -> State:
        """The state for the next step, from the payloads of all ranks or their sum (default: unchanged)."""
        return at.state

    def tally(self, payloads: Sequence[Payload], at: Site) -> tuple[Array, Array] | None:
        """Two 0-d float64 arrays, equal on all ranks, that `retune` gets added up over all tensors (default: none)."""
        return None

    def retune(self, state: State, first: Array, second: Array, at: Site) -> State:
        """The state for the next step, from the sums of what `tally` gave for all tensors of an equal compressor."""
        return state

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        """x minus what the payload carries; consumes x (default: subtract decompressed)."""
        return at.ops.sub_(x, self.decompress(payload, at))

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        """x with the carried coordinates set to zero; consumes x. Only where `selects`."""
        raise TypeError(f"{type(self).__name__} is no sparsifier; erase_ is defined only where selects is True")


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """Base of methods whose payload is `values` at distinct `indices`; they define `wire` and `compress` only."""

    @property
    def sparsifies(self) -> bool:
        return True

    @property
    def linear_in(self) -> tuple[str, ...]:
        return ("values",)

    @property
    def default_memory(self) -> str:
        return "residual"

    def contraction(self, spec: TensorSpec) -> float | None:
        return 0.0

    def unfit(self, spec: TensorSpec) -> str | None:
        return beyond_int32(spec)

    def decompress(self, payload: Payload, at: Site) -> Array:
        return at.ops.desparsify(payload["values"], payload["indices"], at.spec.numel)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        values, indices = ([payload[name] for payload in payloads] for name in ("values", "indices"))
        return at.ops.sparse_sum(values, indices, at.spec.numel)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self.erase_(x, payload, at)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.put_(x, payload["indices"], 0.0)


def keep_count(ratio: float, numel: int) -> int:
    """k = max(1, int(ratio * numel)), and 0 for an empty tensor."""
    return min(numel, max(1, int(ratio * numel)))


def beyond_int32(spec: TensorSpec) -> str | None:
    """Why int32 indices cannot address the tensor; None if they can."""
    return f"{spec.numel} elements cannot be addressed by int32 indices" if spec.numel >= 2**31 else None
