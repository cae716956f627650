"""The findings of the GRACE paper and of the paper on hard thresholds: whether the results of a study reproduce them.

GRACE: Xu et al., "GRACE: a compressed communication framework for distributed machine learning", ICDCS 2021. Sahu et
al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021. A cell is here a method on a task
and a number of ranks, over its seeds. The baselines are no methods.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from grace.report.cell import POINTS
from grace.report.comparison import Case, feedback_pairs, gain
from grace.report.methods import EQUAL as EQUAL_BYTES
from grace.report.speed import FASTER, LINKS
from grace.report.study import USUAL_RANKS

GRACE, HARD = "GRACE", "hard threshold"
SPARSE = ("sparsification", "hybrid")
# Volumes are equal if they differ by less than this factor.
EQUAL = 1.25
# Fewer points have no meaningful correlation.
FEWEST = 5
# A method to avoid loses more than this share of the quality, and more than the noise, or diverges.
LOST = 0.1
# In one sentence, so many methods are named.
NAMED = 8
BALANCE = f"at {FASTER[1]} x"
NOISE = "two seeds of uncompressed training, for the noise"


class Outcome(NamedTuple):
    """The answer to a finding: `holds` is None if the results cannot tell, and `number` then says what is missing."""

    holds: bool | None
    number: str
    cells: str = ""


class Finding(NamedTuple):
    """A statement of a paper in a section or figure, and how the results of a study answer it."""

    paper: str
    section: str
    says: str
    check: Callable[[Sequence[Case]], Outcome]


class Line(NamedTuple):
    """A finding with its outcome."""

    paper: str
    section: str
    says: str
    holds: bool | None
    number: str
    cells: str

    def to_dict(self) -> dict[str, Any]:
        """Return the line for a file."""
        return self._asdict()


def findings(cases: Sequence[Case]) -> list[Line]:
    """Return a line per finding, in the order of the papers."""
    compared = [case for case in cases if not case.is_baseline]
    return [Line(f.paper, f.section, f.says, *f.check(compared)) for f in FINDINGS]


# --- what the checks share ------------------------------------------------------------------------------------------


def _cells(found: Iterable[Case]) -> str:
    """Return which cells a number comes from, within one line."""
    cases = list(found)
    tasks = list(dict.fromkeys(case.table.task for case in cases))
    ranks = sorted({case.ranks for case in cases})
    labels = list(dict.fromkeys(case.method for case in cases))
    named = _quoted(labels) if len(labels) <= 3 else f"{len(labels)} methods"
    return f"{', '.join(tasks)}; {', '.join(map(str, ranks))} ranks; {named}" if cases else ""


def _quoted(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def _missing(what: str) -> Outcome:
    return Outcome(None, f"needs {what}")


def _of(cases: Iterable[Case], task: str) -> list[Case]:
    return [case for case in cases if case.table.task == task]


def _groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Return the cases of each task and number of ranks."""
    groups: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.table.task, case.ranks), []).append(case)
    return list(groups.values())


def _timed(cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if case.dense_parts is not None]


def _share(cases: Sequence[Case], holds: Callable[[Case], bool]) -> float:
    return statistics.fmean(map(holds, cases))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _noise(case: Case) -> float:
    assert case.table.noise is not None
    return case.table.noise


def _faster(case: Case, gbit: float, by: float = 1.0, faster: float = 1) -> bool:
    found = case.throughput(gbit, faster)
    return found is not None and found > by


def _both(number: Callable[[float], float]) -> str:
    """Return shares for computers as measured, and as much faster as GPUs."""
    found = [_percent(number(faster)) for faster in FASTER]
    return f"{found[0]} ({found[1]} {BALANCE})"


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None if one side has equal values only."""
    places = [_places(values) for values in (x, y)]
    return None if any(len(set(p)) == 1 for p in places) else statistics.correlation(*places)


def _places(values: Sequence[float]) -> list[float]:
    """Return the place of each value in their order, from 0; equal values share the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


# --- section V-A, V-B -----------------------------------------------------------------------------------------------


def _known(cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if case.within is not None]


def _comparable(cases: Sequence[Case]) -> Outcome:
    known = _known(cases)
    if not known:
        return _missing(NOISE)
    as_good = [case for case in known if case.within]
    text = (
        f"{len(as_good)} of {len(known)} cells ({_percent(len(as_good) / len(known))}) are within the noise or better"
    )
    return Outcome(2 * len(as_good) > len(known), text, _cells(known))


