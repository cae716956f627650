"""Findings of the study on two papers, and in how many cells methods are faster than uncompressed training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import study_tables
from registry import Block, kind
from registry import row as table_row

from grace.report.comparison import Case, cases, feedback_pairs
from grace.report.findings import findings
from grace.report.findings.finding import decide, percent, quoted, timed
from grace.report.findings.grace_paper import AIMS
from grace.report.speed import FASTER, LINKS
from grace.report.study import USUAL_RANKS
from grace.report.task import MODULES

OUTCOMES = {True: "reproduced", False: "not reproduced", None: "not tested"}
# A gradient of a few kilobytes: messages take longer than their bytes.
SMALL = "factorization"


@cache
def compared() -> list[Case]:
    """Return the cases of the methods of the study, each in the forms that `grace report` has by itself."""
    return cases([result for result in study_tables.runs() if ":" not in result["cell"]["method"]])


@kind("study-findings")
def of_paper(block: Block) -> list[str]:
    """Return the table of the findings of a paper: section, what it says, the outcome and the number."""
    paper = " ".join(block.arguments)
    lines = [table_row("section", "finding", "outcome", "in the study"), table_row(*["---"] * 4)]
    lines += [
        table_row(line.section, line.says, OUTCOMES[line.holds], line.number)
        for line in findings(compared())
        if line.paper == paper
    ]
    return lines


@kind("study-faster")
def faster(block: Block) -> list[str]:
    """Return the table of how many cells are faster than uncompressed training, by link."""
    found = timed(case for case in compared() if not case.is_baseline)
    networks = [case for case in found if not is_small(case)]
    heads = [f"{name}, f = {times}" for name in ("all tasks", "networks") for times in FASTER]
    lines = [table_row("link", "bar", *heads), table_row("---", *["---:"] * (1 + len(heads)))]
    for gbit in LINKS:
        bar = percent(1 - AIMS[gbit]) if gbit in AIMS else ""
        shares = [share(of, gbit, times) for of in (found, networks) for times in FASTER]
        lines.append(table_row(f"{gbit} Gbit/s", bar, *shares))
    return lines


def is_small(case: Case) -> bool:
    """Return whether messages take longer than bytes on the task of a case, whatever the link."""
    return MODULES[case.table.task] == SMALL


def share(found: Sequence[Case], gbit: float, times: float) -> str:
    """Return how many cases are faster than uncompressed training, and their share."""
    number = sum((case.throughput(gbit, times) or 0) > 1 for case in found)
    return f"{number} of {len(found)} ({percent(number / len(found))})"


@kind("study-links")
def links(block: Block) -> list[str]:
    """Return the table of the share of an uncompressed step that the link takes, by task."""
    tasks = {case.table.task: case for case in timed(compared()) if case.ranks == USUAL_RANKS}
    heads = [f"{gbit} Gbit/s, f = {times}" for times in FASTER for gbit in LINKS[:2]]
    lines = [table_row("task", "gradient, kB", *heads), table_row("---", *["---:"] * (1 + len(heads)))]
    for task in sorted(tasks, key=list(MODULES).index):
        case = tasks[task]
        assert case.dense_parts is not None
        size = next(iter(case.runs.values()))["dense_bytes"] / 1000
        shares = [percent(case.dense_parts.link_share(gbit, times)) for times in FASTER for gbit in LINKS[:2]]
        lines.append(table_row(f"`{task}`", f"{size:,.0f}", *shares))
    return lines


@kind("study-gains")
def gains(block: Block) -> list[str]:
    """Return the table of which methods gain from error feedback by more than the noise, on which tasks."""
    groups: dict[str, list[str]] = {
        "gain on all tasks that tell": [],
        "gain on some, lose on others": [],
        "lose": [],
        "differ by no more than the noise": [],
    }
    gain, both, lose, equal = groups.values()
    pairs = [pair for pair in feedback_pairs(compared()) if pair[0].ranks == USUAL_RANKS]
    for name in dict.fromkeys(case.switched or case.method for pair in pairs for case in pair):
        decided = decide(pair for pair in pairs if name in (pair[0].method, pair[1].method))
        if decided.better:
            (both if decided.worse else gain).append(name)
        elif decided.used:
            (lose if decided.worse else equal).append(name)
    lines = [table_row("with error feedback, they", "methods"), table_row("---", "---")]
    return lines + [table_row(text, quoted(names)) for text, names in groups.items() if names]
