"""What `grace bench step` can compare, and how many bytes a rank sends for what a method hands to collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grace.bench.step import original

# A step without any exchange: what remains when communication is free.
COMPUTE = "compute"
# By name the library whose processes run it.
BASELINES = {
    "horovod": "horovod",
    "horovod-fp16": "horovod",
    "ddp": "ddp",
    "ddp-fp16": "ddp",
    "ddp-powersgd": "ddp",
    **dict.fromkeys(original.PARAMETERS, "horovod"),
}
# What every other is compared with.
REFERENCE = "horovod"
# How often Horovod looks for what is to be sent, unless told otherwise.
CYCLE_MS = 1.0


@dataclass(frozen=True)
class Method:
    """A compressor, a baseline or COMPUTE by its name; options beside those of the run, and Horovod's cycle time."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cycle_ms: float = CYCLE_MS

    @property
    def compresses(self) -> bool:
        """Whether it is one of grace's."""
        return self.name != COMPUTE and self.name not in BASELINES

    @property
    def family(self) -> str:
        """The library whose processes run it."""
        return BASELINES.get(self.name, "horovod")


def compared(methods: list[Method]) -> list[Method]:
    """The methods behind the two with which each is compared: a step without exchange, and plain Horovod."""
    first = [Method(COMPUTE), Method(REFERENCE)]
    return [*first, *(method for method in methods if method not in first)]


def hops(exchange: Any, ranks: int) -> int:
    """Bytes that a rank sends in a step, over all hops of Gloo's rings, as `stats()` of its last step says.

    An allreduce of B bytes passes 2 (ranks - 1) / ranks B on, a gather (ranks - 1) B. What the ranks do in place of an
    allreduce of 16-bit floats (docs/design.md, section 6) passes on as much as one.
    """
    total = 0.0
    for collective, nbytes in exchange.stats()["collectives"].items():
        total += nbytes * (ranks - 1) * (2 / ranks if collective == "allreduce" else 1)
    return round(total)
