"""`Occupied`: the time of a process between syncs and in them, and the network that would suffice."""

from __future__ import annotations

import time


class Occupied:
    """Seconds that a process spends on inner steps and on their syncs, and the bytes on the links, since the first.

    The first sync is left out: compilers and allocators work until then. Times are those of the host, so that the work
    of a GPU counts where the host waits for it.
    """

    def __init__(self) -> None:
        #: Syncs, inner steps, and the bytes that have left each rank, as in a ring.
        self.syncs = self.steps = 0
        self.link_bytes = 0.0
        self._computing = self._exchanging = 0.0
        self._last: float | None = None
        self._warm = False

    def mark(self, *, exchanging: bool) -> None:
        """Note that the time since the last mark was taken by an exchange, or by inner steps."""
        now = time.perf_counter()
        if self._last is not None and self._warm:
            if exchanging:
                self._exchanging += now - self._last
            else:
                self._computing += now - self._last
        self._last = now

    def note_sync(self, link_bytes: float) -> None:
        """Count a sync that has just ended; the first one starts the clock."""
        self.mark(exchanging=True)
        if self._warm:
            self.syncs += 1
            self.link_bytes += link_bytes
        self._warm = True

    def note_step(self) -> None:
        """Count an inner step."""
        self.steps += self._warm

    @property
    def utilisation(self) -> float | None:
        """Share of the time that inner steps take; None until the second sync."""
        if not self.syncs or not self._computing:
            return None
        return self._computing / (self._computing + self._exchanging)

    @property
    def seconds(self) -> float:
        """Seconds from one sync to the next."""
        return (self._computing + self._exchanging) / self.syncs

    def needed_bandwidth(self, utilisation: float, delay: int) -> float | None:
        """Return the bits per second that a link must carry for a utilisation; None until the second sync.

        The bytes of a sync may take (1 / utilisation - 1) times as long as the inner steps of its period, and those of
        `delay` steps, which take no time of their own.
        """
        if self.utilisation is None or not self.steps:
            return None
        of_period, of_step = self._computing / self.syncs, self._computing / self.steps
        return 8 * self.link_bytes / self.syncs / (of_period * (1 / utilisation - 1) + delay * of_step)
