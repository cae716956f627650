"""`References`: second gradients of a wrapped optimizer, by its closure at earlier weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from grace.core.errors import ConfigError, StepError
from grace.torch.exchange import Exchange

# More backward passes than a closure takes.
_MANY = 1 << 30


class References:
    """Second gradients of the same batch, for memories that need them: those of a closure at earlier weights.

    `names` has the names of the parameters. `Exchange.earlier` has the weights, which are equal on all ranks. Raises
    ConfigError if some memories follow the last step and others the last full round.
    """

    def __init__(self, exchange: Exchange, optimizer: Any, names: Mapping[torch.nn.Parameter, str]) -> None:
        self._exchange, self._optimizer, self._names = exchange, optimizer, names
        self._gradients: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self._kept: dict[str, torch.Tensor] | None = None

    @property
    def needed(self) -> bool:
        """True if the next step needs a closure."""
        return self._exchange.plan.period > 0

    def of(self, p: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the second gradient of a parameter; None if the step takes none."""
        if p not in self._gradients:
            return None
        gradient = self._gradients[p]
        if gradient is None:
            return torch.zeros_like(p)
        return gradient.to_dense() if gradient.is_sparse else gradient

    def evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """Evaluate a closure at earlier weights, unless this is a full round, and then at those of now.

        Return what the latter returns. Its gradients are exchanged afterwards, however many backward passes it takes.
        Both draw the same random numbers. Raises StepError without a closure.
        """
        if closure is None:
            raise StepError(
                "a memory needs second gradients, and step() was called without a closure; pass one that computes the "
                "gradients: of all data if grace.full_round of the optimizer is true, else of a batch, which stays the "
                "same when it is called twice."
            )
        optimizer, exchange = self._optimizer, self._exchange
        passes, full = optimizer.backward_passes_per_step, exchange.full_round
        now = {name: p.detach().clone() for p, name in self._names.items()}
        optimizer.set_backward_passes_per_step(_MANY)
        try:
            self._gradients = {} if full else self._at(exchange.earlier or now, now, closure)
            self._kept = now if full or follows(exchange) else None
            with torch.enable_grad():
                return closure()
        finally:
            optimizer.set_backward_passes_per_step(passes)

    def _at(
        self, earlier: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor], closure: Callable[[], Any]
    ) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        """Return the gradients of a closure at earlier weights; the weights of now return."""
        devices = {p.device.index for p in self._names if p.device.type == "cuda"}
        try:
            self._put(earlier)
            with torch.random.fork_rng(sorted(devices)), torch.enable_grad():
                closure()
        finally:
            self._put(now)
            self._optimizer._handles.clear()
        gradients = {p: None if p.grad is None else p.grad.detach().clone() for p in self._names}
        self._optimizer.zero_grad()
        return gradients

    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for p, name in self._names.items():
                p.copy_(weights[name])

    def applied(self) -> None:
        """Take note that the gradients of the last `evaluate` were applied."""
        if self._kept is not None:
            self._exchange.earlier = self._kept
        self._gradients, self._kept = {}, None


def follows(exchange: Exchange) -> bool:
    """Return whether second gradients are those at the weights of the step before.

    Raises ConfigError if they are for some tensors only: a closure computes all of them at once.
    """
    found = {"previous" in item.memory.needs for item in exchange.plan.exchanged if "reference" in item.memory.needs}
    if len(found) > 1:
        raise ConfigError(
            f"{exchange.maker}: some tensors need second gradients at the weights of the last step, and others at "
            "those of the last full round, while a closure computes all at once; use one memory, and others only "
            "without second gradients."
        )
    return found == {True}
