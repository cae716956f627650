"""Record of started collectives, with which the ranks finish those that only some of them have started."""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from grace.core.spec import Array
from grace.core.transport.transport import Handle, pack, unpack


class _Noted(Handle):
    """Handle that leaves the record when the rank has waited for it."""

    def __init__(self, name: str, handle: Handle, pending: dict[str, Handle]) -> None:
        self._name, self._handle, self._pending = name, handle, pending

    def wait(self) -> Array:
        result = self._handle.wait()
        self._pending.pop(self._name, None)
        return result

    def arrived(self) -> bool:
        return self._handle.arrived()


class Started:
    """The collectives that this rank has started since the beginning, and those that it has not waited for."""

    def __init__(self) -> None:
        # How often each was started. Ranks between the same two steps have equal counts, whatever has arrived.
        self._counts: collections.Counter[str] = collections.Counter()
        self._calls: dict[str, Mapping[str, Any]] = {}
        self._pending: dict[str, Handle] = {}

    def note(self, name: str, call: Mapping[str, Any], handle: Handle) -> Handle:
        """Note a collective. The JSON-able `call` says how another rank starts it."""
        self._counts[name] += 1
        self._calls[name] = call
        self._pending[name] = noted = _Noted(name, handle, self._pending)
        return noted

    def calls(self) -> dict[str, Any]:
        """Return what `start_missing` needs from each rank, JSON-able."""
        return {name: [count, self._calls[name]] for name, count in self._counts.items()}

    def start_missing(
        self, everyone: Sequence[Mapping[str, Any]], start: Callable[[str, Mapping[str, Any]], Any]
    ) -> list[Handle]:
        """Start what this rank lacks, given the `calls` of all ranks; return all that it has not waited for.

        `start` starts a collective of that name and call, and notes it.
        """
        for name in sorted({name for theirs in everyone for name in theirs}):
            counts = [theirs.get(name, [0, {}])[0] for theirs in everyone]
            call = everyone[counts.index(max(counts))][name][1]
            while self._counts[name] < max(counts):
                start(name, call)
        return [self._pending[name] for name in sorted(self._pending)]


class Dropping:
    """The handshake of ranks that drop a step: they finish what only some have started, and exchange their steps.

    `gather(data, name)` starts to join the bytes of all ranks. The other arguments are those of `start_missing`, the
    name of the handshake, the step of this rank, and the number of ranks.
    """

    def __init__(
        self,
        started: Started,
        start: Callable[[str, Mapping[str, Any]], Any],
        gather: Callable[[bytes, str], Handle],
        name: str,
        step: int,
        size: int,
    ) -> None:
        self._started, self._start, self._gather = started, start, gather
        self._name, self._step, self._size = name, step, size
        self._waits = self._all_waits()
        self._awaited = next(self._waits)

    def wait(self) -> list[int]:
        """Wait for all, in turn; return the steps of all ranks. After a WaitError it can be called again."""
        while True:
            received = self._awaited.wait()
            try:
                self._awaited = self._waits.send(received)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def _all_waits(self) -> Generator[Handle, Array, list[int]]:
        """Yield the collectives to wait for, one after another."""
        received = yield self._gather(pack(self._started.calls()), self._name)
        waiting = self._started.start_missing(unpack(bytes(received.tolist()), self._size), self._start)
        while waiting:
            yield waiting.pop()
        # Ranks that have given up meanwhile come back for this: what they had started is complete without them.
        received = yield self._gather(pack(self._step), f"{self._name}/step")
        return unpack(bytes(received.tolist()), self._size)
