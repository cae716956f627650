"""The communicator that moves the fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.communicators.two_shot import TwoShot
from grace.core.exchange.bucket_step import BucketStep
from grace.core.exchange.collectives import Program
from grace.core.exchange.wire import Layout, Received
from grace.core.methods.communicator import Communicator
from grace.core.methods.compressor import Compressor
from grace.core.values.config import Method
from grace.core.values.registry import communicators
from grace.core.values.spec import Ranks
from grace.core.values.unit import Unit


@communicators.register("auto")
@dataclass(frozen=True)
class Auto(Communicator):
    r"""The communicator that moves the fewest bytes for the method and the number of ranks.

    Formula: 2 (N - 1) / N \;\text{payloads per rank by allreduce or two\_shot},\quad N - 1 \;\text{by allgather}

    This is `allreduce` if payloads can be added. Otherwise it is `allgather` for two ranks, where it moves as much as
    `two_shot` and compresses once only, and `two_shot` for more, if it can carry the method. It is chosen when the plan
    is made, and the report of the plan says why.
    """

    carries_codings: ClassVar[bool] = True

    def check(self, compressor: Compressor) -> None:
        return None

    def resolve(self, method: Method, ranks: Ranks) -> Communicator:
        usual = communicators.make(method.compressor.default_communicator)
        return usual if ranks.size <= 2 or _obstacle(method) else TwoShot()

    def why(self, method: Method, ranks: Ranks) -> str:
        if ranks.size <= 2 or method.compressor.default_communicator != "allgather":
            return ""
        n = ranks.size
        obstacle = _obstacle(method)
        if obstacle:
            return f"allgather: {n - 1} payloads per rank; two_shot cannot: {obstacle}"
        return f"two_shot: {2 * (n - 1) / n:.2f} payloads per rank, by allgather {n - 1}"

    def divide(self, units: Sequence[Unit], ranks: Ranks) -> Sequence[Unit]:
        return self.resolve(units[0].method, ranks).divide(units, ranks)

    def layout(self, units: Sequence[Unit], ranks: Ranks) -> Layout:
        return self.resolve(units[0].method, ranks).layout(units, ranks)

    def program(self, at: BucketStep, layout: Layout) -> Program[Received]:
        return self.resolve(at.steps[0].unit.method, Ranks(at.size)).program(at, layout)


def _obstacle(method: Method) -> str | None:
    """Return the reason why two_shot cannot replace the usual communicator; None if it can."""
    if method.compressor.default_communicator != "allgather":
        return "it has another default"
    if not method.compressor.averages:
        return "the ranks vote, and a tie has no sign to send on"
    if method.compressor.absolute:
        return "its threshold is that of a gradient, and the mean of all ranks is smaller"
    if method.memory.joint:
        return "the memory must receive the mean of what all ranks have sent"
    if method.memory.whole:
        return "the memory needs whole tensors"
    return TwoShot().obstacle(method.compressor)
