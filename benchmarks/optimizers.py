"""Compare the 1-bit optimizers with Adam and with signs of gradients, on real ranks.

    torchrun --nproc-per-node 2 benchmarks/optimizers.py docs/results/optimizers.json

A perceptron trains on scikit-learn's digits by Adam, and the character transformer of `grace report` by AdamW. All take
the same batches and the same learning rates. It takes about a quarter of an hour on two cores.
"""

import math
import os
import statistics
import sys

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRACE_NUM_THREADS="1")

import numpy as np
import tables
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional

import grace
from grace.report.task import find_task
from grace.report.tasks.torch_training import Run, TorchTraining
from grace.torch import optim

# Seeds differ by more on the digits than the optimizers do.
SEEDS = {"digits": range(12), "transformer": range(3)}
SIGNS = {"compressor": "efsignsgd", "communicator": "two_shot"}
COLUMNS = {
    "method": {"title": "optimizer"},
    "share": {"title": "bytes after the warm-up, %", "format": ".1f"},
    "digits": {"title": "digits: loss", "format": ".4f"},
    "digits_range": {"title": "lowest to highest", "range": True},
    "digits_above": {"title": "above Adam, %", "format": "+.1f"},
    "digits_deviation": {"title": "standard error", "format": ".1f"},
    "digits_diverged": {"title": "of 12 runs diverged"},
    "transformer": {"title": "transformer: loss", "format": ".3f"},
    "transformer_range": {"title": "lowest to highest", "range": True},
    "transformer_above": {"title": "above Adam, %", "format": "+.1f"},
    "transformer_deviation": {"title": "standard error", "format": ".1f"},
    "transformer_diverged": {"title": "of 3 runs diverged"},
}


class Digits(TorchTraining):
    """A perceptron on the digits, as a task of the report."""

    def __init__(self, seed, ranks, steps=1000, lr=1e-3):
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        self.images = torch.from_numpy(images[order] / 16).float()
        self.labels = torch.from_numpy(labels[order])
        run = Run(seed, ranks, 16, steps, lr, 0.9)
        model = run.seeded(self.network)
        super().__init__(run, model, torch.optim.Adam(model.parameters()), 1400)

    @staticmethod
    def network():
        hidden = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
        return torch.nn.Sequential(*hidden, torch.nn.Linear(256, 10))

    def batch_loss(self, chosen, rng):
        return functional.cross_entropy(self.model(self.images[chosen]), self.labels[chosen])

    def evaluate(self):
        loss = float(functional.cross_entropy(self.model(self.images[1400:]), self.labels[1400:]))
        return loss, loss


def make_transformer(seed, ranks):
    task = find_task("transformer")
    return task.start(seed, ranks, steps=task.steps, lr=task.lr, momentum=task.momentum)


TASKS = {
    "digits": (Digits, {}),
    "transformer": (make_transformer, {"betas": (0.9, 0.99), "weight_decay": 0.1, "decoupled_weight_decay": True}),
}


def optimizer_of(method, model, steps, options):
    """Return the optimizer of a row."""
    named = list(model.named_parameters())
    if method in ("Adam", "Adam, signs of gradients"):
        adam = torch.optim.Adam(model.parameters(), **options)
        config = SIGNS if "signs" in method else {"compressor": "none"}
        return grace.DistributedOptimizer(adam, named, config)
    if method == "ZeroOneAdam":
        # From the end of the warm-up on, and from the middle of the rest.
        every = {0: 2, 2 * (steps // 5): 4}
        return optim.ZeroOneAdam(named, total_steps=steps, every=every, **options)
    if "10 %" in method:
        return optim.OneBitAdam(named, freeze_step=steps // 10, **options)
    if "uncompressed" in method:
        options = {"config": {"compressor": "none"}, **options}
    return optim.OneBitAdam(named, total_steps=steps, scaled="paper" not in method, **options)


METHODS = (
    "Adam",
    "OneBitAdam",
    "OneBitAdam, uncompressed",
    "OneBitAdam, warm-up of 10 %",
    "OneBitAdam, as in the paper",
    "ZeroOneAdam",
    "Adam, signs of gradients",
)


def train(method, task, seed):
    """Return the loss at the end, and the bytes of the last exchange as a share of those of the gradients."""
    start, options = TASKS[task]
    training = start(seed, dist.get_world_size())
    steps = training.run.steps
    optimizer = optimizer_of(method, training.model, steps, {"lr": training.run.lr, **options})
    parameters = dict(training.model.named_parameters())
    for step in range(steps):
        for name, gradient in training.gradients(dist.get_rank(), step).items():
            parameters[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        optimizer.step()
    stats = optimizer.grace.stats()
    return training.loss(), stats["wire_bytes"] / stats["dense_bytes"]


def row_of(method, adam):
    """Train by a method; return its row. `adam` has the losses of Adam by task, and takes them from the first row."""
    row = {"method": method}
    for task, seeds in SEEDS.items():
        losses, shares = zip(*(train(method, task, seed) for seed in seeds), strict=True)
        row["share"] = 100 * shares[0]
        if not all(map(math.isfinite, losses)):
            row[f"{task}_diverged"] = sum(not math.isfinite(loss) for loss in losses)
            continue
        ends = [round(end, 4) for end in (min(losses), max(losses))]
        row |= {task: statistics.fmean(losses), f"{task}_range": ends}
        above = [100 * (loss / plain - 1) for loss, plain in zip(losses, adam.setdefault(task, losses), strict=True)]
        if method != METHODS[0]:
            deviation = statistics.stdev(above) / math.sqrt(len(above))
            row |= {f"{task}_above": round(statistics.fmean(above), 2), f"{task}_deviation": round(deviation, 2)}
    return row


def main(path):
    dist.init_process_group("gloo")
    rows, adam = [], {}
    for method in METHODS:
        rows.append(row_of(method, adam))
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    if dist.get_rank() == 0:
        seeds = " and ".join(f"{seeds[0]} to {seeds[-1]} for the {task}" for task, seeds in SEEDS.items())
        what = f"Validation loss of the 1-bit optimizers at the end, 2 ranks, seeds {seeds}"
        command = f"torchrun --nproc-per-node {dist.get_world_size()} benchmarks/optimizers.py {path}"
        tables.write(path, what, COLUMNS, rows, commands=[command])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
