"""A run of a trainer with grace's callback, and the same run resumed from the trainer's own checkpoint.

    torchrun --standalone --nproc-per-node 2 tests/examples/resumed_trainer.py TRAINER FOLDER
    torchrun --standalone --nproc-per-node 3 tests/examples/resumed_trainer.py TRAINER FOLDER --resume

The first command trains 12 steps of two accumulated batches each, with an evaluation in between, and saves after 8.
Then it trains the last 4 again. The second one only trains these, from what other ranks have saved. Rank 0 prints as
JSON what test_trainers.py looks at.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

CONFIG = {
    "compressor": "topk",
    "compress_ratio": 0.1,
    "rules": [{"match": "*second.weight", "compressor": "powersgd"}],
}
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
STEPS, SAVED, BATCH, ACCUMULATED = 12, 8, 4, 2


class Images(Dataset[dict[str, torch.Tensor]]):
    """As many images as all ranks see in four steps."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.images = torch.randn(4 * ACCUMULATED * BATCH * RANKS, 64, generator=random)
        self.labels = (self.images[:, :10]).argmax(dim=1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"images": self.images[number], "labels": self.labels[number]}


class Classifier(nn.Module):
    """A network with its loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.second, self.output = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.output(F.relu(self.second(F.relu(self.first(images)))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@dataclasses.dataclass
class Run:
    """The result of a run on a rank."""

    weights: list[torch.Tensor]
    exchange: Any
    # The state of the exchange before the first step.
    began: dict[str, Any] | None
    # The names of the scalars that the trainer has logged.
    logged: list[str]


def everyone(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [value] * RANKS
    if RANKS > 1:
        dist.all_gather_object(values, value)
    return values


def residuals(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the means of the residuals over the ranks."""
    every = [
        {f"{unit}/{key}": x for unit, entry in state["tensors"].items() for key, x in entry["memory"].items()}
        for state in states
    ]
    return {name: torch.stack([one[name].double() for one in every]).mean(dim=0) for name in every[0]}


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the arrays of a state."""
    return {
        f"{unit}/{kind}/{key}": x
        for unit, entry in state["tensors"].items()
        for kind in ("memory", "compressor")
        for key, x in entry[kind].items()
    }


def equal(a: Run, b: Run) -> bool:
    """Return whether two runs have the same weights and states, bit for bit, on all ranks."""
    first, second = flat(a.exchange.state_dict()), flat(b.exchange.state_dict())
    same = all(torch.equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))
    same = same and first.keys() == second.keys() and all(torch.equal(x, second[name]) for name, x in first.items())
    return all(everyone(same))


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer = importlib.import_module(f"tests.examples.trainers.{args.trainer}")
    whole = None if args.resume else trainer.train(args.folder, resume=False)
    again = trainer.train(args.folder, resume=True)
    found: dict[str, Any] = {
        "replicas": all(
            torch.equal(x, y) for other in everyone(again.weights) for x, y in zip(other, again.weights, strict=True)
        ),
        "logged": sorted({name for name in again.logged if name.startswith("grace/")}),
    }
    if again.exchange is not None:
        found |= {
            "steps": int(again.exchange.state_dict()["step"]),
            "began": int(again.began["step"]),
            "held back": {name: float(x.norm()) for name, x in residuals(everyone(again.began)).items()},
            "equal": None if whole is None else equal(whole, again),
        }
    if RANKS == 1 or dist.get_rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
