"""`Library`: the differences between Horovod and torch.distributed for an optimizer."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from grace.core.errors import ConfigError
from grace.core.plan.unit import Assignment
from grace.core.session.start import Request, Session, open_session
from grace.core.state.run import Run
from grace.core.transport.transport import HandshakeTransport


class Settings(NamedTuple):
    """The arguments of a wrapped optimizer that its library honours; see `grace.torch.DistributedOptimizer`."""

    op: Any = None
    backward_passes_per_step: int = 1
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False


PLAIN = Settings()


class Delegated(ABC):
    """The exchange of gradients that stay dense."""

    @abstractmethod
    def start(self, p: torch.nn.Parameter) -> Any:
        """Start the exchange of a gradient; return what `_allreduce_grad_async` may return."""

    def agree_on_sparse(self) -> None:
        """Let ranks without a gradient know which tensors have sparse ones. All ranks call it in their first step.

        Raises StepError on every rank if a tensor is sparse on some ranks and dense on others. Nothing is needed if the
        transport finds collectives that differ.
        """
        return

    def forget(self) -> None:
        """Forget what was started in a step that was dropped, if the transport does not do so."""
        return


class Library(ABC):
    """The library that connects the ranks of one optimizer. Its constructor raises ConfigError if it cannot."""

    # What to do if the replicas start with other weights.
    advice: str
    transport: HandshakeTransport
    # The name of the group of ranks, equal on all of them.
    group: str
    # Rank and size among all processes.
    world: tuple[int, int]
    # What the argument 'compression' may be: the library's own default.
    no_compression: Any = None
    # Ranks may come and go.
    elastic: bool = False
    # The dtypes that it cannot add.
    not_added: ClassVar[frozenset[str]] = frozenset()

    def reduces(self, item: Assignment) -> bool:
        """Return whether the library itself reduces the tensor: it stays dense, and the library can add its dtype."""
        return item.dense and item.spec.dtype not in self.not_added

    def session(self, request: Request, kind: str, gather: Callable[[Any], list[Any]] | None = None) -> Session:
        """Return the start of an exchange among these ranks; see `open_session`."""
        # In elastic mode the handshake comes when states are synchronized: a new rank makes its optimizer while the
        # others go on.
        gather = (lambda mine: [mine]) if self.elastic else gather
        group = f"grace/{self.group}"
        return open_session(request, self.transport, world=self.world, group=group, kind=kind, gather=gather)

    @abstractmethod
    def averages(self, op: Any) -> bool:
        """Return whether a reduction is the mean (None is), rather than the sum. Raises ConfigError for others."""

    @abstractmethod
    def wrap(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        settings: Settings,
    ) -> tuple[Any, dict[torch.nn.Parameter, str]]:
        """Return the optimizer to which the adapter attaches, and the names of its parameters, before the handshake.

        Its hooks call `_allreduce_grad_async(p)` with each finished gradient. The adapter replaces this method. It
        returns a function that waits for the result, or a handle of the library, and a context. `_handles` keeps what
        it has returned, by parameter, until `synchronize()`, which sets `_synchronized`. Raises ConfigError or
        ValueError if the library cannot do what is asked.
        """

    @abstractmethod
    def begin(self, wrapped: Any, names: Mapping[torch.nn.Parameter, str], run: Run, prefix: str) -> Delegated:
        """Register the hooks that are still missing, after the handshake; return what exchanges dense tensors."""

    @abstractmethod
    def drop(self, name: str, step: int) -> list[int]:
        """Drop what is on its way, on all ranks. Return the steps of all."""


def connect(backend: str | None, process_set: Any, process_group: Any, timeout: float, where: str) -> Library:
    """Connect the ranks by the library that was named, or by the one that is initialized.

    `where` is what the user calls. Raises ConfigError if there is none, or if an argument belongs to the other library.
    """
    if backend not in (None, "horovod", "torch"):
        raise ConfigError(f"{where}: the argument 'backend' must be 'horovod' or 'torch', received {backend!r}.")
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    horovod = sys.modules.get("horovod.torch")
    if backend is None and not here and (horovod is None or not horovod.is_initialized()):
        raise ConfigError(
            f"{where}: neither Horovod nor torch.distributed is initialized; call hvd.init() or "
            "torch.distributed.init_process_group() first."
        )
    if backend == "torch" or (backend is None and not (horovod is not None and horovod.is_initialized())):
        from grace.torch.distributed.library import TorchDistributed

        if process_set is not None:
            raise ConfigError(
                f"{where}: the argument 'process_set' belongs to Horovod; pass a process group of torch.distributed "
                "as process_group."
            )
        return TorchDistributed(process_group, timeout)
    from grace.torch.horovod.library import Horovod

    if process_group is not None:
        raise ConfigError(
            f"{where}: the argument 'process_group' belongs to torch.distributed; pass a process set of Horovod as "
            "process_set."
        )
    return Horovod(process_set, timeout)
