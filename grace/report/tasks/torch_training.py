"""The part of a `Training` that all tasks in PyTorch share: batches, gradients, schedule and optimizer step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from grace.core.config.recommended import Optimizer

# Parts of a run in which the learning rate rises, and what remains of it at the end.
WARM_UP, LAST = 0.1, 0.1


class Run(NamedTuple):
    """The arguments of `Task.start`, and the batch of the task."""

    seed: int
    ranks: int
    batch: int
    steps: int
    lr: float
    momentum: float

    def seeded(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a model whose first weights follow from the seed; the generator of PyTorch stays as it is."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            return make()


class TorchTraining(ABC):
    """A run of a module and an optimizer, in one thread.

    The samples are shuffled and dealt to the ranks, as by a `DistributedSampler`, and a step draws its batch from the
    rank's part. Running means of batch normalization see the batches of all ranks.

    samples: number of training samples.
    clip: norm to which the merged gradients are scaled down if theirs is larger.
    """

    framework = "torch"

    def __init__(
        self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, samples: int, clip: float | None = None
    ) -> None:
        torch.set_num_threads(1)
        self.run, self.model, self._optimizer, self._clip = run, model, optimizer, clip
        self.optimizer = Optimizer.of(type(optimizer), run.momentum)
        self._parameters = dict(model.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._parts = np.array_split(np.random.default_rng(run.seed).permutation(samples), run.ranks)
        self._evaluated: tuple[float, float] | None = None

    @abstractmethod
    def batch_loss(self, chosen: npt.NDArray[np.int64], rng: np.random.Generator) -> torch.Tensor:
        """Return the mean loss of the samples of these numbers; `rng` draws the same for a seed, rank and step."""

    @abstractmethod
    def evaluate(self) -> tuple[float, float]:
        """Return loss and quality on the validation data; the model is in evaluation mode, without gradients."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a linear rise in the first tenth, then half a cosine down to a tenth."""
        rise = max(1, round(WARM_UP * self.run.steps))
        if step < rise:
            return self.run.lr * (step + 1) / rise
        done = (step - rise) / max(1, self.run.steps - rise)
        return self.run.lr * (LAST + (1 - LAST) * (1 + math.cos(math.pi * min(1.0, done))) / 2)

    def gradients(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        """Return the gradients of a rank's own batch."""
        rng = np.random.default_rng((self.run.seed, rank, step))
        chosen = rng.choice(self._parts[rank], self.run.batch)
        self.model.train()
        found = torch.autograd.grad(self.batch_loss(chosen, rng), list(self._parameters.values()))
        return dict(zip(self._parameters, found, strict=True))

    def apply(self, merged: Mapping[str, torch.Tensor], step: int) -> None:
        """Take one optimizer step with the merged gradients."""
        for name, p in self._parameters.items():
            # Clipping changes them in place.
            p.grad = merged[name].clone() if self._clip else merged[name]
        if self._clip:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate(step)
        self._optimizer.step()
        self._evaluated = None

    def get_weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights by name."""
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over these weights; the optimizer and the buffers stay as they are."""
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(weights[name])
        self._evaluated = None

    def loss(self) -> float:
        """Return the mean loss over the validation data."""
        return self._results()[0]

    def quality(self) -> float:
        """Return the metric of the task over the validation data."""
        return self._results()[1]

    def _results(self) -> tuple[float, float]:
        if self._evaluated is None:
            self.model.eval()
            with torch.no_grad():
                self._evaluated = self.evaluate()
        return self._evaluated
