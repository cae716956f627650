"""A finding of a paper, its outcome on the results of a study, and what the checks of both papers share.

A check gets all cases but the baselines. A case is a method on a task and a number of ranks, over its seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from grace.report.comparison import Case, gain

T = TypeVar("T")

# What is said of methods in general needs so many, and a correlation so many points.
FEWEST = 5


class Outcome(NamedTuple):
    """The answer to a finding: `holds` is None if the results cannot tell, and `number` then says what is missing."""

    holds: bool | None
    number: str
    #: Those that the number comes from.
    cases: Sequence[Case] = ()


class Finding(NamedTuple):
    """A statement in a section or figure of a paper, and how the results of a study answer it."""

    paper: str
    section: str
    says: str
    check: Callable[[Sequence[Case]], Outcome]


class Paper:
    """A paper, and its findings in their order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[Finding] = []

    def finding(
        self, section: str, says: str, select: Callable[[Sequence[Case]], Sequence[T]], needs: str
    ) -> Callable[[Callable[[Sequence[T]], Outcome | None]], None]:
        """Enter a finding, as the decorator of its check, which gets what `select` returns of the cases.

        If that is empty, or the check returns None, the outcome says what it needs.
        """

        def enter(check: Callable[[Sequence[T]], Outcome | None]) -> None:
            def checked(cases: Sequence[Case]) -> Outcome:
                found = select(cases)
                return (check(found) if found else None) or Outcome(None, f"needs {needs}")

            self.findings.append(Finding(self.name, section, says, checked))

        return enter

    def untested(self, section: str, says: str, reason: str) -> None:
        """Enter a finding that no study can answer."""
        self.findings.append(Finding(self.name, section, says, lambda _: Outcome(None, reason)))


def usual(cases: Iterable[Case]) -> list[Case]:
    """Return the cases that stand for their method, each once: see `Case.is_usual`."""
    return [case for case in cases if case.is_usual]


def known(cases: Iterable[Case]) -> list[Case]:
    """Return the usual cases of which it is known whether they are within the noise."""
    return [case for case in usual(cases) if case.within is not None]


def timed(cases: Iterable[Case]) -> list[Case]:
    """Return the usual cases with uncompressed training on the same task, whose times can be compared."""
    return [case for case in usual(cases) if case.dense_parts is not None]


def several(select: Callable[[Sequence[Case]], list[Case]]) -> Callable[[Sequence[Case]], list[Case]]:
    """Return a function that returns the same as `select`, but no case if they are of less than `FEWEST` methods."""

    def selected(cases: Sequence[Case]) -> list[Case]:
        found = select(cases)
        return found if len({case.method for case in found}) >= FEWEST else []

    return selected


def noise(case: Case) -> float:
    """Return the noise of a case that has one."""
    assert case.table.noise is not None
    return case.table.noise


def by_place(cases: Iterable[Case]) -> list[list[Case]]:
    """Return the cases of each task and number of ranks."""
    found: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        found.setdefault(case.place, []).append(case)
    return list(found.values())


def tasks(cases: Iterable[Case]) -> list[str]:
    """Return the names of the tasks, each once."""
    return list(dict.fromkeys(case.table.task for case in cases))


def quoted(labels: Iterable[str]) -> str:
    """Return labels as code, separated by commas."""
    return ", ".join(f"`{label}`" for label in labels)


def percent(share: float) -> str:
    """Return a share in whole percent."""
    return f"{100 * share:.0f} %"


class Decided(NamedTuple):
    """The tasks of pairs in which the second case is better, worse, or differs by noise, and the cases of all."""

    better: list[str]
    worse: list[str]
    equal: list[str]
    used: list[Case]

    def count_pairs(self, better: str, worse: str) -> str:
        """Return how many pairs there are of each kind, and on which tasks."""
        counts = [
            f"{name}: {len(found)}" + (f" ({', '.join(dict.fromkeys(found))})" if found else "")
            for name, found in ((better, self.better), (worse, self.worse), ("within the noise", self.equal))
        ]
        return "; ".join(counts)

    def most(self, found: Sequence[str]) -> bool:
        """Return whether these are most of the pairs."""
        return 4 * len(found) > len(self.used)


def decide(pairs: Iterable[tuple[Case, Case]]) -> Decided:
    """Compare the cases of pairs over the seeds that both have; pairs of which nothing is known are left out."""
    found = Decided([], [], [], [])
    for first, second in pairs:
        difference = gain(second.task, second.runs, first.runs)
        if difference is not None and second.table.noise is not None:
            equal = abs(difference) <= noise(second)
            (found.equal if equal else found.better if difference > 0 else found.worse).append(second.table.task)
            found.used.extend((first, second))
    return found
