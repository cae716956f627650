"""`References`: second gradients of a wrapped optimizer or a model, by a closure at earlier weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from grace.core.session.outer_setup import follows_steps
from grace.torch.exchange import Exchange
from grace.torch.loss_scale import is_skipped


class References:
    """Second gradients of the same batch, for memories that need them: those of a closure at earlier weights.

    `names` are those of the parameters. In the context `alone()`, backward passes leave their gradients on this
    rank. `model()` returns what the parameters belong to, if that is known: its buffers return as well.
    `Exchange.earlier` has the weights, which are equal on all ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        names: Mapping[torch.Tensor, str],
        alone: Callable[[], AbstractContextManager[Any]],
        model: Callable[[], torch.nn.Module | None] = lambda: None,
    ) -> None:
        self._exchange, self.names, self._alone, self._model = exchange, names, alone, model
        self._gradients: dict[torch.Tensor, torch.Tensor | None] = {}
        self._kept: dict[str, torch.Tensor] | None = None

    @property
    def needed(self) -> bool:
        """True if the next step needs a closure."""
        return self._exchange.plan.period > 0

    def of(self, p: torch.Tensor) -> torch.Tensor | None:
        """Return the second gradient of a parameter, without the loss scale; None if the step takes none."""
        if p not in self._gradients:
            return None
        gradient = self._gradients[p]
        if gradient is None:
            return torch.zeros_like(p)
        return self._exchange.loss_scale.unscale(gradient.to_dense() if gradient.is_sparse else gradient)

    def evaluate(self, closure: Callable[[], Any]) -> None:
        """Evaluate a closure at earlier weights, unless this is a full round; weights, buffers and gradients return.

        It draws the random numbers that the caller will draw next.
        """
        exchange, full = self._exchange, self._exchange.full_round
        now = {name: _own(p).clone() for p, name in self.names.items()}
        self._gradients = {} if full else self._at(exchange.earlier or now, now, closure)
        self._kept = now if full or follows_steps(exchange.plan.exchanged, exchange.maker) else None

    def _at(
        self, earlier: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor], closure: Callable[[], Any]
    ) -> dict[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of a closure at earlier weights."""
        devices = {p.device.index for p in self.names if p.device.type == "cuda"}
        before = {p: p.grad for p in self.names}
        for p in self.names:
            p.grad = None
        try:
            self._put(earlier)
            with (
                self._alone(),
                keep_buffers(self._model()),
                torch.random.fork_rng(sorted(devices)),
                torch.enable_grad(),
            ):
                closure()
            return {p: None if p.grad is None else p.grad.detach().clone() for p in self.names}
        finally:
            self._put(now)
            for p, gradient in before.items():
                p.grad = gradient

    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        for p, name in self.names.items():
            # Not a change that autograd counts: the weights return.
            _own(p).copy_(weights[name])

    def clear(self) -> None:
        """Forget the second gradients, which belong to one exchange."""
        self._gradients = {}

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step of an optimizer, of these parameters or of others."""
        if self._kept is None:
            return
        ours = any(p in self.names for group in optimizer.param_groups for p in group["params"])
        if ours and not is_skipped(optimizer):
            self.note_applied()

    def note_applied(self) -> None:
        """Take note that the gradients of the last `evaluate` were applied."""
        if self._kept is not None:
            self._exchange.earlier = self._kept
        self._gradients, self._kept = {}, None


@contextmanager
def keep_buffers(model: torch.nn.Module | None) -> Iterator[None]:
    """Let the buffers of a model return at the end: BatchNorm would count a batch of two passes twice."""
    modules = () if model is None else model.modules()
    kept = [(module, name, b, b.clone()) for module in modules for name, b in module.named_buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                setattr(module, name, buffer.copy_(value))


def _own(p: torch.Tensor) -> torch.Tensor:
    """Return the data of a parameter, or of a sharded one those of this rank's part."""
    local = getattr(p.data, "to_local", None)
    return p.data if local is None else local()
