"""`TorchDistributed`: an optimizer with hooks over process groups of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from grace.core.errors import ConfigError, StepError
from grace.core.session.start import check_predivide, is_mean
from grace.core.state.run import Run
from grace.torch.adapter import give_own_class
from grace.torch.distributed.delegated import Delegated
from grace.torch.distributed.transport import ProcessGroupTransport
from grace.torch.library import Library, Settings
from grace.torch.tensors import names_of, weak_hook

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
        give_own_class(wrapped, _Hooks)
        wrapped._attach(names, self._settings.backward_passes_per_step)
        return Delegated(self, run, names, self._settings)

    def connect_dense(self, what: str) -> ProcessGroupTransport:
        """Return a transport for tensors that stay dense, whose order among the others differs between ranks.

        All ranks must call it; `what` says what they connect for.
        """
        transport = ProcessGroupTransport(
            self._process_group,
            timeout=self.transport.timeout,
            name=f"{self.transport.name}/dense/{self.transport.connections}",
            store=self.transport.store,
            lanes=1,
            what=what,
        )
        transport.join_waits(self.transport)
        return transport

    def drop(self, name: str, step: int) -> list[int]:
        self.transport.discard()
        return self.transport.gather_objects(step, name, "optimizer.grace.discard()")


class _Hooks:
    """Mixin for the class of an optimizer: its hooks pass each finished gradient to its `_allreduce_grad_async`.

    The methods are those of Horovod's optimizer.
    """

    _allreduce_grad_async: Callable[[torch.nn.Parameter], tuple[Callable[[], torch.Tensor], Any]]
    _parameter_names: Mapping[torch.nn.Parameter, str]
    # What waits for a gradient, or None while further backward passes will add to it.
    _handles: dict[torch.nn.Parameter, tuple[Callable[[], torch.Tensor] | None, Any]]
    # The number of backward passes that are missing until the exchange of a gradient.
    _missing: dict[torch.nn.Parameter, int]
    _synchronized = False
    _should_synchronize = True
    backward_passes_per_step: int
    param_groups: list[dict[str, Any]]

    def _attach(self, names: Mapping[torch.nn.Parameter, str], passes: int) -> None:
        """Register the hooks."""
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._parameter_names, self._handles, self._missing = names, {}, dict.fromkeys(trained, 0)
        self.set_backward_passes_per_step(passes)
        for p in trained:
            p.register_post_accumulate_grad_hook(weak_hook(self._take_gradient))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are added before they are exchanged."""
        self.backward_passes_per_step = passes
        self._missing = dict.fromkeys(self._missing, passes)

    def _take_gradient(self, p: torch.nn.Parameter) -> None:
        """Take note of a gradient; start its exchange after the last backward pass of the step."""
        if not self._missing[p]:
            raise StepError(
                f"the gradient of '{self._parameter_names[p]}' was computed more than "
                f"{self.backward_passes_per_step} times before step(); raise backward_passes_per_step to add the "
                "gradients of several backward passes."
            )
        self._missing[p] -= 1
        self._handles[p] = (None, None) if self._missing[p] else self._allreduce_grad_async(p)

    def synchronize(self) -> None:
        """Complete the exchange: all gradients are then those of all ranks."""
        for p in self._missing:
            if self._handles.get(p, (None, None))[0] is None:
                self._handles[p] = self._allreduce_grad_async(p)
        for p, (wait, _) in self._handles.items():
            assert wait is not None
            result = wait()
            assert p.grad is not None
            if p.grad.is_sparse:
                p.grad = result if result.is_sparse else result.to_sparse()
            else:
                p.grad.set_(result)
        self._handles.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._synchronized = True
