"""Time PowerSGD's three matrix products for a 5000 x 5000 matrix, with NumPy, PyTorch and grace's kernels.

    python benchmarks/products.py

It uses one thread. Each figure is the median of 15 repetitions in turns, divided by the time of a copy of the matrix.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import statistics
import time

import numpy as np
import torch

from grace.core.ops import get_ops

SIDE, RANK, REPETITIONS = 5000, 4, 15


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


torch.set_num_threads(1)
rng = np.random.default_rng(0)
matrix, *factors = (rng.standard_normal((SIDE, n)).astype(np.float32) for n in (SIDE, RANK, RANK))
target = np.zeros_like(matrix)
for framework, convert in (("numpy", np.asarray), ("torch", torch.from_numpy)):
    m, p, q = map(convert, (matrix, *factors))
    for native in (False, True):
        ops = get_ops(framework, native=native)
        works = {
            "copy": lambda: np.copyto(target, matrix),
            "M Q": lambda ops=ops, m=m, q=q: ops.matmul(m, q),
            "M^T P": lambda ops=ops, m=m, p=p: ops.matmul(m, p, transpose_a=True),
            "P Q^T": lambda ops=ops, p=p, q=q: ops.matmul(p, q, transpose_b=True),
        }
        times = {name: [] for name in works}
        for _ in range(REPETITIONS):
            for name, work in works.items():
                times[name].append(seconds(work))
        copy, *found = (statistics.median(mine) for mine in times.values())
        shown = ", ".join(f"{name} {mine / copy:.2f}" for name, mine in zip(list(works)[1:], found, strict=True))
        print(f"{framework:6} {'kernels' if native else 'own':8} {shown}, together {sum(found) / copy:.2f} copies")
