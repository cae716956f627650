"""`Horovod`: the optimizer of Horovod as the entry point of the adapter.

A hook of the backward pass calls its `_allreduce_grad_async(p)`, which starts the reduction of a gradient. Its
`synchronize()` accepts a callable instead of a handle. A subclass would not work, because Horovod's methods use
`super(self.__class__, self)`. Horovod itself stays unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch

from grace.core.errors import ConfigError
from grace.core.guards.elastic import refusal_of_process_sets
from grace.core.session.start import is_mean
from grace.core.spec import COMPLEX_DTYPES
from grace.core.state.run import Run
from grace.torch.horovod.delegated import Delegated
from grace.torch.horovod.transport import HorovodTransport
from grace.torch.library import Library, Settings

_WHERE = "grace.torch.DistributedOptimizer"


class Horovod(Library):
    """The ranks of a process set of Horovod."""

    no_compression = hvd.Compression.none
    not_added = frozenset({"bfloat16", *COMPLEX_DTYPES})
    advice = "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before you train."
    transport: HorovodTransport

    def __init__(self, process_set: Any, timeout: float) -> None:
        if not hvd.is_initialized():
            raise ConfigError(f"{_WHERE}: Horovod is not initialized; call hvd.init() first.")
        self._process_set = hvd.global_process_set if process_set is None else process_set
        self.transport = HorovodTransport(self._process_set)
        self.transport.timeout = timeout
        self.group, self.world = str(self._process_set.process_set_id), (hvd.rank(), hvd.size())
        self.elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        if self.elastic and self._process_set is not hvd.global_process_set:
            raise refusal_of_process_sets(_WHERE)

    def connect(self) -> None:
        """Go on with the ranks that Horovod has now."""
        self.transport.connect()
        self.world = hvd.rank(), hvd.size()

    def averages(self, op: Any) -> bool:
        return is_mean(op, hvd.Average, hvd.Sum, "hvd.Average or hvd.Sum", _WHERE)

    def wrap(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        settings: Settings,
    ) -> tuple[Any, dict[torch.nn.Parameter, str]]:
        arguments = settings._replace(op=hvd.Average if settings.op is None else settings.op)._asdict()
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=named_parameters, process_set=self._process_set, **arguments
        )
        return wrapped, wrapped._parameter_names

    def begin(self, wrapped: Any, names: Mapping[torch.nn.Parameter, str], run: Run, prefix: str) -> Delegated:
        if self.transport.rank >= 0 and hvd.size() == 1 and not self.elastic:
            # With one process Horovod registers no hooks, but gradients shall be compressed all the same.
            wrapped._register_hooks()
        return Delegated(wrapped, self.transport, prefix)

    def drop(self, name: str, step: int) -> list[int]:
        return [step] if self.transport.rank < 0 else self.transport.discard(name, step)
