"""`ModuleExchange`: the exchange of a plain model, whose gradients are exchanged during its backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grace.core.errors import ConfigError, StepError
from grace.torch.applied import Applied
from grace.torch.distributed.ddp import call_after_backward
from grace.torch.library import Settings
from grace.torch.model import ModelExchange
from grace.torch.tensors import refuse_unfrozen
from grace.torch.views import apart

# Keeps each exchange as long as a module of its model lives: hooks of parameters cannot, because Python never frees an
# object that a hook and its parameter own together.
_exchanges: weakref.WeakKeyDictionary[torch.nn.Module, ModuleExchange] = weakref.WeakKeyDictionary()

# As in DDP: few allreduces, and the first ones start early in the backward pass.
_BUCKET_BYTES = 25 << 20


def plain_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model without DDP, by their names if it is not compiled."""
    return {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}


def refuse_registered(model: torch.nn.Module, where: str) -> None:
    """Raise ConfigError if gradients of the model are exchanged already, as those of a plain model."""
    parameters = set(model.parameters())
    if any(parameters & exchange.trained.keys() for exchange in set(_exchanges.values())):
        raise ConfigError(
            f"{where}: the model cannot be used, because it is registered already; call change() of its exchange for "
            "another configuration."
        )


class ModuleExchange(ModelExchange):
    """The exchange of a plain model. After a backward pass, gradients are the means over all ranks.

    The exchange of a gradient starts when the backward pass has added to it, and all are complete at its end. A
    gradient that a pass does not reach takes part as it is, or else with zeros. If no rank has reached it since the
    last exchange, it stays as it is, and so do its memories. `trained` has the names of the parameters that train.
    """

    def __init__(self, session: Any, library: Any, parameters: Any, scaler: torch.amp.GradScaler | None) -> None:
        super().__init__(session, library, parameters, scaler)
        self.trained = {p: name for name, p in parameters.items() if p.requires_grad}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self._kinds = {p: (p.dtype, p.device) for p in self.trained}
        settings = Settings(None, backward_passes_per_step=1, gradient_predivide_factor=1.0, sparse_as_dense=False)
        self._delegated = library.delegated(self.trained, self.run, settings, _BUCKET_BYTES)
        self.applied = Applied(self, self.trained)
        self.rollback.forget = self._forget_pass
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
        if self.loss_scale is not None:
            self.loss_scale.attach_to(lambda: self.trained)
        assert self.applied is not None
        self.applied.attach(lambda: self._syncs)
        self.take_references(self.no_sync)
        alive = weakref.ref(self)

        def reached(p: torch.nn.Parameter) -> None:
            exchange = alive()
            if exchange is not None:
                exchange._take(p)

        for p in self.trained:
            p.register_post_accumulate_grad_hook(reached)
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
                self.rollback.keep()
                self.start_comparing()
                if not self.run.completed:
                    # Ranks at different stages of a schedule would start different collectives, and an error about
                    # these would come first.
                    self.comparisons.finish()
            self._hand_over(p)

    def _hand_over(self, p: torch.nn.Parameter) -> None:
        name, kind = self.trained[p], self._kinds[p]
        if (p.dtype, p.device) != kind:
            raise StepError(
                f"parameter '{name}' was {kind[0]} on {kind[1]} when the model was registered, and is {p.dtype} on "
                f"{p.device} now. Convert or move the model before you register it."
            )
        if p.grad is not None and (p.grad.is_conj() or p.grad.is_neg()):
            # PyTorch has noted only that its signs are others than in memory, which is what is sent and overwritten.
            p.grad = p.grad.resolve_conj().resolve_neg()
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
        if gradient.is_sparse:
            raise StepError(
                f"tensor '{name}' has a sparse gradient, and compressors need dense gradients. Exclude the tensor from "
                f"compression by a rule, for example rules=[{{'match': '{name}', 'compressor': 'none'}}]."
            )
        if not missing:
            self.set_output(name, gradient)
        if self.loss_scale is not None:
            gradient = self.loss_scale.unscaled(gradient)
        self.run.current.ready(name, gradient, reference=self.reference(name), unused=missing)

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
        flags = torch.tensor([name not in self._missing for name in self.trained.values()], dtype=torch.int32)
        used = self.transport.allreduce(flags, op="max", name=f"{self.prefix}/used parameters")
        unused: set[str] = set()

        def find_unused() -> Iterator[str]:
            # Only when all gradients are merged: these would wait for it.
            unused.update(name for name, flag in zip(self.trained.values(), used.wait(), strict=True) if not flag)
            yield from unused

        merged = self.run.finish(apart(self._gradients), find_unused())
        for p, before in self._handed.items():
            name = self.trained[p]
            # Where the result may be written: no rank's gradient has been kept for a later pass.
            out = None if name in unused or p.grad is None or p.grad.is_sparse else p.grad.detach()
            x = merged[name] if name in merged else self._waits[name](out)
            if self.loss_scale is not None and name in merged:
                self.loss_scale.scale_(x)
            if name in unused:
                p.grad = before
            elif p.grad is None or x.is_sparse:
                p.grad = x
            elif x.data_ptr() != p.grad.data_ptr():
                p.grad.detach().copy_(x)
        assert self.applied is not None
        self.applied.exchanged(p for p, name in self.trained.items() if name in merged and name not in unused)
        self.applied.finished()
        self.step_ends()
        self.rollback.release()
        if self.loss_scale is not None:
            self.loss_scale.finish()

    def _clear(self) -> None:
        for collection in (self._reached, self._handed, self._missing, self._waits, self._gradients):
            collection.clear()

    def _forget_pass(self) -> None:
        self._clear()
        self._delegated.forget()
        if self.loss_scale is not None:
            self.loss_scale.forget()
        for p in self.trained:
            p.grad = None
