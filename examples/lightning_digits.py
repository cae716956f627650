"""Train a small convolutional network on handwritten digits with compressed gradients, by Lightning.

    torchrun --standalone --nproc-per-node 2 examples/lightning_digits.py --compressor none qsgd

Data, command line and table are those of torch_digits.py. The code for grace is the line marked GRACE.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import digits
import lightning
import torch
import torch.nn.functional as F
from digits_torch import Network, Torchrun, outcome, tensors
from torch.utils.data import DataLoader

import grace


class Show(lightning.Callback):
    """The progress of a run."""

    def __init__(self, progress: digits.Progress, callback: Any) -> None:
        self.progress, self.callback = progress, callback

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step."""
        self.progress.step(self.callback.exchange.stats())
        self.loss = float(outputs["loss"])

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Show the loss."""
        self.progress.epoch(self.loss)


class Classifier(lightning.LightningModule):
    """A network with its loss and its optimizer."""

    def __init__(self, run: digits.Run) -> None:
        super().__init__()
        self.network, self.run = Network(), run

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer and the schedule of its learning rate."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.run.lr, momentum=self.run.momentum)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(run: digits.Run, data: digits.Data, args: argparse.Namespace) -> digits.Outcome:
    """Train one network and return its result."""
    torch.manual_seed(args.seed)
    model = Classifier(run)
    # Lightning gives each rank a part of the data.
    loader = DataLoader(tensors(data.train), args.batch_size, shuffle=True, drop_last=True)
    steps = args.epochs * (len(data.train.labels) // Torchrun.size() // args.batch_size)
    with digits.Progress(run.label, steps, Torchrun.rank()) as progress:
        callback = grace.torch.trainers.lightning.GraceCallback(run.config)  # GRACE
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=Torchrun.size(),
            max_epochs=args.epochs,
            gradient_clip_val=10.0,
            callbacks=[callback, Show(progress, callback)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader)
    return outcome(model.network, data, progress)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the ranks share the cores of one machine
    sys.exit(digits.main("lightning", __doc__, Torchrun, train))
