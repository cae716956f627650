"""The methods that `grace bench step` compares, and the bytes that their collectives send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grace.bench.step import original

# A step without any exchange: the time that remains if communication is free.
COMPUTE = "compute"
# For each baseline, the library that runs it.
BASELINES = {
    "horovod": "horovod",
    "horovod-fp16": "horovod",
    "ddp": "ddp",
    "ddp-fp16": "ddp",
    "ddp-powersgd": "ddp",
    **dict.fromkeys(original.PARAMETERS, "horovod"),
}
# The baseline that all methods are compared with.
REFERENCE = "horovod"
# Horovod's default cycle time: the interval at which it looks for tensors to send.
CYCLE_MS = 1.0


@dataclass(frozen=True)
class Method:
    """A compressor, a baseline or COMPUTE, with its own options and Horovod's cycle time in milliseconds."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cycle_ms: float = CYCLE_MS

    @property
    def compresses(self) -> bool:
        """True if the method is one of grace's."""
        return self.name != COMPUTE and self.name not in BASELINES

    @property
    def family(self) -> str:
        """The library that runs the method."""
        return BASELINES.get(self.name, "horovod")


def compared(methods: list[Method]) -> list[Method]:
    """Return the methods after the two that they are compared with: a step without exchange, and plain Horovod."""
    first = [Method(COMPUTE), Method(REFERENCE)]
    return [*first, *(method for method in methods if method not in first)]


def hops(exchange: Any, ranks: int) -> int:
    """Return the bytes that a rank sends in a step, over all hops of Gloo's rings, from `stats()` of the last step.

    For B bytes, a rank sends 2 (ranks - 1) / ranks B in an allreduce and (ranks - 1) B in an allgather or broadcast. An
    alltoall sends each buffer to its receiver.
    """
    factors = {"allreduce": 2 * (ranks - 1) / ranks, "alltoall": 1}
    sent = exchange.stats()["collectives"]
    return round(sum(nbytes * factors.get(kind, ranks - 1) for kind, nbytes in sent.items()))
