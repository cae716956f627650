"""Outer steps: each rank steps on its own, and every few steps the ranks exchange the change of their weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from grace.core.errors import ConfigError
from grace.core.session.inner import InnerOptimizer, InnerSteps
from grace.core.spec import TensorSpec
from grace.torch.adapter import OptimizerAdapter, give_own_class
from grace.torch.describe import describe
from grace.torch.tensors import is_sharded, own_part, spec_of


class PlainOptimizer(InnerOptimizer):
    """An optimizer as outer steps see it, with its trained parameters in `names`, and the buffers of its model."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self.used, self._optimizer = describe(optimizer), optimizer
        self._parameters, self._buffers = {name: p for p, name in names.items()}, buffers

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: own_part(p) for name, p in self._parameters.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: own_part(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def rates(self) -> dict[str, float]:
        rate_of = {p: float(group["lr"]) for group in self._optimizer.param_groups for p in group["params"]}
        return {name: rate_of[p] for name, p in self._parameters.items()}

    def frozen_names(self) -> list[str]:
        return [name for name, p in self._parameters.items() if not p.requires_grad]

    def states(self, name: str) -> dict[str, torch.Tensor]:
        return _states(self._optimizer, self._parameters[name])

    def first_states(self, name: str, where: str) -> dict[str, torch.Tensor]:
        """Return the states of a parameter, or those of another optimizer of this class after a step with zeros."""
        p = self._parameters[name]
        if p in self._optimizer.state:
            return self.states(name)
        other = torch.nn.Parameter(torch.zeros_like(p))
        other.grad = torch.zeros_like(other)
        kind = type(self._optimizer)
        group = next(group for group in self._optimizer.param_groups if any(each is p for each in group["params"]))
        try:
            # A group has all options. Those that the class calls by the same names may have no default there.
            needed = inspect.signature(kind).parameters.keys() & group.keys() - {"params"}
            copy = kind([{**group, "params": [other]}], **{key: group[key] for key in needed})
            copy.step()
        except Exception as error:
            raise ConfigError(
                f"{where}: the states of {kind.__name__} are known after its first step only, and a copy of it cannot "
                f"take one ({error}); wrap the optimizer after a step of its own, or set state = 'local'."
            ) from error
        return _states(copy, other)

    def restart(self, name: str) -> None:
        self._optimizer.state.pop(self._parameters[name], None)

    def buffers(self) -> dict[str, torch.Tensor]:
        return _arrays(self._buffers)

    def spec(self, name: str, x: torch.Tensor) -> TensorSpec:
        return spec_of(name, x)

    def write(self, x: torch.Tensor, new: torch.Tensor) -> None:
        x.copy_(new.view(x.shape))


def _states(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what an optimizer keeps of a parameter, but for counts of steps, which are 0-d and equal on all ranks."""
    return {key: x for key, x in _arrays(optimizer.state.get(p, {})).items() if x.ndim}


def _arrays(kept: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the tensors of floats."""
    return {k: own_part(x) for k, x in kept.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}


class OuterAdapter(OptimizerAdapter):
    """The methods of an optimizer whose ranks exchange what their weights have moved, instead of gradients."""

    def __init__(self, *given: Any, scaler: torch.amp.GradScaler | None, steps: InnerSteps) -> None:
        super().__init__(*given)
        give_own_class(self.optimizer)
        self.scaler, self.steps = scaler, steps
        (run,) = self.exchange.outers
        steps.begin(run, self.rollback, self.exchange.comparisons)

    def begin(self) -> str:
        """Begin with the weights of now, and say so."""
        self.steps.restart()
        return "residuals start from zero, and outer steps begin with the weights that this rank has now"

    def attach(self) -> None:
        """Put the methods in their places. A step that the GradScaler skips on this rank is an inner step, too."""
        super().attach()
        if self.scaler is None:
            return
        step = self.scaler.step

        def count(optimizer: Any, *given: Any, **options: Any) -> Any:
            taken = self.steps.run.state.steps
            result = step(optimizer, *given, **options)
            # A wrapper such as Lightning's forwards the attribute.
            if getattr(optimizer, "grace", None) is self.exchange and self.steps.run.state.steps == taken:
                self._begin()
                self.steps.after()
            return result

        self.scaler.step = count

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients of this rank, and exchange what the weights have moved if it is time."""
        self._begin()

        def evaluate() -> Any:
            loss = closure()
            self._ready(loss)
            return loss

        if closure is None:
            self._ready()
        loss = self.plain.step() if closure is None else self.plain.step(evaluate)
        self.steps.after()
        return loss

    def _begin(self) -> None:
        self.steps.before()
        self.exchange.start_comparing()

    def _ready(self, loss: Any = None) -> None:
        self.check_frozen()
        self.steps.ready(loss)

    def forget(self) -> None:
        """Return to the weights after the last sync of each parameter, and to the inner step of the last one."""
        self.steps.forget()
        self.optimizer.zero_grad()


def shared_by(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, list[int]]:
    """Return the ranks that hold parts of one whole: of a sharded parameter, or of the states of an optimizer."""
    found = {f"parameter '{name}'": p.device_mesh.mesh.flatten().tolist() for p, name in names.items() if is_sharded(p)}
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        group = optimizer.process_group
        found["the states of ZeroRedundancyOptimizer"] = torch.distributed.get_process_group_ranks(group)
    return found
