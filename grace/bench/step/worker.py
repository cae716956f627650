"""One rank of `grace bench step`. It reads orders from standard input and writes answers, each as one line of JSON.

An order is {"method": ..., "launcher": ..., "options": {...}, "warm_up": n, "steps": n, "metered": false}; the answer
is a `Visit`. The process ends when its input ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grace.bench.step.meter import Meter, measure_machine, per_step
from grace.bench.step.network import sent_bytes
from grace.bench.step.side import Side
from grace.bench.variants import import_own


@dataclass
class Visit:
    """The measurements of one rank for some steps of one method."""

    times: list[float]
    # Bytes that the rank's interface sent in these steps; None if the ranks share one interface.
    sent: int | None
    # Bytes per step that the method reports as sent; None for a baseline.
    reported: int | None
    # The peak memory of the process minus what it held before the model was made. It is meaningful in new processes
    # that return freed pages to the system.
    peak_bytes: int
    gradient_bytes: int
    # If the order asks for it, what a step took (`Spent`), the facts of the machine, and the bytes that memories keep.
    spent: dict[str, float] | None


def serve(make_side: Callable[[str], Side], library: str, interface: str | None) -> None:
    """Answer orders until the input ends."""
    # Send standard output to stderr, so that the frameworks' output does not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    side = make_side(library)
    _write_line(answers, {"ready": os.getpid()})
    for line in sys.stdin:
        order = json.loads(line)
        _write_line(answers, asdict(visit(side, interface=interface, **order)))


def visit(
    side: Side,
    method: str,
    launcher: str,
    options: Mapping[str, Any],
    warm_up: int,
    steps: int,
    interface: str | None,
    metered: bool = False,
) -> Visit:
    """Make a model for the method and time its steps."""
    known = None
    if metered:
        side.barrier()
        known = measure_machine()
    held = _forget_peak()
    training = side.train(method, launcher, options)
    for _ in range(warm_up):
        training.step()
    times, reports = [], []
    side.barrier()
    before = _read_sent_bytes(interface)
    with Meter() if metered else contextlib.nullcontext() as meter:
        for _ in range(steps):
            start = time.perf_counter()
            training.step()
            times.append(time.perf_counter() - start)
            reports.append(training.reported_bytes())
    side.barrier()
    after = _read_sent_bytes(interface)
    sent = None if before is None or after is None else after - before
    lengths = [report for report in reports if report is not None]
    # The bytes may differ from step to step.
    reported = round(statistics.fmean(lengths)) if lengths else None
    spent = None
    if meter is not None and known is not None:
        spent = {**per_step(meter.spent, steps), **known, "kept_bytes": training.kept_bytes()}
    found = Visit(times, sent, reported, _memory("VmHWM") - held, training.gradient_bytes(), spent)
    del training
    gc.collect()
    return found


def _forget_peak() -> int:
    """Reset the kernel's record of the process' peak memory. Return the bytes that the process holds now."""
    # Some kernels cannot reset it; then the peak counts from the start of the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def _write_line(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _read_sent_bytes(interface: str | None) -> int | None:
    if interface is None:
        return None
    return sent_bytes(interface)


def main() -> None:
    """Run the worker of the arguments FRAMEWORK LIBRARY MODEL INTERFACE|- [MODULE...]."""
    framework, library, model, interface, *modules = sys.argv[1:]
    import_own(modules)
    if framework == "torch":
        from grace.bench.step import side_torch as sides
    else:
        from grace.bench.step import side_tensorflow as sides  # type: ignore[no-redef]
    serve(lambda name: sides.make(name, model), library, None if interface == "-" else interface)
