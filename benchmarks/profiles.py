"""Tell where the time of a codec goes, in copies of the gradient, for methods over their aim or above 8 copies.

    python benchmarks/profiles.py docs/results/profiles.json

It times the step of `grace bench codec` with 25 million elements, NumPy and one thread. The parts are the kernels by
name, the array operations of NumPy by name, and the expressions and the rest of the interpreted code.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import tables

from grace.bench.codec import LocalStep, make_unit, near_square
from grace.bench.gradients import Gradients
from grace.core.ops import get_ops, native
from grace.core.ops.base import Primitives
from grace.core.ops.numpy_ops import NumpyOps

NUMEL, RANKS, STEPS, NAMED = 25_000_000, 2, 3, 5
# Parts below this many copies are not named.
SMALL = 0.1


class Clock:
    """Time by part; what a part calls is not its own."""

    def __init__(self):
        self.spent = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, function, name_of):
        def call(*args, **options):
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                whole = time.perf_counter() - start
                self.spent[name_of(args)] += whole - self._inner.pop()
                self._inner[-1] += whole

        return call


def list_slow():
    """Return the methods that are over their aim, or above 8 copies, in the committed table with NumPy."""
    rows = json.loads((Path(__file__).parents[1] / "docs/results/codec.json").read_text())["rows"]
    numbers = [row for row in rows if "numpy" in row and not isinstance(row.get("aim"), str)]
    return [row["method"] for row in numbers if row["numpy"] > min(8, row.get("aim", 8))]


def time_copy(x):
    """Return the time of a copy of an array to memory that is in use."""
    out, times = np.empty_like(x), []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(out, x)
        times.append(time.perf_counter() - start)
    return sorted(times)[2]


def profile(method, clock, drawn):
    """Return the copies of a step, and those of its parts, the largest first."""
    step = LocalStep(make_unit(method, NUMEL), get_ops("numpy"), RANKS)
    copies, parts = [], defaultdict(list)
    for number in range(STEPS + 1):
        gradients = [drawn.array()[drawn.window(RANKS * number + rank)] for rank in range(RANKS)]
        arrived = step.receive(gradients, number)
        clock.spent.clear()
        start = time.perf_counter()
        step.run(gradients[0], number, arrived)
        whole = time.perf_counter() - start
        if number == 0:
            continue  # The first step is slower.
        copy = time_copy(gradients[0])
        copies.append(whole / copy)
        rest = whole - sum(clock.spent.values())
        for name, seconds in [*clock.spent.items(), ("expressions and interpreter", rest)]:
            parts[name].append(seconds / copy)
    middle = {name: float(np.median(each)) for name, each in parts.items()}
    return float(np.median(copies)), sorted(middle.items(), key=lambda part: -part[1])


def main():
    clock = Clock()
    native.module.run = clock.wrap(native.module.run, lambda args: f"`{args[0]}`")
    for name, function in vars(NumpyOps).items():
        if callable(function) and name[0] != "_" and name in vars(Primitives):
            setattr(NumpyOps, name, clock.wrap(function, lambda args, name=name: f"NumPy's {name.rstrip('_')}"))
    rows, drawn = [], Gradients(near_square(NUMEL), RANKS * (STEPS + 1))
    for method in sys.argv[2:] or list_slow():
        copies, parts = profile(method, clock, drawn)
        named = [f"{name} {part:.1f}" for name, part in parts[:NAMED] if part >= SMALL]
        rows.append({"method": method, "copies": float(f"{copies:.3g}"), "parts": ", ".join(named)})
        print(rows[-1], flush=True)
    columns = {
        "method": {"title": "method"},
        "copies": {"title": "copies", "format": "3"},
        "parts": {"title": "the largest parts, in copies"},
    }
    tables.write(sys.argv[1], "Parts of a step of slow codecs, in copies of the gradient", columns, rows)


if __name__ == "__main__":
    main()
