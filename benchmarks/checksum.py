"""Time what `checksum = true` costs: writing one rank's wire buffer and reading two, with and without it.

    python benchmarks/checksum.py docs/results/checksum.json

It uses one thread. Each figure is the difference of two medians of 15 repetitions in turns, in microseconds.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import functools
import statistics
import sys
import time

import numpy as np
import tables
import torch

from grace.core.ops import get_ops
from grace.core.spec import Field, TensorSpec
from grace.core.wire.layout import GatherLayout

REPETITIONS = 15
FRAMEWORKS = {"numpy": "NumPy", "torch": "PyTorch"}
LENGTHS = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
WORKS = {"write": "write one buffer", "read": "read those of two ranks"}


def time_us(work):
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def measure_overhead(framework, length):
    """Return the microseconds that a checksum adds to each of WORKS."""
    ops = get_ops(framework)
    plain = GatherLayout([TensorSpec("w", (length,))], [[Field("codes", "uint8", length)]], [True])
    payload = {"codes": ops.cast(np.random.default_rng(0).integers(0, 256, length).astype(np.uint8), "uint8")}
    works = {}
    for name, layout in (("without", plain), ("with", plain.checked())):
        sent = ops.concat([layout.encode(ops, [payload], [False], 0)] * 2)
        works[name, "write"] = functools.partial(layout.encode, ops, [payload], [False], 0)
        works[name, "read"] = functools.partial(layout.decode, ops, sent, 2, 0)
    times = {name: [] for name in works}
    for _ in range(REPETITIONS):
        for name, work in works.items():
            times[name].append(time_us(work))
    median = {name: statistics.median(found) for name, found in times.items()}
    return {work: round(median["with", work] - median["without", work]) for work in WORKS}


def main():
    torch.set_num_threads(1)
    rows = []
    for framework, title in FRAMEWORKS.items():
        found = {length: measure_overhead(framework, length) for length in LENGTHS.values()}
        for work, words in WORKS.items():
            times = {name: found[length][work] for name, length in LENGTHS.items()}
            rows.append({"work": f"{title}: {words}", **times})
            print(rows[-1], file=sys.stderr)
    tables.write(
        sys.argv[1],
        "Microseconds that a checksum adds, by the bytes of a rank's payload; one thread",
        {"work": {"title": ""}, **{name: {"title": name} for name in LENGTHS}},
        rows,
    )


main()