def _above(cases: Sequence[Case]) -> Outcome:
    known = _known(cases)
    if not known:
        return _missing(NOISE)
    higher = [case for case in known if case.gain is not None and case.gain > 0]
    clearly = [case for case in higher if case.gain is not None and case.gain > _noise(case)]
    text = f"{len(higher)} of {len(known)} cells end above uncompressed training, {len(clearly)} by more than the noise"
    return Outcome(bool(higher), text, _cells(higher))


def _bound(cases: Sequence[Case]) -> Outcome:
    groups = _groups(_timed(cases))
    if len(groups) < 2:
        return _missing("two tasks")
    shares = [
        (parts.link_share(10), _share(group, lambda case: _faster(case, 10)), group)
        for group in groups
        if (parts := group[0].dense_parts)
    ]
    least, most = min(shares, key=lambda s: s[0]), max(shares, key=lambda s: s[0])
    text = "; ".join(
        f"{group[0].table.task}, {group[0].ranks} ranks (link {_percent(link)} of a dense step): "
        f"{_percent(share)} of methods faster"
        for link, share, group in (least, most)
    )
    return Outcome(most[1] > least[1] and least[1] < 1, text, _cells([*least[2], *most[2]]))


def _ncf_quality(cases: Sequence[Case]) -> Outcome:
    known = [case for case in _of(cases, "ncf") if case.row.relative is not None or case.row.diverged]
    if not known:
        return _missing("cells of ncf")
    worst = min(known, key=lambda case: case.row.relative or 0)
    lowest = worst.row.relative or 0
    below = sum((case.row.relative or 0) < 1 - LOST for case in known)
    text = f"lowest {100 * lowest:.1f} % of uncompressed (`{worst.method}`); {below} of {len(known)} cells below 90 %"
    return Outcome(not below, text, _cells(known))


def _ncf_speed(cases: Sequence[Case]) -> Outcome:
    known = _timed(_of(cases, "ncf"))
    if not known:
        return _missing("cells of ncf")

    def share(faster: float) -> float:
        return _share(known, lambda case: _faster(case, 10, 1.5, faster))

    return Outcome(
        share(1) >= 0.25, f"{_both(share)} of methods at least 1.5 times as fast at 10 Gbit/s", _cells(known)
    )


def _ncf_ratio(cases: Sequence[Case]) -> Outcome:
    return _ratio(_of(cases, "ncf"), harms=True, missing="cells of ncf with topk and topk 10 %")


def _other_ratio(cases: Sequence[Case]) -> Outcome:
    others = [case for case in cases if case.table.task != "ncf"]
    return _ratio(others, harms=False, missing="topk and topk 10 % on another task than ncf")


def _ratio(cases: Sequence[Case], *, harms: bool, missing: str) -> Outcome:
    """Compare 1 and 10 % of the elements: whether fewer harm on most tasks."""
    used, lost = [], []
    for group in _groups(_known(cases)):
        by_name = {case.method: case for case in group}
        if by_name.keys() >= {"topk", "topk 10 %"}:
            few, many = by_name["topk"], by_name["topk 10 %"]
            difference = gain(few.task, few.runs, many.runs)
            if difference is not None:
                used += [few, many]
                lost.append(difference < -_noise(few))
    if not lost:
        return _missing(missing)
    text = f"1 % ends below 10 % by more than the noise in {sum(lost)} of {len(lost)} pairs"
    return Outcome((2 * sum(lost) > len(lost)) == harms, text, _cells(used))


def _decided(pairs: Iterable[tuple[Case, Case]]) -> tuple[list[Case], dict[str, list[str]]]:
    """Return the cases of pairs, and the tasks of those that gain from feedback, lose by it, or differ by noise."""
    used: list[Case] = []
    found: dict[str, list[str]] = {"gains": [], "harms": [], "equal": []}
    for without, with_it in pairs:
        difference = gain(with_it.task, with_it.runs, without.runs)
        if difference is not None and with_it.table.noise is not None:
            used += [without, with_it]
            equal = abs(difference) <= _noise(with_it)
            found["equal" if equal else "gains" if difference > 0 else "harms"].append(with_it.table.task)
    return used, found


