"""The communicator that moves the fewest bytes and loses nothing that matters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import ClassVar, NamedTuple

from grace.core.communicators.allgather import Allgather
from grace.core.communicators.allreduce import Allreduce
from grace.core.communicators.sparse_allreduce import SparseAllreduce
from grace.core.communicators.two_shot import TwoShot
from grace.core.config.config import Method
from grace.core.config.registry import communicators
from grace.core.methods.communicator import Communicator
from grace.core.methods.compressor import Compressor, usual_communicator
from grace.core.methods.memory import Merging
from grace.core.methods.site import Site
from grace.core.ops import get_ops
from grace.core.plan.unit import Assignment, whole
from grace.core.spec import ITEMSIZE, Key, Ranks, TensorSpec
from grace.core.transport.collectives import copies

_UNION = SparseAllreduce(reduction="union")
# What is compared, the simplest first. All deliver the mean of what the ranks have sent, except two_shot,
# which compresses it again: `_obstacle` has its conditions. Sums that drop entries and nodes stay the user's choice.
_CANDIDATES = (Allreduce(), Allgather(), _UNION, TwoShot())
# Up to this error of a compressor, a second compression costs about as much as seeds differ; see "Second compression"
# in docs/communicators_and_memories.md.
_FREE_ERROR = 0.1
_EXAMPLE = TensorSpec("example", (4096,))


@communicators.register("auto")
@dataclass(frozen=True)
class Auto(Communicator):
    r"""The communicator that moves the fewest bytes and still delivers the mean of what the ranks have sent.

    Formula: 2 (N - 1) / N \; B_+ \;\text{by allreduce}, \quad (N - 1) B \;\text{by allgather}, \quad
    (N - 1) / N \; (B + \min(N B, D)) \;\text{by sparse\_allreduce}, \quad 2 (N - 1) / N \; B \;\text{by two\_shot}

    B are the bytes of a payload of the tensor as a whole, B_+ those of one that can be added on N ranks (integers of a
    sum take more bits), and D those of the tensor in float32. Of those that can carry the method, the one that moves
    the fewest bytes is chosen when the plan is made. A tie goes to the first in this order, which is the simplest.
    sparse_allreduce has the reduction "union", and is counted with the most bytes that it can move. two_shot compresses
    the mean again, so it is only for compressors with a small error on normal values: quantizers of 8 bits and most of
    4 bits, but no sparsifier.

    If a payload's bytes depend on the data and the method aims at no ratio, payloads are counted. The report of the
    plan shows the count.
    """

    any_length: ClassVar[bool] = True

    def resolve(self, item: Assignment, ranks: Ranks) -> tuple[Communicator, str]:
        usual = communicators.make(usual_communicator(item.compressor))
        if usual not in _CANDIDATES:
            return usual, "the method's own default"
        if ranks.size == 1:
            return usual, ""
        # The name decides nothing, and a model has many tensors of few shapes.
        return _chosen(dataclasses.replace(item, spec=dataclasses.replace(item.spec, name="")), ranks.size)


@lru_cache(maxsize=4096)
def _chosen(item: Assignment, size: int) -> tuple[Communicator, str]:
    """Return the communicator that moves the fewest bytes of a tensor among so many ranks, and why."""
    counts = [
        _count(communicator, item, size) for communicator in _CANDIDATES if not _obstacle(communicator, item.method)
    ]
    if any(count.nbytes is None for count in counts):
        # How many payloads a union is depends on the data, too.
        counts = [count._replace(nbytes=None) for count in counts if count.communicator != _UNION]
    # The sort keeps the order of what is equal. An empty tensor travels as others of its method do.
    best, *others = sorted(counts, key=lambda count: (count.amount, count.payloads))
    why = f"{best.name}: {best.text} per rank"
    if others:
        tie = others[0].amount == best.amount
        why += f", by {others[0].name} {'as many' if tie else others[0].text}"
    obstacle = _obstacle(TwoShot(), item.method)
    if obstacle and not best.communicator.adds and size > 2:
        why += f"; not by two_shot: {obstacle}"
    dense = copies("allreduce", size) * item.spec.nbytes
    if best.nbytes is not None and best.nbytes > dense:
        why += f"; uncompressed, it would be {round(dense):,} bytes"
    return best.communicator, why


class _Count(NamedTuple):
    """Payloads that leave a rank per step by a communicator, with rings, and their bytes if these are known.

    `about` is what to say before the bytes: they may be those that a method aims at, or the most that a union moves.
    """

    communicator: Communicator
    payloads: Fraction
    nbytes: Fraction | None
    about: str

    @property
    def name(self) -> str:
        name = communicators.name_of(self.communicator)
        return f"{name} (union)" if self.communicator == _UNION else name

    @property
    def amount(self) -> Fraction:
        return self.payloads if self.nbytes is None else self.nbytes

    @property
    def text(self) -> str:
        if self.nbytes is None:
            return f"{float(self.payloads):.4g} payloads"
        return f"{self.about}{round(self.nbytes):,} bytes"


def _count(communicator: Communicator, item: Assignment, size: int) -> _Count:
    method = dataclasses.replace(item.method, communicator=communicator)
    unit = dataclasses.replace(
        whole(dataclasses.replace(item, method=method)), addends=size if communicator.adds else 0
    )
    ring, others = copies("allreduce", size), copies("allgather", size)
    payloads = others if communicator in (Allgather(), _UNION) else ring
    sent = unit.expected_bytes
    if sent is None:
        return _Count(communicator, payloads, None, "")
    proposals = unit.negotiated_bytes
    nbytes, about = payloads * (sent - proposals), "about " if unit.wire_bytes is None else ""
    if communicator == _UNION:
        # Entries to the owners of ranges, and the sums back, without indices where they are many. The ranks agree on
        # the ranges by sums of integers of 64 bits.
        dense = unit.spec.numel * ITEMSIZE[unit.spec.work_dtype]
        nbytes = others / size * (sent - proposals + min(size * (sent - proposals), dense)) + ring * 8 * size
        about = "at most " + about
    return _Count(communicator, payloads, nbytes + ring * proposals, about)


def _obstacle(communicator: Communicator, method: Method) -> str | None:
    """Return the reason why auto does not take a communicator for a method; None if it may."""
    apart = "full" in method.memory.needs or isinstance(method.memory, Merging)
    if (communicator == _UNION or apart) and (obstacle := communicator.memory_obstacle(method.memory)):
        return obstacle
    if communicator == TwoShot():
        # A user may name two_shot for such methods. They would then lose more than by the other programs.
        if not method.compressor.averages:
            return "the ranks vote, and a tie has no sign to send on"
        if method.compressor.absolute:
            return "its threshold is that of a gradient, and the mean of all ranks is smaller"
        if method.memory.across_ranks == "joint":
            return "the memory must receive the mean of what all ranks have sent"
        if "tensor" in method.memory.needs:
            return "the memory needs whole tensors"
        if not method.compressor.flat:
            return "it needs a whole tensor, and whole tensors do not spread evenly over their owners"
        if obstacle := communicator.obstacle(method.compressor):
            return obstacle
        if (error := error_of_normal(method.compressor)) > _FREE_ERROR:
            return f"the mean would be compressed again, with a relative error of {error:.2g}"
    return communicator.obstacle(method.compressor)


@cache
def error_of_normal(compressor: Compressor) -> float:
    """Return |x - C(x)|^2 / |x|^2 of standard normal values, for a compressor that keeps no state."""
    # Not at the top: a process that only names components needs no array library.
    import numpy as np

    x = np.random.default_rng(0).standard_normal(_EXAMPLE.numel)
    at = Site(get_ops("numpy"), _EXAMPLE, Key(0, 0))
    given = x.astype(_EXAMPLE.dtype)
    decoded = compressor.decompress(compressor.compress(given, at), at)
    return float(np.sum((x - decoded) ** 2) / np.sum(x**2))
