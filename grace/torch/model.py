"""`ModelExchange`: the exchange of a registered model, whose gradients are exchanged during its backward pass."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from grace.core.config.recommended import warn_of_pairs
from grace.core.errors import StepError
from grace.torch.describe import describe
from grace.torch.exchange import Exchange
from grace.torch.pending import PendingGradients
from grace.torch.references import References
from grace.torch.tensors import parameters_of

WHERE = "grace.torch.register"
# The exchanges of registered models, not their parameters: PyTorch moves and converts no sharded parameter to which
# there are weak references.
_registered: weakref.WeakSet[ModelExchange] = weakref.WeakSet()
# PyTorch calls it after each step of every optimizer of this process, once a model is registered.
_hooked: list[Any] = []


class ModelExchange(Exchange, ABC):
    """The plan, the statistics and the state of a model's exchange, as `register` returns it."""

    called = "exchange"
    maker = WHERE
    # Second gradients, if a step takes them.
    _references: References

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.rollback.forget = self._forget_pass

    def _note_steps(self) -> None:
        """Call `stepped` after each step of every optimizer from now on: the model is registered."""
        _registered.add(self)
        if not _hooked:
            _hooked.append(register_optimizer_step_post_hook(_note_step))

    @abstractmethod
    def _forget_pass(self) -> None:
        """Forget the backward pass under way, which was dropped."""

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure that computes gradients, at earlier weights as well if a memory needs second gradients.

        Gradients at earlier weights stay on this rank, and those of now are exchanged as usual. Both draw the same
        random numbers, and buffers are those of the pass at the weights of now. Call it in place of the forward and the
        backward pass: of all data if `full_round` is true, else of a batch, which stays the same when the closure is
        called twice. Of several backward passes, all but the last belong into `no_sync()`. Returns what the closure
        returns at the weights of now.
        """
        if not self._references.needed:
            return closure()
        self.rollback.check()
        self._references.evaluate(closure)
        try:
            return closure()
        finally:
            self._references.clear()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step of any optimizer. Warn in its first one if the two are known to be a poor pair."""
        self._references.note_step(optimizer)
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        ours = set(self.exchanged_parameters())
        if any(p in ours for group in optimizer.param_groups for p in group["params"]):
            self.optimizers.append(describe(optimizer))
            if self._logs:
                warn_of_pairs(self.config, self.optimizers[-1])

    def exchanged_parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients it exchanges."""
        return [self._parameters[spec.name] for spec in self._specs]

    def begin_step(self) -> None:
        """Begin a step, at its first gradient. Warn in the first one of an unknown GradScaler."""
        super().begin_step()
        if not self.scaler_sought and not self.all_dense:
            self.warn_of_scaler()
        if not self.run.completed:
            # Ranks at different stages of a schedule would start different collectives, and an error about these would
            # come first.
            self.comparisons.finish()

    def end_step(self) -> None:
        """End a step: the model has the gradients of all ranks."""
        self.rollback.release()
        self.loss_scale.finish()


class ReplicatedExchange(ModelExchange):
    """The exchange of a model of which each rank has all parameters, in DDP or not.

    `trained` has the names of those that train.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trained = {p: name for name, p in self._parameters.items() if p.requires_grad}
        self._kinds = {p: (p.dtype, p.device) for p in self.trained}
        self._pending = PendingGradients(self, self.trained)

    def _watch(
        self,
        model: torch.nn.Module,
        expected: Callable[[], bool],
        no_sync: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Watch the gradients and the optimizers of the model.

        `expected()` tells whether a gradient now belongs to an exchange, and none does in `no_sync()`.
        """
        self._model = weakref.ref(model)

        @contextmanager
        def aside() -> Iterator[None]:
            self._pending.paused = True
            try:
                with no_sync():
                    yield
            finally:
                self._pending.paused = False

        names = {p: name for name, p in self._parameters.items()}
        self._references = References(self, names, aside, self._model)
        self._pending.attach(expected)
        self.loss_scale.attach_to(lambda: self.trained)
        self._note_steps()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step of any optimizer, which may have applied gradients.

        Raises StepError in its first one if some of them were not exchanged, because the model has other parameters.
        """
        if optimizer not in self._seen and (model := self._model()) is not None:
            applied = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
            unknown = applied.difference(self._parameters.values())
            added = [name for name, p in parameters_of(model).items() if p in unknown]
            if added:
                raise StepError(
                    f"parameter '{added[0]}' is not the one of the model that was registered, so its gradient was not "
                    "exchanged and the ranks train apart. Add layers, or load by load_state_dict(assign=True), which "
                    "replaces parameters, before you wrap the model in DistributedDataParallel and register it."
                )
        super().note_step(optimizer)
        self._pending.note_step(optimizer)

    def _refuse_converted(self, parameters: Iterable[torch.Tensor], instead: str) -> None:
        """Raise StepError if a parameter has another dtype or device than when the model was registered."""
        for p in parameters:
            kind = self._kinds[p]
            if p.dtype is not kind[0] or p.device != kind[1]:
                raise StepError(
                    f"parameter '{self.trained[p]}' was {kind[0]} on {kind[1]} when the model was registered, and is "
                    f"{p.dtype} on {p.device} now. {instead}"
                )

    def _start_finding_unused(self, used: Mapping[str, bool], device: Any = None) -> Callable[[], set[str]]:
        """Start to find the gradients that no rank has; return a function that waits for their names.

        `used` tells, in the same order on all ranks, which ones this rank has.
        """
        flags = torch.tensor(list(used.values()), dtype=torch.int32, device=device)
        handle = self.transport.allreduce(flags, op="max", name=f"{self.prefix}/used parameters")
        return lambda: {name for name, flag in zip(used, handle.wait().tolist(), strict=True) if not flag}

    def _forget_earlier(self) -> None:
        super()._forget_earlier()
        self._pending.forget()


def _note_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
    for exchange in list(_registered):
        exchange.note_step(optimizer)


def is_registered(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether a registered model that still exists exchanges the gradient of one of the parameters."""
    exchanged = {p for exchange in _registered for p in exchange.exchanged_parameters()}
    return any(p in exchanged for p in parameters)
