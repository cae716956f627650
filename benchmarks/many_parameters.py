"""Time DDP with thousands of small parameters: plain, and with grace.

    torchrun --nproc_per_node 2 benchmarks/many_parameters.py docs/results/many_parameters.json

The model has 5,000 parameters of 10 elements, by default. Every rank uses one thread. Plain DDP and the configurations
of `CONFIGS` step in turns; a figure is the median over the turns of the time of the slowest rank. `--parameters`,
`--elements`, `--turns` and `--only` (names of configurations) take other values. Beside other work, processor time
differs less between runs than time.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import argparse
import statistics
import sys
import time

import tables
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import grace.torch

METHODS = ("topk", "qsgd", "efsignsgd", "signsgd")
ALONE = {"default_rules": False}
CONFIGS = {
    **{name: {"compressor": name} for name in ("none", "topk", "qsgd")},
    **{f"{name}, no default rules": {"compressor": name, **ALONE} for name in METHODS},
    **{
        f"{name}, no default rules, granularity layer": {"compressor": name, "granularity": "layer", **ALONE}
        for name in ("topk", "qsgd")
    },
}
COLUMNS = {
    "name": {"title": "configuration"},
    "setup_s": {"title": "set-up, s", "format": ".2f"},
    "setup_cpu_s": {"title": "set-up, processor s", "format": ".2f"},
    "first_ms": {"title": "first step, ms", "format": ",.0f"},
    "step_ms": {"title": "step, ms", "format": ",.0f"},
    "ratio": {"title": "x DDP", "format": ".2f"},
    "cpu_ms": {"title": "processor time, ms", "format": ",.0f"},
    "cpu_ratio": {"title": "x DDP", "format": ".2f"},
}


class Model(torch.nn.Module):
    """Sum of the squares of many small parameters."""

    def __init__(self, parameters, elements):
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList(torch.randn(elements) for _ in range(parameters))

    def forward(self, x):
        return torch.stack([(x * w * w).sum() for w in self.weights]).sum()


def time_work(work):
    """Return the seconds and the processor seconds that the work takes."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def max_over_ranks(value):
    """Return the largest of the values of all ranks."""
    x = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.item()


def median_ms(values):
    return 1000 * statistics.median(map(max_over_ranks, values))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path", nargs="?")
    parser.add_argument("--parameters", type=int, default=5000)
    parser.add_argument("--elements", type=int, default=10)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models, setup = {}, {"plain DDP": (0.0, 0.0)}
    for name in ("plain DDP", *given.only):
        model = DistributedDataParallel(Model(given.parameters, given.elements), gradient_as_bucket_view=True)
        models[name] = model
        if name in CONFIGS:
            setup[name] = time_work(lambda model=model, name=name: grace.torch.register(model, CONFIGS[name]))
    x = torch.full((given.elements,), 1.0 + dist.get_rank())

    def step(model):
        model(x).backward()

    # The first step makes DDP's buckets, and the second one uses them.
    first = {name: time_work(lambda model=model: step(model))[0] for name, model in models.items()}
    for model in models.values():
        step(model)
    times = {name: [] for name in models}
    for _ in range(given.turns):
        for name, model in models.items():
            times[name].append(time_work(lambda model=model: step(model)))
    rows = []
    for name, found in times.items():
        wall, cpu = (median_ms(values) for values in zip(*found, strict=True))
        row = {"name": name, "first_ms": 1000 * max_over_ranks(first[name])}
        row["setup_s"], row["setup_cpu_s"] = map(max_over_ranks, setup[name])
        row |= {"step_ms": wall, "cpu_ms": cpu}
        plain = rows[0] if rows else row
        row |= {"ratio": wall / plain["step_ms"], "cpu_ratio": cpu / plain["cpu_ms"]}
        rows.append({key: row[key] if key == "name" else round(row[key], 3) for key in COLUMNS})
        if dist.get_rank() == 0:
            print(rows[-1], file=sys.stderr, flush=True)
    if given.path and dist.get_rank() == 0:
        tables.write(
            given.path,
            f"DDP over gloo, {dist.get_world_size()} ranks, {given.parameters:,} parameters of {given.elements} "
            f"elements, one thread per rank; medians of {given.turns} turns",
            COLUMNS,
            rows,
            commands=[
                f"torchrun --nproc_per_node {dist.get_world_size()} benchmarks/many_parameters.py "
                + " ".join(sys.argv[1:])
            ],
            methods=CONFIGS,
        )
    dist.destroy_process_group()


main()
