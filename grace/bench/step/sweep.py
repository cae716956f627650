"""The command `grace bench step --sweep`: tune the engine's options for each compressor, one after the other.

The order is bucket size, split size, granularity and Horovod's cycle time. Each option is tried with the best values of
the options before it. The values of an option take turns with a step without exchange and with plain Horovod.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grace.bench.step.methods import CYCLE_MS, Method, compared
from grace.bench.step.run import Bed, Result, Setting
from grace.bench.step.table import WIDTHS, cells, head, line, place
from grace.core.values.config import GRANULARITIES

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
    cycles_ms: Sequence[float] = CYCLES_MS,
) -> Choices:
    """Return the values that a sweep tries."""
    return {"bucket_bytes": bucket_bytes, "split_bytes": split_bytes, "granularity": GRANULARITIES, CYCLE: cycles_ms}


@dataclass(frozen=True)
class Trial:
    """The measurement of one value, with the step without exchange and plain Horovod that took turns with it."""

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


def sweep(setting: Setting, names: Sequence[str], tried: Choices, progress: Callable[[str], None]) -> list[Trial]:
    """Run the trials of every compressor, in the order of `tried`, each with the best values of the options before it.

    Calls `progress(text)` before each visit. Raises GraceError if the network cannot be made or a rank fails.
    """
    trials = []
    best = [Method(name) for name in names]
    with Bed(setting, progress) as bed:
        for kind, values in tried.items():
            methods = [_chosen(method, kind, value) for method in best for value in values]
            compute, reference, *rest = bed.measure(compared(methods))
            rows = [rest[i * len(values) : (i + 1) * len(values)] for i in range(len(names))]
            winners = [min(row, key=lambda result: result.median) for row in rows]
            for row, winner in zip(rows, winners, strict=True):
                trials += [Trial(kind, result, compute, reference, result is winner) for result in row]
            best = [winner.method for winner in winners]
    return trials


def visits(setting: Setting, names: Sequence[str], tried: Choices) -> int:
    """Return the number of progress reports of a sweep."""
    turns = sum(2 + len(names) * len(values) for values in tried.values())
    return setting.rounds * turns + len({CYCLE_MS, *tried[CYCLE]})


def lines(trials: Sequence[Trial]) -> list[str]:
    """Return the title, and for every compressor the headings and one line per value. The best values are marked."""
    setting = trials[0].result.setting
    first = max(len(text) for trial in trials for text in (trial.label, trial.result.method.name))
    found = [f"{place(setting)}; {setting.rounds} rounds of {setting.steps} steps"]
    for name in dict.fromkeys(trial.result.method.name for trial in trials):
        found += ["", line(first, name, head(trials[0].reference), WIDTHS)]
        for trial in trials:
            if trial.result.method.name == name:
                row = line(first, trial.label, cells(trial.result, trial.compute, trial.reference), WIDTHS)
                found.append(f"{row}  best" if trial.best else row)
    return found


def _chosen(method: Method, kind: str, value: Any) -> Method:
    if kind == CYCLE:
        return replace(method, cycle_ms=value)
    return replace(method, options={**method.options, kind: value})
