"""The findings of two papers on gradient compression: whether the results of a study reproduce them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from grace.report.comparison import Case
from grace.report.findings.finding import quoted, tasks
from grace.report.findings.grace_paper import GRACE
from grace.report.findings.hard_threshold import HARD_THRESHOLD

FINDINGS = (*GRACE.findings, *HARD_THRESHOLD.findings)


class Line(NamedTuple):
    """A finding with its outcome, and which cells the number comes from."""

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
    """Return a line per finding, in the order of the papers. The baselines are no methods."""
    compared = [case for case in cases if not case.is_baseline]
    lines = []
    for finding in FINDINGS:
        holds, number, used = finding.check(compared)
        lines.append(Line(finding.paper, finding.section, finding.says, holds, number, _cells(used)))
    return lines


def _cells(cases: Iterable[Case]) -> str:
    """Return tasks, numbers of ranks and methods of cases, within one line."""
    found = list(cases)
    ranks = sorted({case.ranks for case in found})
    labels = list(dict.fromkeys(case.method for case in found))
    named = quoted(labels) if len(labels) <= 3 else f"{len(labels)} methods"
    return f"{', '.join(tasks(found))}; {', '.join(map(str, ranks))} ranks; {named}" if found else ""
