"""`Record`: the statistics of the outer steps of this process, which no checkpoint keeps."""

from __future__ import annotations

import math
from typing import Any

from grace.core.config.outer import OuterSteps
from grace.core.observe.announcement import tell_need
from grace.core.session.occupied import Occupied


class Record:
    """Inner steps and syncs of this process: their bytes and times, and how far this rank was from the others."""

    #: True on the rank that logs, until it has logged what network would suffice.
    logs_need = False
    #: The mean of the losses that this rank has noted in the last period.
    loss: float | None = None
    #: The share of the signs that were those of the last change, at the last sync.
    relevance: float | None = None

    def __init__(self, outer: OuterSteps) -> None:
        self._outer, self.occupied = outer, Occupied()
        # Bytes sent and inner steps taken.
        self._sent, self._taken = 0.0, 0
        self._spread: dict[str, float | None] = {"distance": None, "cosine": None}

    def note_step(self) -> None:
        """Count an inner step, whose exchange may have begun."""
        self._taken += 1
        self.occupied.note_step()
        self.occupied.mark(exchanging=True)

    def note_sync(self, step: int, sent: float, link_bytes: float) -> None:
        """Count a sync after an inner step: bytes that this rank has sent, and those that have left it in a ring.

        Tell the user once what network would suffice, after the second sync that follows the warm-up.
        """
        self._sent += sent
        self.occupied.note_sync(link_bytes)
        used, needed = self.occupied.utilisation, self._needed_bandwidth(step)
        if self.logs_need and used is not None and needed and step > self._outer.warmup:
            self.logs_need = False
            tell_need(self.occupied.seconds, used, needed)

    def note_spread(self, own: float, mean: float, both: float) -> None:
        """Note |d|^2, |mean d|^2 and <d, mean d> of a sync, with d what this rank has moved."""
        if not (own and mean):
            self._spread = {"distance": None, "cosine": None}
            return
        apart = max(0.0, own - 2 * both + mean)
        self._spread = {"distance": math.sqrt(apart / mean), "cosine": both / math.sqrt(own * mean)}

    def stats(self, steps: int, rounds: int, *, every: int, participates: bool) -> dict[str, Any]:
        """Return `steps` (inner steps), `rounds` (syncs), and what this rank sends per inner step on the average.

        With `adapt`, `every` is the number of inner steps from the last sync to the next one, and with `relevance`,
        `relevance` is the share of the signs that were those of the change before the last sync.

        `bytes_per_step` counts since the process has started. `distance` is |d - mean d| / |mean d| at the last sync,
        with d what this rank has moved, and `cosine` the one between d and its mean: how far this rank was from the
        others. Both are None unless `track_norms` was set. `participates` is False if this rank will contribute nothing
        to the next sync, and need not train until then.

        `loss` is the mean of the losses that this rank has noted in the period before the last sync. `utilisation` is
        the share of the time that inner steps take, and `needed_bandwidth` the bits per second that a link must carry
        for 95 % of it; both count host times since the first sync of this process, and are None before the second one.
        """
        some: dict[str, Any] = {"every": every} if self._outer.adapt else {}
        if self._outer.relevance:
            some["relevance"] = self.relevance
        return {
            "steps": steps,
            "rounds": rounds,
            "bytes_per_step": self._sent / self._taken if self._taken else 0.0,
            **some,
            **self._spread,
            "loss": self.loss,
            "utilisation": self.occupied.utilisation,
            "needed_bandwidth": self._needed_bandwidth(steps),
            "participates": participates,
        }

    def _needed_bandwidth(self, step: int) -> float | None:
        return self.occupied.needed_bandwidth(0.95, self._outer.delay_after(step))
