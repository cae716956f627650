"""Outer steps: each rank steps on its own, and every few steps the ranks exchange the change of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grace.core.state.merge import optimizer_state
from grace.torch.adapter import OptimizerAdapter, give_own_class


class OuterAdapter(OptimizerAdapter):
    """The methods of an optimizer whose ranks exchange what their weights have moved, instead of gradients.

    `names` has the parameters that train. `grace.core.session.outer` decides when they meet, and has the weights then.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        give_own_class(self.optimizer)
        (self.outer,) = self.exchange.outers
        self.outer.begin(self._weights())

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for p, name in self.names.items()}

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients of this rank, and exchange what the weights have moved if it is time."""
        self.rollback.check()
        self.outer.before(self._weights())
        self.exchange.start_comparing()

        def evaluate() -> Any:
            loss = closure()
            self.check_frozen()
            return loss

        if closure is None:
            self.check_frozen()
        loss = self.plain.step() if closure is None else self.plain.step(evaluate)
        with self.rollback.attempt(), torch.no_grad():
            self._meet()
        return loss

    def _meet(self) -> None:
        if self.outer.meets_next:
            self.rollback.keep()
        weights = self._weights()
        # What was frozen in mid-run keeps its residual and its weight.
        self.outer.send(weights, [name for p, name in self.names.items() if not p.requires_grad])
        if not self.outer.is_due:
            return
        self.exchange.comparisons.finish()
        self._write(self.outer.receive(weights))
        self.rollback.release()

    def _write(self, weights: Mapping[str, torch.Tensor]) -> None:
        for p, name in self.names.items():
            if name in weights:
                p.copy_(weights[name].view(p.shape))

    def forget(self) -> None:
        """Return to the weights after the last meeting of each parameter, and to the inner step of the last one."""
        with torch.no_grad():
            self._write(self.outer.drop())
        self.optimizer.zero_grad()

    def load_state_dict(self, state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """Load a state of this optimizer, or a list with those of all ranks."""
        self.rollback.check()
        given = optimizer_state(state_dict, self.exchange.rank)
        saved = given.pop("grace", {})
        self.exchange.load(saved, self.optimizer, lambda: self.plain.load_state_dict(given))
