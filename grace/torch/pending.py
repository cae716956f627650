"""`PendingGradients`: what becomes of exchanged gradients. Those that nobody applies leave nothing in the memories."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.hooks import unserializable_hook

from grace.core.errors import GraceWarning
from grace.core.state.run import Savepoint
from grace.torch.exchange import Exchange
from grace.torch.tensors import weak_hook


@dataclass
class _Exchanged:
    """A gradient that was exchanged and not applied yet."""

    # The states before the first exchange since an optimizer's last step: several may be accumulated.
    before: Savepoint
    # The version of the parameter after the exchange, and the place and version of its gradient, if they are known.
    weight: int
    gradient: tuple[int, int] | None = None
    # The gradient, if it lies in a bucket of DDP, which may copy it to another one.
    in_bucket: torch.Tensor | None = None

    def note(self, p: torch.Tensor) -> None:
        """Note the gradient of a parameter as it is now."""
        assert p.grad is not None
        if p.grad._is_view():
            # A view of a bucket has the version of all gradients in it. This one has its own.
            p.grad = self.in_bucket = p.grad.data
        self.gradient = p.grad.data_ptr(), p.grad._version

    def is_gone(self, gradient: torch.Tensor | None) -> bool:
        """Return whether the gradient is None or zeros; it is not if it is just as it was left."""
        if gradient is None:
            return True
        left = self.in_bucket if self.in_bucket is not None and gradient._is_view() else gradient
        return (left.data_ptr(), left._version) != self.gradient and not bool(gradient.any())


class PendingGradients:
    """The exchanged gradients of a model that no optimizer has applied yet.

    If such a gradient is gone when the next backward pass reaches the model, it was dropped: the memories of its tensor
    return to what they were before it was exchanged. Until then the old states are kept. `names` are those of the
    parameters.
    """

    def __init__(self, exchange: Exchange, names: Mapping[torch.Tensor, str]) -> None:
        self._run, self._rollback, self._names = exchange.run, exchange.rollback, names
        self._keeps_states = exchange.config.rollback
        self._waiting: dict[torch.Tensor, _Exchanged] = {}
        # The backward pass that has been looked at, and whether gradients have come since an optimizer's last step.
        self._pass = -1
        self._came = self._exchanged = False
        # The parameters of optimizers, as far as they are known.
        self._of_optimizers: set[int] = set()
        self._sought = self._told_of_dropped = self._told_of_passed = False
        self._expected: Callable[[], bool] = lambda: False
        # The parameters with a hook.
        self._watched: set[torch.Tensor] = set()
        #: True during backward passes whose gradients are put aside.
        self.paused = False

    def attach(self, expected: Callable[[], bool]) -> None:
        """Watch the gradients; `expected()` tells whether a gradient now belongs to an exchange."""
        self._expected = expected
        # One parameter is enough to notice a pass, and a hook takes microseconds in each of them.
        for p in itertools.islice(self._names, 1):
            self._watch(p)

    def _watch(self, p: torch.Tensor) -> None:
        """Look at a backward pass before autograd adds the gradient of this parameter to that of earlier passes."""
        if p in self._watched:
            return
        p.register_hook(unserializable_hook(weak_hook(self._look)))
        self._watched.add(p)

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take note of an exchange of these gradients, at its end."""
        self._exchanged, before = True, self._rollback.before
        if before is None or not self._keeps_states:
            return
        for p in parameters:
            self._watch(p)
            oldest = self._waiting[p].before if p in self._waiting else before
            self._waiting[p] = _Exchanged(oldest, p._version)

    def note_places(self) -> None:
        """Take note of the gradients after DDP has put them in their places."""
        for p, each in self._waiting.items():
            if p.grad is not None:
                each.note(p)

    def forget(self) -> None:
        """Forget all gradients: other states were loaded."""
        self._waiting.clear()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step of an optimizer, of these parameters or of others."""
        ours = False
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in self._names and p.grad is not None:
                    ours = True
                    self._of_optimizers.add(id(p))
                    self._waiting.pop(p, None)
        if ours:
            if self._came and not self._exchanged and not self._told_of_passed:
                self._told_of_passed = True
                _warn(
                    "an optimizer has applied gradients of a registered model that were not exchanged: the ranks train "
                    "apart. Call the DDP model itself, not its 'module'. Passes of this rank alone belong into "
                    "no_sync(), of the DDP model or of the exchange of a plain one."
                )
            self._came = self._exchanged = False

    def _look(self, _: torch.Tensor) -> None:
        """Find what was dropped, before the first gradient of a backward pass is added to those that are left."""
        if self.paused or self._pass == (now := torch._C._current_graph_task_id()):
            return
        self._pass = now
        self._came = self._came or self._expected()
        if not self._waiting or self._rollback.before is not None:
            return
        dropped: dict[int, tuple[Savepoint, list[str]]] = {}
        unknown: list[str] = []
        for p, each in list(self._waiting.items()):
            if p._version != each.weight:
                # Something else than an optimizer has applied it.
                del self._waiting[p]
            elif each.is_gone(p.grad):
                del self._waiting[p]
                if self._has_optimizer(p):
                    dropped.setdefault(id(each.before), (each.before, []))[1].append(self._names[p])
                else:
                    unknown.append(self._names[p])
            elif each.in_bucket is not None and p.grad._is_view():
                each.note(p)
        with torch.no_grad():
            for before, names in dropped.values():
                self._run.put_back(before, names)
        if unknown and not self._told_of_dropped:
            self._told_of_dropped = True
            _warn(
                f"the gradients of {len(unknown)} tensors, the first of which is '{unknown[0]}', were exchanged, and "
                "are gone before an optimizer has applied them. If they were dropped, later steps send what is left of "
                "them in the residuals: compute gradients that nobody applies in no_sync(), of the DDP model or of the "
                "exchange of a plain one. If a loop of your own has applied them, change weights in place under "
                "torch.no_grad() instead of by '.data'."
            )

    def _has_optimizer(self, p: torch.Tensor) -> bool:
        """Return whether an optimizer has the parameter, so that it could not have been applied unseen."""
        if id(p) not in self._of_optimizers and not self._sought:
            self._sought = True
            # `type`, because other objects may compute their `__class__`.
            optimizers = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
            groups = [group for optimizer in optimizers for group in vars(optimizer).get("param_groups", ())]
            self._of_optimizers |= {id(p) for group in groups for p in group["params"]}
        return id(p) in self._of_optimizers


def _warn(text: str) -> None:
    warnings.warn(f"grace.torch.register: {text}", GraceWarning, stacklevel=3)
