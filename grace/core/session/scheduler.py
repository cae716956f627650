"""A scheduler for the compression, used like a learning-rate scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grace.core.config.schedule import as_changes
from grace.core.errors import ConfigError
from grace.core.session.exchange import Exchange
from grace.core.state.checks import check_mapping, check_number


class CompressionScheduler:
    """A scheduler that changes the options or the method of the compression during training. Residuals are kept.

    `optimizer` is a wrapped optimizer, or any exchange. `schedule(n)` returns the settings after n calls of `step()`; n
    = 0 is the start. It returns a dictionary such as {"compress_ratio": 0.01}, a number (the compress_ratio), or None
    for no change, and the same on all ranks. Call `step()` after `optimizer.step()`, once per step or epoch. A
    `schedule` or `warmup_steps` in the configuration does not need this class. Raises the errors of `Exchange.change`,
    and ConfigError for an optimizer without grace.
    """

    def __init__(self, optimizer: Any, schedule: Callable[[int], Mapping[str, Any] | float | None]) -> None:
        exchange = getattr(optimizer, "grace", optimizer)
        if not isinstance(exchange, Exchange):
            raise ConfigError(
                "CompressionScheduler: expected an optimizer that grace has wrapped, or an exchange, received "
                f"{type(optimizer).__qualname__}, which does not compress; wrap it first."
            )
        self._exchange = exchange
        self._schedule = schedule
        self._last: dict[str, Any] = {}
        self.last_step = -1
        self.step()

    def step(self) -> None:
        """Advance the schedule by one step."""
        self._go_to(self.last_step + 1)

    def _go_to(self, step: int) -> None:
        changes = as_changes(self._schedule(step))
        if changes and changes != self._last:
            self._exchange.change(**changes)
            self._last = changes
        self.last_step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position and the options of that time. Call it before the optimizer loads its state.

        It applies all steps up to the position, because each step gives only a change. Raises ConfigError if the
        position is earlier than the current one, and StateError if the state holds no position.
        """
        last: Any = check_mapping(state, "CompressionScheduler").get("last_step")
        check_number(last, "CompressionScheduler, last_step")
        if last < self.last_step:
            raise ConfigError(
                f"CompressionScheduler: cannot go back from step {self.last_step} to step {last} of the saved state; "
                "load it into a new scheduler with a new optimizer."
            )
        for step in range(self.last_step + 1, last + 1):
            self._go_to(step)
