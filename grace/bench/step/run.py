"""Methods and baselines in turns over one network: A B C A B C, so that what drifts meets all of them alike."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grace.bench.step.methods import COMPUTE, REFERENCE, family_of
from grace.bench.step.network import LINKS, Network
from grace.bench.step.ranks import Ranks

WARM_UP = 3
VISIT_S = 900.0


@dataclass(frozen=True)
class Setting:
    """What all methods of a run have in common."""

    framework: str
    model: str
    ranks: int
    link: str
    latency: str | None
    rounds: int
    steps: int

    @property
    def rate(self) -> int | None:
        """Bits per second of a link."""
        return LINKS[self.link]


@dataclass
class Result:
    """What was seen of one method: the slowest rank's seconds of every step, and bytes of one step and rank."""

    method: str
    setting: Setting
    times: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    reported: int | None = None
    peak_bytes: int = 0

    def add(self, visits: Sequence[dict[str, Any]]) -> None:
        """Take in the answers of all ranks."""
        self.times += [max(step) for step in zip(*(visit["times"] for visit in visits), strict=True)]
        steps = self.setting.steps
        self.sent += [visit["sent"] / steps for visit in visits if visit["sent"] is not None]
        if visits[0]["reported"] is not None:
            self.reported = round(statistics.fmean(visit["reported"] for visit in visits))
        self.peak_bytes = max(self.peak_bytes, *(visit["peak_bytes"] for visit in visits))

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.times)

    @property
    def spread(self) -> tuple[float, float]:
        """Tenth and ninetieth percentile of a step's seconds."""
        if len(self.times) == 1:
            return self.times[0], self.times[0]
        tenths = statistics.quantiles(self.times, n=10, method="inclusive")
        return tenths[0], tenths[-1]

    @property
    def wire_bytes(self) -> int | None:
        """Bytes that a rank's interface sends in a step; None without interfaces of their own."""
        return round(statistics.fmean(self.sent)) if self.sent else None

    def to_dict(self, compute: Result, reference: Result) -> dict[str, Any]:
        """JSON-able and complete; `speedup_bound` is what free codecs would reach."""
        setting, wire = self.setting, self.wire_bytes
        on_wire = 8 * wire / setting.rate if wire is not None and setting.rate is not None else 0.0
        return {
            "method": self.method,
            "framework": setting.framework,
            "link": setting.link,
            "latency": setting.latency,
            "ranks": setting.ranks,
            "model": setting.model,
            "median_s": self.median,
            "spread": list(self.spread),
            "compute_s": compute.median,
            "wire_bytes": wire,
            "reported_bytes": self.reported,
            "speedup_over_horovod": reference.median / self.median,
            "speedup_bound": reference.median / max(compute.median, on_wire),
            "peak_bytes": self.peak_bytes,
            "times": self.times,
        }


def measure(setting: Setting, methods: Sequence[str], progress: Callable[[str], None]) -> list[Result]:
    """Results of the methods, of a step without exchange and of plain Horovod, in this order of their visits.

    `progress(text)` hears of what comes next. Raises GraceError where the test bed or a rank fails.
    """
    results = {name: Result(name, setting) for name in dict.fromkeys([COMPUTE, REFERENCE, *methods])}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(setting.ranks, setting.link, setting.latency))
        groups: dict[str, Ranks] = {}
        for family in dict.fromkeys(map(family_of, results)):
            progress(f"starting {setting.ranks} ranks ({family})")
            groups[family] = stack.enter_context(Ranks(network, setting.framework, family, setting.model, VISIT_S))
            groups[family].pause()
        for turn in range(setting.rounds):
            for name, result in results.items():
                progress(f"{name}, round {turn + 1} of {setting.rounds}")
                group = groups[family_of(name)]
                group.go_on()
                result.add(group.visit(name, WARM_UP, setting.steps))
                group.pause()
    return list(results.values())
