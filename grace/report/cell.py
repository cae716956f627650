"""A cell of the study: one task trained with one method, on one number of ranks, with one seed."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grace
from grace.core.config.config import Method as Parts
from grace.core.config.registry import communicators
from grace.core.observe.log import logger
from grace.core.plan.unit import Assignment
from grace.core.spec import Ranks, TensorSpec
from grace.core.transport.collectives import KINDS
from grace.report.data_sets import BUILT_IN, DATA_SETS, files
from grace.report.methods import Method, methods
from grace.report.replicas import Replicas, replicas
from grace.report.task import Task, find_task

# Loss and quality of a run are measured at its start and this many times, the last time at its end.
POINTS = 10
# Where ranks vote, the learning rate of uncompressed training is multiplied by one of these. Short runs, of a fifth of
# the steps, favour large ones. So whole runs compare the best of them with the next smaller one. All have seed 0.
FACTORS = (1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 1024)
SHORTER = 5
# For bytes that equal those of another method, a threshold is tried that begins here, first in such short runs and then
# in whole ones, until the bytes differ by less than this factor, or so many times. Bytes grow as the threshold to the
# power -1 where error feedback adds up equal gradients, and -2 where it adds up noise; the step fits the middle.
THRESHOLD, CLOSE, TRIES, POWER = 0.01, 1.1, 8, 2 / 3
# A loss this many times that of the first weights will not come back.
DIVERGED = 1000.0
# What a result has beside `cell` and `setting`, if there was no error.
_KEYS = frozenset(
    ("lr", "tried", "curve", "errors", "loss", "quality", "diverged", "bytes", "collectives", "sends", "dense_bytes")
    + ("compute_seconds", "exchange_seconds", "seconds")
)
# For what `auto` takes, which the settings of a cell name.
_EXAMPLE = TensorSpec("example", (256, 256))
_NAME = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True)
class Cell:
    """A task, a method, a number of ranks, a seed, and the number of optimizer steps.

    `data` is a folder with the data set of the task; without it, the task has its own data.
    """

    task: str
    method: Method
    ranks: int
    seed: int
    steps: int
    data: Path | None = None

    @property
    def key(self) -> dict[str, Any]:
        """The names by which the cell differs from others of a study."""
        return {"task": self.task, "method": self.method.label, "ranks": self.ranks, "seed": self.seed}

    @property
    def file(self) -> str:
        """Name of the result file."""
        label = self.method.label
        name = _NAME.sub("_", label).strip("_")
        if name != label:
            # Two labels may differ only in what a name of a file cannot have.
            name += f"-{hashlib.sha256(label.encode()).hexdigest()[:6]}"
        task = f"{self.task}-{_NAME.sub('_', DATA_SETS[self.task])}" if self.data else self.task
        return f"{task}-{name}-{self.ranks}-ranks-seed-{self.seed}.json"

    def __str__(self) -> str:
        return f"{self.task}, {self.method.label}, {self.ranks} ranks, seed {self.seed}"

    def setting(self) -> dict[str, Any]:
        """Return all that the result depends on. A file with another setting is not this cell's result.

        The configuration is complete, and `communicator` is what `auto` takes for an example: both change with grace.
        `own` tells the source files of a method from outside grace, which change as it is written. Data of a folder are
        recognized by their size. Raises ConfigError if files of them lack.
        """
        task, made, data = find_task(self.task), self.method.made, BUILT_IN
        if self.data:
            name = DATA_SETS[self.task]
            data = f"{name} ({sum(path.stat().st_size for path in files(name, self.data)):,} bytes)"
        item = Assignment(_EXAMPLE, made.method)
        return {
            "config": json.loads(json.dumps({**made.to_dict(), "seed": self.seed})),
            "communicator": communicators.name_of(made.method.communicator.resolve(item, Ranks(self.ranks))[0]),
            "data": data,
            "steps": self.steps,
            "batch": task.batch,
            "lr": task.lr,
            "momentum": 0.0 if self.method.accelerates else task.momentum,
            "factors": list(FACTORS) if self.method.votes else [],
            **({"equal": self.method.equal} if self.method.equal else {}),
            **({"own": own} if (own := _own(made.method)) else {}),
        }


def _own(method: Parts) -> str:
    """Return a hash of the source files of the parts of a method that are not grace's; empty if all are."""
    parts = (method.compressor, method.memory, method.communicator)
    modules = {type(part).__module__ for part in parts}
    files = {getattr(sys.modules[name], "__file__", None) for name in modules if name.partition(".")[0] != "grace"}
    texts = [Path(file).read_bytes() for file in sorted(filter(None, files))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12] if texts else ""


