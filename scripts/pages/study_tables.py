"""Tables of the study: the quality of methods relative to uncompressed training, from docs/results/study.json.

Only runs with today's settings count. A cell has the relative quality in percent, and in brackets the lowest and the
highest of the seeds. It is bold if the method is behind by more than the noise, or diverges.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import measurements
from registry import ROOT, Block, kind, wrapped
from registry import row as table_row

from grace.report.methods import DENSE, methods
from grace.report.study import USUAL_RANKS
from grace.report.table import Row, Table, tables
from grace.report.task import MODULES, find_task

sys.path.append(str(ROOT / "benchmarks"))
import study

FILE = "study"


@cache
def runs() -> list[dict[str, Any]]:
    """Return the results of the file with today's settings."""
    return [result for result in study.results(measurements.load(FILE)) if study.is_current(result)]


@cache
def found() -> dict[tuple[str, int], Table]:
    """Return the tables of the study by task and number of ranks, in the order of the tasks."""
    made = {(table.task, table.ranks): table for table in tables(runs())}
    return dict(sorted(made.items(), key=lambda item: (list(MODULES).index(item[0][0]), item[0][1])))


def tasks_of(optimizer: str) -> list[str]:
    """Return the tasks whose optimizer is SGD, or one of Adam's kind, with results on the usual number of ranks."""
    return [task for task, ranks in found() if ranks == USUAL_RANKS and find_task(task).optimizer.startswith(optimizer)]


def row_of(method: str, task: str, ranks: int = USUAL_RANKS) -> Row | None:
    """Return the row of a method, or None if it was not trained."""
    table = found().get((task, ranks))
    return next((row for row in table.rows if row.method == method), None) if table else None


def behind(row: Row, task: str, ranks: int = USUAL_RANKS) -> bool:
    """Return whether a method is behind uncompressed training by more than the noise, or diverged."""
    if row.quality is None:
        return True
    noise = found()[task, ranks].noise
    if noise is None or row.difference is None:
        return False
    return (-row.difference if find_task(task).higher_is_better else row.difference) > noise


def percent(row: Row | None, task: str, ranks: int = USUAL_RANKS, *, band: bool = True) -> str:
    """Return the relative quality of a row, with its range over the seeds."""
    if row is None or (row.quality is not None and row.relative is None):
        return ""
    if row.quality is None:
        every = len(row.diverged) == len(row.seeds)
        return "**diverges**" if every else f"**diverges, {len(row.diverged)} of {len(row.seeds)}**"
    assert row.relative is not None
    assert row.difference is not None
    text = f"{100 * row.relative:.1f}"
    if band:
        reference = row.quality - row.difference
        ends = sorted(x / reference if find_task(task).higher_is_better else reference / x for x in (row.low, row.high))
        more = f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}" if len(row.seeds) > 1 else "one seed"
        text += f" ({more})"
    return f"**{text}**" if behind(row, task, ranks) else text


def worst(method: str, places: Iterable[tuple[str, int]]) -> tuple[bool, float]:
    """Return a key by which to sort methods: the best first, by their worst relative quality; dense before all."""
    rows = [row for place in places if (row := row_of(method, *place))]
    relatives = [0.0 if row.relative is None else row.relative for row in rows]
    return method != DENSE, -min(relatives, default=0.0)


def labels(places: Iterable[tuple[str, int]], which: Callable[[str], bool] = lambda label: True) -> list[str]:
    """Return the labels that have a row in one of the tables, the best first."""
    names = dict.fromkeys(row.method for place in places for row in found()[place].rows if which(row.method))
    return sorted(names, key=lambda name: worst(name, places))


def sent(method: str, places: Sequence[tuple[str, int]]) -> str:
    """Return what a rank sends in percent of the bytes of the gradients, as a range if it depends on the task."""
    shares = [100 * row.bytes for place in places if (row := row_of(method, *place))]
    least, most = min(shares), max(shares)
    text = f"{most:.1f}"
    return text if most <= 1.05 * least else f"{least:.1f} to {text}"


def usual(label: str) -> bool:
    """Return whether a label is no method with switched error feedback."""
    return label not in methods() or not methods()[label].switched


@kind("study")
def overview(block: Block) -> list[str]:
    """Return the table of all methods for an optimizer: bytes, and the relative quality on each of its tasks."""
    (optimizer,) = block.arguments
    tasks = tasks_of(optimizer)
    places = [(task, USUAL_RANKS) for task in tasks]
    lines = [
        table_row("method", "bytes, %", *(f"`{task}`" for task in tasks)),
        table_row("---", *["---:"] * (1 + len(tasks))),
    ]
    for name in labels(places, usual):
        cells = (percent(row_of(name, task), task) for task in tasks)
        lines.append(table_row(f"`{name}`", sent(name, places), *cells))
    return [*lines, "", *origin(block)]


@kind("study-ranks")
def by_ranks(block: Block) -> list[str]:
    """Return a table of some tasks over the number of ranks, of the methods that were trained on several."""
    places = [place for place in found() if place[0] in block.arguments]
    head = (f"`{task}`, {ranks} ranks" for task, ranks in places)
    lines = [table_row("method", *head), table_row("---", *["---:"] * len(places))]
    for name in labels(places, usual):
        if sum(row_of(name, *place) is not None for place in places) > len(block.arguments):
            lines.append(
                table_row(f"`{name}`", *(percent(row_of(name, *place), *place, band=False) for place in places))
            )
    return lines


@kind("study-feedback")
def feedback(block: Block) -> list[str]:
    """Return the table of methods with and without error feedback."""
    places = [place for place in found() if place[1] == USUAL_RANKS]
    lines = [table_row("method", "default", *(f"`{task}`" for task, _ in places))]
    lines.append(table_row("---", "---", *["---:"] * len(places)))
    for name, other in pairs():
        if not any(row_of(other, *place) for place in places):
            continue
        on = methods()[name].made.method.memory.feeds_back
        both = (name, other) if on else (other, name)
        cells = []
        for place in places:
            texts = [percent(row_of(label, *place), *place, band=False) for label in both]
            cells.append(" / ".join(texts) if all(texts) else "")
        lines.append(table_row(f"`{name}`", "with" if on else "without", *cells))
    return lines


def pairs() -> list[tuple[str, str]]:
    """Return the labels of methods, and of the same with error feedback switched."""
    return [(method.switched, label) for label, method in methods().items() if method.switched]


def origin(block: Block) -> list[str]:
    """Return the lines that say where the results come from."""
    shown = [result for result in runs() if result["cell"]["ranks"] == USUAL_RANKS]
    machines = sorted({result["machine"] for result in shown})
    versions = sorted({f"{name} {version}" for result in shown for name, version in result["versions"].items()})
    days = sorted({result["date"][:10] for result in shown})
    seeds = sorted({result["cell"]["seed"] for result in shown})
    return wrapped(
        f"{USUAL_RANKS} simulated ranks, seeds {', '.join(map(str, seeds))}. {'; '.join(machines)}, CPU only; "
        f"{', '.join(versions)}. {' to '.join(dict.fromkeys((days[0], days[-1])))}. Data, commits and commands: "
        f"[{FILE}.json]({block.link(f'docs/results/{FILE}.json')})"
    )
