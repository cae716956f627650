"""The demands of outer steps on a configuration, a front end and the tensors of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from grace.core.communicators.pairs import Pairs
from grace.core.config.config import Config, Method, dense_method
from grace.core.config.outer import OuterSteps
from grace.core.config.recommended import Optimizer
from grace.core.errors import ConfigError
from grace.core.methods.memory import keeps_nothing
from grace.core.plan.plan import Modules
from grace.core.plan.unit import Assignment
from grace.core.spec import TensorSpec

#: The tensor that outer steps add to those of a run: it brings the mean loss of all ranks.
LOSS = "loss of all ranks"


def fragments_of(config: Config, specs: Sequence[TensorSpec]) -> Modules | None:
    """Return what syncs at a time as modules of a run; None if all tensors always sync together.

    Raises ConfigError if tensors accompany weights that take no outer steps.
    """
    if config.outer is None:
        if names := [spec.name for spec in specs if spec.rounds]:
            raise ConfigError(
                f"tensor '{names[0]}': rounds is the number of syncs between two means, and without outer there are "
                "none; set outer, or leave rounds out."
            )
        return None
    beside = [spec.name for spec in specs if spec.rounds and spec.name != LOSS]
    if beside and config.outer.noise:
        raise ConfigError(
            f"tensor '{beside[0]}': with noise in outer, what accompanies the weights would not be hidden; leave it "
            "out, or noise."
        )
    members = modules_of(config.outer, specs)
    pairs = Pairs(config.seed) if config.outer.pairs else None
    if len(members) == 1 and pairs is None:
        return None
    return Modules({name: module for module, names in members.items() for name in names}, pairs)


def modules_of(outer: OuterSteps, specs: Sequence[TensorSpec]) -> dict[str, list[str]]:
    """Return the tensors of each module: those of the fragments, and then what accompanies them, by its rounds."""
    parts = outer.divide([spec for spec in specs if not spec.rounds])
    beside: dict[str, list[str]] = {}
    for spec in specs:
        if spec.rounds:
            beside.setdefault(module_beside(spec.rounds), []).append(spec.name)
    if len(parts) == 1 and not beside:
        return {"": parts[0]}
    return {**{f"fragment {i}": part for i, part in enumerate(parts)}, **beside}


def module_beside(rounds: int) -> str:
    """Return the module of what accompanies the weights at every `rounds`-th sync."""
    return f"beside the weights, every {rounds}"


def check_outer(config: Config, where: str, *, average: bool, size: int) -> None:
    """Raise ConfigError if outer steps cannot be combined with the rest of a configuration, or with sums."""
    if config.outer is None:
        return
    if not average:
        raise ConfigError(
            f"{where}: local_steps and outer average the change of the weights and need the mean as op, received a "
            "sum; leave op out."
        )
    weights = len(config.outer.weight)
    if weights and weights != size:
        raise ConfigError(f"{where}: outer has {weights} numbers as weight, and there are {size} ranks; pass one each.")
    methods = [*(stage.method for _, stage in config.stages), *(rule.method for rule in config.rules)]
    partly, varies = config.outer.participation < 1 or config.outer.relevance > 0, config.outer.variates
    # The mean of the shifts goes on without those of the ranks that are out.
    shared = [
        method.memory
        for method in methods
        if method.memory.across_ranks != "apart" and not (varies and method.memory.pace == 1)
    ]
    if shared and partly:
        raise ConfigError(
            f"{where}: with participation below 1 or relevance, some ranks contribute nothing, and {shared[0]} must "
            "follow all of them; use the memory residual or none, or with variates ef21, or diana with damped."
        )
    if partly and varies and len(config.stages) > 1:
        raise ConfigError(
            f"{where}: where a part of the ranks contributes, control variates go with one method in all syncs, "
            f"received {len(config.stages)} stages; leave schedule and warmup_steps out, or participation, or variates."
        )
    lossy = [method for method in methods if method.compressor != dense_method().compressor]
    adding_up = [m for m in lossy if not (m.memory.feeds_back or m.memory.pace or _is_unbiased(m))]
    if adding_up and config.outer.variates:
        raise ConfigError(
            f"{where}: what {adding_up[0].compressor} drops would add up in the control variates; use the memory "
            "residual, ef21 or diana, or leave variates out."
        )
    keeping = [method.memory for method in lossy if not keeps_nothing(method.memory)]
    if keeping and config.outer.local_error:
        raise ConfigError(
            f"{where}: with local_error, what a compressor drops stays in the weights, and {keeping[0]} would keep it "
            "as well; set memory = 'none'."
        )
    if config.outer.pairs and (lossy or any(m.memory != dense_method().memory for m in methods)):
        raise ConfigError(
            f"{where}: with pairs, the ranks exchange weights, and not their changes; set compressor = 'none', "
            f"without a memory, received {methods[0].compressor} with {methods[0].memory}."
        )
    counting = [m.communicator if m.communicator.result else m.compressor for m in methods if not _takes_mean(m)]
    if counting and (config.outer.local_error or not config.outer.is_plain_mean):
        raise ConfigError(
            f"{where}: participation, weight, relevance and local_error need the mean of what all ranks send, and "
            f"{counting[0]} takes none; use another one, or leave them out."
        )
    needing = [stage.method.memory for _, stage in config.stages if "lr" in stage.method.memory.needs]
    if needing:
        raise ConfigError(
            f"{where}: with local_steps or outer, the residual already includes the learning rate, and {needing[0]} "
            "would correct it for the learning rate again; leave lr_correction out."
        )


def check_inner(outer: OuterSteps, used: Optimizer, where: str) -> None:
    """Raise ConfigError if control variates do not go with the inner optimizer."""
    if outer.variates and (used.adaptive or used.momentum):
        raise ConfigError(
            f"{where}: control variates suppose that an inner step moves weights by learning rate times gradient, "
            f"received {used.name} with momentum {used.momentum:g}; use SGD without, or leave variates out."
        )


def _is_unbiased(method: Method) -> bool:
    return method.compressor.unbiased and keeps_nothing(method.memory)


def _takes_mean(method: Method) -> bool:
    return method.compressor.averages and method.communicator.result is None


def refuse_arguments_of_gradients(where: str, **given: bool) -> None:
    """Raise ConfigError for arguments of an exchange of gradients, which outer steps do not have."""
    if names := [name for name, value in given.items() if value]:
        raise ConfigError(
            f"{where}: with local_steps and outer no gradients are exchanged, so {' and '.join(names)} would have no "
            "effect; leave it out. To accumulate gradients, call step() after several backward passes, or set "
            "gradient_accumulation_steps of an optimizer that has it."
        )


def refuse_states(config: Config, where: str) -> None:
    """Raise ConfigError if the states of an inner optimizer should sync, for a front end that does not know them."""
    if config.outer is not None and config.outer.state != "local":
        raise ConfigError(
            f"{where}: it does not know the states of an inner optimizer, received state = {config.outer.state!r} in "
            "outer; leave it out, and pass states that sync as TensorSpec(name, shape, rounds=1) where specs are taken."
        )


def refuse_parts(parts: Mapping[str, Collection[int]], sites: Collection[int] | None, where: str) -> None:
    """Raise ConfigError if ranks that sync hold parts of one whole. `parts` has those that do, by what it is.

    `sites` are the ranks that sync; None stands for all.
    """
    for what, ranks in parts.items():
        if len(set(ranks).intersection(ranks if sites is None else sites)) > 1:
            raise ConfigError(
                f"{where}: the ranks {sorted(ranks)} each hold a part of {what}, and would sync as if each had all of "
                "it; pass process_group with the ranks that hold the same part, one of each site."
            )


def rounds_of_states(outer: OuterSteps, found: Sequence[str], kind: str, where: str) -> dict[str, int]:
    """Return the number of syncs between two means of each state, of those that an inner optimizer keeps.

    `kind` is the class of the optimizer. Raises ConfigError for states that it does not have.
    """
    if isinstance(outer.state, str):
        rounds = dict.fromkeys(found, 1) if outer.state == "average" else {}
        wanted = outer.state == "average"
    else:
        rounds, wanted = dict(outer.state), True
    if wanted and (not rounds or rounds.keys() - set(found)):
        raise ConfigError(
            f"{where}: outer has state = {outer.state if isinstance(outer.state, str) else rounds!r}, and {kind} keeps "
            f"{', '.join(dict.fromkeys(found)) or 'no arrays'}; name these, or set state = 'local'."
        )
    return rounds


def refuse_outer(config: Config, where: str) -> None:
    """Raise ConfigError if the configuration has outer steps, for a front end that cannot take them."""
    if config.outer is not None:
        raise ConfigError(
            f"{where}: it exchanges gradients and cannot take outer steps ({config.outer}); leave outer out of the "
            "configuration. docs/outer_steps.md lists what can."
        )


def check_references(config: Config, where: str, possible: bool) -> None:
    """Raise ConfigError if a memory needs second gradients, for a front end or outer steps that have none."""
    methods = [*(stage.method for _, stage in config.stages), *(rule.method for rule in config.rules)]
    needing = [method.memory for method in methods if "reference" in method.memory.needs]
    if needing and config.outer is not None:
        raise ConfigError(
            f"{where}: outer steps exchange changes of weights, of which there is no second gradient, and "
            f"{needing[0]} needs one; use another memory, or leave outer out."
        )
    if needing and not possible:
        raise ConfigError(
            f"{where}: {needing[0]} needs a second gradient of the same batch at other weights, and no step here takes "
            "one; use another memory. docs/communicators_and_memories.md lists what takes second gradients."
        )


def follows_steps(items: Iterable[Assignment], where: str) -> bool:
    """Return whether second gradients are those at the weights of the step before, not of the last full round.

    Raises ConfigError if they are for some tensors only: a closure computes all of them at once.
    """
    found = {"previous" in item.memory.needs for item in items if "reference" in item.memory.needs}
    if len(found) > 1:
        raise ConfigError(
            f"{where}: some tensors need second gradients at the weights of the last step, and others at "
            "those of the last full round, while a closure computes all at once; use one memory, and others only "
            "without second gradients."
        )
    return found == {True}


def with_local_steps(options: Mapping[str, Any], local_steps: int, where: str) -> dict[str, Any]:
    """Return the options of a configuration with the argument `local_steps`, the short form of `outer`.

    Raises ConfigError if it is less than 1, or if both are given.
    """
    if local_steps == 1:
        return dict(options)
    if local_steps < 1:
        raise ConfigError(f"{where}: local_steps must be at least 1, received {local_steps!r}.")
    if options.get("outer") is not None:
        raise ConfigError(
            f"{where}: local_steps = {local_steps} is the short form of outer = {{'every': {local_steps}}}; leave one "
            "of them out."
        )
    return {**options, "outer": {"every": local_steps}}


def with_added(config: Config, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
    """Return the tensors of a run, with the loss if it decides on periods."""
    if config.outer is None or config.outer.adapt != "loss" or not specs:
        return specs
    return [*specs, TensorSpec(LOSS, (), device=specs[0].device, rounds=1)]