def train(cell: Cell) -> dict[str, Any]:
    """Train the cell and return its result; equal cells give equal results, but for the times.

    `curve` has a step, and loss and quality on the validation data after it, several times. `loss` and `quality` are
    those of the end; they are None if the run ended early because its loss was not finite or 1,000 times that of the
    first weights. `diverged` says that it did so, or ended above the first loss. `errors` has pairs of a step and the
    norm of what error feedback then keeps, root mean square over the ranks; it is empty without error feedback.

    `bytes` are what a rank sends per step, on average, `collectives` the same by kind, and `dense_bytes` those of the
    gradients. `sends` says in how many collectives of each kind a rank sends something per step, on average: in most
    broadcasts it only receives. `compute_seconds` of a rank's gradients, with the optimizer step of a process, and
    `exchange_seconds` of what one rank does in the exchange are processor times of one core, medians of the steps;
    `seconds` is the time of the whole cell, as a clock tells it. With outer steps, loss and quality are those of the
    weights that the ranks have in common, and `exchange_seconds` is a mean.

    `tried` has pairs of a learning rate and the loss of its run where ranks vote, and of a threshold and the bytes of
    its run for a method that sends the bytes of another. The latter has its `threshold` as well.
    """
    began, task, setting = time.perf_counter(), find_task(cell.task), cell.setting()
    tuned = _tuned(task, cell) if cell.method.votes else {}
    factor = _best(tuned) if tuned else 1.0
    tried, chosen = [[task.lr * f, loss] for f, loss in tuned.items()], {}
    if cell.method.equal:
        sizes, aim = _sizes(task, cell)
        tried = [[threshold, nbytes] for threshold, nbytes in sizes.items()]
        chosen = {"threshold": min(sizes, key=lambda threshold: abs(math.log(sizes[threshold] / aim)))}
        cell = _with_threshold(cell, chosen["threshold"])
    result = _run(task, cell, cell.seed, cell.steps, factor)
    seconds = time.perf_counter() - began
    return {
        "cell": cell.key,
        "setting": setting,
        "lr": task.lr * factor,
        "tried": tried,
        **chosen,
        **result,
        "seconds": round(seconds, 3),
    }


