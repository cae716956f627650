"""Checks and messages of elastic runs, in which ranks die and come back: the same in every adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from grace.core.config.outer import OuterSteps
from grace.core.errors import ConfigError
from grace.core.guards.agreement import Handshake
from grace.core.methods.memory import holds_residual
from grace.core.observe.log import logger
from grace.core.plan.plan import Plan


def _check_syncs(outer: OuterSteps | None, where: str) -> None:
    """Raise ConfigError for outer steps that cannot go on with other ranks."""
    if outer is not None and (outer.weight or outer.pairs):
        raise ConfigError(
            f"{where}: in elastic mode, ranks come and go, so that outer cannot have a number per rank as weight, nor "
            f"pairs, whose ranks have anchors of their own; leave them out, received {outer}."
        )
    if outer is not None and outer.participation < 1 and outer.delay:
        raise ConfigError(
            f"{where}: in elastic mode, ranks may go while a change is on its way, and nobody knows then how many of "
            f"the others have contributed to it; leave delay or participation out, received {outer}."
        )


def stays(steps: int, now: int, *, keeps: bool) -> bool:
    """Return whether a rank keeps the weights and states that are its own between two syncs.

    It does if it stays among the others and has taken as many steps as the first rank, from which all others take them.
    Steps that are missing could be those of a sync.
    """
    return keeps and steps == now > 0


def refusal_of_process_sets(where: str) -> ConfigError:
    """Return the error of an exchange among some of the ranks only."""
    return ConfigError(f"{where}: process_set is not supported in elastic mode; leave it out.")


def _check_plan(plan: Plan, where: str) -> None:
    """Raise ConfigError if a memory cannot go on with other ranks when one of them is gone."""
    for unit in plan.units:
        keeps = [each.memory for each in unit.chain if holds_residual(each.memory)]
        if any(each.memory.across_ranks == "joint" for each in (unit, *unit.chain)) or (
            keeps and not holds_residual(unit.memory)
        ):
            raise ConfigError(
                f"{where}: in elastic mode, every rank must keep a residual of its own, and no state of others; "
                f"{unit.memory} with the communicator {unit.communicator} does not. Valid memories are for instance "
                "residual, with communicators such as allgather and two_shot."
            )


class Membership:
    """The ranks of an elastic run, as an exchange of this rank knows them.

    `plans` returns those of the exchange. Raises ConfigError if it cannot go on with other ranks.
    """

    def __init__(self, exchange: Any, plans: Callable[[], Iterable[Plan]], where: str) -> None:
        self._exchange, self._plans, self._where = exchange, plans, where
        # The number of ranks among which this one was last; None if it is new.
        self._before: int | None = None
        _check_syncs(exchange.config.outer, where)
        self._check_plans()
        exchange.synchronized = True

    def _check_plans(self) -> None:
        for plan in self._plans():
            _check_plan(plan, self._where)

    def move(self) -> None:
        """Go on with the ranks that the library has now. Raises ConfigError if the exchange cannot."""
        self._before, after = self._exchange.move()
        self._check_plans()
        _log(
            self._exchange.rank,
            "elastic mode: %d ranks before, %d now. Ranks that stay keep what they hold back; what a rank that is "
            "gone held back is lost.",
            self._before,
            after,
        )

    def agree(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Compare the exchange with those of the other ranks; return whether this rank keeps what it holds back.

        A new rank among others does not. At the start of a run all are new, and what one has loaded is its own. Raises
        the errors of `agree`.
        """
        with Handshake(gather, self._where) as handshake:
            handshake.local = {**self._exchange.description(), "of this rank": self._before}
        known = [theirs["of this rank"] for theirs in handshake.everyone]
        keeps = self._before is not None or not any(known)
        stayed, before = len(known) - known.count(None), max((n for n in known if n is not None), default=0)
        if before:
            _log(
                self._exchange.rank,
                "elastic mode: of %d ranks, %d have stayed and %d are new. What the other %d held back is lost.",
                before,
                stayed,
                known.count(None),
                before - stayed,
            )
        self._before = len(known)
        return keeps


def _log(rank: int, text: str, *values: int | None) -> None:
    if rank == 0:
        logger().warning(text, *values)
