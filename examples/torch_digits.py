"""Train a small convolutional network on handwritten digits with compressed gradients, by a PyTorch training loop.

    torchrun --standalone --nproc-per-node 2 examples/torch_digits.py --compressor none qsgd
    horovodrun -np 2 --gloo python examples/torch_digits.py --compressor none qsgd topk efsignsgd powersgd
    mpirun -np 2 python examples/torch_digits.py --config examples/grace.toml
    python examples/torch_digits.py --compressor topk --set compress_ratio=0.001

The data are 1,797 images of 8 x 8 pixels, which come with scikit-learn; nothing is downloaded. Several compressors are
trained one after the other. At the end, rank 0 prints a table and optionally writes a JSON file. The exit status is 1
if the ranks have different weights at the end of a run.

The code for grace is in `train`, between the two lines marked GRACE. Settings, data and table are in digits.py,
the network in digits_torch.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import digits
import torch
import torch.nn.functional as F
from digits_torch import Network, Torchrun, outcome, tensors
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import grace

if "TORCHELASTIC_RUN_ID" in os.environ:
    hvd: Any = Torchrun
else:
    import horovod.torch as hvd


def train(run: digits.Run, data: digits.Data, args: argparse.Namespace) -> digits.Outcome:
    """Train one network and return its result."""
    torch.manual_seed(args.seed)
    model = Network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)

    # GRACE: everything that compressed gradients add to a script ----------------------------------------------------
    optimizer = grace.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        config=run.config,  # or a dictionary such as {"compressor": "qsgd"}, or a TOML file
    )
    # GRACE: end -----------------------------------------------------------------------------------------------------

    dataset = tensors(data.train)
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    with digits.Progress(run.label, steps, hvd.rank()) as progress:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.step(optimizer.grace.stats())
            progress.epoch(loss.item())
    return outcome(model, data, progress)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the ranks share the cores of one machine
    sys.exit(digits.main("torch", __doc__, hvd, train))
