"""Loss scaling with one decision for all ranks, by an extension of one `torch.amp.GradScaler`."""

from __future__ import annotations

from typing import Any

import torch

from grace.core.exchange.engine import Engine, Snapshot
from grace.core.values.errors import ConfigError


class LossScale:
    """The scale of the gradients of an optimizer, and the states to return to if the scaler skips a step.

    Gradients are exchanged before the scaler looks at them: a bad gradient of one rank arrives as NaN on all ranks, and
    all of them skip the step. They are exchanged unscaled, because residuals must not depend on the current scale.
    """

    def __init__(self, scaler: torch.amp.GradScaler, engine: Engine) -> None:
        self._scaler, self._engine = scaler, engine
        # The scale during this step; None between steps.
        self._scale: float | None = None
        self._before: Snapshot | None = None
        self._applied = False

    def unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient divided by the scale; the first gradient of a step keeps the states before it."""
        if self._scale is None:
            self._scale, self._before = self._scaler.get_scale(), self._engine.snapshot()
        return gradient * (1.0 / self._scale)

    def scale_again(self, merged: dict[str, torch.Tensor]) -> None:
        """Multiply merged gradients by the scale, in place, because the scaler divides them."""
        for gradient in merged.values():
            gradient.mul_(self._scale or 1.0)
        self._scale = None

    def forget(self) -> None:
        """Forget the step under way."""
        self._scale = self._before = None

    def applied(self, optimizer: Any) -> None:
        """Take note of a call of the optimizer's own step. A fused one skips the step itself, inside its kernel."""
        found_inf = getattr(optimizer, "found_inf", None)
        self._applied = found_inf is None or not bool(found_inf)

    def attach(self, optimizer: Any) -> None:
        """Replace methods of the scaler, on this instance, so that it sees exchanged gradients of the optimizer."""
        scaler: Any = self._scaler
        unscale, scaler_step = scaler.unscale_, scaler.step

        def is_ours(which: Any) -> bool:
            # A wrapper such as Lightning's forwards the attribute.
            return getattr(which, "grace", None) is optimizer.grace

        def unscale_(which: torch.optim.Optimizer) -> None:
            if is_ours(which):
                optimizer.synchronize()
            unscale(which)

        def step(which: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not is_ours(which):
                return scaler_step(which, *args, **kwargs)
            optimizer.synchronize()
            self._applied = False
            with optimizer.skip_synchronize():
                result = scaler_step(which, *args, **kwargs)
            if not self._applied and self._before is not None:
                self._engine.undo(self._before)
            self._before = None
            optimizer.grace.way_back.let_go()
            return result

        scaler.unscale_, scaler.step = unscale_, step


def check_scaler(scaler: Any, optimizer: torch.optim.Optimizer, local_steps: int) -> None:
    """Raise TypeError or ConfigError if loss scaling cannot work."""
    where = "grace.torch.DistributedOptimizer"
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"{where}: expected a torch.amp.GradScaler as grad_scaler, received {type(scaler).__name__}.")
    if local_steps != 1:
        raise ConfigError(
            f"{where}: local_steps cannot be combined with grad_scaler, because ranks may skip different steps; "
            "train in float32 or bfloat16."
        )
    if any(p.dtype == torch.float16 for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"{where}: grad_scaler needs parameters in float32, because GradScaler unscales no float16 gradients; "
            "keep the model in float32 and use torch.autocast."
        )
