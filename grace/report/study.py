"""The cells of the study, and of the short one by `--quick`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from grace.core.errors import ConfigError
from grace.machine import installed
from grace.report.cell import FACTORS, SHORTER, TRIES, Cell
from grace.report.data_sets import DATA_SETS, files
from grace.report.methods import BASELINES, DENSE, RECOMMENDED, chosen
from grace.report.task import find_task

SEEDS = (0, 1, 2)
RANKS = (2, 4, 8)
# Methods with other error feedback than by default, or with the bytes of another, run on this number of ranks only,
# and so does --quick.
USUAL_RANKS = 4
# Of tasks that take more seconds than this, --quick trains a few methods, and with several seeds only those that are
# recommended. Uncompressed training is one of them: how much its runs differ is the noise.
SHORT = 3.0
QUICK = (
    *BASELINES, *RECOMMENDED, "topk 10 %", "topk, no feedback", "qsgd, feedback", "terngrad, feedback",
    "eden", "powersgd", "efsignsgd",
)  # fmt: skip


def cells(
    task_names: Iterable[str],
    *,
    quick: bool,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    data: Path | None = None,
) -> list[Cell]:
    """Return the cells to train; of what is None, the study decides. `data` is a folder with the tasks' data sets.

    Uncompressed training comes first, and then one seed after the other, so that an interrupted study has something of
    everything. Raises ConfigError for names that do not exist, and for data that a task lacks; ModuleNotFoundError if
    they are in a package that is not installed.
    """
    found = []
    for name in task_names:
        task = find_task(name)
        if data:
            _check(name, data)
        elif task.package and not installed(task.package):
            raise ModuleNotFoundError(f"task '{name}' needs the package '{task.package}'", name=task.package)
        few = quick and task.seconds > SHORT
        for method in chosen(methods):
            if few and methods is None and method.label not in QUICK:
                continue
            usual = ranks is None and (quick or bool(method.switched or method.equal))
            sizes = (USUAL_RANKS,) if usual else RANKS if ranks is None else ranks
            one = few and seeds is None and method.label not in RECOMMENDED
            of_method = SEEDS[:1] if one else SEEDS if seeds is None else seeds
            steps = task.quick_steps if quick else task.steps
            found += [Cell(name, method, size, seed, steps, data) for size in sizes for seed in of_method]
    return sorted(found, key=lambda cell: (cell.method.label != DENSE, cell.seed))


def _check(task: str, data: Path) -> None:
    if task not in DATA_SETS:
        sets = ", ".join(f"{name} ({data_set})" for name, data_set in DATA_SETS.items())
        raise ConfigError(f"--data: task '{task}' has its own data only; expected --tasks of {sets}.")
    try:
        files(DATA_SETS[task], data)
    except ConfigError as error:
        raise ConfigError(f"--data: task '{task}' takes {DATA_SETS[task]}. {error}") from None


def expected_seconds(cell: Cell) -> float:
    """Return roughly the seconds of one core that a cell takes, from what its task says."""
    task = find_task(cell.task)
    # Where a method is tuned, short runs come before the whole ones, of which equal bytes mostly need one.
    short, whole = (len(FACTORS), 2) if cell.method.votes else (TRIES / 2, 1) if cell.method.equal else (0, 0)
    runs = 1 + short / SHORTER + whole
    return task.seconds * cell.steps / task.quick_steps * cell.ranks / USUAL_RANKS * runs
