"""Tables of the study: the quality of methods relative to uncompressed training, from docs/results/study.

Only runs with today's settings count. A cell has the relative quality in percent, and in brackets the lowest and the
highest of the seeds, each relative to the uncompressed run with the same seed. It is bold if the method is behind by
more than the noise, or diverges.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import measurements
from registry import ROOT, Block, kind, wrapped
from registry import row as table_row

from grace.core.communicators.auto import error_of_normal
from grace.core.config.registry import compressors
from grace.report.methods import DENSE, EQUAL, methods
from grace.report.study import USUAL_RANKS
from grace.report.table import Row, Table, tables
from grace.report.task import MODULES, find_task

sys.path.append(str(ROOT / "benchmarks"))
import study

FOLDER = "study"
TITLES = {"python": "Python", "numpy": "NumPy", "torch": "PyTorch"}


@cache
def runs() -> list[dict[str, Any]]:
    """Return the results of the files with today's settings."""
    return [result for result in study.load(measurements.RESULTS / FOLDER) if study.is_current(result)]


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


def qualities(task: str, ranks: int) -> dict[tuple[str, int], float | None]:
    """Return the qualities of a task by method and seed."""
    found = ((result["cell"], result["quality"]) for result in runs())
    return {(c["method"], c["seed"]): quality for c, quality in found if (c["task"], c["ranks"]) == (task, ranks)}


def worse(quality: float, reference: float, task: str) -> float:
    """Return by how much a quality is worse than another one."""
    return reference - quality if find_task(task).higher_is_better else quality - reference


def behind(row: Row, task: str, ranks: int = USUAL_RANKS) -> bool:
    """Return whether a method is behind uncompressed training by more than the noise, or diverged."""
    if row.quality is None:
        return True
    noise = found()[task, ranks].noise
    return row.difference is not None and noise is not None and worse(row.difference, 0, task) > noise


def percent(row: Row | None, task: str, ranks: int = USUAL_RANKS, *, band: bool = True) -> str:
    """Return the relative quality of a row, with its range over the seeds."""
    if row is None or (row.quality is not None and row.relative is None):
        return ""
    if row.quality is None:
        every = len(row.diverged) == len(row.seeds)
        return "**diverges**" if every else f"**diverges, {len(row.diverged)} of {len(row.seeds)}**"
    assert row.relative is not None
    text = f"{100 * row.relative:.1f}"
    if band:
        ends = sorted(relatives(row, task, ranks))
        more = f"{100 * ends[0]:.1f} to {100 * ends[-1]:.1f}" if len(ends) > 1 else "one seed"
        text += f" ({more})"
    return f"**{text}**" if behind(row, task, ranks) else text


def relatives(row: Row, task: str, ranks: int) -> list[float]:
    """Return the relative quality of each run of a row to the uncompressed one with its seed; of those, to their mean.

    Where lower is better, it is the inverse.
    """
    of_seed = qualities(task, ranks)
    power = 1 if find_task(task).higher_is_better else -1
    reference = {seed: row.quality if row.method == DENSE else of_seed[DENSE, seed] for seed in row.seeds}
    return [(of_seed[row.method, seed] / reference[seed]) ** power for seed in row.seeds]


def least(method: str, optimizer: str) -> float | None:
    """Return the lowest relative quality of a method on the tasks of an optimizer, in percent.

    It is 0 if the method diverged, and None if it was not trained.
    """
    rows = [row for task in tasks_of(optimizer) if (row := row_of(method, task))]
    return 100 * min(row.relative or 0.0 for row in rows) if rows else None


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
    """Return whether a label is no method with switched error feedback, and none with options of its own."""
    return ":" not in label and not (label in methods() and methods()[label].switched)


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
    return [*lines, "", *origin(block, tasks)]


@kind("study-ranks")
def by_ranks(block: Block) -> list[str]:
    """Return a table of some tasks over the number of ranks, of the methods that were trained on several."""
    several = [task for task in block.arguments if sum(place[0] == task for place in found()) > 1]
    places = [place for place in found() if place[0] in several]
    head = (f"`{task}`, {ranks} ranks" for task, ranks in places)
    lines = [table_row("method", *head), table_row("---", *["---:"] * len(places))]
    for name in labels(places, usual):
        if sum(row_of(name, *place) is not None for place in places) > len(several):
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
        method = study.method_of(name)
        on = method.made.method.memory.feeds_back
        both = (name, other) if on else (other, name)
        cells = []
        for place in places:
            texts = [percent(row_of(label, *place), *place, band=False) for label in both]
            cells.append(" / ".join(texts) if all(texts) else "")
        asked = "memory" in compressors.required(compressors.name_of(method.made.method.compressor))
        label = name.removesuffix(":communicator=allgather")
        lines.append(table_row(f"`{label}`", "to be named" if asked else "with" if on else "without", *cells))
    return lines


