"""The methods that `grace bench step` compares, and the bytes that their collectives send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grace.bench.step import original
from grace.bench.variants import Variant
from grace.core.transport.collectives import copies

# A step without any exchange: the time that remains if communication is free.
COMPUTE = "compute"
# For each baseline, the library that runs it.
BASELINES = {
    "horovod": "horovod",
    "horovod-fp16": "horovod",
    "ddp": "torch",
    "ddp-fp16": "torch",
    "ddp-powersgd": "torch",
    "fsdp": "torch",
    "fsdp-zero2": "torch",
    **dict.fromkeys(original.PARAMETERS, "horovod"),
}


@dataclass(frozen=True)
class Launcher:
    """A way to use grace: the library that connects the ranks, and the baseline that its methods are compared with."""

    library: str
    reference: str


# By `DistributedOptimizer` over Horovod, `register` with DDP and with a plain model, `DistributedOptimizer` and
# `OneBitAdam` after its warm-up over torch.distributed, and `register` with FSDP2, which gathers the parameters for
# each pass or only once a step.
LAUNCHERS = {
    "horovod": Launcher("horovod", "horovod"),
    "torch": Launcher("torch", "ddp"),
    "torch-module": Launcher("torch", "ddp"),
    "torch-optimizer": Launcher("torch", "ddp"),
    "torch-one-bit-adam": Launcher("torch", "ddp"),
    "torch-fsdp": Launcher("torch", "fsdp"),
    "torch-fsdp-zero2": Launcher("torch", "fsdp-zero2"),
}
# Horovod's default cycle time: the interval at which it looks for tensors to send.
CYCLE_MS = 1.0


@dataclass(frozen=True)
class Method:
    """A compressor, a baseline or COMPUTE, with its launcher, its own options and Horovod's cycle time in ms."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cycle_ms: float = CYCLE_MS
    launcher: str = "torch"

    @property
    def compresses(self) -> bool:
        """True if the method is one of grace's."""
        return self.name != COMPUTE and self.name not in BASELINES

    @property
    def library(self) -> str:
        """The library that runs the method."""
        return BASELINES.get(self.name, LAUNCHERS[self.launcher].library)

    @property
    def label(self) -> str:
        """The name with the method's own options, and with the launcher of a compressor unless it is DDP."""
        text = Variant(self.name, self.options).label
        return f"{text} ({self.launcher})" if self.compresses and self.launcher != "torch" else text


def with_references(methods: list[Method], launcher: str) -> list[Method]:
    """Return the methods after the two that they are compared with: a step without exchange, and a baseline."""
    first = [Method(COMPUTE, launcher=launcher), Method(LAUNCHERS[launcher].reference)]
    return [*first, *(method for method in methods if method not in first)]


def count_memory_bytes(exchange: Any) -> int:
    """Return the bytes that this rank's memories keep between steps."""
    tensors = exchange.state_dict()["tensors"].values()
    return sum(x.nbytes for tensor in tensors for x in tensor["memory"].values())


def count_hop_bytes(exchange: Any, ranks: int) -> int:
    """Return the bytes that a rank sends in a step, over all hops of Gloo's rings, from `stats()` of the last step.

    `copies` has the factors: 2 (ranks - 1) / ranks for an allreduce, 1 for an alltoall, else ranks - 1.
    """
    sent = exchange.stats()["collectives"]
    return round(sum(nbytes * copies(kind, ranks) for kind, nbytes in sent.items()))
