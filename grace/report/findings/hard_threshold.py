"""The findings of the paper on hard thresholds.

Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021. A fixed threshold is
compared with top-k where both send as many bytes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grace.report.cell import POINTS
from grace.report.comparison import Case, Result
from grace.report.findings.finding import Outcome, Paper, by_place, decide, percent
from grace.report.methods import EQUAL as EQUAL_BYTES

HARD_THRESHOLD = Paper("hard threshold")
# Volumes are equal if they differ by less than this factor.
EQUAL = 1.25

Pair = tuple[Case, Case]


def _at_equal_volume(section: str, says: str) -> Callable[[Callable[[list[Pair]], Outcome | None]], None]:
    """Enter a finding, whose check gets the pairs of top-k and a fixed threshold of equal volume, at least one."""

    def enter(check: Callable[[list[Pair]], Outcome | None]) -> None:
        @HARD_THRESHOLD.finding(
            section, f"at equal volume, {says}", _alike, f"runs of `{EQUAL_BYTES}` and `topk` with equal seeds"
        )
        def _(alike: Sequence[Pair]) -> Outcome | None:
            pairs = [pair for pair in alike if _factor(pair) <= EQUAL]
            return check(pairs) if pairs else _none_equal(min(alike, key=_factor))

    return enter


def _alike(cases: Sequence[Case]) -> list[Pair]:
    """Return the pairs in one place that have error feedback, and equal memory and communicator."""
    return [
        (top, hard)
        for group in by_place(cases)
        for top, hard in itertools.product(group, group)
        if (top.compressor, hard.compressor) == ("topk", "hardthreshold")
        and _is_fixed(hard)
        and _way(top) == _way(hard)
        and _way(hard)[0]["name"] != "none"
    ]


def _way(case: Case) -> tuple[Any, Any]:
    """Return the memory and the communicator."""
    return case.setting["config"]["memory"], case.setting["communicator"]


def _is_fixed(case: Case) -> bool:
    """Return whether the threshold is one number, and not found by a probe in the run itself."""
    return bool(case.setting.get("equal")) or case.setting["config"]["compressor"].get("threshold") is not None


def _factor(pair: Pair) -> float:
    """Return by which factor the bytes differ."""
    top, hard = (case.row.bytes for case in pair)
    return max(hard / top, top / hard)


def _none_equal(pair: Pair) -> Outcome:
    top, hard = pair
    return Outcome(
        None,
        f"no equal volume (closest: {hard.table.task}, {hard.ranks} ranks: `{hard.method}` "
        f"{100 * hard.row.bytes:.2f} %, `{top.method}` {100 * top.row.bytes:.2f} %); choose one by "
        "`--methods topk hardthreshold:threshold=VALUE`",
    )


def _runs(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, Result, Result]]:
    """Yield the runs of pairs with equal seeds, with their pair."""
    for pair in pairs:
        top, hard = pair
        for seed in sorted(top.runs.keys() & hard.runs.keys()):
            yield pair, top.runs[seed], hard.runs[seed]


@_at_equal_volume("Fig. 2", "a hard threshold ends better than top-k")
def _(pairs: list[Pair]) -> Outcome | None:
    found = decide(pairs)
    if not found.used:
        return None
    counts = found.count_pairs("better", "worse")
    text = f"pairs whose bytes differ by less than {percent(EQUAL - 1)} in which it ends {counts}"
    return Outcome(found.most(found.better), text, found.used)


@_at_equal_volume("Fig. 1, 3", "a hard threshold converges faster than top-k")
def _(pairs: list[Pair]) -> Outcome | None:
    used, lower = list[Case](), []
    for pair, *runs in _runs(pairs):
        losses = [{step: math.inf if loss is None else loss for step, loss, _ in run["curve"]} for run in runs]
        early = sorted((losses[0].keys() & losses[1].keys()) - {0})
        middle = [of[early[(len(early) - 1) // 2]] for of in losses] if early else [0.0, 0.0]
        if middle[0] != middle[1]:
            used += pair
            lower.append(middle[1] < middle[0])
    if not lower:
        return None
    text = f"in the middle of training, the loss is lower in {sum(lower)} of {len(lower)} pairs of runs of equal volume"
    return Outcome(2 * sum(lower) > len(lower), text, used)


@_at_equal_volume("Fig. 3", "the total error is smaller than that of top-k")
def _(pairs: list[Pair]) -> Outcome | None:
    used, ratios = list[Case](), []
    for pair, *runs in _runs(pairs):
        top, hard = (math.fsum(error**2 for _, error in run["errors"]) for run in runs)
        if top and hard:
            used += pair
            ratios.append(hard / top)
    if not ratios:
        return None
    text = (
        f"sum of squares of what feedback keeps, at {POINTS} steps: {statistics.median(ratios):.2f} times that of topk "
        f"(median of {len(ratios)} pairs of runs, {min(ratios):.2f} to {max(ratios):.2f})"
    )
    return Outcome(statistics.median(ratios) < 1, text, used)


@_at_equal_volume("Section 1", "a hard threshold is cheaper to compute than top-k")
def _(pairs: list[Pair]) -> Outcome:
    ratios = [hard.parts.exchange / top.parts.exchange for top, hard in pairs]
    text = f"a step's exchange takes {statistics.median(ratios):.2f} times that of topk (median)"
    return Outcome(statistics.median(ratios) < 1, text, [case for pair in pairs for case in pair])


HARD_THRESHOLD.untested("Table 1", "a hard threshold beats Accordion", "the study has no Accordion")
