"""Train the model of benchmarks/outer.py by DiLoCo and SparseLoCo in plain PyTorch, to check grace's outer steps.

    python benchmarks/outer_reference.py docs/results/outer_reference.json

The recursions are written down once more here, without grace: only the model, its batches and the schedule of the
learning rate are those of the study. The file gets a line per run, and what it has is not trained again. A run of 600
steps takes two minutes of one core.
"""

import argparse
import itertools
import json
import os

import outer
import tables
import torch

RANKS, EVERY, LR = outer.RANKS, outer.EVERY, outer.RATES[0]
COLUMNS = {
    "method": {"title": "method"},
    "steps": {"title": "steps", "format": ","},
    "seed": {"title": "seed"},
    "loss": {"title": "loss", "format": ".4f"},
}


class DiLoCo:
    """The mean change of the weights is the gradient of Nesterov's SGD."""

    def __init__(self, anchor):
        self._anchor = anchor
        self._optimizer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)

    def sync(self, weights):
        """Move the anchor. `weights` has the tensors of each rank."""
        for a, *theirs in zip(self._anchor, *weights, strict=True):
            a.grad = torch.stack([a.detach() - w for w in theirs]).mean(0)
        self._optimizer.step()


class SparseLoCo:
    """The largest elements with feedback that forgets, and the mean over their senders, clipped to the median norm.

    A tensor is cut into chunks of `chunk` elements, each of which sends the largest 1/64. With `bins`, the values of a
    tensor fall into so many bins over six standard deviations, and the mean of a bin takes their place.
    """

    def __init__(self, anchor, chunk=4096, bins=4):
        self._anchor, self._chunk, self._bins = anchor, chunk, bins
        self._errors = [[torch.zeros(a.numel()) for a in anchor] for _ in range(RANKS)]

    def sync(self, weights):
        """Move the anchor. `weights` has the tensors of each rank."""
        for place, a in enumerate(self._anchor):
            sent = torch.stack([self._compress(self._errors[r][place], a - weights[r][place]) for r in range(RANKS)])
            norms = sent.norm(dim=1, keepdim=True).clamp(min=1e-30)
            sent *= (norms.median() / norms).clamp(max=1)
            a -= (sent.sum(0) / (sent != 0).sum(0).clamp(min=1)).view(a.shape)

    def _compress(self, error, change):
        """Return what a rank sends, as a flat tensor, and keep the rest in its error."""
        error.mul_(0.95).add_(change.flatten())
        kept = torch.cat([self._mask_largest(part) for part in error.abs().split(self._chunk)])
        values = error[kept]
        sent = torch.zeros_like(error)
        sent[kept] = self._quantize(values) if self._bins and len(values) > self._bins else values
        error -= sent
        return sent

    def _mask_largest(self, sizes):
        """Return a mask of the elements of a chunk that are sent."""
        mask = torch.zeros(len(sizes), dtype=torch.bool)
        mask[sizes.topk(max(1, len(sizes) // 64)).indices] = True
        return mask

    def _quantize(self, values):
        centre, width = values.mean(), 6 * values.std() / self._bins
        numbers = ((values - centre) / width + self._bins / 2).floor().clamp(0, self._bins - 1).long()
        sums = torch.zeros(self._bins).index_add(0, numbers, values)
        return (sums / numbers.bincount(minlength=self._bins).clamp(min=1))[numbers]


METHODS = {"DiLoCo": DiLoCo, "SparseLoCo": SparseLoCo}


@torch.no_grad()
def train(make, seed, steps, task):
    """Return the validation loss of the anchor at the end. `make(anchor)` returns what moves it at a sync."""
    ranks = [task.start(seed, RANKS, steps=steps, lr=LR, momentum=task.momentum) for _ in range(RANKS)]
    weights = [list(rank.model.parameters()) for rank in ranks]
    optimizers = [torch.optim.AdamW(mine, LR, (task.momentum, 0.99), weight_decay=0.1) for mine in weights]
    anchor = [w.detach().clone() for w in weights[0]]
    method = make(anchor)
    for step in range(steps):
        for number, (rank, mine, optimizer) in enumerate(zip(ranks, weights, optimizers, strict=True)):
            with torch.enable_grad():
                found = rank.gradients(number, step)
            for w, g in zip(mine, found.values(), strict=True):
                w.grad = g
            optimizer.param_groups[0]["lr"] = rank.rate(step)
            optimizer.step()
        if (step + 1) % EVERY == 0:
            method.sync(weights)
            for mine in weights:
                for w, a in zip(mine, anchor, strict=True):
                    w.copy_(a)
    return ranks[0].loss()


def main():
    parser = argparse.ArgumentParser(description="Train the runs that a file lacks, and add them.")
    parser.add_argument("path", help="the file of results")
    parser.add_argument("--steps", type=int, nargs="+", default=outer.STEPS[:1])
    parser.add_argument("--seeds", type=int, nargs="+", default=outer.SEEDS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    rows = []
    if os.path.exists(arguments.path):
        with open(arguments.path, encoding="utf-8") as file:
            rows = json.load(file)["rows"]
    done = {(row["method"], row["steps"], row["seed"]) for row in rows}
    for steps, seed, method in itertools.product(arguments.steps, arguments.seeds, arguments.methods):
        if (method, steps, seed) not in done:
            loss = train(METHODS[method], seed, steps, outer.Million())
            rows.append({"method": method, "steps": steps, "seed": seed, "loss": round(loss, 4)})
            print(rows[-1], flush=True)
            what = "Validation loss of the recursions in plain PyTorch"
            tables.write(arguments.path, what, COLUMNS, sorted(rows, key=lambda row: (row["steps"], row["method"])))


if __name__ == "__main__":
    main()
