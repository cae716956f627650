"""Loss scaling with one decision for all ranks, by an extension of one `torch.amp.GradScaler`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from grace.core.errors import ConfigError, StepError
from grace.core.state.run import Run, Savepoint


class LossScale:
    """The scale of the gradients of a model, and the states to return to if the scaler skips a step; 1 without scaler.

    Gradients are exchanged before the scaler looks at them: a bad gradient of one rank arrives as NaN on all ranks, and
    all of them skip the step. They are exchanged unscaled, because residuals must not depend on the current scale.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, run: Run) -> None:
        self._scaler, self._run = scaler, run
        # The scale during an exchange; None between two of them, and without a scaler.
        self._scale: float | None = None
        # The states before the first exchange since the scaler's last step: several may be accumulated.
        self._before: Savepoint | None = None
        self._applied = False
        # The scaler's names for our optimizers of which it has unscaled gradients in this step.
        self._unscale: set[int] = set()

    @property
    def has_scaler(self) -> bool:
        """True if there is a scaler."""
        return self._scaler is not None

    def _begin(self) -> None:
        """Keep the scale and the states before the step, at the first gradient of an exchange."""
        if self._scaler is not None and self._scale is None:
            self._scale = self._scaler.get_scale()
            if self._before is None:
                self._before = self._run.savepoint

    def unscale(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient divided by the scale."""
        self._begin()
        return gradient * (1.0 / self._scale) if self._scale else gradient

    def unscale_(self, gradients: torch.Tensor) -> None:
        """Divide gradients by the scale, in place."""
        self._begin()
        if self._scale:
            gradients.mul_(1.0 / self._scale)

    def scale_(self, merged: torch.Tensor) -> None:
        """Multiply merged gradients by the scale, in place, because the scaler divides them."""
        if self._scale:
            merged.mul_(self._scale)

    def finish(self) -> None:
        """Forget the scale: all gradients are exchanged."""
        self._scale = None

    def forget_before(self) -> None:
        """Forget the states before the step, because others were loaded."""
        self._before = None

    def forget(self) -> None:
        """Forget the step under way, and make the scaler forget it: else it would not unscale the next gradients."""
        self._scale = self._before = None
        for optimizer in self._unscale:
            self._scaler._per_optimizer_states.pop(optimizer, None)  # type: ignore[union-attr]
        self._unscale.clear()

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        """Take note of a call of the optimizer's own step."""
        self._applied = not is_skipped(optimizer)

    def attach(
        self,
        is_ours: Callable[[Any], bool],
        *,
        synchronize: Callable[[], None] = lambda: None,
        exchanged: Callable[[], AbstractContextManager[Any]] = nullcontext,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace methods of the scaler, on this instance, so that it sees the exchanged gradients of optimizers.

        `is_ours` tells whether an optimizer applies these gradients, and `synchronize` completes their exchange. The
        optimizer steps in the context `exchanged()`. `done` is called at the end.
        """
        scaler: Any = self._scaler
        if scaler is None:
            return
        unscale, scaler_step = scaler.unscale_, scaler.step

        def unscale_(which: torch.optim.Optimizer) -> None:
            if is_ours(which):
                self._unscale.add(id(which))
                synchronize()
            unscale(which)

        def step(which: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not is_ours(which):
                return scaler_step(which, *args, **kwargs)
            self._unscale.add(id(which))
            synchronize()
            self._applied = False
            handle = which.register_step_post_hook(self._note_step)
            try:
                with exchanged():
                    result = scaler_step(which, *args, **kwargs)
            finally:
                handle.remove()
            if not self._applied and self._before is not None:
                self._run.put_back(self._before)
            self._before = None
            self._unscale.clear()
            done()
            return result

        scaler.unscale_, scaler.step = unscale_, step

    def attach_to(self, names: Callable[[], Mapping[torch.Tensor, str]]) -> None:
        """Attach to the optimizer of a model whose backward pass exchanges gradients; `names` returns its parameters.

        The scaler's calls then raise StepError for an optimizer of some of the parameters only.
        """

        def is_ours(optimizer: torch.optim.Optimizer) -> bool:
            ours, theirs = names(), {p for group in optimizer.param_groups for p in group["params"]}
            both = ours.keys() & theirs
            if both and len(both) < len(ours):
                missing = next(name for p, name in ours.items() if p not in theirs)
                raise StepError(
                    f"the GradScaler steps an optimizer of some parameters of the model, without '{missing}': expected "
                    "all of them, because a skipped step is taken back as a whole. Use one optimizer, or train in "
                    "bfloat16."
                )
            return bool(both)

        self.attach(is_ours)


def is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused optimizer skips the step that a GradScaler calls, which it does itself in its kernel."""
    return bool(getattr(optimizer, "found_inf", None))


def check_scaler(scaler: Any, parameters: Iterable[torch.Tensor], where: str) -> torch.amp.GradScaler | None:
    """Return the scaler if there is one, and it is enabled.

    Raises TypeError for something else, and ConfigError if loss scaling cannot work with these parameters.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"{where}: expected a torch.amp.GradScaler as grad_scaler, received {type(scaler).__name__}.")
    if any(p.dtype == torch.float16 for p in parameters):
        raise ConfigError(
            f"{where}: grad_scaler needs parameters in float32, because GradScaler unscales no float16 gradients; "
            "keep the model in float32 and use torch.autocast."
        )
    return scaler if scaler.is_enabled() else None


def unknown_scaler_scales() -> bool:
    """Return whether this process has a GradScaler that has scaled a loss and that grace does not know."""
    # grace replaces the methods of those it knows. `type`, because other objects may compute their `__class__`.
    return any(
        issubclass(type(x), torch.amp.GradScaler) and vars(x).get("_scale") is not None and "step" not in vars(x)
        for x in gc.get_objects()
    )
