"""Timing of methods and baselines in turns over one network: A B C A B C, so that drift affects all methods equally."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from grace.bench.step.methods import Method
from grace.bench.step.network import Network, limit_kind, rate_of
from grace.bench.step.ranks import Ranks
from grace.core.config.registry import compressors

WARM_UP = 3


@dataclass(frozen=True)
class Setting:
    """The settings that all methods of a run share."""

    framework: str
    model: str
    ranks: int
    link: str
    latency: str | None
    rounds: int
    steps: int
    # Ranks of each node; they share its link.
    local_size: int = 1
    # Part of the configuration of every compressor.
    options: Mapping[str, Any] = field(default_factory=dict)
    # Modules with components of the user, by the names that `import_own` returns.
    modules: Sequence[str] = ()
    # Steps before those that are timed, in every round.
    warm_up: int = WARM_UP

    def options_of(self, method: Method) -> dict[str, Any]:
        """Return the options of a method's configuration."""
        if not method.compresses:
            return {}
        return {**compressors.required(method.name), **self.options, **method.options}

    @property
    def rate(self) -> int | None:
        """Bandwidth of a link in bits per second, None without a limit."""
        return rate_of(self.link)


@dataclass
class Result:
    """The measurements of one method.

    `times` holds the seconds of every step on its slowest rank. `sent` are bytes per step and node, `reported` per
    step and rank.
    """

    method: Method
    setting: Setting
    times: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    reported_bytes: int | None = None
    # Of metered steps, what each rank spent in each turn.
    spent: list[dict[str, float]] = field(default_factory=list)
    gradient_bytes: int = 0

    def add(self, visits: Sequence[dict[str, Any]]) -> None:
        """Add the answers of all ranks."""
        self.times += [max(step) for step in zip(*(visit["times"] for visit in visits), strict=True)]
        steps = self.setting.steps
        self.sent += [visit["sent"] / steps for visit in visits if visit["sent"] is not None]
        if visits[0]["reported"] is not None:
            self.reported_bytes = round(statistics.fmean(visit["reported"] for visit in visits))
        self.spent += [visit["spent"] for visit in visits if visit["spent"] is not None]
        self.gradient_bytes = visits[0]["gradient_bytes"]

    @property
    def median(self) -> float:
        """Median time of a step in seconds."""
        return statistics.median(self.times)

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile of a step's time in seconds."""
        if len(self.times) == 1:
            return self.times[0], self.times[0]
        tenths = statistics.quantiles(self.times, n=10, method="inclusive")
        return tenths[0], tenths[-1]

    @property
    def wire_bytes(self) -> int | None:
        """Bytes that a rank's interface sends in a step; None if the ranks share one interface."""
        return round(statistics.fmean(self.sent)) if self.sent else None

    def to_dict(self, compute: Result, reference: Result) -> dict[str, Any]:
        """Return the settings, measurements and derived figures as an object for JSON.

        `speedup_bound` is the speedup over the reference if compression took no time.
        """
        setting, wire = self.setting, self.wire_bytes
        on_wire = 8 * wire / setting.rate if wire is not None and setting.rate is not None else 0.0
        return {
            "method": self.method.name,
            "options": setting.options_of(self.method),
            "launcher": self.method.launcher if self.method.compresses else None,
            "cycle_time_ms": self.method.cycle_ms if self.method.library == "horovod" else None,
            "framework": setting.framework,
            "link": setting.link,
            "limited_by": limit_kind(setting.link),
            "latency": setting.latency,
            "ranks": setting.ranks,
            "ranks_per_node": setting.local_size,
            "model": setting.model,
            "median_s": self.median,
            "spread": list(self.spread),
            "compute_s": compute.median,
            "wire_bytes": wire,
            "reported_bytes": self.reported_bytes,
            f"speedup_over_{reference.method.name}": reference.median / self.median,
            "speedup_bound": reference.median / max(compute.median, on_wire),
            "times": self.times,
        }


class Bed:
    """A network with groups of ranks.

    A group starts when a method first needs it, and is paused during the turns of other groups. `progress(text)` is
    called before each start and each visit. `metered` visits say where the time went.
    """

    def __init__(self, setting: Setting, progress: Callable[[str], None], *, metered: bool = False) -> None:
        self._setting, self._progress, self._metered = setting, progress, metered
        self._stack = contextlib.ExitStack()
        self._groups: dict[tuple[str, float], Ranks] = {}

    def __enter__(self) -> Bed:
        setting = self._setting
        self._network = self._stack.enter_context(
            Network(setting.ranks, setting.link, setting.latency, setting.local_size)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def measure(self, methods: list[Method]) -> list[Result]:
        """Time the methods in turns. Return their results in the given order. Raises GraceError if a rank fails."""
        setting = self._setting
        results = [Result(method, setting) for method in methods]
        groups = [self._ranks(result.method) for result in results]
        for turn in range(setting.rounds):
            for result, group in zip(results, groups, strict=True):
                self._progress(f"{result.method.label}, round {turn + 1} of {setting.rounds}")
                group.go_on()
                options = setting.options_of(result.method)
                visits = group.visit(result.method, options, setting.warm_up, setting.steps, metered=self._metered)
                result.add(visits)
                group.pause()
        return results

    def _ranks(self, method: Method) -> Ranks:
        key = (method.library, method.cycle_ms)
        if key not in self._groups:
            setting = self._setting
            self._progress(f"starting {setting.ranks} ranks ({method.library})")
            ranks = Ranks(self._network, setting.framework, setting.model, *key, modules=setting.modules)
            self._groups[key] = self._stack.enter_context(ranks)
            ranks.pause()
        return self._groups[key]


def measure(setting: Setting, methods: list[Method], progress: Callable[[str], None]) -> list[Result]:
    """Make a network, time the methods on it and return their results.

    Raises GraceError if the network cannot be made or a rank fails.
    """
    with Bed(setting, progress) as bed:
        return bed.measure(methods)
