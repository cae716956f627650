"""Compare one scale, or one choice of elements, per tensor with one for all tensors together.

    python benchmarks/layers.py docs/results/layers.json

A perceptron trains on scikit-learn's digits with SGD on simulated ranks. In the second column the gradients are
concatenated to one tensor before they are compressed. In the rows with a factor, one layer has other units: its weights
are larger and its gradients smaller by that factor. It takes some minutes on one thread.
"""

import os
import statistics
import sys

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import numpy as np
import tables
import torch
from sklearn.datasets import load_digits

import grace

RANKS, BATCH, EPOCHS, SEEDS = 2, 32, 10, (0, 1, 2)
LR, MOMENTUM = 0.02, 0.9
TOPK = {"compressor": "topk", "compress_ratio": 0.01}
METHODS = {
    "none": {"compressor": "none"},
    "efsignsgd": {"compressor": "efsignsgd", "memory": "residual"},
    "onebit": {"compressor": "onebit"},
    "terngrad": {"compressor": "terngrad"},
    "3lc": {"compressor": "3lc"},
    "lpc": {"compressor": "lpc", "width": 4},
    "eightbit": {"compressor": "eightbit"},
    "qsgd": {"compressor": "qsgd", "quantum_num": 7},
    "topk": TOPK,
    "topk, 5 %": {**TOPK, "compress_ratio": 0.05},
}
# The factor by which the gradients of the middle layer are smaller.
FACTORS = {"none": (1, 3, 10), "topk": (1, 3, 10), "topk, 5 %": (1, 3, 10)}
COLUMNS = {
    "method": {"title": "method"},
    "apart": {"title": "loss, per tensor", "format": ".3f"},
    "apart_range": {"title": "lowest to highest", "range": True},
    "together": {"title": "loss, all together", "format": ".3f"},
    "together_range": {"title": "lowest to highest", "range": True},
}


class Scaled(torch.nn.Linear):
    """Linear layer with weights that are larger by a factor, and the same output."""

    def __init__(self, inputs, outputs, factor):
        super().__init__(inputs, outputs)
        self.factor = factor
        with torch.no_grad():
            self.weight.mul_(factor)
            self.bias.mul_(factor)

    def forward(self, x):
        return super().forward(x) / self.factor


def make_network(factor):
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), Scaled(256, 128, factor), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def train(config, factor, seed, images, labels, together):
    """Return the mean training loss of the last epoch."""
    torch.manual_seed(seed)
    model = make_network(factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    shapes = {"all": (total,)} if together else {name: tuple(p.shape) for name, p in parameters.items()}
    options = {"seed": seed, "default_rules": False, "granularity": "layer"}
    simulation, rng = (
        grace.Simulation(RANKS, shapes, {**config, **options}, framework="torch"),
        np.random.default_rng(seed),
    )
    for _ in range(EPOCHS):
        order, losses = rng.permutation(len(images)), []
        for start in range(0, len(order) - RANKS * BATCH + 1, RANKS * BATCH):
            given = []
            for rank in range(RANKS):
                mine = order[start + rank * BATCH : start + (rank + 1) * BATCH]
                loss = torch.nn.functional.cross_entropy(model(images[mine]), labels[mine])
                gradients = torch.autograd.grad(loss, parameters.values())
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                given.append({"all": flat} if together else dict(zip(parameters, gradients, strict=True)))
                losses.append(loss.item())
            # All ranks receive the same bits, so one model stands for all.
            merged = simulation.step(given, lr=LR)[0]
            if together:
                pieces = merged["all"].split([p.numel() for p in parameters.values()])
                merged = {n: x.view_as(p) for (n, p), x in zip(parameters.items(), pieces, strict=True)}
            for name, p in parameters.items():
                p.grad = merged[name]
            optimizer.step()
    return statistics.fmean(losses)


def main():
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    rows = []
    for name, config in METHODS.items():
        for factor in FACTORS.get(name, (1,)):
            row = {"method": name if factor == 1 else f"{name}, factor {factor}"}
            for key, together in (("apart", False), ("together", True)):
                found = [train(config, factor, seed, images, labels, together) for seed in SEEDS]
                row[key] = round(statistics.fmean(found), 4)
                row[f"{key}_range"] = [f"{worst(found):.3f}" for worst in (min, max)]
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    tables.write(
        sys.argv[1],
        f"Training loss of the last epoch: SGD, learning rate {LR}, momentum {MOMENTUM}, {RANKS} simulated "
        f"ranks, batch {BATCH} each, {EPOCHS} epochs; means over the seeds {', '.join(map(str, SEEDS))}",
        COLUMNS,
        rows,
        methods=METHODS,
    )


main()
