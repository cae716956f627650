"""Train the network of the digits examples on many simulated ranks, by the communicators whose bytes do not grow.

    python benchmarks/many_ranks.py docs/results/many_ranks.json

All ranks live in one process (`grace.Simulation`) and compute one after another, so that the accuracy is that of a real
run, and the time is not. The learning rates are those of examples/digits.py. It takes about half an hour on one core.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRACE_NUM_THREADS="1")

import torch
from torch.nn import functional

import grace
from grace.core.exchange.simulation import Simulation
from grace.machine import processor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import digits

RANKS, BATCH, EPOCHS, SEEDS = 16, 8, 30, (0, 1)
METHODS = {
    "none": {"compressor": "none"},
    "qsgd": {"compressor": "qsgd"},
    "efsignsgd": {"compressor": "efsignsgd"},
    "terngrad": {"compressor": "terngrad", "memory": "residual"},
    "topk": {"compressor": "topk", "compress_ratio": 0.01},
}
COMMUNICATORS = dict.fromkeys(METHODS, ("allgather", "two_shot"))
COMMUNICATORS |= {"none": ("allreduce",), "topk": ("allgather", "two_shot", "sparse_allreduce")}
# One bit per element to the owners, and four bits per element back.
FINER = {"name": "two_shot", "second": {"name": "qsgd", "quantum_num": 7}}
COMMUNICATORS["efsignsgd"] = ("allgather", "two_shot", FINER)


def accuracy(method: str, communicator: str | dict[str, Any], seed: int) -> float:
    """Return the share of test images that are classified rightly after a run."""
    torch.manual_seed(seed)
    data, setting = digits.load_data(), digits.SETTINGS[method]
    images, labels = (torch.from_numpy(x) for x in data.train)
    images = images.unsqueeze(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=setting.lr, momentum=setting.momentum)
    config = grace.make_config({**METHODS[method], "communicator": communicator}, seed=seed)
    exchange = Simulation(RANKS, {n: tuple(p.shape) for n, p in parameters.items()}, config, framework="torch")
    steps = len(labels) // (RANKS * BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(labels))[: steps * RANKS * BATCH].split(RANKS * BATCH):
            given = []
            for mine in chosen.split(BATCH):
                loss = functional.cross_entropy(model(images[mine]), labels[mine])
                given.append(dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True)))
            merged = exchange.step(given, lr=optimizer.param_groups[0]["lr"])[0]
            for name, p in parameters.items():
                p.grad = merged[name]
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        guesses = model(torch.from_numpy(data.test.images).unsqueeze(1)).argmax(1)
    return float((guesses == torch.from_numpy(data.test.labels)).double().mean())


def main(path: str) -> None:
    """Measure every row, print it, and write all of them to a file."""
    torch.set_num_threads(1)
    started, rows = time.time(), []
    for method, names in COMMUNICATORS.items():
        for communicator in names:
            found = [accuracy(method, communicator, seed) for seed in SEEDS]
            rows.append({"method": method, "communicator": communicator, "accuracy": found})
            print(f"{method:10} {communicator!s:16} {100 * statistics.mean(found):6.2f} %  {found}", flush=True)
    settings = {"ranks": RANKS, "batch": BATCH, "epochs": EPOCHS, "seeds": SEEDS}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "grace": grace.__version__}
    result = {"settings": settings, "rows": rows, "machine": processor(), "versions": versions}
    Path(path).write_text(json.dumps({**result, "seconds": round(time.time() - started)}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
