"""Train a small perceptron with AdamW and every method at its default options, on simulated ranks.

    python benchmarks/adamw.py docs/results/adamw.json

All methods have the optimizer's settings of the dense run; none was tuned for a method. A second row of topk keeps 10 %
of the elements. It takes some minutes on one thread.
"""

import os
import statistics
import sys
import time

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import numpy as np
import tables
import torch
from sklearn.datasets import load_digits

import grace

RANKS, BATCH, EPOCHS, SEEDS = 2, 32, 20, (0, 1, 2)
LR, DECAY = 0.002, 0.01
TEST_IMAGES = 360
COLUMNS = {
    "method": {"title": "method"},
    "accuracy": {"title": "accuracy, %", "format": ".2f"},
    "accuracy_range": {"title": "lowest to highest", "range": True},
    "loss": {"title": "training loss", "format": ".4f"},
    "bytes": {"title": "% of dense bytes", "format": ".1f"},
}


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )


def train(config, seed, images, labels):
    """Return the accuracy in percent, the mean training loss of the last epoch, and the bytes sent over dense bytes."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    simulation = grace.Simulation(RANKS, shapes, {**config, "seed": seed}, framework="torch")
    rng, shares = np.random.default_rng(seed), []
    for _ in range(EPOCHS):
        order, losses = rng.permutation(len(images) - TEST_IMAGES), []
        for start in range(0, len(order) - RANKS * BATCH + 1, RANKS * BATCH):
            gradients = []
            for rank in range(RANKS):
                mine = order[start + rank * BATCH : start + (rank + 1) * BATCH]
                loss = torch.nn.functional.cross_entropy(model(images[mine]), labels[mine])
                gradients.append(dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True)))
                losses.append(loss.item())
            # All ranks receive the same bits, so one model stands for all.
            merged = simulation.step(gradients)[0]
            for name, p in parameters.items():
                p.grad = merged[name]
            optimizer.step()
            stats = simulation.stats()
            shares.append(stats["wire_bytes"] / stats["dense_bytes"])
    with torch.no_grad():
        found = model(images[-TEST_IMAGES:]).argmax(1) == labels[-TEST_IMAGES:]
    return 100 * found.double().mean().item(), statistics.fmean(losses), 100 * statistics.fmean(shares)


def main():
    torch.set_num_threads(1)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.tensor(digits.data[order] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target[order])
    configs = {name: {"compressor": name} for name in grace.compressors}
    configs["topk, 10 %"] = {"compressor": "topk", "compress_ratio": 0.1}
    rows = []
    for name, config in configs.items():
        began = time.monotonic()
        accuracies, losses, shares = zip(*(train(config, seed, images, labels) for seed in SEEDS), strict=True)
        row = {
            "method": name,
            "accuracy": round(statistics.fmean(accuracies), 2),
            "accuracy_range": [f"{worst(accuracies):.2f}" for worst in (min, max)],
            "loss": round(statistics.fmean(losses), 5),
            "bytes": round(statistics.fmean(shares), 2),
        }
        rows.append(row)
        print(row, f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    # Those that train most alike first.
    rows.sort(key=lambda row: (row["method"] != "none", row["loss"]))
    tables.write(
        sys.argv[1],
        f"AdamW, learning rate {LR}, weight decay {DECAY}, {RANKS} simulated ranks, batch {BATCH} each, "
        f"{EPOCHS} epochs; means over the seeds {', '.join(map(str, SEEDS))}",
        COLUMNS,
        rows,
    )


main()