def _told(found: dict[str, list[str]]) -> str:
    """Return in how many pairs feedback gains and harms, and on which tasks."""
    counts = [
        f"{len(tasks)} ({', '.join(dict.fromkeys(tasks))})" if (tasks := found[kind]) else "0"
        for kind in ("gains", "harms", "equal")
    ]
    return "pairs in which feedback gains: {}; harms: {}; within the noise: {}".format(*counts)


def _feedback_of_sparse(cases: Sequence[Case]) -> Outcome:
    used, found = _decided(pair for pair in feedback_pairs(cases) if pair[0].family in SPARSE)
    if not used:
        return _missing("sparsifiers with and without feedback, and the noise")
    return Outcome(2 * len(found["gains"]) > sum(map(len, found.values())), _told(found), _cells(used))


def _harms(compressors: Sequence[str], task: str = "") -> Callable[[Sequence[Case]], Outcome]:
    """Return the check whether feedback harms compressors in most pairs, on a task or on all."""

    def check(cases: Sequence[Case]) -> Outcome:
        pairs = [
            pair
            for pair in feedback_pairs(cases)
            if pair[0].compressor in compressors and task in ("", pair[0].table.task)
        ]
        used, found = _decided(pairs)
        if not used:
            where = f" on {task}" if task else ""
            return _missing(f"{' or '.join(compressors)} with and without feedback{where}, and the noise")
        return Outcome(2 * len(found["harms"]) > sum(map(len, found.values())), _told(found), _cells(used))

    return check


def _nowhere_else(cases: Sequence[Case]) -> Outcome:
    tasks = {case.table.task for case in _known(cases)}
    if len(tasks) < 2:
        return _missing("two tasks, and the noise")
    everywhere = _good_everywhere(cases)
    text = f"within the noise on all {len(tasks)} tasks and numbers of ranks: {_quoted(everywhere) or 'no method'}"
    return Outcome(not everywhere, text, _cells(_known(cases)))


def _good_everywhere(cases: Sequence[Case]) -> list[str]:
    known = _known(cases)
    places: dict[str, list[Case]] = {}
    for case in known:
        places.setdefault(case.method, []).append(case)
    tasks = {case.table.task for case in known}
    return [
        method
        for method, found in places.items()
        if all(case.within for case in found) and {case.table.task for case in found} == tasks
    ]


def _speed_and_quality(cases: Sequence[Case]) -> Outcome:
    return _correlated(
        cases, lambda case: case.throughput(10) or 0, "throughput at 10 Gbit/s", lambda rho: abs(rho) < 0.5
    )


def _correlated(
    cases: Sequence[Case], x: Callable[[Case], float], name: str, holds: Callable[[float], bool]
) -> Outcome:
    """Correlate something with the relative quality, on each task and number of ranks, and take the mean."""
    used, found = [], []
    for group in _groups(_timed(cases)):
        known = [case for case in group if case.row.relative is not None]
        if len(known) >= FEWEST:
            rho = _correlation([x(case) for case in known], [case.row.relative or 0 for case in known])
            if rho is not None:
                found.append(rho)
                used += known
    if not found:
        return _missing(f"{FEWEST} methods that end on one task")
    mean = statistics.fmean(found)
    text = f"rank correlation of {name} and quality {mean:+.2f} on average ({min(found):+.2f} to {max(found):+.2f})"
    return Outcome(holds(mean), text, _cells(used))


# --- section V-C ----------------------------------------------------------------------------------------------------


def _more_bytes(cases: Sequence[Case]) -> Outcome:
    return _correlated(cases, lambda case: case.row.bytes, "bytes", lambda rho: rho > 0)


def _more_is_worse(cases: Sequence[Case]) -> Outcome:
    used, examples = [], []
    for group in _groups(_known(cases)):
        for more in group:
            for less in group:
                if more.row.bytes >= 2 * less.row.bytes and more.gain is not None and less.gain is not None:
                    used += [more, less]
                    if less.gain - more.gain > _noise(more):
                        examples.append((more.row.bytes / less.row.bytes, more, less))
    if not used:
        return _missing("two methods of which one sends twice the bytes, and the noise")
    if not examples:
        return Outcome(
            False, "no method with twice the bytes of another ends below it by more than noise", _cells(used)
        )
    _, more, less = max(examples, key=lambda example: example[0])
    text = (
        f"{len(examples)} of {len(used) // 2} pairs; the furthest: `{more.method}` sends {100 * more.row.bytes:.1f} % "
        f"and ends below `{less.method}` with {100 * less.row.bytes:.1f} % on {more.table.task}"
    )
    return Outcome(True, text, _cells(used))


