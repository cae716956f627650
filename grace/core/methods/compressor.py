"""Base class of compressors, pure maps between a flat gradient and a payload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from grace.core.methods.capabilities import Selecting
from grace.core.methods.site import Site
from grace.core.spec import Array, Field, Payload, TensorSpec


@dataclass(frozen=True)
class Compressor(ABC):
    """Base of compressors: a pure map between a flat gradient and a payload, configured by its fields only.

    A new method defines `wire`, `compress` and `decompress`. What only some methods do is a capability, a class that
    they also derive from, such as `Negotiating`. Gradients are flat, finite, of dtype `spec.work_dtype`,
    and must not be changed. A rank usually decodes payloads of other ranks, so everything that `decompress` needs must
    be in the payload, be static, follow from the shared key, or be a field with `wire=False`.
    Plain class attributes may override the properties below.
    """

    @property
    def summable(self) -> bool:
        """True if payload(a) + payload(b) decodes to a + b, so that allreduce can carry payloads."""
        return False

    @property
    def unbiased(self) -> bool:
        """True if the mean of decompress(compress(x)) over random keys is x."""
        return False

    @property
    def of_any_length(self) -> bool:
        """True if `compress` and `decompress` take a tensor whose number of elements is known only at run time.

        In a graph, `spec.numel` and the lengths of `wire` are then 0-d tensors.
        """
        return False

    @cached_property
    def averages(self) -> bool:
        """False if merge() is scale-free (a vote), so that its result must not be divided by the number of ranks."""
        return True

    @property
    def nonfinite(self) -> Literal["lost", "shown", "carried"]:
        """Fate of NaN and infinity: "carried" if they pass through the payload unchanged.

        They are "shown" if a float of the payload counts as infinite whenever an element of x does, so that no pass
        must look. `MAX_MAGNITUDE` says what counts. `compress` then gets such elements if there are kernels. Without
        kernels it never does, because NumPy warns of arithmetic with them.
        """
        return "lost"

    @property
    def absolute(self) -> bool:
        """True if it depends on the size of the gradient, as a fixed threshold does, so that C(a x) is not a C(x)."""
        return False

    @property
    def flat(self) -> bool:
        """True if only the length of the tensor matters, not its shape; a large tensor may then be cut."""
        return True

    @property
    def joins(self) -> bool:
        """True if tensors whose gradients differ in size may be compressed as one, because they share no scale.

        Sparsifiers, which send exact values, choose among the elements of all these tensors.
        """
        return False

    @property
    def multiplies(self) -> bool:
        """True if matrix products decode a payload: kernels and the frameworks' libraries round them differently."""
        return False

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        """Names of the fields that scale the decoded gradient: multiplying all of them multiplies it."""
        return ()

    @property
    def default_memory(self) -> str:
        """Name of the memory that is used unless the user names one."""
        return "none"

    @property
    def harmed_by_feedback(self) -> str | None:
        """Reason why error feedback harms this method (GRACE, Table I and section V-B); None if it does not."""
        if not self.averages:
            return "the ranks vote, and a vote is not the mean of their signs"
        if self.unbiased and self.nonfinite != "carried":
            return "its errors average out, and error feedback adds them to the variance"
        return None

    @property
    def advice(self) -> str | None:
        """Setting that must change with this method, such as the learning rate, for the report; None if none must."""
        return None

    def contraction(self, spec: TensorSpec) -> float | None:
        """Return delta with E|x - C(x)|^2 <= (1 - delta) |x|^2 for every x; None if the error can exceed |x|."""
        return None

    def unfit(self, spec: TensorSpec) -> str | None:
        """Return the reason why this method cannot compress the tensor, which stays dense; None if it can."""
        return None

    @abstractmethod
    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        """Return the fields of the payload, from static facts only."""

    @abstractmethod
    def compress(self, x: Array, at: Site) -> Payload:
        """Return the payload of the flat gradient x; never change x."""

    @abstractmethod
    def decompress(self, payload: Payload, at: Site) -> Array:
        """Return the dense flat gradient that one payload carries; equal in every call."""

    def check_ranks(self, size: int) -> None:
        """Raise IncompatibleError if the payloads of `size` ranks cannot be merged (default: any number can)."""
        return

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        """Return the sum of the decoded payloads (default: decompress each and add in rank order)."""
        if len(payloads) == 1:
            return self.decompress(payloads[0], at)
        at = at._replace(out=None)
        total = self.decompress(payloads[0], at)
        for payload in payloads[1:]:
            total = at.ops.weighted_sum(total, 1, self.decompress(payload, at), 1)
        return total

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        """Return x minus the decoded payload; consumes x."""
        return at.ops.sub_(x, self.decompress(payload, at))


@dataclass(frozen=True)
class Sparsifier(Compressor, Selecting):
    """Base of sparsifiers, whose payload is exact `values` at distinct `indices`; they define `wire` and `compress`.

    If options change the values, `selects` must be False.
    """

    @property
    def joins(self) -> bool:
        # Chosen from all tensors, the largest elements train better than the largest of each (docs/accuracy.md).
        return True

    @cached_property
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
        return at.ops.desparsify(payload["values"], payload["indices"], at.spec.numel, at.out)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        values, indices = [p["values"] for p in payloads], [p["indices"] for p in payloads]
        return at.ops.sparse_sum(values, indices, at.spec.numel, out=at.out)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self.erase_(x, payload, at)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.put_(x, payload["indices"], 0.0)


def usual_communicator(compressor: Compressor) -> str:
    """Return the name of the simplest communicator that carries the payloads; `auto` may take one of fewer bytes."""
    return "allreduce" if compressor.summable else "allgather"


@cache
def fixed_size(compressor: Compressor) -> bool:
    """Return whether no field of the payload has a length that depends on the data."""
    return all(isinstance(field.length, int) for field in compressor.wire(TensorSpec("", (64, 64))))


def sparsifies(compressor: Compressor) -> bool:
    """Return whether the payload carries some coordinates exactly and nothing of the others."""
    return isinstance(compressor, Sparsifier) and compressor.selects


def keep_count(ratio: float, numel: int) -> int:
    """Return k = max(1, int(ratio * numel)); 0 for an empty tensor."""
    return min(numel, max(1, int(ratio * numel)))


def beyond_int32(spec: TensorSpec) -> str | None:
    """Return the reason why int32 indices cannot address the tensor; None if they can."""
    return f"{spec.numel} elements cannot be addressed by int32 indices" if spec.numel >= 2**31 else None
