"""`Exchange`: the interface behind an optimizer's attribute `grace`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from grace.core.errors import StateError, StepError
from grace.core.guards.replicas import digest
from grace.core.ops import get_ops
from grace.core.session import exchange as core
from grace.core.session.comparisons import Comparisons
from grace.core.session.outer_setup import follows_steps
from grace.core.session.start import Session
from grace.core.state.checkpoint import carried_tensors
from grace.core.state.rollback import Rollback
from grace.core.state.run import Run
from grace.torch.library import Library
from grace.torch.loss_scale import LossScale, unknown_scaler_scales
from grace.torch.tensors import start_gathering
from grace.torch.views import writable

OPS = functools.partial(get_ops, "torch")


class Exchange(core.Exchange):
    """The plan, the statistics and the state of an exchange: `optimizer.grace`, or what `register` returns."""

    called = "optimizer.grace"
    watches = True
    # The function that makes it.
    maker = "grace.torch.DistributedOptimizer"
    # With replicas of a sharded model, the number of the part that this rank holds, and that of all parts.
    part: tuple[int, int] | None = None

    def __init__(
        self,
        session: Session,
        library: Library,
        parameters: Mapping[str, torch.Tensor],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        super().__init__(**session.arguments)
        self._library, self._parameters = library, parameters
        self.transport, self.takes_references = library.transport, session.takes_references
        follows_steps(self.plan.exchanged, self.maker)
        # In elastic mode, True if a state of `grace.torch.horovod.TorchState` keeps it.
        self.synchronized = False
        gather = functools.partial(start_gathering, library.transport)
        self.comparisons = Comparisons(self, library.transport, gather, library.advice)
        self._merged: dict[str, torch.Tensor] = {}
        # PyTorch's buffers with the gradients of the current step.
        self._gradients: dict[str, torch.Tensor] = {}
        #: The weights at which second gradients are computed, by name; None before the first full round.
        self.earlier: Mapping[str, torch.Tensor] | None = None
        self.loss_scale = LossScale(scaler, self.run)
        # True as soon as a GradScaler has been looked for, or if one was passed.
        self.scaler_sought = scaler is not None
        self.rollback = Rollback(self.run, lambda step: library.drop(f"{self.prefix}/discard", step), self.called)

    def discard(self) -> None:
        """Drop the step under way on all ranks: after an error in it, or because nobody needs its gradients.

        All ranks must call it between the same two calls of `step()`, wherever they are between these, also if the step
        failed on some of them only. Residuals and all other states are then what they were before the step, gradients
        are None, and nothing is on its way. With `rollback = false`, memories start from zero instead. It does not
        change weights, except with `local_steps` or `outer`: each parameter then returns to its weights after the last
        exchange. A rank waits up to twice the `timeout` of the configuration for the others. Raises MismatchError on
        every rank if some ranks have applied a step that others have not. Then a checkpoint can be loaded.
        """
        self._forget()
        self.rollback.discard()

    @property
    def _logs(self) -> bool:
        """True on rank 0; of a sharded model's replicas, on that of the first part."""
        return self.rank == 0 and (self.part is None or self.part[0] == 0)

    @property
    def all_dense(self) -> bool:
        """True if no tensor is compressed now."""
        return all(item.dense for item in self.plan.assignments)

    def abandon(self) -> None:
        """Drop the step under way on this rank, whatever the others do, because Horovod will restart."""
        self._forget()
        if self.outers:
            # Inner steps stay. What is on its way will be sent again.
            self.rollback.undo()
            self.run.discard()
            for outer in self.outers:
                outer.restore(outer.now)
        else:
            self.rollback.give_up()

    def _forget(self) -> None:
        """Forget the gradients, the loss scale and the comparisons of the step under way."""
        self._merged, self._gradients = {}, {}
        self.loss_scale.forget()
        # Some ranks may have compared and others not.
        self.comparisons.restart("the first step after discard()")

    def move(self) -> tuple[int, int]:
        """Go on with the ranks that the library has now; return the numbers of ranks before and now."""
        before = self.size
        self.rank, self.ranks, self._world = self.transport.rank, self.transport.ranks, [self._library.world]
        self.run.move(self._plans_for(self.ranks, carried_tensors(self.plan.stateful)), before)
        for outer in self.outers:
            outer.ranks_changed()
        self.comparisons.restart("the first step")
        self.announce(self.run.stages, int(self.run.step))
        return before, self.size

    def load(self, saved: Any, optimizer: Any, load_plain: Callable[[], None]) -> None:
        """Load a checkpoint: grace's part `saved` (None: initial states), and the optimizer's own by `load_plain`.

        `saved` is what `load_state_dict` takes, and the warnings are the same. Raises StateError if the checkpoint has
        other tensors, methods, shapes or dtypes, or if PyTorch refuses its part; then nothing was loaded.
        """
        plain, earlier = (optimizer.state, optimizer.param_groups), self.earlier
        for outer in self.outers:
            outer.drain()
        with self._all_or_nothing():
            notice = "" if saved is None else self._load(self.run, self.rank, saved)[1]
            try:
                load_plain()
            except Exception as error:
                (optimizer.state, optimizer.param_groups), self.earlier = plain, earlier
                raise StateError(
                    "checkpoint: expected a state of the same optimizer, received one that PyTorch refuses "
                    f"({type(error).__name__}: {error}); load a checkpoint of this optimizer and these parameters."
                ) from error
        self._merged.clear()
        if saved is None:
            self.run.reset()
            self.earlier = None
            self._forget_earlier()
        if notice:
            self._warn(notice)

    def begin_step(self) -> None:
        """Begin a step, at its first gradient: start to compare the ranks, and keep the states to return to."""
        self.start_comparing()
        # Not before: the advisor may change the method first.
        self.rollback.keep()

    def start_comparing(self) -> None:
        """Start to compare the ranks; see `Comparisons.start`. Raises StepError in elastic mode without a state."""
        self.step_begins()
        if self._library.elastic and not self.synchronized:
            raise StepError(
                "elastic Horovod keeps no residuals in its own TorchState; pass the optimizer to "
                "grace.torch.horovod.TorchState in its place."
            )
        self.comparisons.start()

    def warn_of_scaler(self) -> None:
        """Warn of a GradScaler that has scaled a loss and was not passed."""
        self.scaler_sought = True
        if unknown_scaler_scales():
            self._warn(
                f"{self.maker}: a torch.amp.GradScaler scales a loss in this process, and was not passed. If it scales "
                "the loss of this model, residuals and thresholds are wrong after each change of the scale, and with a "
                "wrapped optimizer the ranks may skip different steps: pass it as grad_scaler."
            )

    def _weights(self) -> Mapping[str, torch.Tensor]:
        # With outer steps, the weights of a rank are its own between two syncs.
        return self.outers[0].equal_weights if self.outers else self._parameters

    def _saved(self, run: Run) -> dict[str, Any]:
        saved = super()._saved(run)
        return saved if self.earlier is None else {**saved, "earlier": dict(self.earlier)}

    def _load(self, run: Run, rank: int, state: Any) -> tuple[bool, str]:
        result = super()._load(run, rank, state)
        # Equal on all ranks.
        saved = (state[0] if isinstance(state, list) else state).get("earlier")
        self.earlier = saved and {name: self._place(saved[name], p) for name, p in self._parameters.items()}
        self._forget_earlier()
        return result

    def _forget_earlier(self) -> None:
        """Forget the states before earlier steps, because others were loaded."""
        self.rollback.release()
        self.loss_scale.forget_before()

    def _digest(self, x: torch.Tensor) -> int:
        return digest(self._ops(str(x.device)), x.detach())

    def _place(self, saved: Any, current: torch.Tensor) -> torch.Tensor:
        if not isinstance(saved, torch.Tensor):
            raise StateError(
                f"checkpoint: expected a torch.Tensor, received {type(saved).__name__}; "
                "load a checkpoint that grace.torch has saved."
            )
        return torch.empty_like(current).copy_(saved.detach())

    def set_output(self, name: str, gradient: torch.Tensor) -> None:
        """Let the exchange write the merged gradient of a tensor into PyTorch's buffer."""
        self._gradients[name] = gradient

    def result(self, name: str) -> torch.Tensor:
        """Return the merged gradient of a tensor; complete the exchange of all for the first."""
        if name not in self._merged:
            with torch.no_grad():
                self._merged = self.run.finish(writable(self._gradients))
                for merged in self._merged.values():
                    self.loss_scale.scale_(merged)
                self.loss_scale.finish()
            self._gradients = {}
        return self._merged.pop(name)
