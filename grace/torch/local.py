"""Local steps: each rank steps on its own, and every few steps the ranks exchange the change of their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from grace.core.config.config import Config
from grace.core.errors import ConfigError, GraceError, StateError
from grace.core.state.state import check_number, shown
from grace.torch.plain import PlainMethods

if TYPE_CHECKING:
    from grace.torch.exchange import Exchange


def check_local(
    config: Config, local_steps: int, average: bool, backward_passes_per_step: int, predivide: float
) -> None:
    """Raise ConfigError if an argument cannot be combined with local steps."""
    where = "grace.torch.DistributedOptimizer"
    if local_steps < 1:
        raise ConfigError(f"{where}: local_steps must be at least 1, received {local_steps!r}.")
    if not average:
        raise ConfigError(
            f"{where}: local_steps averages the change of the weights and needs op=hvd.Average, or with "
            "torch.distributed ReduceOp.AVG, received a sum; leave op out."
        )
    if backward_passes_per_step != 1 or predivide != 1.0:
        raise ConfigError(
            f"{where}: with local_steps no gradients are exchanged, so backward_passes_per_step and "
            "gradient_predivide_factor have no effect; leave them out. To accumulate gradients, call step() after "
            "several backward passes."
        )
    needing = [stage.method.memory for _, stage in config.stages if stage.method.memory.needs_lr]
    if needing:
        raise ConfigError(
            f"{where}: with local_steps the residual already includes the learning rate, and {needing[0]} would "
            "correct it for the learning rate again; leave lr_correction out."
        )


def local_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """Return the name of each parameter of the optimizer. Without given names, names are made from indices.

    Raises ValueError, as Horovod does, if parameters have no name or share one.
    """
    groups = optimizer.param_groups
    if named_parameters is None:
        return {p: f"parameter.{i}.{j}" for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
    names = {p: name for name, p in named_parameters}
    unnamed = sum(p not in names for group in groups for p in group["params"])
    if unnamed or len(set(names.values())) < len(names):
        raise ValueError(
            f"named_parameters: {unnamed} parameters of the optimizer have no name, and names must be unique; "
            "pass model.named_parameters()."
        )
    return {p: names[p] for group in groups for p in group["params"]}


def step_locally(
    optimizer: Any,
    plain: PlainMethods,
    names: Mapping[torch.nn.Parameter, str],
    exchange: Exchange,
    every: int,
    check_frozen: Callable[[], None],
) -> None:
    """Change the optimizer in place so that it exchanges weights instead of gradients, after every `every`-th step.

    Each rank sends d = (weights after the last exchange - weights now), compressed with error feedback. All ranks then
    set their weights to (weights after the last exchange - mean of the decoded d). The residual is in units of the
    weights. Momentum stays local. Basu et al., "Qsparse-local-SGD", NeurIPS 2019, Algorithm 1.

    `names` has the parameters that train. `check_frozen` raises StepError if another one has a gradient.
    """
    engine = exchange.engine
    met = {p: p.detach().clone() for p in names}
    steps = 0
    # True from the beginning of an exchange until it is complete.
    meeting = False

    def meet() -> None:
        nonlocal meeting
        meeting = True
        with exchange.way_back.attempt(), torch.no_grad():
            exchange.way_back.keep()
            exchange.finish_comparing()
            for p, name in names.items():
                if p.requires_grad:
                    engine.ready(name, met[p] - p)
                else:
                    # It was frozen in mid-run, and keeps its residual and its weight.
                    engine.rest(name)
            moved = engine.finish()
            for p, name in names.items():
                if p.requires_grad:
                    p.copy_(met[p] - moved[name])
        meeting = False
        exchange.way_back.let_go()

    def forget() -> None:
        nonlocal steps, meeting
        begun = every if meeting else steps % every
        if begun:
            with torch.no_grad():
                for p in names:
                    p.copy_(met[p])
        steps -= begun
        meeting = False
        optimizer.zero_grad()

    def evaluate(closure: Callable[[], Any]) -> Any:
        loss = closure()
        check_frozen()
        return loss

    def step(self: Any, closure: Any = None) -> Any:
        nonlocal steps
        exchange.way_back.check()
        if steps % every == 0:
            exchange.start_comparing()
            # The weights may have been loaded or broadcast since the last exchange.
            for p in names:
                met[p].copy_(p.detach())
        if closure is None:
            check_frozen()
            loss = plain.step()
        else:
            loss = plain.step(functools.partial(evaluate, closure))
        steps += 1
        if steps % every == 0:
            meet()
        return loss

    def state_dict() -> dict[str, Any]:
        local = {"steps": steps, "met": {name: met[p] for p, name in names.items()}}
        return {**plain.state_dict(), "grace": engine.state_dict(), "grace_local": local}

    def load_state_dict(state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        nonlocal steps
        exchange.way_back.check()
        given = exchange.gathered(state_dict)
        saved, local = given.pop("grace", None), given.pop("grace_local", None)
        expected = {name: shown(met[p]) for p, name in names.items()}
        found = local.get("met") if isinstance(local, Mapping) else None
        fits = isinstance(found, Mapping) and {name: shown(value) for name, value in found.items()} == expected
        if saved is None or not fits or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise StateError(
                "checkpoint: expected the state of an optimizer with local_steps and the same parameters (keys "
                "'grace' and 'grace_local'); load a checkpoint that was saved with local_steps."
            )
        check_number(local.get("steps"), "grace_local, steps")
        exchange.load(saved, optimizer, lambda: plain.load_state_dict(given))
        steps = int(local["steps"])
        for p, name in names.items():
            met[p].copy_(found[name])

    def add_param_group(group: dict[str, Any]) -> None:
        raise GraceError(
            "add_param_group() was called after the optimizer was wrapped, and the new parameters would not be "
            "exchanged; add the group before you wrap the optimizer."
        )

    exchange.way_back.forget = forget
    optimizer.grace = exchange
    plain.replace_step(optimizer, step)
    optimizer.state_dict = state_dict
    optimizer.load_state_dict = load_state_dict
    optimizer.add_param_group = add_param_group
