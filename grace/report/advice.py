"""Advice in sentences: which methods to take and to avoid, by the results of a study."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from grace.report.comparison import Case
from grace.report.findings.finding import percent, quoted, tasks
from grace.report.speed import FASTER
from grace.report.study import USUAL_RANKS

# A method to avoid loses more than this share of the quality, and more than the noise, or diverges.
LOST = 0.1
# The link in Gbit/s for which a method is named; computation and codecs are those of a device 100 times as fast.
LINK = 1
# In one sentence, so many methods are named.
NAMED = 8


def usual_ranks(cases: Iterable[Case]) -> int | None:
    """Return the number of ranks that stands for all: that of `--quick` if there are results, else the largest."""
    ranks = {case.ranks for case in cases}
    return USUAL_RANKS if USUAL_RANKS in ranks else max(ranks, default=None)


def advice(cases: Sequence[Case]) -> list[str]:
    """Return three sentences: the best method per family of optimizers, those to avoid, and the noise."""
    ranks = usual_ranks(cases)
    here = [case for case in cases if case.ranks == ranks]
    families = {
        "SGD": [case for case in cases if not _is_adam(case)],
        "Adam": [case for case in cases if _is_adam(case)],
    }
    families = {family: found for family, found in families.items() if any(case.ranks == ranks for case in found)}
    of_ranks = {family: [case for case in found if case.ranks == ranks] for family, found in families.items()}
    return [_take(cases, families, ranks), _avoid(of_ranks), _noises(here)]


def _is_adam(case: Case) -> bool:
    return case.task.optimizer.startswith("Adam")


class Best(NamedTuple):
    """The method to take: on how many tasks of all it is good, and on how many tasks and numbers of ranks it is not."""

    method: str
    good: int
    tasks: int
    behind: int


def best(cases: Sequence[Case], seconds: Callable[[Sequence[Case]], float]) -> Best | None:
    """Return the method to take, by the rule of grace's recommendations; None if two seeds of no method are known.

    Quality comes first, then speed, then bytes. A method is good on a task if it is within the noise of uncompressed
    training or better, on the usual number of ranks and with two seeds at least: a single run may be so by chance. Of
    the methods that are good on most tasks, and then behind by more than the noise in the fewest places, other numbers
    of ranks included, it is the one with the shortest step, and of equal ones that with the fewest bytes. `seconds`
    returns the time of a step from the cases of a method on the usual number of ranks. Methods count in their default
    form.
    """
    ranks = usual_ranks(cases)
    methods = _by_method(case for case in cases if case.is_usual and case.within is not None)
    usual = {name: [c for c in found if c.ranks == ranks and len(c.runs) > 1] for name, found in methods.items()}
    standing = {
        name: (
            -sum(bool(case.within) for case in found),
            sum(not case.within for case in methods[name]),
            seconds(found),
            statistics.fmean(case.sent or 0 for case in found),
            name,
        )
        for name, found in usual.items()
        if found
    }
    if not standing:
        return None
    less, behind, *_, name = min(standing.values())
    return Best(name, -less, len(tasks(case for found in usual.values() for case in found)), behind)


def step_time(cases: Sequence[Case]) -> float:
    """Return the time of a step on the named link as a share of that of an uncompressed one, mean over the cases."""
    return statistics.geometric_mean(1 / (case.throughput(LINK, FASTER[1]) or 1) for case in cases)


def _take(cases: Sequence[Case], families: Mapping[str, Sequence[Case]], ranks: int | None) -> str:
    every = best(cases, step_time)
    if len(families) > 1 and every and every.good == every.tasks and not every.behind:
        families = {"any optimizer": cases}
    parts = [f"with {family} {_told(found, ranks)}" for family, found in families.items()]
    return f"Take, at equal steps on {ranks} ranks, {'; '.join(parts)}." if parts else "There are no results."


def _told(cases: Sequence[Case], ranks: int | None) -> str:
    """Return the method to take, and why."""
    found = best(cases, step_time)
    if not found:
        return "nothing can be said, because that needs two seeds of a method and of uncompressed training"
    if not found.good:
        return "nothing: no method is within the noise of uncompressed training"
    time = step_time([case for case in cases if (case.method, case.ranks) == (found.method, ranks)])
    if time >= 1:
        return f"nothing: at {LINK} Gbit/s, the steps of `{found.method}`, the best, take longer than uncompressed ones"
    return (
        f"`{found.method}` (within the noise of uncompressed training or better on {found.good} of {found.tasks} "
        f"{'task' if found.tasks == 1 else 'tasks'}; at {LINK} Gbit/s, its steps take {percent(time)} of the time of "
        "uncompressed ones)"
    )


def _by_method(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Return the cases of each method that one can take; bytes that equal those of another serve a comparison only."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        if not case.is_baseline and not case.setting.get("equal"):
            found.setdefault(case.method, []).append(case)
    return found


def _avoid(families: Mapping[str, Sequence[Case]]) -> str:
    parts = []
    for family, cases in families.items():
        methods = _by_method(case for case in cases if case.is_usual and case.relative is not None)
        lost = {method: sum(map(_loses, found)) for method, found in methods.items()}
        worst = [method for method, found in methods.items() if 2 * lost[method] >= len(found)]
        # First those of which most tasks say so.
        worst.sort(key=lambda method, lost=lost: (-lost[method], method))
        if worst:
            more = len(worst) - NAMED
            parts.append(f"with {family} {quoted(worst[:NAMED])}" + (f" and {more} more" if more > 0 else ""))
    if not parts:
        return f"No method diverges or loses more than {percent(LOST)} of the quality on half of the tasks."
    return (
        f"Avoid {'; '.join(parts)}: on at least half of the tasks that a method trained, it diverges, or loses more "
        f"than {percent(LOST)} of the quality."
    )


def _loses(case: Case) -> bool:
    return case.relative is not None and case.relative < 1 - LOST and case.within is not True


def _noises(cases: Sequence[Case]) -> str:
    noises = {
        case.table.task: f"{case.table.noise:.3g} on {case.table.task} ({case.task.metric})"
        for case in cases
        if case.table.noise is not None
    }
    if not noises:
        return "The noise is unknown: it needs two seeds of uncompressed training."
    return (
        "The noise, by which uncompressed runs differ from those with other seeds or with 16 bits, is "
        f"{', '.join(noises.values())}; smaller differences say nothing."
    )
