"""Start of an exchange, the same in every adapter: the plans, the engine, and what the ranks compare before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grace.core.config.config import Config
from grace.core.guards.agreement import Meeting, formats
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan, make_plans
from grace.core.plan.unit import Assignment
from grace.core.spec import TensorSpec
from grace.core.step.engine import Engine
from grace.core.transport.transport import TIMEOUT, Transport


class Request(NamedTuple):
    """The configuration that this rank asks for, or an error in its place.

    The other ranks must learn of the error when they meet. For that, they need a transport with a time limit.
    """

    made: Config | None
    failure: Exception | None = None

    @property
    def timeout(self) -> float:
        """The time limit of the transport in seconds."""
        return TIMEOUT if self.made is None else self.made.timeout

    def config(self) -> Config:
        """Return the configuration, or raise the error."""
        if self.made is None:
            assert self.failure is not None
            raise self.failure
        return self.made


def request(make: Callable[[], Config]) -> Request:
    """Return the request of this rank: the configuration that `make` returns, or its error."""
    try:
        return Request(make())
    except Exception as error:
        return Request(None, error)


def begin(
    meeting: Meeting,
    config: Config,
    specs: Sequence[TensorSpec],
    ops: Callable[[str], ArrayOps],
    transport: Transport,
    *,
    average: bool,
    world: tuple[int, int],
    prefix: str = "grace",
    delegate: Callable[[Assignment], bool] = lambda item: False,
) -> Engine:
    """Return the engine of this process, and describe its exchange to the meeting. Call it in the meeting's body.

    The arguments are those of `Engine` and `Exchange`; `world` has rank and size among all processes.
    """
    plans = make_plans(specs, config, ranks=transport.ranks, prefix=prefix, delegate=delegate)
    meeting.mine.update(described(config, specs, [plan for _, plan in plans], ops))
    (_, plan), *later = plans
    engine = Engine(plan, ops, transport, seed=config.seed, average=average, rollback=config.rollback, later=later)
    if transport.rank >= 0:
        engine.times.start_as_told(*world)
    return engine


def described(
    config: Config, specs: Sequence[TensorSpec], plans: Sequence[Plan], ops: Callable[[str], ArrayOps]
) -> dict[str, Any]:
    """Return what must be equal on all ranks in every adapter: configuration, tensors and formats."""
    return {
        "configuration": config.to_dict(),
        "parameters": {spec.name: [list(spec.shape), spec.dtype] for spec in specs},
        "formats": formats(plans, ops),
    }
