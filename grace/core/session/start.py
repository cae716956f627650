"""Start of an exchange, the same in every adapter: its arguments, plans and run, and what the ranks compare."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grace.core.config.config import Config, make_config, refuse_typos
from grace.core.errors import ConfigError
from grace.core.guards.agreement import Handshake, formats
from grace.core.observe.timeline import ModuleTimes
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Modules, Plan, make_plans
from grace.core.plan.unit import Assignment
from grace.core.session.outer_setup import (
    check_outer,
    check_references,
    fragments_of,
    refuse_outer,
    with_added,
    with_local_steps,
)
from grace.core.spec import TensorSpec
from grace.core.state.run import Run
from grace.core.transport.transport import TIMEOUT, HandshakeTransport

#: Arguments of other libraries that no adapter supports, with the reasons.
REFUSED = {
    "compression": "is not supported; name a compressor in the configuration instead, for example "
    "config={'compressor': 'fp16'}",
    "groups": "would bypass the compression; leave it out. grace groups tensors by the option 'bucket_bytes'",
    "num_groups": "would bypass the compression; leave it out. grace groups tensors by the option 'bucket_bytes'",
}
# How many exchanges have started under each name. It is part of the names of their collectives, which must differ
# between exchanges and be equal on all ranks.
_started: collections.Counter[str] = collections.Counter()


class Request:
    """The configuration that this rank asks for, or an error in its place.

    The other ranks must learn of the error in the handshake. For that, they need a transport with a time limit.
    `function` has the arguments `config` and `options`; `where` is its public name. `local_steps` is the short form of
    the option `outer`.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None,
        options: Mapping[str, Any],
        function: Callable[..., Any],
        where: str,
        local_steps: int = 1,
    ) -> None:
        self.where, self.local_steps = where, local_steps
        self._made: Config | Exception
        try:
            refuse_typos(options, function, where)
            self._made = make_config(config, **with_local_steps(options, local_steps, where))
        except Exception as error:
            self._made = error

    @property
    def timeout(self) -> float:
        """The time limit of the transport in seconds."""
        return self._made.timeout if isinstance(self._made, Config) else TIMEOUT

    @property
    def config(self) -> Config:
        """The configuration. Raises the error that has taken its place."""
        if isinstance(self._made, Config):
            return self._made
        raise self._made


class Session(Handshake):
    """The start of an exchange, in the context in which the ranks compare it; see `open_session`."""

    def __init__(
        self,
        request: Request,
        transport: HandshakeTransport,
        gather: Callable[[Any], list[Any]],
        prefix: str,
        number: int,
        world: tuple[int, int],
    ) -> None:
        super().__init__(gather, request.where)
        self._request, self.transport = request, transport
        #: What the names of collectives and buckets begin with, and its number among those of the same kind.
        self.prefix, self.number = prefix, number
        #: Rank and size among all processes.
        self.world = world
        #: What `Exchange` is made with, as soon as it has begun.
        self.arguments: dict[str, Any] = {}
        #: True if a step takes second gradients.
        self.takes_references = False

    def __enter__(self) -> Session:
        return self

    @property
    def config(self) -> Config:
        """The configuration. Raises the error of this rank's request, so that the other ranks learn of it."""
        return self._request.config

    def begin(
        self,
        specs: Sequence[TensorSpec],
        ops: Callable[[str], ArrayOps],
        *,
        average: bool,
        delegate: Callable[[Assignment], bool] = lambda item: False,
        modules: Modules | None = None,
        outer: bool = False,
        references: bool = False,
        auto: bool = False,
    ) -> Run:
        """Return the run of this process, and describe its exchange to the other ranks.

        The arguments are those of `Run` and `Exchange`. `modules` has the module of each tensor, if the framework
        reduces a model module by module. `outer` says that outer steps are possible, and `references` that a step takes
        second gradients, and `auto` that the run can choose its compressor. Raises ConfigError if they are not, and the
        configuration needs them.
        """
        config, transport, self.takes_references = self.config, self.transport, references
        if outer:
            check_outer(config, self._where, average=average, size=transport.size)
            specs = with_added(config, specs)
            modules = fragments_of(config, specs)
        else:
            refuse_outer(config, self._where)
        check_references(config, self._where, references)
        check_auto(config, self._where, auto)
        plans = make_plans(specs, config, ranks=transport.ranks, prefix=self.prefix, delegate=delegate, modules=modules)
        self.local.update(describe(config, specs, [plan for _, plan in plans], ops))
        run = Run(
            plans,
            ops,
            transport,
            seed=config.seed,
            average=average,
            rollback=config.rollback,
            modules=modules and modules.members,
            times=modules and ModuleTimes(),
        )
        if transport.rank >= 0:
            run.times.start_from_environment(*self.world)
        self.arguments = {
            "config": config,
            "specs": specs,
            "runs": [run],
            "ops": ops,
            "rank": transport.rank,
            "ranks": transport.ranks,
            "prefix": self.prefix,
            "delegate": delegate,
            "world": [self.world],
        }
        return run


