"""`ModelExchange`: the exchange of a model that PyTorch itself makes parallel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from grace.core.config.recommended import warn_of_pairs
from grace.torch.exchange import Exchange
from grace.torch.references import References
from grace.torch.steps import describe, watch

WHERE = "grace.torch.register"
# The exchanges of registered models, not their parameters: PyTorch moves and converts no sharded parameter to which
# there are weak references.
_registered: weakref.WeakSet[ModelExchange] = weakref.WeakSet()


class ModelExchange(Exchange):
    """The plan, the statistics and the state of a model's exchange, as `register` returns it."""

    called = "exchange"
    maker = WHERE

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._references: References | None = None
        watch(self)
        _registered.add(self)

    def take_references(self, alone: Callable[[], AbstractContextManager[Any]]) -> None:
        """Let `evaluate` compute second gradients; in `alone()`, backward passes leave gradients on this rank."""
        self._references = References(self, {p: name for name, p in self._parameters.items()}, alone)
        watch(self._references)

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure that computes gradients, at earlier weights as well if a memory needs second gradients.

        Gradients at earlier weights stay on this rank, and those of now are exchanged as ever. Both draw the same
        random numbers. Call it in place of the forward and the backward pass: of all data if `full_round` is true, else
        of a batch, which stays the same when the closure is called twice. Of several backward passes, all but the last
        belong into `no_sync()`. Returns what the closure returns at the weights of now.
        """
        references = self._references
        if references is None or not references.needed:
            return closure()
        self.rollback.check()
        references.evaluate(closure)
        try:
            return closure()
        finally:
            references.clear()

    def reference(self, name: str) -> torch.Tensor | None:
        """Return the second gradient of a parameter; None if the step takes none."""
        return None if self._references is None else self._references.of(self._parameters[name])

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step of an optimizer. Warn in the first one if the two are known to be a poor pair."""
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        ours = set(self.exchanged())
        if any(p in ours for group in optimizer.param_groups for p in group["params"]):
            self.optimizers.append(describe(optimizer))
            if self._logs:
                warn_of_pairs(self.config, self.optimizers[-1])

    def exchanged(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients it exchanges."""
        return [self._parameters[spec.name] for spec in self._specs]

    def start_comparing(self) -> None:
        """Start to compare the ranks. Warn in the first step of an unknown GradScaler."""
        super().start_comparing()
        if not self.scaler_sought and not self.all_dense:
            self.warn_of_scaler()


def is_registered(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether a registered model that still exists exchanges the gradient of one of the parameters."""
    exchanged = {p for exchange in _registered for p in exchange.exchanged()}
    return any(p in exchanged for p in parameters)
