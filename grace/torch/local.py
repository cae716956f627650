"""Local steps: each rank steps on its own, and every few steps the ranks exchange the change of their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from grace.core.errors import GraceError, StateError
from grace.core.state.state import check_number, shown
from grace.torch.plain import PlainMethods

if TYPE_CHECKING:
    from grace.torch.exchange import Exchange


def step_locally(
    optimizer: Any,
    plain: PlainMethods,
    names: Mapping[torch.nn.Parameter, str],
    exchange: Exchange,
    every: int,
    check_frozen: Callable[[], None],
) -> None:
    """Change the optimizer in place so that it exchanges weights instead of gradients, after every `every`-th step.

    See `grace.core.session.local_steps`. `names` has the parameters that train. `check_frozen` raises StepError if
    another one has a gradient.
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
