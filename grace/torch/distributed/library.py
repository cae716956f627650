"""`TorchDistributed`: an optimizer with hooks over process groups of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from grace.core.errors import ConfigError
from grace.core.session.start import check_predivide, is_mean
from grace.core.state.run import Run
from grace.torch.distributed.delegated import Delegated
from grace.torch.distributed.hooks import hook
from grace.torch.distributed.transport import ProcessGroupTransport
from grace.torch.library import Library, Settings
from grace.torch.tensors import names_of

_WHERE = "grace.torch.DistributedOptimizer"


class TorchDistributed(Library):
    """The ranks of a process group of torch.distributed."""

    advice = (
        "Give all ranks the weights of rank 0 before you train: "
        "for x in model.state_dict().values(): torch.distributed.broadcast(x, 0)."
    )
    transport: ProcessGroupTransport

    def __init__(self, process_group: Any, timeout: float, where: str = _WHERE) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"{where}: torch.distributed is not initialized; call torch.distributed.init_process_group() first."
            )
        self.transport = ProcessGroupTransport(process_group, timeout=timeout)
        self.group, self.world = self.transport.group, (dist.get_rank(), dist.get_world_size())
        self._process_group = process_group

    def averages(self, op: Any) -> bool:
        return is_mean(op, dist.ReduceOp.AVG, dist.ReduceOp.SUM, "torch.distributed.ReduceOp.AVG or SUM", _WHERE)

    def wrap(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        settings: Settings,
    ) -> tuple[Any, dict[torch.nn.Parameter, str]]:
        passes = settings.backward_passes_per_step
        if passes < 1:
            raise ConfigError(f"{_WHERE}: backward_passes_per_step must be at least 1, received {passes!r}.")
        average = self.averages(settings.op)
        check_predivide(settings.gradient_predivide_factor, average, "a mean", settings.op, _WHERE)
        self._settings = settings
        return optimizer, names_of(optimizer, named_parameters)

    def begin(self, wrapped: Any, names: Mapping[torch.nn.Parameter, str], run: Run, prefix: str) -> Delegated:
        hook(wrapped, names, self._settings.backward_passes_per_step)
        return self.delegated(names, run, self._settings)

    def delegated(
        self, names: Mapping[torch.nn.Parameter, str], run: Run, settings: Settings, bucket_bytes: int = 0
    ) -> Delegated:
        """Return the exchange of the gradients that stay dense, some of which may share an allreduce.

        All ranks must call it.
        """

        def connect(what: str) -> ProcessGroupTransport:
            return ProcessGroupTransport(
                self._process_group,
                timeout=self.transport.timeout,
                name=f"{self.transport.name}/dense/{self.transport.connections}",
                store=self.transport.store,
                lanes=1,
                what=what,
            )

        return Delegated(
            connect,
            run,
            names,
            average=self.averages(settings.op),
            predivide=settings.gradient_predivide_factor,
            sparse_as_dense=settings.sparse_as_dense,
            bucket_bytes=bucket_bytes,
        )

    def drop(self, name: str, step: int) -> list[int]:
        self.transport.discard()
        return self.transport.gather_objects(step, name, "optimizer.grace.discard()")
