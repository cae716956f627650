"""Advice in sentences: which methods to take and to avoid, by the results of a study."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from grace.report.comparison import Case
from grace.report.findings.finding import percent, quoted, tasks
from grace.report.study import USUAL_RANKS

# A method to avoid loses more than this share of the quality, and more than the noise, or diverges.
LOST = 0.1
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
        family: of_family
        for family, adaptive in (("SGD", False), ("Adam", True))
        if (of_family := [case for case in here if case.task.optimizer.startswith("Adam") == adaptive])
    }
    return [_take(families, ranks), _avoid(families), _noises(here)]


def _take(families: Mapping[str, Sequence[Case]], ranks: int | None) -> str:
    parts = [f"with {family} {_best(cases)}" for family, cases in families.items()]
    return f"Take, at equal steps on {ranks} ranks, {'; '.join(parts)}." if parts else "There are no results."


def _best(cases: Sequence[Case]) -> str:
    """Return the method that is good on most tasks, and of those the one with the fewest bytes, and why it is."""
    # A single run may be good by chance.
    methods = _by_method(case for case in cases if case.within is not None and len(case.runs) > 1)
    if not methods:
        return "nothing can be said, because that needs two seeds of a method and of uncompressed training"
    good = {method: sum(bool(case.within) for case in found) for method, found in methods.items()}
    sent = {method: statistics.fmean(case.sent or 0 for case in found) for method, found in methods.items()}
    best = min(methods, key=lambda method: (-good[method], sent[method], method))
    if not good[best]:
        return "nothing: no method is within the noise of uncompressed training"
    number = len(tasks(case for found in methods.values() for case in found))
    return (
        f"`{best}` (within the noise of uncompressed training or better on {good[best]} of {number} "
        f"{'task' if number == 1 else 'tasks'}, with {100 * sent[best]:.1f} % of the bytes)"
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
