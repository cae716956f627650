"""Time what `checksum = true` costs: writing one rank's wire buffer and reading two, with and without it.

    python benchmarks/checksum.py

It uses one thread. Each figure is the median of 15 repetitions in turns, in microseconds.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import functools
import statistics
import time

import numpy as np
import torch

from grace.core.exchange.wire import GatherLayout
from grace.core.ops import get_ops
from grace.core.values.spec import Field, TensorSpec

REPETITIONS = 15


def microseconds(work):
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


torch.set_num_threads(1)
for framework in ("numpy", "torch"):
    ops = get_ops(framework)
    for length in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        plain = GatherLayout([TensorSpec("w", (length,))], [[Field("codes", "uint8", length)]], [True])
        payload = {"codes": ops.cast(np.random.default_rng(0).integers(0, 256, length).astype(np.uint8), "uint8")}
        works = {}
        for name, layout in (("without", plain), ("with", plain.checked())):
            sent = ops.concat([layout.encode(ops, [payload], [False], 0)] * 2)
            works[name, "write"] = functools.partial(layout.encode, ops, [payload], [False], 0)
            works[name, "read two"] = functools.partial(layout.decode, ops, sent, 2, 0)
        times = {name: [] for name in works}
        for _ in range(REPETITIONS):
            for name, work in works.items():
                times[name].append(microseconds(work))
        shown = ", ".join(f"{' '.join(name)} {statistics.median(found):,.0f}" for name, found in times.items())
        print(f"{framework:6} {length:>10,} bytes: {shown}")
