"""Meter of the thread that trains: processor time, calls of kernels, steps of grace, waiting, page faults.

It needs Linux, whose `schedstat` counts in nanoseconds, and eager steps.
"""

from __future__ import annotations

import functools
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grace.core.errors import GraceError
from grace.core.ops import native
from grace.core.step.step import Step

# Bytes of the arrays that are copied to measure the bandwidth, beyond the caches of common processors.
COPIED = 128 * 1024**2
TRIES = 5
# They read and write only some elements of their first argument.
SPARSE = ("put", "gather", "scatter_add")
ENTRIES = ("ready", "ready_in_parts", "poll", "complete", "finish")


@dataclass
class Spent:
    """Time of some steps, in seconds, with bytes and numbers; of the main thread, unless something else is said.

    `delayed` is the time in which it could run, but the core ran another thread. `steps` is its processor time in steps
    of grace, of which `kernels` is that in kernels, whose arguments and results have `kernel_bytes`. `others` is the
    processor time of all other threads of the process. `faults` counts fresh pages, `kernel_faults` those in kernels.
    """

    wall: float = 0.0
    cpu: float = 0.0
    delayed: float = 0.0
    others: float = 0.0
    steps: float = 0.0
    kernels: float = 0.0
    kernel_bytes: int = 0
    faults: int = 0
    kernel_faults: int = 0


class Meter:
    """Counters of the process: a context manager that watches kernels and steps until its exit.

    Raises GraceError where the system does not count.
    """

    def __init__(self) -> None:
        self.spent = Spent()
        self._thread = threading.get_native_id()
        self._depth = 0
        self._plain: list[tuple[Any, str, Any]] = []
        if not Path("/proc/self/schedstat").exists():
            raise GraceError("--account needs a Linux kernel with /proc/self/schedstat, and found none; leave it out.")

    def __enter__(self) -> Meter:
        if native.module is not None:
            self._watch(native.module, "run", self._kernel)
        for name in ENTRIES:
            self._watch(Step, name, self._entry)
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        end = self._now()
        for name, value in end.items():
            setattr(self.spent, name, value - self._start[name])
        for owner, name, plain in self._plain:
            setattr(owner, name, plain)

    def _watch(self, owner: Any, name: str, watched: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        plain = getattr(owner, name)
        self._plain.append((owner, name, plain))
        setattr(owner, name, watched(plain))

    def _now(self) -> dict[str, Any]:
        tasks = {int(task): _read_schedule(task) for task in os.listdir("/proc/self/task")}
        cpu, delayed = tasks[self._thread]
        others = sum(ran for task, (ran, _) in tasks.items() if task != self._thread)
        return {
            "wall": time.perf_counter(),
            "cpu": cpu,
            "delayed": delayed,
            "others": others,
            "faults": _count_faults(),
        }

    def _kernel(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        spent = self.spent

        @functools.wraps(plain)
        def run(kernel: str, inputs: Any, *rest: Any) -> Any:
            faults, start = _count_faults(), time.thread_time()
            results = plain(kernel, inputs, *rest)
            spent.kernels += time.thread_time() - start
            spent.kernel_faults += _count_faults() - faults
            spent.kernel_bytes += _size(inputs[1:] if kernel in SPARSE else inputs) + _size(results)
            return results

        return run

    def _entry(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            self._depth += 1
            try:
                return plain(*arguments, **options)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.spent.steps += time.thread_time() - start

        return call


def measure_machine() -> dict[str, float]:
    """Return `copy_bandwidth`, bytes that a copy reads and writes per second, and `fault_s`, the time per fresh page.

    Ranks that call it together share the bandwidth of the memory, as they do in a step.
    """
    source = np.ones(COPIED // 8)
    target = np.ones_like(source)
    bandwidth = 2 * COPIED / min(_time_call(lambda: np.copyto(target, source)) for _ in range(TRIES))
    costs = []
    for _ in range(TRIES):
        before = _count_faults()
        with mmap.mmap(-1, COPIED) as fresh:
            view = np.frombuffer(fresh, dtype=np.uint8)
            seconds = _time_call(lambda view=view: view[:: mmap.PAGESIZE].fill(1))  # type: ignore[misc]
            del view
        costs.append(seconds / max(1, _count_faults() - before))
    return {"copy_bandwidth": bandwidth, "fault_s": min(costs)}


def per_step(spent: Spent, steps: int) -> dict[str, float]:
    """Return the figures of one step."""
    return {name: value / steps for name, value in asdict(spent).items()}


def _time_call(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _read_schedule(task: str) -> tuple[float, float]:
    """Return the seconds that a thread ran, and those for which it waited for a core; zeros if it has ended."""
    try:
        ran, waited, _ = Path(f"/proc/self/task/{task}/schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0
    return int(ran) * 1e-9, int(waited) * 1e-9


def _count_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _size(arrays: Iterable[Any] | None) -> int:
    # A condition is a Python bool.
    return sum(x.nbytes for x in arrays or () if not isinstance(x, bool))
