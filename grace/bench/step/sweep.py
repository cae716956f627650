"""The command `grace bench step --sweep`: tune the options of the exchange for each compressor, one after the other.

The order is bucket size, split size, granularity and, with Horovod, its cycle time. Each option is tried with the best
values of the options before it. The values of an option take turns with a step without exchange and with the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grace.bench.step.methods import CYCLE_MS, Method, with_references
from grace.bench.step.run import Bed, Result, Setting
from grace.bench.step.table import cells, describe_run, figures, head
from grace.core.config.config import GRANULARITIES

BUCKET_BYTES = tuple(n * 1024**2 for n in (1, 2, 4, 8, 16, 32))
SPLIT_BYTES = tuple(n * 1024**2 for n in (0, 8, 16, 32, 64))
CYCLES_MS = (0.5, 1.0, 2.0, 5.0)
CYCLE = "cycle_time_ms"

# The values to try by name of the option, in the order of the sweep. All options but the cycle time belong to grace's
# configuration.
Choices = Mapping[str, Sequence[Any]]


def choices(
    bucket_bytes: Sequence[int] = BUCKET_BYTES,
    split_bytes: Sequence[int] = SPLIT_BYTES,
    cycles_ms: Sequence[float] = (),
) -> Choices:
    """Return the values that a sweep tries; without cycle times it does not tune them."""
    tried: dict[str, Sequence[Any]] = {"bucket_bytes": bucket_bytes, "split_bytes": split_bytes}
    return {**tried, "granularity": GRANULARITIES, **({CYCLE: cycles_ms} if cycles_ms else {})}


@dataclass(frozen=True)
class Trial:
    """The measurement of one value, with the step without exchange and the baseline that took turns with it.

    `of` is the label of the method that is tuned.
    """

    of: str
    swept: str
    result: Result
    compute: Result
    reference: Result
    best: bool

    @property
    def label(self) -> str:
        """The value as text: `option=value`."""
        method = self.result.method
        value = method.cycle_ms if self.swept == CYCLE else method.options[self.swept]
        return f"{self.swept}={value}"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, measurements and derived figures as an object for JSON."""
        return {**self.result.to_dict(self.compute, self.reference), "swept": self.swept, "best": self.best}


def sweep(setting: Setting, methods: Sequence[Method], tried: Choices, progress: Callable[[str], None]) -> list[Trial]:
    """Run the trials of every method, in the order of `tried`, each with the best values of the options before it.

    Calls `progress(text)` before each visit. Raises GraceError if the network cannot be made or a rank fails.
    """
    trials = []
    best = list(methods)
    with Bed(setting, progress) as bed:
        for kind, values in tried.items():
            variants = [_with_value(method, kind, value) for method in best for value in values]
            compute, reference, *rest = bed.measure(with_references(variants, methods[0].launcher))
            rows = [rest[i * len(values) : (i + 1) * len(values)] for i in range(len(methods))]
            winners = [min(row, key=lambda result: result.median) for row in rows]
            for method, row, winner in zip(methods, rows, winners, strict=True):
                trials += [Trial(method.label, kind, result, compute, reference, result is winner) for result in row]
            best = [winner.method for winner in winners]
    return trials


def count_visits(setting: Setting, methods: Sequence[Method], tried: Choices) -> int:
    """Return the number of progress reports of a sweep."""
    turns = sum(2 + len(methods) * len(values) for values in tried.values())
    return setting.rounds * turns + len({CYCLE_MS, *tried.get(CYCLE, ())})


def lines(trials: Sequence[Trial]) -> list[str]:
    """Return the title, and for every compressor the headings and one line per value. The best values are marked."""
    setting = trials[0].result.setting
    found = [f"{describe_run(setting)}; {setting.rounds} rounds of {setting.steps} steps"]
    for of in dict.fromkeys(trial.of for trial in trials):
        tried = [trial for trial in trials if trial.of == of]
        rows = ([trial.label, *cells(trial.result, trial.compute, trial.reference)] for trial in tried)
        title, *lines = figures([of, *head(trials[0].reference)], *rows)
        marked = (f"{line}  best" if trial.best else line for trial, line in zip(tried, lines, strict=True))
        found += ["", title, *marked]
    return found


def _with_value(method: Method, kind: str, value: Any) -> Method:
    if kind == CYCLE:
        return replace(method, cycle_ms=value)
    return replace(method, options={**method.options, kind: value})