# --- section V-D ----------------------------------------------------------------------------------------------------


def _overhead(cases: Sequence[Case]) -> Outcome:
    timed = _timed(cases)
    if not timed:
        return _missing("uncompressed training on the same task")
    shares = [
        (case.parts.exchange - case.dense_parts.exchange) / case.parts.compute for case in timed if case.dense_parts
    ]
    text = f"codecs add {_percent(statistics.median(shares))} of the computation of a step (median), on one core"
    return Outcome(statistics.median(shares) > 0.05, text, _cells(timed))


def _slow(*compressors: str) -> Callable[[Sequence[Case]], Outcome]:
    """Return the check whether compressors take longer than the median of the methods, in most places."""

    def check(cases: Sequence[Case]) -> Outcome:
        used, slower, texts = [], [], []
        for name in compressors:
            found = [case for case in cases if case.compressor == name]
            places = [
                statistics.fmean(other.parts.exchange < case.parts.exchange for other in group)
                for group in _groups(cases)
                for case in group
                if case.compressor == name and len(group) >= FEWEST
            ]
            if not places:
                return _missing(f"{name} among {FEWEST} methods")
            used += found
            slower.append(statistics.fmean(places) > 0.5)
            texts.append(f"{name} takes longer than {_percent(statistics.fmean(places))} of the methods")
        return Outcome(all(slower), "; ".join(texts), _cells(used))

    return check


# --- section V-E, V-F -----------------------------------------------------------------------------------------------


def _not_here(reason: str) -> Callable[[Sequence[Case]], Outcome]:
    return lambda _: Outcome(None, reason)


def _slow_links(cases: Sequence[Case]) -> Outcome:
    timed = _timed(cases)
    if not timed:
        return _missing("uncompressed training on the same task")
    slow, fast = (_share(timed, lambda case, gbit=gbit: _faster(case, gbit)) for gbit in (1, 10))
    text = f"{_percent(slow)} of cells are faster than dense at 1 Gbit/s, {_percent(fast)} at 10 Gbit/s"
    return Outcome(slow > fast and slow > 0.5, text, _cells(timed))


def _faster_link(cases: Sequence[Case]) -> Outcome:
    timed = _timed(cases)
    if not timed:
        return _missing("uncompressed training on the same task")

    def more(faster: float) -> float:
        return statistics.fmean(case.parts.seconds(10, faster) / case.parts.seconds(25, faster) - 1 for case in timed)

    found = [f"{100 * more(faster):.1f} %" for faster in FASTER]
    text = f"{found[0]} more on average ({found[1]} {BALANCE})"
    return Outcome(more(1) <= 0.05, text, _cells(timed))


def _not_faster(cases: Sequence[Case], gbit: float, faster: float) -> float:
    return 1 - _share(cases, lambda case: _faster(case, gbit, faster=faster))


def _dense_is_faster(cases: Sequence[Case]) -> Outcome:
    timed = _timed(cases)
    if not timed:
        return _missing("uncompressed training on the same task")

    def share(faster: float) -> float:
        return statistics.fmean(_not_faster(timed, gbit, faster) for gbit in (10, 25))

    return Outcome(share(1) > 0.5, f"dense is at least as fast in {_both(share)} of cells", _cells(timed))


def _dense_wins(cases: Sequence[Case]) -> Outcome:
    timed = _timed(cases)
    if not timed:
        return _missing("uncompressed training on the same task")
    wins = round(sum(_not_faster(timed, gbit, 1) for gbit in LINKS) * len(timed))
    total = len(timed) * len(LINKS)
    links = [
        f"{gbit} Gbit/s: {_both(lambda faster, gbit=gbit: _not_faster(timed, gbit, faster))}{aim}"
        for gbit, aim in zip(LINKS, (", aim at most 5 %", ", aim at most 25 %", ""), strict=True)
    ]
    text = (
        f"dense is at least as fast in {wins} of {total} cells and links ({_percent(wins / total)}); {'; '.join(links)}"
    )
    return Outcome(2 * wins > total, text, _cells(timed))


