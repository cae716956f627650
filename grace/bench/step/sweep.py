"""`grace bench step --sweep`: the engine's choices for each compressor, one after the other.

First the sizes of buckets, then from which size on tensors are cut, the granularities, and Horovod's cycle times, each
with the best of what came before. What is compared takes turns, beside a step without exchange and plain Horovod of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grace.bench.step.methods import CYCLE_MS, Method, compared
from grace.bench.step.run import Bed, Result, Setting
from grace.bench.step.table import HEAD, WIDTHS, cells, line, place
from grace.core.config import GRANULARITIES

BUCKET_BYTES = tuple(n * 1024**2 for n in (1, 2, 4, 8, 16, 32))
SPLIT_BYTES = tuple(n * 1024**2 for n in (0, 8, 16, 32, 64))
CYCLES_MS = (0.5, 1.0, 2.0, 5.0)
CYCLE = "cycle_time_ms"

# By the option's name, in the order of the sweep; all but the cycle time are of grace's configuration.
Choices = Mapping[str, Sequence[Any]]


def choices(
    bucket_bytes: Sequence[int] = BUCKET_BYTES,
    split_bytes: Sequence[int] = SPLIT_BYTES,
    cycles_ms: Sequence[float] = CYCLES_MS,
) -> Choices:
    """What a sweep tries."""
    return {"bucket_bytes": bucket_bytes, "split_bytes": split_bytes, "granularity": GRANULARITIES, CYCLE: cycles_ms}


@dataclass(frozen=True)
class Trial:
    """A choice that was measured, with the step without exchange and plain Horovod that took turns with it."""

    swept: str
    result: Result
    compute: Result
    reference: Result
    best: bool

    @property
    def label(self) -> str:
        """The choice as it is written."""
        method = self.result.method
        value = method.cycle_ms if self.swept == CYCLE else method.options[self.swept]
        return f"{self.swept}={value}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able and complete."""
        return {**self.result.to_dict(self.compute, self.reference), "swept": self.swept, "best": self.best}


def sweep(setting: Setting, names: Sequence[str], tried: Choices, progress: Callable[[str], None]) -> list[Trial]:
    """Trials of every compressor in the order of `tried`, each kind with the best of the kinds before it.

    `progress(text)` hears of what comes next. Raises GraceError where the test bed or a rank fails.
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
    """What `progress` of a sweep hears."""
    turns = sum(2 + len(names) * len(values) for values in tried.values())
    return setting.rounds * turns + len({CYCLE_MS, *tried[CYCLE]})


def lines(trials: Sequence[Trial]) -> list[str]:
    """Title, and for every compressor a head and a line per choice, of which the best are marked."""
    setting = trials[0].result.setting
    first = max(len(text) for trial in trials for text in (trial.label, trial.result.method.name))
    found = [f"{place(setting)}; {setting.rounds} rounds of {setting.steps} steps"]
    for name in dict.fromkeys(trial.result.method.name for trial in trials):
        found += ["", line(first, name, HEAD, WIDTHS)]
        for trial in trials:
            if trial.result.method.name == name:
                row = line(first, trial.label, cells(trial.result, trial.compute, trial.reference), WIDTHS)
                found.append(f"{row}  best" if trial.best else row)
    return found


def _chosen(method: Method, kind: str, value: Any) -> Method:
    if kind == CYCLE:
        return replace(method, cycle_ms=value)
    return replace(method, options={**method.options, kind: value})
