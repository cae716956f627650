"""The findings of the GRACE paper.

Xu et al., "GRACE: a compressed communication framework for distributed machine learning", ICDCS 2021. Where a check has
a bound that the paper does not name, the finding names it. A place is a task and a number of ranks. Verdicts on speed
are those of the computer that trained.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from grace.report.comparison import Case, feedback_pairs, gain
from grace.report.findings.finding import (
    FEWEST,
    Outcome,
    Paper,
    by_place,
    decide,
    known,
    noise,
    percent,
    quoted,
    several,
    tasks,
    timed,
    usual,
)
from grace.report.speed import FASTER, LINKS

GRACE = Paper("GRACE")
SPARSE = ("sparsification", "hybrid")
# Where the link takes more than this share of an uncompressed step, communication binds.
BOUND = 0.5
# Less than this share of the bytes is heavy compression.
HEAVY = 0.1
# For each link, the share of cells in which dense may be faster.
AIMS = {1: 0.05, 10: 0.25}
BALANCE = f"at {FASTER[1]} x"


Enter = Callable[[Callable[[Sequence[Case]], Outcome | None]], None]


def _in_quality(section: str, says: str, also: str = "") -> Enter:
    """Enter a finding on the quality of methods in general; `also` is what else it needs."""
    needs = f"{FEWEST} methods, two seeds of uncompressed training{also}"
    return GRACE.finding(section, says, several(known), needs)


def _in_time(section: str, says: str, also: str = "") -> Enter:
    """Enter a finding on the speed of methods in general; `also` is what else it needs."""
    return GRACE.finding(section, says, several(timed), f"{FEWEST} methods, uncompressed training{also}")


def _relative(case: Case) -> float:
    assert case.relative is not None
    return case.relative


def _rated(cases: Iterable[Case]) -> list[Case]:
    return [case for case in usual(cases) if case.relative is not None]


def _of_ncf(cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if case.table.task == "ncf"]


def _faster(cases: Sequence[Case], gbit: float, faster: float, by: float = 1.0) -> float:
    """Return the share of cases with more than `by` times the throughput of uncompressed training."""
    return statistics.fmean((case.throughput(gbit, faster) or 0) > by for case in cases)


def _both(number: Callable[[float], float]) -> str:
    """Return shares for computers as measured, and as much faster as GPUs."""
    as_measured, balanced = (percent(number(faster)) for faster in FASTER)
    return f"{as_measured} ({balanced} {BALANCE})"


# --- section V-A, V-B -----------------------------------------------------------------------------------------------


@_in_time("V-A", "25 Gbit/s give 1.3 % more throughput than 10 (here: at most 5 %)")
def _(cases: Sequence[Case]) -> Outcome:
    found = [
        100 * statistics.fmean(case.parts.seconds(10, faster) / case.parts.seconds(25, faster) - 1 for case in cases)
        for faster in FASTER
    ]
    return Outcome(found[0] <= 5, f"{found[0]:.1f} % more on average ({found[1]:.1f} % {BALANCE})", cases)


@_in_quality("V-B, Fig. 6", "most methods end with a quality comparable to the baseline")
def _(cases: Sequence[Case]) -> Outcome:
    good = sum(bool(case.within) for case in cases)
    text = f"{good} of {len(cases)} cells ({percent(good / len(cases))}) are within the noise or better"
    return Outcome(2 * good > len(cases), text, cases)


@_in_quality("V-B", "the quality is sometimes above the baseline (here: by more than the noise)")
def _(cases: Sequence[Case]) -> Outcome:
    higher = [case for case in cases if case.gain is not None and case.gain > 0]
    clearly = [case for case in higher if case.gain is not None and case.gain > noise(case)]
    text = f"{len(higher)} of {len(cases)} cells end above uncompressed training, {len(clearly)} by more than the noise"
    return Outcome(bool(clearly), text, clearly or cases)


@_in_time(
    "V-B",
    "compression slows down tasks bound by computation, and pays where communication binds (here: for most methods)",
    ", and tasks bound by computation and by communication",
)
def _(cases: Sequence[Case]) -> Outcome | None:
    shares: dict[bool, list[float]] = {True: [], False: []}
    for group in by_place(cases):
        for faster in FASTER:
            assert group[0].dense_parts is not None
            shares[group[0].dense_parts.link_share(10, faster) > BOUND].append(_faster(group, 10, faster))
    if not all(shares.values()):
        return None
    bound, free = (statistics.fmean(shares[key]) for key in (True, False))
    text = (
        f"at 10 Gbit/s, as measured and {BALANCE}: {percent(bound)} of methods are faster where the link takes more "
        f"than {percent(BOUND)} of an uncompressed step, {percent(free)} elsewhere"
    )
    return Outcome(bound > 0.5 > free, text, cases)


@GRACE.finding(
    "V-B, Fig. 6d",
    "on NCF, the quality falls by up to 10 % and no more",
    several(lambda cases: _of_ncf(_rated(cases))),
    f"{FEWEST} methods on ncf",
)
def _(cases: Sequence[Case]) -> Outcome:
    worst = min(cases, key=_relative)
    below = sum(_relative(case) < 0.9 for case in cases)
    text = (
        f"lowest {100 * _relative(worst):.1f} % of uncompressed (`{worst.method}`); {below} of {len(cases)} below 90 %"
    )
    return Outcome(not below, text, cases)


@GRACE.finding(
    "V-B, Fig. 6d",
    "on NCF, many methods are 1.5 to 4.5 times as fast (here: a quarter)",
    several(lambda cases: _of_ncf(timed(cases))),
    f"{FEWEST} methods on ncf",
)
def _(cases: Sequence[Case]) -> Outcome:
    def share(faster: float) -> float:
        return _faster(cases, 10, faster, 1.5)

    return Outcome(share(1) >= 0.25, f"{_both(share)} of methods at least 1.5 times as fast at 10 Gbit/s", cases)


def _fewer_elements(cases: Sequence[Case], *, harms: bool) -> Outcome | None:
    """Compare 1 and 10 % of the elements: whether fewer harm in most places."""
    used, lost = list[Case](), []
    for group in by_place(cases):
        by_name = {case.method: case for case in group}
        if by_name.keys() >= {"topk", "topk 10 %"}:
            few, many = by_name["topk"], by_name["topk 10 %"]
            difference = gain(few.task, few.runs, many.runs)
            if difference is not None:
                used += [few, many]
                lost.append(difference < -noise(few))
    text = f"1 % ends below 10 % by more than the noise in {sum(lost)} of {len(lost)} pairs"
    return Outcome((2 * sum(lost) > len(lost)) == harms, text, used) if lost else None


@GRACE.finding(
    "V-B, Fig. 6d",
    "on NCF, stronger compression lowers the quality",
    lambda cases: _of_ncf(known(cases)),
    "cells of ncf with topk and topk 10 %, and the noise",
)
def _(cases: Sequence[Case]) -> Outcome | None:
    return _fewer_elements(cases, harms=True)


@GRACE.finding(
    "V-B",
    "elsewhere, stronger compression changes the quality little",
    lambda cases: [case for case in known(cases) if not _of_ncf([case])],
    "topk and topk 10 % on another task than ncf, and the noise",
)
def _(cases: Sequence[Case]) -> Outcome | None:
    return _fewer_elements(cases, harms=False)


def _feedback(section: str, says: str, which: Callable[[Case], bool], what: str, *, gains: bool = False) -> None:
    """Enter a finding that feedback makes most pairs of some methods worse, or better."""

    @GRACE.finding(
        section,
        says,
        lambda cases: [pair for pair in feedback_pairs(cases) if which(pair[0])],
        f"{what} with and without feedback, and the noise",
    )
    def _(pairs: Sequence[tuple[Case, Case]]) -> Outcome | None:
        found = decide(pairs)
        most = found.most(found.better if gains else found.worse)
        text = f"pairs in which feedback {found.count_pairs('gains', 'harms')}"
        return Outcome(most, text, found.used) if found.used else None


_feedback(
    "V-B, V-F", "error feedback improves sparsifiers", lambda case: case.family in SPARSE, "sparsifiers", gains=True
)
_feedback("V-B", "error feedback harms QSGD", lambda case: case.compressor == "qsgd", "qsgd")
_feedback("V-B", "error feedback harms TernGrad", lambda case: case.compressor == "terngrad", "terngrad")
GRACE.untested(
    "V-B",
    "error feedback harms SignSGD and SIGNUM",
    "not combined: the ranks vote, and a vote has no error to keep",
)
_feedback(
    "V-B, Fig. 6d",
    "on NCF, error feedback worsens Top-k, 8-bit and natural compression",
    lambda case: bool(_of_ncf([case])) and case.compressor in ("topk", "eightbit", "natural"),
    "topk, eightbit or natural on ncf",
)


def _on_all_tasks(cases: Sequence[Case], good: Callable[[Case], bool], what: str) -> Outcome | None:
    """Return whether no method that trained on all tasks is good in all of its places."""
    every, places = tasks(cases), dict[str, list[Case]]()
    for case in cases:
        places.setdefault(case.method, []).append(case)
    found = [name for name, of in places.items() if len(tasks(of)) == len(every) and all(map(good, of))]
    text = f"within the noise of {what} on all {len(every)} tasks, wherever it trained: {quoted(found) or 'no method'}"
    return Outcome(not found, text, cases) if len(every) > 1 else None


@_in_quality("V-B", "no method performs well on all tasks", ", and two tasks")
def _(cases: Sequence[Case]) -> Outcome | None:
    return _on_all_tasks(cases, lambda case: bool(case.within), "uncompressed training")


def _correlated(
    cases: Sequence[Case], x: Callable[[Case], float], name: str, holds: Callable[[float], bool]
) -> Outcome | None:
    """Correlate something with the quality in each place, and take the mean; a diverged run has the lowest quality."""
    used, found = list[Case](), []
    for group in by_place(_rated(cases)):
        rho = _correlation([x(case) for case in group], [_relative(case) for case in group])
        if rho is not None:
            found.append(rho)
            used += group
    if not found:
        return None
    mean = statistics.fmean(found)
    text = f"rank correlation of {name} and quality {mean:+.2f} on average ({min(found):+.2f} to {max(found):+.2f})"
    return Outcome(holds(mean), text, used)


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None of few points, or if one side has equal values only."""
    if len(x) < FEWEST or len(set(x)) == 1 or len(set(y)) == 1:
        return None
    return statistics.correlation(_order(x), _order(y))