@kind("study-outer")
def outer(block: Block) -> list[str]:
    """Return the table of gradients, updates of each step and rare syncs on some tasks."""
    tasks = block.arguments
    places = [(task, USUAL_RANKS) for task in tasks]
    lines = [table_row("what the ranks exchange", "bytes, %", *(f"`{task}`" for task in tasks))]
    lines.append(table_row("---", *["---:"] * (1 + len(tasks))))
    trained = set(labels(places))
    for words, name in study.OUTER.items():
        if name in trained:
            lines.append(table_row(words, sent(name, places), *(percent(row_of(name, task), task) for task in tasks)))
    return [*lines, "", *origin(block, tasks)]


@kind("study-twice")
def twice(block: Block) -> list[str]:
    """Return the table of methods by allgather, by two_shot, and with 8 bits for the mean, the smallest error first."""
    tasks = block.arguments
    lines = [table_row("method", "relative error", f"`auto` on {USUAL_RANKS} ranks", *(f"`{task}`" for task in tasks))]
    lines.append(table_row("---", "---:", "---", *["---:"] * len(tasks)))
    for name in sorted(study.TWICE, key=error_of):
        cells = [
            " / ".join(filter(None, (percent(row, task, band=False) for row in ways(name, task)))) for task in tasks
        ]
        lines.append(table_row(f"`{name}`", f"{error_of(name):.2g}", auto(name), *cells))
    return [*lines, "", *origin(block, tasks)]


def ways(name: str, task: str) -> tuple[Row | None, Row | None, Row | None]:
    """Return the rows of a method by allgather, by two_shot, and by two_shot with 8 bits for the mean."""
    once, again = (row_of(f"{name}:communicator={way}", task) for way in ("allgather", "two_shot"))
    return once, again, row_of(name + study.FINER, task)


def lost_by_second_compression() -> tuple[dict[str, float], dict[str, float]]:
    """Return the points that two_shot loses to allgather on the worse of two tasks, by method.

    Those of methods that `auto` sends by two_shot come first, then the others.
    """
    taken, others = dict[str, float](), dict[str, float]()
    for name in study.TWICE:
        (taken if auto(name) == "two_shot" else others)[name] = max(
            100 * (once.relative - again.relative)
            for once, again, _ in (ways(name, task) for task in ("mf", "mf_adam"))
        )
    return taken, others


def error_of(name: str) -> float:
    """Return the error by which `auto` decides about a method."""
    return error_of_normal(study.method_of(name).made.method.compressor)


def auto(name: str) -> str:
    """Return the communicator that `auto` takes for a method."""
    return study.setting_of("mf", name, USUAL_RANKS)["communicator"]


@kind("study-volume")
def volume(block: Block) -> list[str]:
    """Return the table of hard thresholds: bytes as a share of those of topk, and the quality."""
    tasks = block.arguments
    lines = [table_row("method", *(f"`{task}`: {of}" for task in tasks for of in ("bytes", "quality")))]
    lines.append(table_row("---", *["---:"] * 2 * len(tasks)))
    for name in ("topk", *study.VOLUME, EQUAL):
        rows = [(task, row_of(name, task)) for task in tasks]
        cells = [text for task, row in rows for text in (share_of_topk(row, task), percent(row, task))]
        lines.append(table_row(f"`{name}`", *cells))
    return [*lines, "", *origin(block, tasks)]


def share_of_topk(row: Row | None, task: str) -> str:
    """Return the bytes of a method as a share of those of topk."""
    return "" if row is None else f"{row.bytes / row_of('topk', task).bytes:.2f}"


def pairs() -> list[tuple[str, str]]:
    """Return the labels of methods, and of the same with error feedback switched."""
    found = [(method.switched, label) for label, method in methods().items() if method.switched]
    return [*found, *((label, label + more) for label, more in study.COARSE.items())]


def origin(block: Block, tasks: Sequence[str]) -> list[str]:
    """Return the lines that say where the results of tasks come from."""
    shown = [result for result in runs() if result["cell"]["ranks"] == USUAL_RANKS and result["cell"]["task"] in tasks]
    machines = sorted({result["machine"] for result in shown})
    versions = sorted({f"{TITLES[k]} {v}" for result in shown for k, v in result["versions"].items() if k in TITLES})
    days = sorted({result["date"][:10] for result in shown})
    seeds = sorted({result["cell"]["seed"] for result in shown})
    return wrapped(
        f"{USUAL_RANKS} simulated ranks, seeds {', '.join(map(str, seeds))}. {'; '.join(machines)}, CPU only; "
        f"{', '.join(versions)}. {' to '.join(dict.fromkeys((days[0], days[-1])))}. Data, commits and commands: "
        + ", ".join(f"[{task}.json]({block.link(f'docs/results/{FOLDER}/{task}.json')})" for task in tasks)
    )
