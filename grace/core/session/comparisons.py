"""`Comparisons`: comparisons of the ranks before their steps, which wait for nobody while gradients are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from grace.core.guards.agreement import agree
from grace.core.guards.replicas import SUMMARY_BYTES, WEIGHTS, check_digests, check_equal, is_due, summary
from grace.core.session.exchange import Exchange
from grace.core.transport.transport import Handle, HandshakeTransport


class Comparisons:
    """The comparisons of an exchange: before its first step, and before each step for which `check_replicas` asks.

    `gather(data, name)` starts to join the bytes of all ranks. `advice` says what to do if weights differ at the start.
    """

    def __init__(
        self,
        exchange: Exchange,
        transport: HandshakeTransport,
        gather: Callable[[bytes, str], Handle],
        advice: str,
    ) -> None:
        self._exchange, self._transport, self._gather, self._advice = exchange, transport, gather, advice
        self.restart("the first step")

    def restart(self, first: str) -> None:
        """Forget what is under way, and compare the ranks before the next step, which is called `first`."""
        # None when the ranks have compared themselves before it.
        self._first: str | None = first
        # How many steps were completed when the replicas were last compared.
        self._compared = -1
        # What is under way, for what it is, and what to do if the ranks differ.
        self._under_way: list[tuple[Handle, str, Callable[[], None]]] = []

    def start(self) -> None:
        """Start to compare the ranks before the first gradient of a step: in the first step, or if it is due.

        This does not wait for other ranks, which may call `discard` meanwhile.
        """
        exchange, run = self._exchange, self._exchange.run
        outer = exchange.outer_of(run)
        step = int(run.step) if outer is None else outer.state.steps
        if self._first is not None:
            # Otherwise replicas would part silently, or ranks would start different collectives and wait forever.
            what, mine = self._first, {name: exchange._digest(p) for name, p in exchange._weights().items()}
            in_detail = functools.partial(self._compare_first, step, mine, what)
            self._start({"step": step, **mine}, "first step", what, in_detail)
            self._first = None
        if is_due(run.completed, exchange.config.check_replicas) and self._compared != run.completed:
            states, what = exchange._digests(run, exchange._weights()), "the comparison of replicas"
            self._start(states, "replicas", what, functools.partial(self._compare_all, step, states, what))
            self._compared = run.completed

    def finish(self) -> None:
        """Wait for what `start` has started. Raises MismatchError on every rank if the ranks differ."""
        under_way, self._under_way = self._under_way, []
        for handle, what, in_detail in under_way:
            with self._transport.handshake_for(what):
                received = bytes(handle.wait().tolist())
            if received != received[:SUMMARY_BYTES] * self._exchange.size:
                in_detail()

    def _start(self, digests: Mapping[str, int], purpose: str, what: str, in_detail: Callable[[], None]) -> None:
        if self._transport.rank >= 0:
            handle = self._gather(summary(digests), f"{self._exchange.prefix}/{purpose}")
            self._under_way.append((handle, what, in_detail))

    def _compare_first(self, step: int, digests: Mapping[str, int], what: str) -> None:
        """Say in what the ranks differ: in the stage of a schedule, or in the weights that they begin with."""
        everyone = agree(
            {"step of the loaded checkpoint": step, "of this rank": digests},
            None,
            lambda mine: self._exchange._gather([mine], "first step in detail", what),
            what,
        )
        check_digests([other["of this rank"] for other in everyone], WEIGHTS, f"before {what}", self._advice)

    def _compare_all(self, step: int, digests: Mapping[str, int], what: str) -> None:
        check_equal(self._exchange._gather([(step, digests)], "replicas in detail", what), self._exchange.rank)
