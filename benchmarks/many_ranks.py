"""Train the network of the digits examples on many simulated ranks, by the communicators whose bytes do not grow.

    python benchmarks/many_ranks.py docs/results/many_ranks.json

All ranks live in one process (`grace.Simulation`) and compute one after another, so that the accuracy is that of a real
run, and the time is not. The learning rates are those of examples/digits.py. It takes about half an hour on one core.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRACE_NUM_THREADS="1")

import tables
import torch
from torch.nn import functional

import grace
from grace.core.session.simulation import Simulation

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import digits

RANKS, BATCH, EPOCHS, SEEDS = 16, 8, 30, (0, 1)
# One bit per element to the owners, and four bits per element back.
FINER = {"name": "two_shot", "second": {"name": "qsgd", "quantum_num": 7}}
# The rows of the table: a compressor with what is not its default, and the communicators that it is trained with.
BOTH = ("allgather", "two_shot")
ROWS: dict[str, tuple[dict[str, Any], tuple[str | dict[str, Any], ...]]] = {
    "none": ({}, ("allreduce",)),
    "qsgd": ({}, BOTH),
    "terngrad": ({"memory": "residual"}, BOTH),
    "topk": ({"compress_ratio": 0.01}, (*BOTH, "sparse_allreduce")),
    "efsignsgd": ({}, (*BOTH, FINER)),
}
COLUMNS = {
    "method": {"title": "method"},
    "options": {"title": "options"},
    "allreduce": {"title": "allreduce", "format": ".2f"},
    "allgather": {"title": "allgather", "format": ".2f"},
    "two_shot": {"title": "two_shot", "format": ".2f"},
    "finer": {"title": "two_shot, `second` = qsgd with 7 levels", "format": ".2f"},
    "sparse_allreduce": {"title": "sparse_allreduce", "format": ".2f"},
}


def measure_accuracy(method: str, communicator: str | dict[str, Any], seed: int) -> float:
    """Return the percentage of test images that are classified rightly after a run."""
    torch.manual_seed(seed)
    data, setting = digits.load_data(), grace.compressors.about(method).digits
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
    config = grace.make_config({"compressor": method, **ROWS[method][0], "communicator": communicator}, seed=seed)
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
    return 100 * float((guesses == torch.from_numpy(data.test.labels)).double().mean())


def main(path: str) -> None:
    """Measure every row, print it, and write the table to a file."""
    torch.set_num_threads(1)
    rows = []
    for method, (options, communicators) in ROWS.items():
        row: dict[str, Any] = {"method": method, "options": ", ".join(f"{k} = {v}" for k, v in options.items())}
        for communicator in communicators:
            found = [measure_accuracy(method, communicator, seed) for seed in SEEDS]
            row[communicator if isinstance(communicator, str) else "finer"] = round(statistics.mean(found), 2)
            print(f"{method:10} {communicator!s:16} {found}", flush=True)
        rows.append(row)
    tables.write(
        path,
        "Test accuracy in percent of a small convolutional network on scikit-learn's digits: "
        f"{RANKS} simulated ranks, batch {BATCH} each, {EPOCHS} epochs; means over the seeds "
        f"{', '.join(map(str, SEEDS))}",
        COLUMNS,
        rows,
    )


if __name__ == "__main__":
    main(sys.argv[1])