def open_session(
    request: Request,
    transport: HandshakeTransport,
    *,
    world: tuple[int, int],
    group: str = "grace",
    kind: str | None = None,
    gather: Callable[[Any], list[Any]] | None = None,
) -> Session:
    """Return the start of an exchange, as a context in whose body all ranks check their arguments and make their plans.

    The body adds to `local` what must be equal on all ranks, besides what `begin` describes. An error in it is raised
    on all ranks, and so is a MismatchError at its end if they differ. `world` has rank and size among all processes.
    `group` names the ranks, equally on all of them; exchanges of a `kind` are numbered, so that a group can have
    several. All kinds compare under one name, by `gather` or over the transport: ranks with other numbers of exchanges
    get an error instead of waiting forever.
    """
    number, prefix = 0, group
    if kind is not None:
        number, prefix = _started[f"{group}.{kind}"], f"{group}.{kind}{_started[f'{group}.{kind}']}"
        _started[f"{group}.{kind}"] += 1
    gather = gather or (lambda mine: transport.gather_objects(mine, f"{group}/agree", f"{request.where}()"))
    return Session(request, transport, gather, prefix, number, world)


def describe(
    config: Config, specs: Sequence[TensorSpec], plans: Sequence[Plan], ops: Callable[[str], ArrayOps]
) -> dict[str, Any]:
    """Return what must be equal on all ranks in every adapter: configuration, tensors and formats."""
    return {
        "configuration": config.to_dict(),
        "parameters": {
            spec.name: [list(spec.shape), spec.dtype, *([f"every {spec.rounds} syncs"] if spec.rounds else [])]
            for spec in specs
        },
        "formats": formats(plans, ops),
    }


def check_auto(config: Config, where: str, possible: bool) -> None:
    """Raise ConfigError for the compressor "auto" in a front end that cannot change its method during the run."""
    if config.auto and not possible:
        raise ConfigError(
            f"{where}: the compressor 'auto' measures steps and changes the method between them, which is not possible "
            "here; name a compressor. docs/choose.md tells how to find it, and where 'auto' works."
        )


def refuse_arguments(options: Mapping[str, Any], where: str, more: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for an argument of Horovod that is not supported; `more` has further ones, with reasons."""
    for name, why in {**REFUSED, **(more or {})}.items():
        if name in options:
            raise ConfigError(f"{where}: the argument '{name}' {why}.")


def is_mean(op: Any, mean: Any, total: Any, names: str, where: str) -> bool:
    """Return whether a reduction is the mean (None is), rather than the sum. Raises ConfigError for others.

    `mean` and `total` are the library's values, and `names` is what it calls them.
    """
    if op is not None and op not in (mean, total):
        raise ConfigError(
            f"{where}: the argument 'op' must be {names}, received {op}; other reductions are not linear and do not "
            "work with compression."
        )
    return bool(op != total)


def check_predivide(factor: float, average: bool, mean: str, op: Any, where: str) -> None:
    """Raise ConfigError unless `gradient_predivide_factor` is 1, or positive with a mean, which is called `mean`."""
    if factor != 1.0 and not (average and factor > 0.0):
        raise ConfigError(
            f"{where}: the argument 'gradient_predivide_factor' must be a positive number and needs {mean}, received "
            f"{factor!r} with op={op}."
        )
