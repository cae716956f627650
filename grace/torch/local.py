"""Local steps: each rank steps on its own, and every few steps the ranks exchange the change of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grace.core.errors import StateError
from grace.core.state.checks import check_number, show
from grace.core.state.merge import optimizer_state
from grace.torch.adapter import OptimizerAdapter, give_own_class


class LocalAdapter(OptimizerAdapter):
    """The methods of an optimizer that exchanges weights instead of gradients, after every `every`-th step.

    See `grace.core.session.local_steps`. `names` has the parameters that train.
    """

    def __init__(self, *given: Any, every: int) -> None:
        super().__init__(*given)
        give_own_class(self.optimizer)
        self.every, self.steps = every, 0
        # The weights after the last exchange.
        self.exchanged = {p: p.detach().clone() for p in self.names}
        # True from the beginning of an exchange until it is complete.
        self.exchanging = False

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients of this rank, and exchange the weights if it is time."""
        self.rollback.check()
        if self.steps % self.every == 0:
            self.exchange.start_comparing()
            # The weights may have been loaded or broadcast since the last exchange.
            for p in self.names:
                self.exchanged[p].copy_(p.detach())

        def evaluate() -> Any:
            loss = closure()
            self.check_frozen()
            return loss

        if closure is None:
            self.check_frozen()
        loss = self.plain.step() if closure is None else self.plain.step(evaluate)
        self.steps += 1
        if self.steps % self.every == 0:
            self._exchange_weights()
        return loss

    def _exchange_weights(self) -> None:
        self.exchanging = True
        with self.rollback.attempt(), torch.no_grad():
            self.rollback.keep()
            self.exchange.comparisons.finish()
            for p, name in self.names.items():
                if p.requires_grad:
                    self.run.current.ready(name, self.exchanged[p] - p)
                else:
                    # It was frozen in mid-run, and keeps its residual and its weight.
                    self.run.current.rest(name)
            moved = self.run.finish()
            for p, name in self.names.items():
                if p.requires_grad:
                    p.copy_(self.exchanged[p] - moved[name])
        self.exchanging = False
        self.rollback.release()

    def forget(self) -> None:
        """Return to the weights after the last exchange."""
        begun = self.every if self.exchanging else self.steps % self.every
        if begun:
            with torch.no_grad():
                for p in self.names:
                    p.copy_(self.exchanged[p])
        self.steps -= begun
        self.exchanging = False
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, with that of grace and the weights after the last exchange."""
        local = {"steps": self.steps, "met": {name: self.exchanged[p] for p, name in self.names.items()}}
        return {**super().state_dict(), "grace_local": local}

    def load_state_dict(self, state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """Load a state of this optimizer, or a list with those of all ranks."""
        self.rollback.check()
        given = optimizer_state(state_dict, self.exchange.rank)
        saved, local = given.pop("grace", None), given.pop("grace_local", None)
        expected = {name: show(self.exchanged[p]) for p, name in self.names.items()}
        found = local.get("met") if isinstance(local, Mapping) else None
        fits = isinstance(found, Mapping) and {name: show(value) for name, value in found.items()} == expected
        if saved is None or not fits or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise StateError(
                "checkpoint: expected the state of an optimizer with local_steps and the same parameters (keys "
                "'grace' and 'grace_local'); load a checkpoint that was saved with local_steps."
            )
        check_number(local.get("steps"), "grace_local, steps")
        self.exchange.load(saved, self.optimizer, lambda: self.plain.load_state_dict(given))
        self.steps = int(local["steps"])
        for p, name in self.names.items():
            self.exchanged[p].copy_(found[name])
