"""Let the links of a run fall from 10 Gbit/s to 100 Mbit/s while it trains with `compressor = "auto"`.

    python benchmarks/auto_falling.py docs/results/auto_falling.json
    python benchmarks/auto_falling.py falling.json --ranks 3

The ranks train in DDP, each in a network namespace of its own. `tc` changes the rates of their links while they go on.
The gradients are random and known: small integers, which 16 bits hold. So nothing may be lost. The sum of their means
is compared with the sum of what the ranks got, with a last step that sends the residuals. If `qsgd` was taken, it is
not: that rounds at random and keeps no residual.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRACE_NUM_THREADS="1")

import tables
import torch
import torch.distributed as dist

import grace.torch
from grace.bench.run import Job
from grace.bench.step.network import Network, find_namespace_command
from grace.bench.step.ranks import torch_environment

FAST, SLOW = "10gbit", "100mbit"
# Steps until the links fall, and from then on. "auto" has measured and decided in the first ones.
BEFORE, AFTER = 40, 100
# 1 MB of gradients.
SHAPES = [(256, 256)] * 4
# Gradients are integers up to this one.
MOST = 8
# The file that asks for the fall.
READY = "ready"
POLL_S = 0.005
COLUMNS = {
    "ranks": {"title": "ranks"},
    "before": {"title": "method before"},
    "after": {"title": "after"},
    "steps": {"title": "steps until the change"},
    "same": {"title": "on all ranks in the same step"},
    "fast": {"title": "step before: ms", "format": ".1f"},
    "fallen": {"title": "until the change: ms", "format": ".1f"},
    "taken": {"title": "after: ms", "format": ".1f"},
    "lost": {"title": "lost per step", "format": ".1e"},
}


class Given(torch.nn.Module):
    """A model whose gradients are those that it is given."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True))


def run_rank(folder):
    """Train on this rank, and write when each step began, its method, and what was lost."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mine = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(Given())
    exchange = grace.torch.register(model, {"compressor": "auto"})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(mine)
    given, merged = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))

    def step(gradients):
        model(gradients).backward()
        for parameter, gradient, *sums in zip(model.module.weights, gradients, given, merged, strict=True):
            sums[0] += gradient
            sums[1] += parameter.grad
        optimizer.step()
        optimizer.zero_grad()

    begun, methods = [], []
    for number in range(BEFORE + AFTER):
        if number == BEFORE and mine == 0:
            open(os.path.join(folder, READY), "w").close()
        begun.append(time.time())
        step([torch.randint(-MOST, MOST + 1, shape, generator=draws).float() for shape in SHAPES])
        methods.append(exchange.config.to_dict()["compressor"]["name"])
    # What compression has left out so far is sent.
    exchange.change(compressor="none")
    step([torch.zeros(shape) for shape in SHAPES])
    for total in given:
        dist.all_reduce(total)
    lost = max(float((a / dist.get_world_size() - b).abs().max()) for a, b in zip(given, merged, strict=True))
    with open(os.path.join(folder, f"{mine}.json"), "w", encoding="utf-8") as file:
        json.dump({"begun": begun, "methods": methods, "lost": lost / len(begun)}, file)
    dist.destroy_process_group()


def measure_fall(ranks):
    """Run so many ranks, let their links fall meanwhile, and return the row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, __file__, folder, "--rank"]
        moments = []

        def slow_links(network):
            while not os.path.exists(os.path.join(folder, READY)):
                time.sleep(POLL_S)
            moments.append(time.time())
            network.change(SLOW)

        with Network(ranks, FAST) as network, Job(network, torch_environment(network), program, False) as job:
            threading.Thread(target=slow_links, args=(network,), daemon=True).start()
            if status := job.wait():
                sys.exit(status)
        found = []
        for number in range(ranks):
            with open(os.path.join(folder, f"{number}.json"), encoding="utf-8") as file:
                found.append(json.load(file))
    first = found[0]
    methods, seconds = first["methods"], [b - a for a, b in zip(first["begun"], first["begun"][1:], strict=False)]
    fell = next(i for i, at in enumerate(first["begun"]) if at > moments[0])
    changed = next((i for i in range(fell, len(methods)) if methods[i] != methods[fell]), None)
    until = len(seconds) if changed is None else changed
    lost = {} if "qsgd" in methods else {"lost": float(f"{max(one['lost'] for one in found):.1e}")}
    return {
        "ranks": ranks,
        "before": methods[fell],
        "after": methods[-1],
        **({} if changed is None else {"steps": changed - fell}),
        "same": "yes" if all(one["methods"] == methods for one in found) else "no",
        "fast": round(1e3 * statistics.median(seconds[BEFORE // 2 : fell - 1]), 1),
        "fallen": round(1e3 * statistics.median(seconds[fell:until]), 1),
        "taken": round(1e3 * statistics.median(seconds[until:]), 1),
        **lost,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(given.file)
        return
    if find_namespace_command() is None:
        sys.exit("This needs network namespaces with tc: see docs/measure.md, 'Links without root'.")
    rows = [measure_fall(ranks) for ranks in given.ranks]
    print(tables.format_markdown(COLUMNS, rows), flush=True)
    what = f'Links that fall from {FAST} to {SLOW} while ranks of DDP train with `compressor = "auto"`'
    command = shlex.join(["python", "benchmarks/auto_falling.py", *sys.argv[1:]])
    tables.write(given.file, what, COLUMNS, rows, commands=[command])


if __name__ == "__main__":
    main()
