"""`ModuleExchange`: the exchange of a plain model, whose gradients are exchanged during its backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grace.core.errors import ConfigError, StepError
from grace.torch.distributed.ddp import call_after_backward
from grace.torch.distributed.delegated import Delegated
from grace.torch.model import ReplicatedExchange
from grace.torch.tensors import refuse_sparse, refuse_unfrozen, resolve_signs, weak_hook
from grace.torch.views import writable

# Keeps each exchange as long as a module of its model lives: hooks of parameters cannot; see `weak_hook`.
_exchanges: weakref.WeakKeyDictionary[torch.nn.Module, ModuleExchange] = weakref.WeakKeyDictionary()

# As in DDP: few allreduces, and the first ones start early in the backward pass.
_BUCKET_BYTES = 25 << 20


def refuse_registered(model: torch.nn.Module, where: str) -> None:
    """Raise ConfigError if gradients of the model are exchanged already, as those of a plain model."""
    parameters = set(model.parameters())
    if any(parameters & exchange.trained.keys() for exchange in set(_exchanges.values())):
        raise ConfigError(
            f"{where}: the model cannot be used, because it is registered already; call change() of its exchange for "
            "another configuration."
        )


class ModuleExchange(ReplicatedExchange):
    """The exchange of a plain model. After a backward pass, gradients are the means over all ranks.

    The exchange of a gradient starts when the backward pass has added to it, and all are complete at its end. A
    gradient that a pass does not reach takes part as it is, or else with zeros. If no rank has reached it since the
    last exchange, it stays as it is, and so do its memories.
    """

    def __init__(self, session: Any, library: Any, parameters: Any, scaler: torch.amp.GradScaler | None) -> None:
        super().__init__(session, library, parameters, scaler)
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self._delegated = Delegated(library, self.run, self.trained, bucket_bytes=_BUCKET_BYTES)
        # The parameters that backward passes have reached since the last exchange.
        self._reached: set[torch.nn.Parameter] = set()
        # Of this exchange: the gradients that parameters had, the names of those not reached, and what waits for the
        # tensors that stay dense.
        self._handed: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self._missing: set[str] = set()
        self._waits: dict[str, Callable[[torch.Tensor | None], torch.Tensor]] = {}
        # The backward pass at whose end the exchange is completed.
        self._pass = -1
        self._syncs = True

    def attach(self, model: torch.nn.Module) -> None:
        """Give all ranks the parameters and buffers of rank 0, and watch the gradients of the model."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        flat = {name: x.detach().contiguous().view(-1).view(torch.uint8) for name, x in tensors.items()}
        prefix = f"{self.prefix}/rank 0's"
        handles = {name: self.transport.broadcast(x, root=0, name=f"{prefix} {name}") for name, x in flat.items()}
        for name, handle in handles.items():
            x, received = tensors[name].detach(), handle.wait()
            if self.rank:
                x.copy_(received.view(x.dtype).view(x.shape))
        self._watch(model, lambda: self._syncs, self.no_sync)
        for p in self.trained:
            p.register_post_accumulate_grad_hook(weak_hook(self._take))
        _exchanges.update(dict.fromkeys(model.modules(), self))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backward passes on this rank; the next pass outside of it exchanges their sum."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _take(self, p: torch.nn.Parameter) -> None:
        """Start the exchange of a gradient to which a backward pass has added."""
        self._reached.add(p)
        if not self._syncs:
            return
        with self.rollback.attempt(), torch.no_grad():
            if p in self._handed:
                raise StepError(
                    f"parameter '{self.trained[p]}' got a second gradient before its exchange was complete: an earlier "
                    "backward pass was interrupted, or checkpointed layers use the parameter several times. After an "
                    "interruption, call discard() of the exchange on all ranks; for such layers, pass "
                    "use_reentrant=False to checkpoint()."
                )
            if self._pass != (now := torch._C._current_graph_task_id()):
                self._pass = now
                call_after_backward(self._end)
            if not self._handed:
                self.begin_step()
            self._hand_over(p)

    def _hand_over(self, p: torch.nn.Parameter) -> None:
        name = self.trained[p]
        self._refuse_converted([p], "Convert or move the model before you register it.")
        resolve_signs(p)
        self._handed[p] = p.grad
        if p.grad is not None and not p.grad.is_sparse:
            self.note_gradient(name, p.grad)
        missing = p.grad is None or p not in self._reached
        if missing:
            self._missing.add(name)
        if not self.run.exchanges(name):
            self._waits[name], _ = self._delegated.start(p)
            return
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.detach()
        refuse_sparse(name, gradient)
        if not missing:
            self.set_output(name, gradient)
        gradient = self.loss_scale.unscale(gradient)
        self.run.current.ready(name, gradient, reference=self._references.of(p), unused=missing)

    def _end(self) -> None:
        """Complete the exchange at the end of a backward pass."""
        node = torch._C._current_autograd_node()
        if node is not None and len(self._handed) < len(self.trained):
            # A layer that is computed again has a pass of its own, within a node of another pass, which goes on.
            for following, _ in node.next_functions:
                if following is not None:
                    following.register_prehook(lambda _: call_after_backward(self._end))
        elif self._handed:
            with self.rollback.attempt(), torch.no_grad():
                self._finish()
            self._clear()

    def _finish(self) -> None:
        refuse_unfrozen(self._frozen, "the model was registered", "Unfreeze parameters before you register the model.")
        for p in self.trained:
            if p not in self._handed:
                self._hand_over(p)
        self.comparisons.finish()
        wait_unused = self._start_finding_unused({name: name not in self._missing for name in self.trained.values()})
        unused: set[str] = set()

        def find_unused() -> Iterator[str]:
            # Only when all gradients are merged: these would wait for it.
            unused.update(wait_unused())
            yield from unused

        merged = self.run.finish(writable(self._gradients), find_unused())
        for p, before in self._handed.items():
            name = self.trained[p]
            # Where the result may be written: no rank's gradient has been kept for a later pass.
            out = None if name in unused or p.grad is None or p.grad.is_sparse else p.grad.detach()
            x = merged[name] if name in merged else self._waits[name](out)
            if name in merged:
                self.loss_scale.scale_(x)
            if name in unused:
                p.grad = before
            elif p.grad is None or x.is_sparse:
                p.grad = x
            elif x.data_ptr() != p.grad.data_ptr():
                p.grad.detach().copy_(x)
        self._pending.add(p for p, name in self.trained.items() if name in merged and name not in unused)
        self._pending.note_places()
        self.step_ends()
        self.end_step()

    def _clear(self) -> None:
        for collection in (self._reached, self._handed, self._missing, self._waits, self._gradients):
            collection.clear()

    def _forget_pass(self) -> None:
        self._clear()
        self._delegated.forget()
        for p in self.trained:
            p.grad = None
