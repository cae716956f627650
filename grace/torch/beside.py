"""States of the inner optimizer, and buffers, which accompany the weights at the meetings of outer steps."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping

import torch

from grace.core.config.outer import OuterSteps
from grace.core.errors import ConfigError
from grace.core.session.outer_setup import check_inner, rounds_of_states
from grace.core.spec import TensorSpec
from grace.core.transport.transport import Transport
from grace.torch.steps import describe
from grace.torch.tensors import own_part, spec_of

#: Returns the buffers of a model by name, as they are now.
Buffers = Callable[[], Mapping[str, torch.Tensor]]


class Beside:
    """The states and buffers that meet, for an optimizer and the names of its trained parameters.

    Raises ConfigError for states that the optimizer does not have, or if it cannot be found out which it has.
    """

    def __init__(
        self,
        outer: OuterSteps,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        buffers: Buffers,
        transport: Transport,
        where: str,
    ) -> None:
        self._outer, self._optimizer, self._names = outer, optimizer, names
        check_inner(outer, describe(optimizer), where)
        self._transport = transport
        self._buffers = buffers if outer.buffers != "local" else dict
        self._states: dict[str, tuple[torch.Tensor, str]] = {}
        self.specs: list[TensorSpec] = []
        if outer.state not in ("local", "reset"):
            self._find(where)
        self._kept = [name for name, x in self._buffers().items() if x.is_floating_point()]
        self.specs += [dataclasses.replace(spec_of(n, own_part(self._buffers()[n])), rounds=1) for n in self._kept]

    def _find(self, where: str) -> None:
        arrays = {
            (p, key): x
            for p in self._names
            for key, x in _first_states(self._optimizer, p, where).items()
            # All ranks have the same counts of steps, which are 0-d.
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim
        }
        rounds = rounds_of_states(self._outer, [key for _, key in arrays], type(self._optimizer).__name__, where)
        for (p, key), x in arrays.items():
            if key in rounds:
                spec = spec_of(f"{key} of {self._names[p]}", own_part(x))
                self.specs.append(dataclasses.replace(spec, rounds=rounds[key]))
                self._states[spec.name] = p, key

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what this rank hands to a meeting; zeros for a parameter that has had no gradient yet."""
        shapes = {spec.name: spec for spec in self.specs}
        # A mean that only the first rank contributes to is the buffer of the first rank.
        factor = self._transport.size * (self._transport.rank == 0) if self._outer.buffers == "first" else 1
        found = {}
        for name, (p, key) in self._states.items():
            x = self._optimizer.state[p].get(key) if p in self._optimizer.state else None
            found[name] = own_part(p).new_zeros(shapes[name].shape) if x is None else own_part(x)
        for name in self._kept:
            own = own_part(self._buffers()[name])
            found[name] = own if factor == 1 else own * factor
        return found

    def write(self, met: Mapping[str, torch.Tensor]) -> None:
        """Write what has met, and forget the states of the parameters that have met if the option says so."""
        now = self._buffers()
        for name, new in met.items():
            if name in self._states:
                p, key = self._states[name]
                x = self._optimizer.state[p].get(key) if p in self._optimizer.state else None
            else:
                x = now.get(name)
            if x is not None:
                own_part(x).copy_(new.view(own_part(x).shape))
        if self._outer.state == "reset":
            for p, name in self._names.items():
                if name in met:
                    self._optimizer.state.pop(p, None)


def buffers_of(module: torch.nn.Module) -> Buffers:
    """Return what returns the buffers of a model that are saved with it; caches and the like are not."""
    saved = module.state_dict()
    names = [name for name, _ in module.named_buffers() if name in saved]
    return lambda: {name: module.get_buffer(name) for name in names}


def _first_states(optimizer: torch.optim.Optimizer, p: torch.Tensor, where: str) -> Mapping[str, object]:
    """Return the states of a parameter, or those of another optimizer of this class after a step with zeros."""
    if p in optimizer.state:
        return dict(optimizer.state[p])
    other = torch.nn.Parameter(torch.zeros_like(p))
    other.grad = torch.zeros_like(other)
    group = next(group for group in optimizer.param_groups if any(each is p for each in group["params"]))
    options = {**group, "params": [other]}
    try:
        # A group has all options. Those that the class calls by the same names may have no default there.
        needed = inspect.signature(type(optimizer)).parameters.keys() & group.keys() - {"params"}
        copy = type(optimizer)([options], **{key: group[key] for key in needed})
        copy.step()
    except Exception as error:
        raise ConfigError(
            f"{where}: the states of {type(optimizer).__name__} are known after its first step only, and a copy of it "
            f"cannot take one ({error}); wrap the optimizer after a step of its own, or set state = 'local'."
        ) from error
    return dict(copy.state[other])
