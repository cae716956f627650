"""Time PowerSGD's three matrix products for a 5000 x 5000 matrix, with NumPy, PyTorch and grace's kernels.

    python benchmarks/products.py docs/results/products.json

It uses one thread. Each figure is the median of 15 repetitions in turns, divided by the time of a copy of the matrix.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import statistics
import sys
import time

import numpy as np
import tables
import torch

from grace.core.ops import get_ops

SIDE, RANK, REPETITIONS = 5000, 4, 15


def time_work(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


torch.set_num_threads(1)
rng = np.random.default_rng(0)
matrix, *factors = (rng.standard_normal((SIDE, n)).astype(np.float32) for n in (SIDE, RANK, RANK))
target = np.zeros_like(matrix)
rows = []
for title, framework, native in (("NumPy", "numpy", False), ("PyTorch", "torch", False), ("kernels", "numpy", True)):
    ops = get_ops(framework, native=native)
    m, p, q = (torch.from_numpy(x) if framework == "torch" else x for x in (matrix, *factors))
    works = {
        "copy": lambda: np.copyto(target, matrix),
        "mq": lambda ops=ops, m=m, q=q: ops.matmul(m, q),
        "mtp": lambda ops=ops, m=m, p=p: ops.matmul(m, p, transpose_a=True),
        "pqt": lambda ops=ops, p=p, q=q: ops.matmul(p, q, transpose_b=True),
    }
    times = {name: [] for name in works}
    for _ in range(REPETITIONS):
        for name, work in works.items():
            times[name].append(time_work(work))
    copy, *found = (statistics.median(mine) for mine in times.values())
    row = {name: round(mine / copy, 2) for name, mine in zip(list(works)[1:], found, strict=True)}
    rows.append({"products": title, **row, "together": round(sum(found) / copy, 2)})
columns = {"products": "products of", "mq": "M Q", "mtp": "Mᵀ P", "pqt": "P Qᵀ", "together": "together"}
tables.write(
    sys.argv[1],
    f"Products of PowerSGD with rank {RANK}, in copies of the matrix",
    {name: {"title": title} | ({} if name == "products" else {"format": "3"}) for name, title in columns.items()},
    rows,
)
