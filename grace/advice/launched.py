"""`Launched`: measures an exchange in a job that `grace advise` has started, and ends the job."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from grace.advice.advise import measure
from grace.advice.hook import ADVICE, FIRST, MEASURED, SEEN, end, fail, leave
from grace.advice.watch import Watch

if TYPE_CHECKING:
    from grace.core.session.exchange import Exchange

#: The first steps, in which buffers and connections are made, are not counted; so many after them are.
WARM, STEPS = 5, 20
# The second of the first steps tells how long steps take. If all would take longer than so many seconds, no more are
# left out, and fewer are counted, but at least one.
_FIRST, _SECONDS = 2, 30.0
# Seconds that a rank stays after its last collective.
_LINGER_S = 1.0


class Launched(Watch):
    """Watches an exchange from its first step on; then rank 0 leaves the advice, and all ranks end."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, _FIRST)
        # The numbers of steps to see after these; None if they are not known yet.
        self._then: list[int] | None = None
        leave(SEEN, "")
        if exchange._logs:
            leave(FIRST, "")

    def decide(self) -> None:
        """Measure as soon as all steps were seen. All ranks count alike, and so they end in the same step."""
        if not self.complete:
            return
        try:
            self._next()
        except Exception as error:
            # Other ranks wait for this one, and a script may catch what it does not know.
            fail(self.exchange.rank, error)

    def _next(self) -> None:
        exchange = self.exchange
        if self._then is None:
            periods = exchange.everyone(self.periods[-1], "advice", "the times of the first steps")
            left = int(_SECONDS / max(*periods, 1e-9)) - _FIRST
            more = WARM - _FIRST
            self._then = [more, STEPS] if left >= more + STEPS else [min(STEPS, max(1, left))]
        if self._then:
            # Counts again, from nothing.
            Watch.__init__(self, exchange, self._then.pop(0))
            return
        advice = measure(self).advice()
        if exchange._logs:
            leave(ADVICE, json.dumps({**advice.to_dict(), "text": str(advice), "toml": advice.toml}))
        leave(MEASURED, "")
        # No rank goes before all have what they need of it.
        exchange.everyone(0, "advice", "the end of the measurement")
        # Who is done with this collective must not close connections that others still read.
        time.sleep(_LINGER_S)
        end()