def _order(values: Sequence[float]) -> list[float]:
    """Return the position of each value in their order, from 0; equal values share the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


@_in_time("V-B", "throughput and quality are not strongly correlated (here: by less than 0.5)", " on one task")
def _(cases: Sequence[Case]) -> Outcome | None:
    return _correlated(
        cases, lambda case: case.throughput(10) or 0, "throughput at 10 Gbit/s", lambda mean: abs(mean) < 0.5
    )


# --- section V-C, V-D -----------------------------------------------------------------------------------------------


@_in_time("V-C, Fig. 7", "in general, more data gives a higher quality", " on one task")
def _(cases: Sequence[Case]) -> Outcome | None:
    return _correlated(cases, lambda case: case.row.bytes, "bytes", lambda mean: mean > 0)


@GRACE.finding(
    "V-C, V-F",
    "for some methods, more data gives a lower quality",
    known,
    "two methods of which one sends twice the bytes, and the noise",
)
def _(cases: Sequence[Case]) -> Outcome | None:
    pairs = [
        (more, less)
        for group in by_place(cases)
        for more in group
        for less in group
        if more.row.bytes >= 2 * less.row.bytes
    ]
    worse = [(more, less) for more, less in pairs if (less.gain or 0) - (more.gain or 0) > noise(more)]
    text = f"{len(worse)} of {len(pairs)} pairs of which one sends twice the bytes or more"
    if worse:
        more, less = max(worse, key=lambda pair: pair[0].row.bytes / pair[1].row.bytes)
        text += (
            f"; the furthest: `{more.method}` sends {100 * more.row.bytes:.1f} % and ends below `{less.method}` with "
            f"{100 * less.row.bytes:.1f} % on {more.table.task}"
        )
    return Outcome(bool(worse), text, cases) if pairs else None


@_in_time(
    "V-D, Fig. 8", "the cost of compression and decompression is not negligible (here: above 5 % of the computation)"
)
def _(cases: Sequence[Case]) -> Outcome:
    share = statistics.median(
        (case.parts.exchange - case.dense_parts.exchange) / case.parts.compute for case in cases if case.dense_parts
    )
    text = f"codecs add {percent(share)} of the computation of a step (median), on one core"
    return Outcome(share > 0.05, text, cases)


def _slow(says: str, *compressors: str) -> None:
    """Enter a finding that compressors take longer than most methods, on average over all places."""

    @GRACE.finding("V-D", says, usual, f"{' and '.join(compressors)} among {FEWEST} methods")
    def _(cases: Sequence[Case]) -> Outcome | None:
        places = [group for group in by_place(cases) if len(group) >= FEWEST]
        used, shares = list[Case](), dict[str, float]()
        for name in compressors:
            found = [(case, group) for group in places for case in group if case.compressor == name]
            if not found:
                return None
            used += [case for case, _ in found]
            shares[name] = statistics.fmean(
                statistics.fmean(other.parts.exchange < case.parts.exchange for other in group) for case, group in found
            )
        text = "; ".join(f"{name} takes longer than {percent(share)} of the methods" for name, share in shares.items())
        return Outcome(min(shares.values()) > 0.5, text, used)


_slow("Random-k and 8-bit are slow, for want of kernels", "randomk", "eightbit")
_slow("Adaptive and DGC are slow, because they search for a threshold", "adaptive", "dgc")
_slow("SketchML is slow", "sketchml")


# --- section V-E, V-F -----------------------------------------------------------------------------------------------


GRACE.untested(
    "V-E, Fig. 9",
    "RDMA is consistently faster than TCP",
    "simulated ranks use no network; `grace bench step` measures on links",
)


@_in_time(
    "V-E, Fig. 10", "at 1 Gbit/s, many more methods are faster than the baseline (here: most, and more than at 10)"
)
def _(cases: Sequence[Case]) -> Outcome:
    slow, fast = (_faster(cases, gbit, 1) for gbit in (1, 10))
    text = f"{percent(slow)} of cells are faster than dense at 1 Gbit/s, {percent(fast)} at 10 Gbit/s"
    return Outcome(slow > max(fast, 0.5), text, cases)


@_in_quality("V-F", "no method is the best in all cases (here: nor within the noise of it)", ", and two tasks")
def _(cases: Sequence[Case]) -> Outcome | None:
    best = {group[0].place: max(case.gain or 0 for case in group) for group in by_place(cases)}
    return _on_all_tasks(cases, lambda case: (case.gain or 0) >= best[case.place] - noise(case), "the best")


@_in_time("V-F", "at 10 Gbit/s and more, training is typically faster without compression")
def _(cases: Sequence[Case]) -> Outcome:
    def share(faster: float) -> float:
        return 1 - statistics.fmean(_faster(cases, gbit, faster) for gbit in (10, 25))

    return Outcome(share(1) > 0.5, f"dense is at least as fast in {_both(share)} of cells", cases)


@_in_time("all results", "dense is at least as fast in 459 of 668 cells (here: in most)")
def _(cases: Sequence[Case]) -> Outcome:
    wins, total = round(sum(1 - _faster(cases, gbit, 1) for gbit in LINKS) * len(cases)), len(cases) * len(LINKS)
    links = [
        f"{gbit} Gbit/s: {_both(lambda faster, gbit=gbit: 1 - _faster(cases, gbit, faster))}"
        + (f", aim at most {percent(AIMS[gbit])}" if gbit in AIMS else "")
        for gbit in LINKS
    ]
    text = (
        f"dense is at least as fast in {wins} of {total} cells and links ({percent(wins / total)}); {'; '.join(links)}"
    )
    return Outcome(2 * wins > total, text, cases)


@GRACE.finding(
    "V-F",
    "heavy compression tends to lower the quality",
    several(_rated),
    f"{FEWEST} methods, with less and with more than {percent(HEAVY)} of the bytes on one task",
)
def _(cases: Sequence[Case]) -> Outcome | None:
    used, means = list[Case](), []
    for group in by_place(cases):
        heavy = [_relative(case) for case in group if case.row.bytes < HEAVY]
        light = [_relative(case) for case in group if case.row.bytes >= HEAVY]
        if heavy and light:
            used += group
            means.append((statistics.fmean(heavy), statistics.fmean(light)))
    if not means:
        return None
    lower = sum(of_heavy < of_light for of_heavy, of_light in means)
    averages = [f"{100 * statistics.fmean(column):.1f} %" for column in zip(*means, strict=True)]
    text = (
        f"with less than {percent(HEAVY)} of the bytes, the mean quality is lower in {lower} of {len(means)} places: "
        f"{averages[0]} instead of {averages[1]} on average"
    )
    return Outcome(2 * lower > len(means), text, used)


GRACE.untested(
    "V-F",
    "frameworks differ little, collective libraries much",
    "simulated ranks use neither; docs/speed.md has measurements",
)
