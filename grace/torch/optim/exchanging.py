"""`Exchanging`: an optimizer that exchanges what it needs itself, each time by an ordinary step of a run.

It takes the place of a plain optimizer and of what makes it distributed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from grace.core.config.config import Config
from grace.core.config.recommended import warn_of_pairs
from grace.core.errors import ConfigError, GraceError
from grace.core.optim.moments import ONE_BIT, freeze_step_of
from grace.core.session.start import Request
from grace.core.state.merge import optimizer_state
from grace.core.state.run import Run
from grace.torch.describe import describe
from grace.torch.exchange import OPS, Exchange
from grace.torch.library import Library, connect
from grace.torch.optim.ruled import Parameters, Ruled
from grace.torch.optimizer import refuse_parameters
from grace.torch.tensors import names_of, refuse_unfrozen, spec_of
from grace.torch.typed import no_grad


class Momenta(Exchange):
    """The exchange of momenta; `equal` returns what the ranks compare, the weights included."""

    watches = False
    equal: Callable[[], dict[str, torch.Tensor]]
    #: The exchange of gradients as they are.
    gradients: Exchange

    def move(self) -> tuple[int, int]:
        self.gradients.move()
        # Those of new ranks begin, too.
        self.gradients.run.reset()
        return super().move()

    def _weights(self) -> Mapping[str, torch.Tensor]:
        return self.equal()


class _Gradients(Exchange):
    """The exchange of gradients, of which users need not know."""

    _logs = False


class Exchanging(Ruled, ABC):
    """Base of optimizers that exchange their gradients and momenta, over Horovod or torch.distributed.

    Two runs share one transport: `_gradients` carries gradients as they are, and that of `grace` momenta by the method
    of the configuration.
    """

    #: The exchange of the momenta.
    grace: Exchange
    # By this attribute, a GradScaler leaves unscaling, and the decision to skip a step, to the optimizer.
    _step_supports_amp_scaling = True

    #: What groups keep besides, and its value at the start. Groups are a part of checkpoints.
    kept: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        *,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        freeze_step: int | None = None,
        total_steps: int | None = None,
        backend: str | None = None,
        process_set: Any = None,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, options, {"step": 0, "freeze_step": freeze_step, **self.kept})
        if config is None and "compressor" not in options:
            options = {**ONE_BIT, **options}
        request = Request(config, options, type(self), self._where)
        library = connect(backend, process_set, process_group, request.timeout, self._where)
        if library.transport.rank < 0:
            raise ConfigError(
                f"{self._where}: this process is not in the process set; make the optimizer on the ranks of the set "
                "only."
            )
        self._begin(request, library, total_steps)

    def _begin(self, request: Request, library: Library, total_steps: int | None) -> None:
        """Start both exchanges; the ranks compare their options and configurations."""
        with library.session(request, "momentum") as session:
            session.local = {"optimizer number": session.number, **self._options(total_steps)}
            self._names = names_of(self, _named(self.param_groups))
            refuse_parameters(list(self._names), request.where)
            self._frozen = {name: p for p, name in self._names.items() if not p.requires_grad}
            gradients = [spec_of(name, p) for p, name in self._names.items() if p.requires_grad]
            session.begin([dataclasses.replace(spec, dtype=spec.work_dtype) for spec in gradients], OPS, average=True)
        settings = {"compressor": "none", "seed": session.config.seed, "timeout": session.config.timeout}
        with library.session(Request(settings, {}, type(self), request.where), "gradient") as dense:
            self._gradients: Run = dense.begin(gradients, OPS, average=True)
        self.grace = momenta = Momenta(session, library, {name: p for p, name in self._names.items()}, None)
        momenta.equal, momenta.gradients = self._equal, _Gradients(dense, library, {}, None)
        # Its gradients come uncompressed.
        self.grace.optimizers.append(describe(self)._replace(adaptive=False))
        if library.transport.rank == 0:
            warn_of_pairs(session.config, self.grace.optimizers[0])
        self.grace.rollback.forget = self._forget
        self.grace.announce(self.grace.run.stages)

    def _options(self, total_steps: int | None) -> dict[str, Any]:
        """Set the end of the warm-up; return what must be equal on all ranks besides the configuration.

        Raises ConfigError for options that cannot work.
        """
        for group in self.param_groups:
            self._check(group)
            group["freeze_step"] = freeze_step_of(group["freeze_step"], total_steps, self._where)
        return {"optimizer": type(self).__name__, "freeze_step": self.param_groups[0]["freeze_step"]}

    # --- steps --------------------------------------------------------------------------------------------------------

    @no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange gradients or momenta, and update the weights; all ranks must call it equally often.

        With a GradScaler that has scaled the gradients, all ranks leave the step out if one of them has found NaN or
        infinity. Raises StepError, WaitError or MismatchError if the exchange fails; then nothing was changed.
        """
        self.grace.rollback.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_unfrozen(self._frozen, "the optimizer was made", "Make a new optimizer after you unfreeze parameters.")
        self._advance()
        return loss

    @abstractmethod
    def _advance(self) -> None:
        """Exchange, and update the weights."""

    def _gradient(self, p: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Return the gradient of this rank without the loss scale; zeros if there is none, as others may have one."""
        if p.grad is None:
            return torch.zeros_like(p)
        gradient, scale, found = self._dense(p), getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            gradient = gradient / scale.to(gradient.device)
        # A limit would hide infinity from the other ranks, and NaN it leaves.
        return gradient if found is None else gradient.masked_fill(found.to(gradient.device) > 0, math.nan)

    def _exchange(
        self, run: Run, value: Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Return the means over all ranks of a value per parameter; None if a loss scaler has all ranks skip it."""
        exchange, before = self.grace, run.savepoint
        with exchange.rollback.attempt():
            exchange.begin_step()
            for group in reversed(self.param_groups):
                lr = float(group["lr"])
                for p in reversed(group["params"]):
                    name = self._names[p]
                    if p.requires_grad:
                        run.current.ready(name, value(p, group), lr)
                    elif name not in self._frozen:
                        # Frozen during the run: it keeps its residual and its weight.
                        run.current.rest(name, lr)
            exchange.comparisons.finish()
            merged = run.finish()
        # What one rank has found arrives at all of them as NaN.
        if hasattr(self, "found_inf") and not all(bool(torch.isfinite(x).all()) for x in merged.values()):
            run.put_back(before)
            exchange.rollback.release()
            return None
        return merged

    def _forget(self) -> None:
        """Forget the step under way, which was dropped."""
        self._gradients.discard()
        self.zero_grad()

    def _equal(self) -> dict[str, torch.Tensor]:
        """Return the weights and moments, which are equal on all ranks, by a name that says what they are."""
        found: dict[str, torch.Tensor] = {name: p for p, name in self._names.items()}
        for group in self.param_groups:
            rule = self._rule_of(group)
            for p in group["params"]:
                arrays = self._state_of(p, rule) if self._names[p] not in self._frozen else {}
                found |= {f"{key} of {self._names[p]}": x for key, x in arrays.items() if key != "step"}
        return found

    # --- checkpoints and refusals -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, with that of grace; every rank must save its own."""
        return {**super().state_dict(), "grace": self.grace.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """Load a state of this optimizer, or a list with those of all ranks, whose residuals are merged.

        Raises StateError if it was saved by another optimizer, or with other tensors or methods; nothing is loaded.
        """
        self.grace.rollback.check()
        given = optimizer_state(state_dict, self.grace.rank)
        saved = given.pop("grace", {})
        self.grace.load(saved, self, functools.partial(self._load_plain, given))

    def _load_plain(self, given: dict[str, Any]) -> None:
        super().load_state_dict(given)
        # PyTorch rounds states to the dtype of the parameter.
        numbers, parameters = (
            [x for group in groups for x in group["params"]] for groups in (given["param_groups"], self.param_groups)
        )
        for number, p in zip(numbers, parameters, strict=True):
            for key, x in given["state"].get(number, {}).items():
                if isinstance(x, torch.Tensor):
                    self.state[p][key] = x.detach().to(p.device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; the constructor does. Raises GraceError afterwards."""
        if hasattr(self, "grace"):
            raise GraceError(
                f"{self._where}: add_param_group() was called after the optimizer was made, and the new parameters "
                "would not be exchanged; pass all groups when you make it."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Raise GraceError: the copy would have no connection to the other ranks."""
        raise GraceError(
            f"{self._where}: it cannot be copied or pickled, because its collectives belong to one object; save "
            "state_dict(), or make another one."
        )


def _named(groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, torch.nn.Parameter]] | None:
    """Return the parameters with the names that they were passed with; None if there were none."""
    pairs = [zip(group["param_names"], group["params"], strict=True) for group in groups if "param_names" in group]
    return [pair for each in pairs for pair in each] or None
