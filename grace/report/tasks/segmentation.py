"""Image segmentation: a small U-Net under Adam."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from grace.report.models import UNet
from grace.report.task import Task, register
from grace.report.tasks.data import Images, shapes
from grace.report.tasks.torch_training import Run, TorchTraining


class Segmentation(TorchTraining):
    """Cross entropy of the pixels, and intersection over union of what is found with what is there."""

    def __init__(self, run: Run, model: nn.Module, images: Images) -> None:
        optimizer = torch.optim.Adam(model.parameters(), run.lr, (float(run.momentum), 0.999))
        super().__init__(run, model, optimizer, len(images.images))
        self._images, self._masks, self._unseen, self._unseen_masks = map(torch.from_numpy, images)

    def batch_loss(self, chosen: npt.NDArray[np.int64], rng: np.random.Generator) -> torch.Tensor:
        numbers = torch.from_numpy(chosen)
        return functional.binary_cross_entropy_with_logits(self.model(self._images[numbers]), self._masks[numbers])

    def evaluate(self) -> tuple[float, float]:
        logits = torch.cat([self.model(part) for part in self._unseen.split(128)])
        found, there = logits > 0, self._unseen_masks > 0
        loss = float(functional.binary_cross_entropy_with_logits(logits, self._unseen_masks))
        return loss, float((found & there).sum() / (found | there).sum())


@register
class Shapes(Task):
    """A U-Net that finds ellipses among bars on a noisy ground, 68,000 parameters."""

    name, title = "unet", "U-Net on drawn shapes"
    metric, higher_is_better, optimizer = "intersection over union", True, "Adam"
    steps, quick_steps = 250, 100
    # Intersection over union of seeds 0 and 2: 0.762 and 0.687 with 0.005, 0.704 and 0.762 with 0.01, from `grace
    # report --quick --tasks unet --methods none`. After 250 steps, seeds 0 and 1 have 0.834 and 0.858 with 0.01. A
    # moving average of the weights has 0.828 and 0.857: seeds differ in how far they have come.
    batch, lr, momentum = 8, 1e-2, 0.9
    seconds = 11.0

    def start(self, seed: int, ranks: int, *, steps: int, lr: float, momentum: float) -> Segmentation:
        run = Run(seed, ranks, self.batch, steps, lr, momentum)
        return Segmentation(run, run.seeded(lambda: UNet(1, 12, (12, 24), 48)), shapes())
