"""`Auto`: chooses the compressor of a run by measurement, and again when the link changes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from grace.advice import probe
from grace.advice.advise import Figures, best_of, has_nodes, measure, measure_link
from grace.advice.candidates import LOW, NONE, changes
from grace.advice.model import Link, Machine
from grace.advice.watch import Watch
from grace.core.observe.announcement import say

if TYPE_CHECKING:
    from grace.core.session.exchange import Exchange

# The first steps, in which buffers and connections are made, and those right after a change, are not counted.
_FIRST, _AFTER = 5, 2
# A decision follows from so many steps, and so does a comparison of the ranks, after as many that are not counted: what
# a comparison takes must stay far below 1 % of the steps.
_STEPS = 10
# A step that takes longer or shorter by such a factor is looked into. A link has changed if its times have by the
# second. Without a reason, a small allreduce looks at the link after so many comparisons, for such a share of the time;
# after twice as many if the last look has led to a trial of what was slower.
_STEP_CHANGED, _LINK_CHANGED, _LOOKS, _SHARE = 1.25, 2.0, 5, 0.001


class Auto(Watch):
    """The choice of `compressor = "auto"`: equal on all ranks, made in the same step, because all count alike.

    It begins without compression and measures some steps, the link, and the codecs of candidates. It takes the gentlest
    configuration near the fastest one of no or low risk, measures it as well, and goes back if it gains less than the
    times of steps vary. If it gains little, it measures `none` once more, because the first steps of a job are slower
    than later ones. Then it compares the steps with the measured ones. If they differ, or now and then, it looks at the
    link, and decides again if that or the steps have changed.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, _STEPS)
        self._skipped = _FIRST
        self._figures: Figures | None = None
        self._label: str | None = None
        # Seconds of steps with candidates over the link of now, as far as they were measured.
        self._known: dict[str, float] = {}
        # The choice is measured next; `_again` if that is `none` once more.
        self._on_trial = self._again = False
        self._reference, self._looks, self._patience = 0.0, 0, _LOOKS
        self._why, self._since = "the first steps are measured", 0
        # The last message to the user.
        self._told: str | None = None

    def stats(self) -> dict[str, Any]:
        """Return the choice, why, since which step, the seconds of steps by candidate, and the link."""
        link = self._figures and self._figures.link
        return {
            "compressor": self._label or NONE,
            "why": self._why,
            "since": self._since,
            "step_seconds": dict(self._known),
            "link": link and {"bytes_per_s": link.bandwidth, "latency_s": link.latency},
        }

    def begin(self, at: float | None = None) -> None:
        """Note that a step begins."""
        super().begin(at)
        if self._skipped:
            self._skipped -= 1
            self.periods.clear()

    def decide(self) -> None:
        """Decide if it is time. All ranks decide between the same two steps."""
        if self.complete and self.exchange.size > 1:
            self._act()
            self.clear()

    def _act(self) -> None:
        if self._figures is None:
            # It takes no others.
            self._figures = measure(self, LOW)
            self._label = self._figures.now
            if self._label is not None:
                self._known[self._label] = self._figures.period
            self._decide()
        elif self._on_trial:
            self._judge()
        else:
            self._compare()

    def _decide(self) -> None:
        """Take what seems best over the link of now."""
        assert self._figures is not None
        advice = self._figures.advice(self._figures.link, self._known)
        best, why = self._of_first([advice.best, advice.sentence])
        self._take(best, why)
        self._on_trial = best not in self._known
        self._reference = self._known.get(best, 0.0)

    def _judge(self) -> None:
        """Keep the choice that was measured, or return to `none` if it gains less than the times of steps vary."""
        assert self._figures is not None
        assert self._label is not None
        label, seconds = self._label, self._everyones_period()
        self._known[label] = seconds
        rows = {row.label: row for row in self._figures.advice(self._figures.link, self._known).rows}
        spread = self._mean(_spread(self.periods))
        best = best_of(row for row in rows.values() if row.label in (*self._known, NONE))
        best, pays = self._of_first([best, best != NONE and gains(rows[NONE].seconds, rows[best].seconds, spread)])
        why, again = f"steps with {label} took {seconds * 1e3:.4g} ms", pays is None and best == label
        if again:
            self._known.pop(NONE, None)
            why = f"{why}, and those without compression are measured once more"
        if again or pays is False:
            best = NONE
        if best != label and not (again or self._again):
            # A link whose times vary must not cost a trial at every look.
            self._patience *= 2
        self._again = again
        if best != label:
            self._take(best, why)
        self._on_trial = best not in self._known
        self._reference = self._known.get(best, 0.0)

    def _compare(self) -> None:
        """Look at the link if the steps have changed, or after some time."""
        assert self._figures is not None
        assert self._label is not None
        figures, period = self._figures, self._everyones_period()
        self._reference, self._skipped = self._reference or period, _STEPS
        self._looks += 1
        changed = not 1 / _STEP_CHANGED < period / self._reference < _STEP_CHANGED
        if changed:
            self._patience = _LOOKS
        elif self._looks < self._patience:
            return
        self._looks = 0
        link = measure_link(self.exchange) if self._link_seems_other(period) else figures.link
        factor = self._of_first(self._seconds(link) / self._seconds(figures.link))
        if not changed and 1 / _LINK_CHANGED < factor < _LINK_CHANGED:
            return
        figures.link = link
        figures.observe(self.exchange.everyone(self.seen(), "auto", "the steps that have changed"), self._label)
        # What the link does not explain is that of the machine, and remains with every candidate.
        figures.compute += max(figures.period - figures.seconds(self._label, link), 0.0)
        # The present steps were measured: a link that only seemed slow, in a noisy moment, is no reason to leave them.
        self._known = {self._label: figures.period}
        self._decide()

    def _seconds(self, link: Link) -> float:
        """Return the seconds of an allreduce of all gradients over a link."""
        return Machine(self.exchange.size, link).seconds("allreduce", self.exchange.plan.dense_bytes)

    def _link_seems_other(self, period: float) -> bool:
        """Time allreduces that take a small share of the time, and return whether they took another time than known."""
        assert self._figures is not None
        link, exchange = self._figures.link, self.exchange
        nbytes = min(max(_SHARE * 2 * _STEPS * _LOOKS * period * link.bandwidth, 16 * 1024), 4 * 1024 * 1024)
        ops, allreduce = exchange._ops(exchange._specs[0].device), probe.over(exchange.transport)
        seconds = []
        for _ in range(3):
            x = ops.zeros(int(nbytes / 4), "float32")
            begin = time.perf_counter()
            float(allreduce(x)[0])
            seconds.append(time.perf_counter() - begin)
        factor = self._mean(min(seconds)) / Machine(exchange.size, link).seconds("allreduce", nbytes)
        return not 1 / _STEP_CHANGED < factor < _STEP_CHANGED

    def _of_first(self, mine: Any) -> Any:
        """Return what the first rank has found, so that all decide alike: those of FSDP2's parts have other plans."""
        return self.exchange.everyone(mine, "auto", "the choice of the first rank")[0]

    def _everyones_period(self) -> float:
        return self._mean(statistics.median(self.periods))

    def _mean(self, mine: float) -> float:
        return statistics.fmean(self.exchange.everyone(mine, "auto", "the times of steps"))

    def _take(self, label: str, why: str) -> None:
        """Change to a candidate on all ranks, and tell the user on rank 0."""
        exchange = self.exchange
        self._why = why
        self._skipped = _AFTER
        if label != self._label:
            exchange._change(changes(has_nodes(exchange))[label], auto=True)
            self._label, self._since = label, int(exchange.run.step)
        if exchange._logs and label != self._told:
            say(f"grace: auto takes {label} from step {int(exchange.run.step)}. {why}")
        self._told = label


def gains(none: float, seconds: float, spread: float) -> bool | None:
    """Return whether steps are shorter than those of `none` by more than their times vary; None if only a little."""
    if none - seconds < spread:
        return False
    return True if none >= _STEP_CHANGED * seconds else None


def _spread(seconds: Collection[float]) -> float:
    """Return by how much the middle half of some times differ."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return high - low
