"""Every method of a study compared with uncompressed training: what the page, its figures and its findings show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grace.core.config.registry import compressors
from grace.report.methods import BASELINES, DENSE, methods
from grace.report.speed import Parts, parts, qualities_at_equal_time
from grace.report.table import Row, Table, tables
from grace.report.task import Task, find_task

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A method on a task and a number of ranks; `runs` and `dense` are its results and uncompressed ones, by seed."""

    table: Table
    row: Row
    #: The label of the same method with the usual memory, if this one has error feedback on in place of off, or off.
    switched: str
    parts: Parts
    dense_parts: Parts | None
    runs: Mapping[int, Result]
    dense: Mapping[int, Result]

    @property
    def method(self) -> str:
        """The label of the method."""
        return self.row.method

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.table.ranks

    @property
    def task(self) -> Task:
        """The task."""
        return find_task(self.table.task)

    @property
    def setting(self) -> Mapping[str, Any]:
        """The setting of its first run; others differ by the seed."""
        found: Mapping[str, Any] = next(iter(self.runs.values()))["setting"]
        return found

    @property
    def compressor(self) -> str:
        """The name of the compressor."""
        return str(self.setting["config"]["compressor"]["name"])

    @property
    def family(self) -> str:
        """The family of the compressor; empty for one from outside grace."""
        return compressors.about(self.compressor).family

    @property
    def is_baseline(self) -> bool:
        """True for uncompressed training and for 16 bits."""
        return self.method in BASELINES

    @property
    def is_usual(self) -> bool:
        """True if the case stands for its method: error feedback is as by default, and the bytes are its own."""
        return not (self.is_baseline or self.switched or self.setting.get("equal"))

    @property
    def place(self) -> tuple[str, int]:
        """The task and the number of ranks, where it can be compared with other methods."""
        return self.table.task, self.ranks

    @property
    def relative(self) -> float | None:
        """The quality as a share of that of uncompressed training; 0 if a run diverged, None if it is not known."""
        return 0.0 if self.row.diverged else self.row.relative

    @property
    def gain(self) -> float | None:
        """By how much the quality is better than uncompressed with the same seeds; minus infinity if a run diverged.

        None if a seed has no uncompressed run.
        """
        if not self.dense.keys() >= self.runs.keys():
            return None
        return gain(self.task, self.runs, self.dense)

    @property
    def within(self) -> bool | None:
        """True if the quality is as good as uncompressed, but for the noise; None if that is not known."""
        if self.gain is None or self.table.noise is None:
            return None
        return self.gain >= -self.table.noise

    @property
    def sent(self) -> float | None:
        """The bytes that leave a rank in a step, as a share of those of uncompressed training; None if it has none."""
        if self.dense_parts is None or not self.dense_parts.link_bytes:
            return None
        return self.parts.link_bytes / self.dense_parts.link_bytes

    def throughput(self, gbit: float, faster: float = 1) -> float | None:
        """Return the steps per second as a multiple of those of uncompressed training; None if it has none."""
        if self.dense_parts is None:
            return None
        return self.dense_parts.seconds(gbit, faster) / self.parts.seconds(gbit, faster)

    def qualities_at_equal_time(self, gbit: float, faster: float = 1) -> tuple[float, float] | None:
        """Return the mean quality, and that of uncompressed training, when the faster of both has ended.

        None if no seed has both runs, or if one diverged.
        """
        shared = sorted(self.runs.keys() & self.dense.keys())
        diverged = any(of[seed]["diverged"] for of in (self.runs, self.dense) for seed in shared)
        if self.dense_parts is None or not shared or diverged:
            return None
        times = self.parts.seconds(gbit, faster), self.dense_parts.seconds(gbit, faster)
        found = [qualities_at_equal_time(self.runs[seed], times[0], self.dense[seed], times[1]) for seed in shared]
        known = [pair for pair in found if pair is not None]
        if len(known) < len(found):
            return None
        return statistics.fmean(pair[0] for pair in known), statistics.fmean(pair[1] for pair in known)


def gain(task: Task, runs: Mapping[int, Result], others: Mapping[int, Result]) -> float | None:
    """Return by how much better the mean quality of runs is than that of others with the same seeds.

    It is infinite if only one of them diverged, and None if both did or if they share no seed.
    """
    shared = sorted(runs.keys() & others.keys())
    ended = [not any(of[seed]["diverged"] for seed in shared) for of in (runs, others)]
    if not shared or not any(ended):
        return None
    if not all(ended):
        return math.inf if ended[0] else -math.inf
    more = statistics.fmean(runs[seed]["quality"] - others[seed]["quality"] for seed in shared)
    return more if task.higher_is_better else -more


def cases(results: Sequence[Result]) -> list[Case]:
    """Return the cases of results, in the order of the tables; those with an error are left out."""
    runs: dict[tuple[str, int, str], dict[int, Result]] = {}
    for found in results:
        if "error" not in found:
            cell = found["cell"]
            runs.setdefault((cell["task"], cell["ranks"], cell["method"]), {})[cell["seed"]] = found
    times, known = parts(results), methods()
    answer = []
    for table in tables(results):
        of_step = times[table.task, table.ranks]
        dense = runs.get((table.task, table.ranks, DENSE), {})
        for row in table.rows:
            own = runs[table.task, table.ranks, row.method]
            switched = known[row.method].switched if row.method in known else ""
            answer.append(Case(table, row, switched, of_step[row.method], of_step.get(DENSE), own, dense))
    return answer


def feedback_pairs(found: Iterable[Case]) -> list[tuple[Case, Case]]:
    """Return the cases that differ by error feedback alone: without it, and with it."""
    by_name = {(case.place, case.method): case for case in found}
    answer = []
    for (place, _), case in by_name.items():
        if other := by_name.get((place, case.switched)):
            off = case.setting["config"]["memory"]["name"] == "none"
            answer.append((case, other) if off else (other, case))
    return answer
