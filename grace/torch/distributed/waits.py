"""The waits that the ranks of a group report to each other in their store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

# Seconds in which the store must answer. It may have ended with its process.
_ANSWER_S = 2.0
# All ranks ask about all others at the same time, so that more of them would keep the store from answering.
_MOST_RANKS = 256


class Waits:
    """Entries of a store where ranks that wait long report for what.

    It is common to all transports of the group, so a rank that waits at another one is seen to wait. The store blocks
    other calls while it does not answer, so it is asked in a thread, and only while no other question is open.
    """

    def __init__(self, store: Any, group: str, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._keys = [f"grace/{group}/wait of rank {i}" for i in range(size if size <= _MOST_RANKS else 0)]
        self._mine = ""
        self._thread: threading.Thread | None = None

    def report(self, text: str) -> None:
        """Report what this rank waits for. It stays there until `clear`, also if the rank gives up."""
        self._mine = text
        self._set(text)

    def clear(self) -> None:
        """Report the end of a wait, if one was reported. If the store does not answer, call it again."""
        if self._mine and self._set(""):
            self._mine = ""

    def of_others(self) -> str:
        """Return a sentence on what the other ranks wait for; nothing if the store does not answer soon."""
        return self._ask(self._sentence) or ""

    def _set(self, text: str) -> bool:
        """Return whether the store has the text now."""
        return bool(self._ask(lambda: self._store.set(self._keys[self._rank], text) is None))

    def _sentence(self) -> str:
        found: dict[str, list[str]] = {}
        for rank, key in enumerate(self._keys):
            if rank != self._rank:
                # It returns what is there. `get` would wait for a rank that has reported nothing.
                found.setdefault(self._store.compare_set(key, "", "").decode(), []).append(str(rank))
        clauses = []
        for text, ranks in found.items():
            s = ("", "s") if len(ranks) > 1 else ("s", "")
            wait = f"wait{s[0]} for {'the same' if text == self._mine else text}" if text else f"report{s[0]} no wait"
            clauses.append(f"rank{s[1]} {', '.join(ranks)} {wait}")
        return f"Of the others, {'; '.join(clauses)}." if clauses else ""

    def _ask(self, ask: Callable[[], Any]) -> Any:
        if not self._keys or (self._thread is not None and self._thread.is_alive()):
            return None
        answers: list[Any] = []

        def run() -> None:
            with contextlib.suppress(Exception):
                answers.append(ask())

        self._thread = threading.Thread(target=run, name="grace", daemon=True)
        self._thread.start()
        self._thread.join(_ANSWER_S)
        return answers[0] if answers else None
