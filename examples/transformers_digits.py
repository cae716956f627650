"""Train a small convolutional network on handwritten digits with compressed gradients, by Hugging Face's Trainer.

    torchrun --standalone --nproc-per-node 2 examples/transformers_digits.py --compressor none qsgd

Data, command line and table are those of torch_digits.py. The code for grace is the line marked GRACE.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import digits
import torch
import torch.nn.functional as F
import transformers
from digits_torch import Network, Torchrun, outcome, tensors
from torch import nn

import grace


class Show(transformers.TrainerCallback):
    """The progress of a run."""

    def __init__(self, progress: digits.Progress, callback: Any) -> None:
        self.progress, self.callback = progress, callback

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Count the step."""
        self.progress.step(self.callback.exchange.stats())


class Classifier(nn.Module):
    """A network with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def train(run: digits.Run, data: digits.Data, args: argparse.Namespace) -> digits.Outcome:
    """Train one network and return its result."""
    torch.manual_seed(args.seed)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
    images = [{"images": images, "labels": labels} for images, labels in tensors(data.train)]
    steps = args.epochs * (len(images) // Torchrun.size() // args.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    with tempfile.TemporaryDirectory() as folder, digits.Progress(run.label, steps, Torchrun.rank()) as progress:
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                folder,
                use_cpu=True,
                num_train_epochs=args.epochs,
                per_device_train_batch_size=args.batch_size,
                dataloader_drop_last=True,
                ddp_find_unused_parameters=False,
                max_grad_norm=10.0,
                seed=args.seed,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=images,
            optimizers=(optimizer, schedule),
        )
        callback = grace.torch.trainers.transformers.GraceCallback(trainer, run.config)  # GRACE
        trainer.add_callback(callback)
        trainer.add_callback(Show(progress, callback))
        trainer.remove_callback(transformers.PrinterCallback)
        progress.epoch(trainer.train().training_loss)
    return outcome(model.network, data, progress)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the ranks share the cores of one machine
    sys.exit(digits.main("transformers", __doc__, Torchrun, train))