def _tuned(task: Task, cell: Cell) -> dict[float, float | None]:
    """Return the losses of whole runs with seed 0 by the factor of the learning rate; None if a run diverged."""
    key = _key(cell)
    if key not in _losses:
        short = {factor: _run(task, cell, 0, cell.steps // SHORTER, factor)["loss"] for factor in FACTORS}
        first = FACTORS.index(_best(short))
        _losses[key] = {
            factor: _run(task, cell, 0, cell.steps, factor)["loss"] for factor in FACTORS[first : first + 2]
        }
    return _losses[key]


def _sizes(task: Task, cell: Cell) -> tuple[dict[float, float], float]:
    """Return the bytes of whole runs with seed 0 by the threshold, and those of the method that they shall equal."""
    # Every step of that method sends as much.
    aim = _run(task, replace(cell, method=methods()[cell.method.equal]), 0, 1, 1.0)["bytes"]
    key = _key(cell)
    if key not in _sent:
        threshold = THRESHOLD
        for steps in (cell.steps // SHORTER, cell.steps):
            sizes: dict[float, float] = {}
            for _ in range(TRIES):
                sizes[threshold] = _run(task, _with_threshold(cell, threshold), 0, steps, 1.0)["bytes"]
                share = sizes[threshold] / aim
                if 1 / CLOSE <= share <= CLOSE:
                    break
                threshold *= share**POWER
        _sent[key] = sizes
    return _sent[key], aim


def _with_threshold(cell: Cell, threshold: float) -> Cell:
    return replace(cell, method=cell.method._replace(config={**cell.method.config, "threshold": threshold}))


def _key(cell: Cell) -> tuple[str, str, int, int, Path | None]:
    return cell.task, json.dumps(cell.method.config, sort_keys=True), cell.ranks, cell.steps, cell.data


# Cells that differ by their seeds share these runs, if one process trains them: losses by the factor of the learning
# rate, and bytes by the threshold.
_losses: dict[tuple[str, str, int, int, Path | None], dict[float, float | None]] = {}
_sent: dict[tuple[str, str, int, int, Path | None], dict[float, float]] = {}


def _best(losses: Mapping[float, float | None]) -> float:
    return min(losses, key=lambda factor: math.inf if (loss := losses[factor]) is None else loss)


def _run(task: Task, cell: Cell, seed: int, steps: int, factor: float) -> dict[str, Any]:
    momentum = 0.0 if cell.method.accelerates else task.momentum
    with _quiet():
        data = {"data": cell.data} if cell.data else {}
        settings = {"steps": steps, "lr": task.lr * factor, "momentum": momentum, **data}
        start = functools.partial(task.start, seed, cell.ranks, **settings)
        return _trained(replicas(start, {**cell.method.config, "seed": seed}, cell.ranks), steps)


def _trained(ranks: Replicas, steps: int) -> dict[str, Any]:
    curve, errors, taken = [(0, *ranks.evaluate())], [], 0
    points = {round(steps * i / POINTS) for i in range(1, POINTS + 1)}
    for step in range(steps):
        ranks.advance(step)
        taken += 1
        if step + 1 in points:
            curve.append((step + 1, *ranks.evaluate()))
            errors += [[step + 1, error] for error in _error(ranks.simulation)]
            if not abs(curve[-1][1]) <= DIVERGED * abs(curve[0][1]):
                break
    first, last = curve[0][1], curve[-1][1]
    ended = curve[-1][0] == steps and abs(last) <= DIVERGED * abs(first)
    sent, (compute, exchange), sends = ranks.sent(), ranks.seconds, ranks.simulation.network.sends
    return {
        "curve": [[step, *(x if math.isfinite(x) else None for x in measured)] for step, *measured in curve],
        "errors": errors,
        "loss": last if ended else None,
        "quality": curve[-1][2] if ended else None,
        "diverged": not (ended and last <= first),
        "bytes": sum(sent.values()),
        "collectives": sent,
        "sends": {kind: sends[kind] / (ranks.simulation.size * taken) for kind in KINDS},
        "dense_bytes": ranks.simulation.stats()["dense_bytes"],
        "compute_seconds": compute,
        "exchange_seconds": exchange,
    }


def _error(simulation: grace.Simulation) -> list[float]:
    """Return the norm of what error feedback keeps after a step, over ranks; nothing without it, or if not finite."""
    # Norms of what is kept cost nothing in a step, if they are asked for only after it.
    simulation.track_norms = True
    norms = [simulation.scalars(rank).get("grace/residual_norm") for rank in range(simulation.size)]
    simulation.track_norms = False
    known = [norm for norm in norms if norm is not None and math.isfinite(norm)]
    return [math.hypot(*known) / math.sqrt(len(known))] if len(known) == len(norms) else []


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of grace about its methods, which the study tries on purpose, and of runs that diverge."""
    import logging

    import numpy as np

    before = logger().level
    logger().setLevel(logging.ERROR)
    try:
        # A run that diverges overflows first.
        with np.errstate(all="ignore"):
            yield
    finally:
        logger().setLevel(before)


def read(cell: Cell, folder: Path) -> dict[str, Any] | None:
    """Return the result of a cell from its file, an error as well; None if it is damaged or has another setting.

    Raises GraceError if the method does not fit the number of ranks.
    """
    setting = cell.setting()
    try:
        found = json.loads((folder / cell.file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("cell") != cell.key or found.get("setting") != setting:
        return None
    if "error" in found:
        return found
    # A file that another program has cut or changed.
    return found if found.keys() >= _KEYS else None


def write(found: Mapping[str, Any], path: Path) -> None:
    """Write a file of JSON at once."""
    write_text(json.dumps(found, indent=1) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a file at once: it has all of the text, or is not there."""
    draft = path.with_suffix(f".{os.getpid()}.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
