"""`Helper`: a thread that lets collectives go on while the program computes."""

from __future__ import annotations

import threading
import time
import weakref

from grace.core.transport.ordered import OrderedTransport


class Helper:
    """Thread that advances the collectives of a transport while their headers are on the way."""

    # Seconds between two looks. A wait for a rank that is late makes them rarer.
    _SHORTEST_S, _LONGEST_S, _GROWTH = 2e-4, 5e-3, 1.05

    def __init__(self, transport: OrderedTransport) -> None:
        self._transport = weakref.ref(transport)
        self._awake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="grace", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Make the thread look, because a collective was started."""
        self._awake.set()

    def end(self) -> None:
        """End the thread, and wait for it."""
        self._ended = True
        self._awake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._awake.wait()
            self._awake.clear()
            pause = self._SHORTEST_S
            while not self._ended and self._advance():
                time.sleep(pause)
                pause = min(self._GROWTH * pause, self._LONGEST_S)
            if self._ended:
                return

    def _advance(self) -> bool:
        """Advance what can be; return whether a header is still on the way."""
        transport = self._transport()
        if transport is None:
            return False
        transport.advance()
        return transport.header_under_way
