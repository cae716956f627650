"""Compare steps of `compressor = "auto"` with those of plain DDP, in turns within one job.

    python benchmarks/auto.py docs/results/auto.json
    python benchmarks/auto.py auto.json --models resnet --links none 10gbit --seconds 60

Three copies of a model train in turns on two ranks of this machine: one in plain DDP, one in plain DDP as well, which
shows the noise, and one with "auto" on DDP. All that "auto" measures and tries counts, except in the first two turns.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRACE_NUM_THREADS="1")

import tables
import torch
import torch.distributed as dist

import grace.torch
from grace.bench.step.models_torch import MODELS

RANKS = 2
# "auto" takes medians of ten steps: the first step of a turn, which follows the turns of others, must be one of many.
TURN = 25
# Turns in which buffers are made, and in which "auto" measures and decides for the first time.
FIRST = 2
COLUMNS = {
    "model": {"title": "model"},
    "link": {"title": "link"},
    "chosen": {"title": "`auto` took"},
    "turns": {"title": f"turns of {TURN} steps"},
    "ms": {"title": "plain DDP: ms"},
    "again": {"title": "plain DDP again: x time", "format": ".3f"},
    "auto": {"title": "`auto`: x time", "format": ".3f"},
}


class Loss(torch.nn.Module):
    """The loss of a model as a module, because DistributedDataParallel acts on `forward`."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS[name]()

    def forward(self):
        return self.model.loss()


class Training:
    """A model in DDP and its optimizer."""

    def __init__(self, name):
        self.ddp = torch.nn.parallel.DistributedDataParallel(Loss(name), gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-4)

    def run_turn(self):
        """Take the steps of a turn on all ranks, and return their seconds on this one."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(TURN):
            self.ddp().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return time.perf_counter() - begin


def run_rank(name, seconds):
    """Train on this rank, and return what rank 0 has measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainings = {label: Training(name) for label in ("plain", "again", "auto")}
    exchange = grace.torch.register(trainings["auto"].ddp, {"compressor": "auto"})
    found, order, goes_on = {label: [] for label in trainings}, list(trainings), torch.ones(1)
    begin = time.perf_counter()
    while goes_on:
        for label in order:
            found[label].append(trainings[label].run_turn())
        # Nobody is always the first.
        order.append(order.pop(0))
        goes_on[0] = time.perf_counter() - begin < seconds
        dist.broadcast(goes_on, 0)
    rows = list(zip(*(turns[FIRST:] for turns in found.values()), strict=True))
    return {
        "chosen": exchange.stats()["auto"]["compressor"],
        "turns": len(rows),
        "ms": round(1e3 * statistics.median(plain for plain, _, _ in rows) / TURN, 1),
        "again": round(statistics.median(again / plain for plain, again, _ in rows), 3),
        "auto": round(statistics.median(2 * auto / (plain + again) for plain, again, auto in rows), 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--models", nargs="+", default=["resnet", "transformer", "mlp"], choices=list(MODELS))
    parser.add_argument("--links", nargs="+", default=["none", "10gbit", "1gbit"])
    parser.add_argument("--seconds", type=float, default=120, help="of the turns of a model over a link")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        row = run_rank(given.rank, given.seconds)
        if dist.get_rank() == 0:
            with open(given.file, "w", encoding="utf-8") as file:
                json.dump(row, file)
        dist.destroy_process_group()
        return
    rows = []
    for model in given.models:
        for link in given.links:
            part = f"{given.file}.part"
            script = [sys.executable, __file__, part, "--rank", model, "--seconds", str(given.seconds)]
            launch = [sys.executable, "-m", "grace", "bench", "run", "--link", link, "--ranks", str(RANKS), "--"]
            subprocess.run([*launch, *script], check=True)
            with open(part, encoding="utf-8") as file:
                rows.append({"model": model, "link": link, **json.load(file)})
            os.remove(part)
            print(tables.format_markdown(COLUMNS, rows), flush=True)
    what = f"Steps with `auto` beside plain DDP, in turns on {RANKS} ranks"
    command = shlex.join(["python", "benchmarks/auto.py", *sys.argv[1:]])
    tables.write(given.file, what, COLUMNS, rows, commands=[command])


if __name__ == "__main__":
    main()
