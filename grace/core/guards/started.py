"""Record of started collectives, with which the ranks finish those that only some of them have started."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grace.core.spec import Array
from grace.core.transport.transport import Handle


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