def _best(cases: Sequence[Case]) -> Outcome:
    best = {}
    for group in _groups(cases):
        ended = [case for case in group if case.row.relative is not None]
        if ended:
            best[group[0].table.task, group[0].ranks] = max(ended, key=lambda case: case.row.relative or 0)
    if len({task for task, _ in best}) < 2:
        return _missing("two tasks")
    count = Counter(case.method for case in best.values())
    text = "best quality: " + ", ".join(f"`{method}` ({n})" for method, n in count.most_common())
    return Outcome(len(count) > 1, text, _cells(best.values()))


def _heavy(cases: Sequence[Case]) -> Outcome:
    ended = [case for case in cases if case.row.relative is not None]
    light = [case.row.relative or 0 for case in ended if case.row.bytes >= 0.1]
    heavy = [case.row.relative or 0 for case in ended if case.row.bytes < 0.1]
    if not light or not heavy:
        return _missing("methods with less and with more than 10 % of the bytes")
    means = [100 * statistics.fmean(found) for found in (heavy, light)]
    text = f"mean quality {means[0]:.1f} % with less than 10 % of the bytes, {means[1]:.1f} % with more"
    return Outcome(means[0] < means[1], text, _cells(ended))


# --- the paper on hard thresholds -----------------------------------------------------------------------------------


def _equal_volumes(cases: Sequence[Case]) -> tuple[list[tuple[Case, Case]], str]:
    """Return the pairs of a fixed threshold and top-k of equal bytes, memory and communicator, or the closest pair."""
    pairs, closest, text = [], math.inf, ""
    for group in _groups(cases):
        for hard, top in _alike(group):
            factor = max(hard.row.bytes / top.row.bytes, top.row.bytes / hard.row.bytes)
            if factor <= EQUAL:
                pairs.append((hard, top))
            if factor < closest:
                closest = factor
                text = (
                    f"{hard.table.task}, {hard.ranks} ranks: `{hard.method}` {100 * hard.row.bytes:.2f} %, "
                    f"`{top.method}` {100 * top.row.bytes:.2f} %"
                )
    return pairs, text


def _alike(cases: Sequence[Case]) -> list[tuple[Case, Case]]:
    """Return the pairs of a fixed threshold and top-k with error feedback, equal memory and communicator."""
    return [
        (hard, top)
        for hard, top in itertools.product(cases, cases)
        if (hard.compressor, top.compressor) == ("hardthreshold", "topk")
        and _is_fixed(hard)
        and _way(hard) == _way(top)
        and _way(hard)[0]["name"] != "none"
    ]


def _way(case: Case) -> tuple[Any, Any]:
    """Return the memory and the communicator."""
    return case.setting["config"]["memory"], case.setting["communicator"]


def _is_fixed(case: Case) -> bool:
    """Return whether the threshold is one number, and not found by a probe in the run itself."""
    return bool(case.setting.get("equal")) or case.setting["config"]["compressor"].get("threshold") is not None


def _volume_missing(pairs: Sequence[Any], closest: str) -> Outcome:
    if pairs or not closest:
        return _missing(f"runs of `{EQUAL_BYTES}` and `topk` with equal seeds")
    return Outcome(
        None, f"no equal volume (closest: {closest}); choose one by `--methods topk hardthreshold:threshold=VALUE`"
    )


def _hard_quality(cases: Sequence[Case]) -> Outcome:
    pairs, closest = _equal_volumes(cases)
    used, gains = [], []
    for hard, top in pairs:
        difference = gain(hard.task, hard.runs, top.runs)
        if difference is not None:
            used += [hard, top]
            gains.append(difference)
    if not gains:
        return _volume_missing(pairs, closest)
    better = sum(g > 0 for g in gains)
    text = f"better in {better} of {len(gains)} pairs whose bytes differ by less than {_percent(EQUAL - 1)}"
    return Outcome(better == len(gains), text, _cells(used))


