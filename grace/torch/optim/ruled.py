"""`Ruled`: an optimizer of PyTorch whose arithmetic is a pure step per tensor of `grace.core.optim`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from grace.core.errors import ConfigError, StepError
from grace.core.optim.moments import Moments, signature_of
from grace.torch.exchange import OPS
from grace.torch.typed import Optimizer

#: What `params` of an optimizer of PyTorch may be.
Parameters = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class Ruled(Optimizer):
    """An optimizer whose steps are those of `rule`, whose fields are options of the parameter groups."""

    rule: ClassVar[type[Moments]]
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "rule" not in vars(cls):
            return
        cls.__signature__ = signature_of(cls, Ruled, {f.name: f.default for f in dataclasses.fields(cls.rule)})

    def __init__(self, params: Parameters, lr: float, options: dict[str, Any], kept: Mapping[str, Any]) -> None:
        """Make the groups; take the options of the rule out of `options`. `kept` is what groups keep besides."""
        own = {f.name: options.pop(f.name, f.default) for f in dataclasses.fields(self.rule)}
        super().__init__(params, {"lr": lr, **own, **kept})

    @property
    def _where(self) -> str:
        return f"grace.torch.optim.{type(self).__name__}"

    def _rule_of(self, group: Mapping[str, Any]) -> Moments:
        fields = {f.name: group[f.name] for f in dataclasses.fields(self.rule)}
        return self.rule(**{**fields, "betas": tuple(group["betas"])})

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise ConfigError for options that cannot work."""
        self._rule_of(group)
        if not group["lr"] >= 0:
            raise ConfigError(f"{self._where}: lr must not be negative, received {group['lr']!r}.")

    def _dense(self, p: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a parameter. Raises StepError if it is sparse."""
        if p.grad.is_sparse:
            raise StepError(
                f"a parameter of shape {tuple(p.shape)} has a sparse gradient, and moments are dense; create the "
                "embedding with sparse=False."
            )
        return p.grad.detach()

    def _state_of(self, p: torch.Tensor, rule: Moments) -> dict[str, Any]:
        """Return the state of a parameter, as flat arrays and the number of its steps."""
        if not self.state[p]:
            self._keep(p, 0, rule.init(OPS(str(p.device)), flat(p)))
        return {key: x.reshape(-1) if isinstance(x, torch.Tensor) else x for key, x in self.state[p].items()}

    def _update(self, p: torch.Tensor, taken: int, weights: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> None:
        """Write the weights and the state of a parameter after a step; it has `taken` so many before."""
        p.copy_(weights.view(p.shape))
        self._keep(p, taken + 1, arrays)

    def _keep(self, p: torch.Tensor, number: int, arrays: Mapping[str, torch.Tensor]) -> None:
        shaped = {key: x.reshape(p.shape) if x.numel() == p.numel() else x for key, x in arrays.items()}
        self.state[p] = {"step": number, **shaped}


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return the elements as a flat array of the dtype in which moments are kept."""
    return x.detach().reshape(-1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
