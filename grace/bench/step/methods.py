"""What `grace bench step` can compare, and how many bytes a rank sends for what a method hands to collectives."""

from __future__ import annotations

from typing import Any

# A step without any exchange: what remains when communication is free.
COMPUTE = "compute"
# By name the library whose processes run it.
BASELINES = {
    "horovod": "horovod",
    "horovod-fp16": "horovod",
    "ddp": "ddp",
    "ddp-fp16": "ddp",
    "ddp-powersgd": "ddp",
}
# What every other is compared with.
REFERENCE = "horovod"


def family_of(method: str) -> str:
    """The library whose processes run a method."""
    return BASELINES.get(method, "horovod")


def hops(exchange: Any, ranks: int) -> int:
    """Bytes that a rank sends in a step, over all hops of Gloo's rings, as `stats()` of its last step says.

    An allreduce of B bytes passes 2 (ranks - 1) / ranks B on, a gather (ranks - 1) B. What the ranks do in place of an
    allreduce of 16-bit floats (docs/design.md, section 6) passes on as much as one.
    """
    total = 0.0
    for collective, nbytes in exchange.stats()["collectives"].items():
        total += nbytes * (ranks - 1) * (2 / ranks if collective == "allreduce" else 1)
    return round(total)
