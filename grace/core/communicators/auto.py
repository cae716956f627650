"""The communicator that moves the fewest bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, NamedTuple, NoReturn

from grace.core.communicators.allgather import Allgather
from grace.core.communicators.allreduce import Allreduce
from grace.core.communicators.two_shot import TwoShot
from grace.core.exchange.bucket_step import BucketStep
from grace.core.methods.communicator import Communicator
from grace.core.values.config import Method
from grace.core.values.registry import communicators
from grace.core.values.spec import Ranks
from grace.core.values.unit import Assignment, Unit, whole
from grace.core.wire.layout import Layout

# The programs that are compared, the simplest first. They lose nothing but what the method itself loses: two_shot
# compresses the mean by the same method, for which `_obstacle` adds conditions. Lossy sums of sparse payloads and nodes
# stay the user's choice.
_PROGRAMS = (Allreduce(), Allgather(), TwoShot())


@communicators.register("auto")
@dataclass(frozen=True)
class Auto(Communicator):
    r"""The communicator that moves the fewest bytes for the method and the number of ranks.

    Formula: 2 (N - 1) / N \; B_+ \;\text{by allreduce}, \quad (N - 1) B \;\text{by allgather}, \quad
    2 (N - 1) / N \; B \;\text{by two\_shot}

    B are the bytes of a payload of the tensor as a whole, and B_+ those of one that can be added on N ranks: integers
    of a sum take more bits. Of those programs that can carry the method, the one that moves the fewest bytes is chosen
    when the plan is made. A tie goes to the first in this order, which is the simplest. If a payload's bytes depend on
    the data and the method aims at no ratio, payloads are counted. The report of the plan shows the count.
    """

    carries_codings: ClassVar[bool] = True

    def resolve(self, item: Assignment, ranks: Ranks) -> tuple[Communicator, str]:
        usual = communicators.make(item.compressor.default_communicator)
        if usual not in _PROGRAMS:
            return usual, "the method's own default"
        counts = [_count(program, item, ranks.size) for program in _PROGRAMS if not _obstacle(program, item.method)]
        if any(count.nbytes is None for count in counts):
            counts = [count._replace(nbytes=None) for count in counts]
        # The sort keeps the order of what is equal. An empty tensor travels as others of its method do.
        best, *others = sorted(counts, key=lambda count: (count.amount, count.payloads))
        if ranks.size == 1:
            return best.program, ""
        why = f"{best.name}: {best.text} per rank"
        if others:
            tie = others[0].amount == best.amount
            why += f", by {others[0].name} {'as many' if tie else others[0].text}"
        elif obstacle := _obstacle(TwoShot(), item.method):
            why += f"; two_shot cannot: {obstacle}"
        return best.program, why

    def layout(self, units: Sequence[Unit], ranks: Ranks) -> NoReturn:
        # A plan has what `resolve` returns, and never this communicator.
        raise AssertionError

    def program(self, at: BucketStep, layout: Layout) -> NoReturn:
        raise AssertionError


class _Count(NamedTuple):
    """Payloads that leave a rank per step by a program, with rings, and their bytes if these are known.

    `about` says that the bytes are those that a method aims at.
    """

    program: Communicator
    payloads: Fraction
    nbytes: Fraction | None
    about: bool

    @property
    def name(self) -> str:
        return communicators.name_of(self.program)

    @property
    def amount(self) -> Fraction:
        return self.payloads if self.nbytes is None else self.nbytes

    @property
    def text(self) -> str:
        if self.nbytes is None:
            return f"{float(self.payloads):.4g} payloads"
        return f"{'about ' if self.about else ''}{round(self.nbytes):,} bytes"


def _count(program: Communicator, item: Assignment, size: int) -> _Count:
    method = dataclasses.replace(item.method, communicator=program)
    unit = dataclasses.replace(whole(dataclasses.replace(item, method=method)), summed=size if program.sums else 0)
    ring = Fraction(2 * (size - 1), size)
    payloads = Fraction(size - 1) if program == Allgather() else ring
    sent = unit.expected_bytes
    if sent is None:
        return _Count(program, payloads, None, False)
    proposals = unit.negotiated_bytes
    return _Count(program, payloads, payloads * (sent - proposals) + ring * proposals, unit.wire_bytes is None)


def _obstacle(program: Communicator, method: Method) -> str | None:
    """Return the reason why auto does not take a program for a method; None if it may."""
    if program == TwoShot():
        # A user may name two_shot for such methods. They would then lose more than by the other programs.
        if not method.compressor.averages:
            return "the ranks vote, and a tie has no sign to send on"
        if method.compressor.absolute:
            return "its threshold is that of a gradient, and the mean of all ranks is smaller"
        if method.memory.joint:
            return "the memory must receive the mean of what all ranks have sent"
        if method.memory.whole:
            return "the memory needs whole tensors"
    return program.obstacle(method.compressor)
