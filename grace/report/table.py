"""The results of cells, put together: for each task and number of ranks a row per method.

A difference from uncompressed training means something if it is larger than the noise: how much uncompressed runs
differ by their seeds, or runs with 16 bits from those with the same seed, whichever is more.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grace.core.observe.table import align
from grace.report.data_sets import BUILT_IN
from grace.report.methods import DENSE, SIXTEEN_BIT
from grace.report.task import Task, find_task

WIDTH = 100
LABEL = 29
HEAD = ("method", "quality", "lowest to highest", "difference", "relative, %", "bytes, %")
LEGEND = (
    "Difference: from uncompressed training with the same seeds, and after ± the noise, which is how much uncompressed "
    "runs differ from each other, or runs with 16 bits from them. Relative: the quality as a share of theirs. Bytes: "
    "what a rank sends, as a share of the bytes of the gradients."
)


@dataclass(frozen=True)
class Row:
    """A method on a task and a number of ranks, over its seeds; None is what cannot be known."""

    method: str
    seeds: tuple[int, ...]
    #: Seeds whose run diverged. Then `quality` and all that follows from it is None.
    diverged: tuple[int, ...]
    quality: float | None
    low: float | None
    high: float | None
    #: Quality minus that of uncompressed training with the same seeds.
    difference: float | None
    #: Quality as a share of that of uncompressed training, or the inverse if lower is better.
    relative: float | None
    #: What a rank sends, as a share of the bytes of the gradients.
    bytes: float

    def to_dict(self) -> dict[str, Any]:
        """Return the row for a file."""
        return dict(vars(self))


@dataclass(frozen=True)
class Table:
    """The rows of a task and a number of ranks, uncompressed training first and then the best."""

    task: str
    #: Name and size of the data, or `BUILT_IN`.
    data: str
    ranks: int
    #: How much uncompressed runs differ, or runs with 16 bits from them; None if there are not two uncompressed runs.
    noise: float | None
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """The title of the task, with the data of this table."""
        title = find_task(self.task).title
        return title if self.data == BUILT_IN else f"{title.partition(' on ')[0]} on {self.data}"

    def to_dict(self) -> dict[str, Any]:
        """Return the table for a file."""
        return {**vars(self), "rows": [row.to_dict() for row in self.rows]}


def tables(results: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Return the tables of results, of which those with an error are left out."""
    groups: dict[tuple[str, int], dict[str, dict[int, Mapping[str, Any]]]] = {}
    for found in results:
        if "error" not in found:
            cell = found["cell"]
            of_method = groups.setdefault((cell["task"], cell["ranks"]), {}).setdefault(cell["method"], {})
            of_method[cell["seed"]] = found
    return [_table(task, ranks, groups[task, ranks]) for task, ranks in groups]


def _table(name: str, ranks: int, found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Table:
    task = find_task(name)
    (data,) = {run["setting"]["data"] for runs in found.values() for run in runs.values()}
    dense = _qualities(found.get(DENSE, {}))
    rows = [_row(task, method, runs, dense) for method, runs in found.items()]
    # The sort is stable, so equal rows stay in the order of the study.
    rows.sort(key=lambda row: (row.method != DENSE, row.quality is None, -(row.relative or 0)))
    return Table(name, data, ranks, _noise(found, dense), tuple(rows))


def _qualities(runs: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Return the qualities of the runs that did not diverge, by seed."""
    return {seed: run["quality"] for seed, run in runs.items() if not run["diverged"]}


def _noise(found: Mapping[str, Mapping[int, Mapping[str, Any]]], dense: Mapping[int, float]) -> float | None:
    if len(dense) < 2:
        return None
    # A few uncompressed runs may be equal by chance.
    rounded = [
        abs(quality - dense[seed])
        for method in SIXTEEN_BIT
        for seed, quality in _qualities(found.get(method, {})).items()
        if seed in dense
    ]
    return max([max(dense.values()) - min(dense.values()), *rounded])


def _row(task: Task, method: str, runs: Mapping[int, Mapping[str, Any]], dense: Mapping[int, float]) -> Row:
    seeds = tuple(sorted(runs))
    diverged = tuple(seed for seed in seeds if runs[seed]["diverged"])
    sent = statistics.fmean(run["bytes"] / run["dense_bytes"] for run in runs.values())
    if diverged:
        return Row(method, seeds, diverged, None, None, None, None, None, sent)
    found = [runs[seed]["quality"] for seed in seeds]
    quality = statistics.fmean(found)
    difference = relative = None
    if dense.keys() >= set(seeds):
        reference = statistics.fmean(dense[seed] for seed in seeds)
        difference = quality - reference
        ratio = (quality, reference) if task.higher_is_better else (reference, quality)
        relative = ratio[0] / ratio[1] if ratio[1] else None
    return Row(method, seeds, diverged, quality, min(found), max(found), difference, relative, sent)


def printed(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of all tables, and of the errors, within 100 columns."""
    parts = [_text(table) for table in tables(results)]
    parts += ["\n".join(textwrap.wrap(LEGEND, WIDTH))] * bool(parts)
    for found in results:
        if "error" in found:
            cell = "{task}, {method}, {ranks} ranks, seed {seed}".format(**found["cell"])
            parts.append("\n".join(textwrap.wrap(f"error: {cell}: {found['error']}", WIDTH)))
    return "\n\n".join(parts)


def _text(table: Table) -> str:
    task = find_task(table.task)
    better = "higher" if task.higher_is_better else "lower"
    noise = "unknown" if table.noise is None else _number(table.noise)
    title = f"{table.task}: {table.title}, {task.metric} ({better} is better), {table.ranks} ranks; noise {noise}"
    cells = align([HEAD, *(cells_of(row, table) for row in table.rows)], right=(1, 3, 4, 5))
    return "\n".join([*textwrap.wrap(title, WIDTH), *cells])


def cells_of(row: Row, table: Table) -> list[str]:
    """Return the texts of a row under `HEAD`."""
    label = textwrap.shorten(row.method, LABEL, placeholder="...") if " " in row.method else row.method
    label = label if len(label) <= LABEL else f"{label[: LABEL - 3]}..."
    share = f"{100 * row.bytes:.2f}"
    if row.quality is None:
        return [label, "-", f"diverged: {len(row.diverged)} of {len(row.seeds)}", "", "", share]
    spread = f"{_number(row.low)} to {_number(row.high)}" if len(row.seeds) > 1 else "one seed"
    difference = relative = "?"
    if row.difference is not None:
        band = "" if table.noise is None else f" ±{_number(table.noise)}"
        # Without 0.0, there would be a minus before a zero.
        shown = f"{round(row.difference, 4) + 0.0:+{_form(row.difference)}}"
        difference = "0" if row.method == DENSE else f"{shown}{band}"
    if row.relative is not None:
        relative = f"{100 * row.relative:.1f}"
    return [label, _number(row.quality), spread, difference, relative, share]


def _form(value: float) -> str:
    return ".4f" if abs(value) < 10 else ".2f"


def _number(value: float | None) -> str:
    assert value is not None
    return f"{value:{_form(value)}}"