def _hard_speed(cases: Sequence[Case]) -> Outcome:
    pairs, closest = _equal_volumes(cases)
    used, lower = [], []
    for hard, top in pairs:
        for seed in sorted(hard.runs.keys() & top.runs.keys()):
            curves = [{step: loss for step, loss, _ in case.runs[seed]["curve"]} for case in (hard, top)]
            early = [step for step in curves[0] if step and step in curves[1]]
            step = early[(len(early) - 1) // 2] if early else 0
            losses = [math.inf if curve[step] is None else curve[step] for curve in curves]
            if step and losses[0] != losses[1]:
                used += [hard, top]
                lower.append(losses[0] < losses[1])
    if not lower:
        return _volume_missing(pairs, closest)
    text = f"in the middle of training, the loss is lower in {sum(lower)} of {len(lower)} pairs of runs of equal volume"
    return Outcome(2 * sum(lower) > len(lower), text, _cells(used))


def _hard_error(cases: Sequence[Case]) -> Outcome:
    pairs, closest = _equal_volumes(cases)
    used, ratios = [], []
    for hard, top in pairs:
        for seed in sorted(hard.runs.keys() & top.runs.keys()):
            squares = [math.fsum(error**2 for _, error in case.runs[seed]["errors"]) for case in (hard, top)]
            if all(squares):
                used += [hard, top]
                ratios.append(squares[0] / squares[1])
    if not ratios:
        return _volume_missing(pairs, closest)
    text = (
        f"sum of squares of what feedback keeps, at {POINTS} steps: {statistics.median(ratios):.2f} times that of topk "
        f"(median of {len(ratios)} pairs of runs, {min(ratios):.2f} to {max(ratios):.2f})"
    )
    return Outcome(statistics.median(ratios) < 1, text, _cells(used))


def _hard_cost(cases: Sequence[Case]) -> Outcome:
    pairs = [pair for group in _groups(cases) for pair in _alike(group)]
    used = [case for pair in pairs for case in pair]
    ratios = [hard.parts.exchange / top.parts.exchange for hard, top in pairs]
    if not ratios:
        return _volume_missing([], "")
    text = f"a step's exchange takes {statistics.median(ratios):.2f} times that of topk (median)"
    return Outcome(statistics.median(ratios) < 1, text, _cells(used))


FINDINGS = (
    Finding(GRACE, "V-A", "25 Gbit/s give 1.3 % more throughput than 10 (here: at most 5 %)", _faster_link),
    Finding(GRACE, "V-B, Fig. 6", "most methods end with a quality comparable to the baseline", _comparable),
    Finding(GRACE, "V-B", "the quality is sometimes slightly above the baseline", _above),
    Finding(
        GRACE, "V-B", "compression slows down tasks bound by computation, and pays where communication binds", _bound
    ),
    Finding(GRACE, "V-B, Fig. 6d", "on NCF, the quality falls by up to 10 % and no more", _ncf_quality),
    Finding(GRACE, "V-B, Fig. 6d", "on NCF, many methods are 1.5 to 4.5 times as fast (here: a quarter)", _ncf_speed),
    Finding(GRACE, "V-B, Fig. 6d", "on NCF, stronger compression lowers the quality", _ncf_ratio),
    Finding(GRACE, "V-B", "elsewhere, stronger compression changes the quality little", _other_ratio),
    Finding(GRACE, "V-B, V-F", "error feedback improves sparsifiers", _feedback_of_sparse),
    Finding(GRACE, "V-B", "error feedback harms QSGD", _harms(("qsgd",))),
    Finding(GRACE, "V-B", "error feedback harms TernGrad", _harms(("terngrad",))),
    Finding(
        GRACE,
        "V-B",
        "error feedback harms SignSGD and SIGNUM",
        _not_here("not combined: the ranks vote, and a vote has no error to keep"),
    ),
    Finding(
        GRACE,
        "V-B, Fig. 6d",
        "on NCF alone, error feedback worsens Top-k, 8-bit and natural compression",
        _harms(("topk", "eightbit", "natural"), "ncf"),
    ),
    Finding(GRACE, "V-B", "no method performs well on all tasks", _nowhere_else),
    Finding(GRACE, "V-B", "throughput and quality are not strongly correlated", _speed_and_quality),
    Finding(GRACE, "V-C, Fig. 7", "in general, more data gives a higher quality", _more_bytes),
    Finding(GRACE, "V-C, V-F", "for some methods, more data gives a lower quality", _more_is_worse),
    Finding(GRACE, "V-D, Fig. 8", "the cost of compression and decompression is not negligible", _overhead),
    Finding(GRACE, "V-D", "Random-k and 8-bit are slow, for want of kernels", _slow("randomk", "eightbit")),
    Finding(GRACE, "V-D", "Adaptive and DGC are slow, because they search for a threshold", _slow("adaptive", "dgc")),
    Finding(GRACE, "V-D", "SketchML is slow", _slow("sketchml")),
    Finding(
        GRACE,
        "V-E, Fig. 9",
        "RDMA is consistently faster than TCP",
        _not_here("simulated ranks use no network; `grace bench step` measures on links"),
    ),
    Finding(GRACE, "V-E, Fig. 10", "at 1 Gbit/s, many more methods are faster than the baseline", _slow_links),
    Finding(GRACE, "V-F", "no method is the best in all cases", _best),
    Finding(GRACE, "V-F", "at 10 Gbit/s and more, training is typically faster without compression", _dense_is_faster),
    Finding(GRACE, "all results", "dense is at least as fast in 459 of 668 cells", _dense_wins),
    Finding(GRACE, "V-F", "heavy compression tends to lower the quality", _heavy),
    Finding(
        GRACE,
        "V-F",
        "frameworks differ little, collective libraries much",
        _not_here("simulated ranks use neither; docs/speed.md has measurements"),
    ),
    Finding(HARD, "Fig. 2", "at equal volume, a hard threshold ends better than top-k", _hard_quality),
    Finding(HARD, "Fig. 1, 3", "at equal volume, a hard threshold converges faster than top-k", _hard_speed),
    Finding(HARD, "Section 1", "a hard threshold is cheaper to compute than top-k", _hard_cost),
    Finding(HARD, "Fig. 3", "at equal volume, the total error is smaller than that of top-k", _hard_error),
    Finding(HARD, "Table 1", "a hard threshold beats Accordion", _not_here("the study has no Accordion")),
)


# --- what to take ---------------------------------------------------------------------------------------------------


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


def _take(families: dict[str, list[Case]], ranks: int | None) -> str:
    parts = []
    for family, cases in families.items():
        known = _known(cases)
        by_method = _by_method(known)
        if not by_method:
            parts.append(f"with {family} nothing can be said, because that needs {NOISE}")
            continue
        good = {method: sum(bool(case.within) for case in found) for method, found in by_method.items()}
        sent = {method: statistics.fmean(case.sent or 0 for case in found) for method, found in by_method.items()}
        best = min(by_method, key=lambda method, good=good, sent=sent: (-good[method], sent[method], method))
        tasks = len({case.table.task for found in by_method.values() for case in found})
        if good[best]:
            parts.append(
                f"with {family} `{best}` (within the noise of uncompressed training or better on {good[best]} of "
                f"{tasks} {'task' if tasks == 1 else 'tasks'}, with {100 * sent[best]:.1f} % of the bytes)"
            )
        else:
            parts.append(f"with {family} nothing: no method is within the noise of uncompressed training")
    return f"Take, at equal steps on {ranks} ranks, {'; '.join(parts)}." if parts else "There are no results."


def _by_method(cases: Iterable[Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases:
        # Bytes that equal those of another method serve a comparison only.
        if not case.is_baseline and not case.setting.get("equal"):
            found.setdefault(case.method, []).append(case)
    return found


def _loses(case: Case) -> bool:
    if case.row.diverged:
        return True
    return case.row.relative is not None and case.row.relative < 1 - LOST and case.within is not True


def _avoid(families: dict[str, list[Case]]) -> str:
    parts = []
    for family, cases in families.items():
        # Of methods with and without feedback, the usual form stands for both.
        usual = [case for case in cases if not case.switched and (case.row.diverged or case.row.relative is not None)]
        lost = {method: _share(found, _loses) for method, found in _by_method(usual).items()}
        worst = sorted((method for method in lost if lost[method] >= 0.5), key=lambda m, lost=lost: (-lost[m], m))
        if worst:
            more = len(worst) - NAMED
            parts.append(f"with {family} {_quoted(worst[:NAMED])}" + (f" and {more} more" if more > 0 else ""))
    if not parts:
        return f"No method diverges or loses more than {_percent(LOST)} of the quality on half of the tasks."
    return (
        f"Avoid {'; '.join(parts)}: on at least half of the tasks they diverge, or lose more than {_percent(LOST)} of "
        "the quality."
    )


def _noises(cases: Sequence[Case]) -> str:
    noises = {
        case.table.task: f"{case.table.noise:.3g} on {case.table.task} ({case.task.metric})"
        for case in cases
        if case.table.noise is not None
    }
    if not noises:
        return f"The noise is unknown: it needs {NOISE}."
    return (
        "The noise, by which uncompressed runs with other seeds differ, is "
        f"{', '.join(noises.values())}; smaller differences say nothing."
    )
