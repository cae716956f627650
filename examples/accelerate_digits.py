"""Train a small convolutional network on handwritten digits with compressed gradients, by Hugging Face Accelerate.

    accelerate launch --cpu --num_processes 2 examples/accelerate_digits.py --compressor none qsgd
    torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py --compressor none qsgd

Data, command line and table are those of torch_digits.py. The code for grace is the line between those marked GRACE.
"""

from __future__ import annotations

import argparse
import sys

import digits
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from digits_torch import Network, Torchrun, outcome, tensors
from torch.utils.data import DataLoader

import grace


def train(run: digits.Run, data: digits.Data, args: argparse.Namespace) -> digits.Outcome:
    """Train one network and return its result."""
    torch.manual_seed(args.seed)
    accelerator = Accelerator(cpu=True)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
    # Accelerate gives every second batch to each of two ranks.
    loader = DataLoader(tensors(data.train), args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # GRACE: everything that compressed gradients add to a script ----------------------------------------------------
    compression = grace.torch.trainers.accelerate.register(accelerator, model, run.config)
    # GRACE: end -----------------------------------------------------------------------------------------------------

    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=steps)
    with digits.Progress(run.label, steps, accelerator.process_index) as progress:
        for _ in range(args.epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                schedule.step()
                progress.step(compression.exchange.stats())
            progress.epoch(loss.item())
    return outcome(accelerator.unwrap_model(model), data, progress)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the ranks share the cores of one machine
    sys.exit(digits.main("accelerate", __doc__, Torchrun, train))
