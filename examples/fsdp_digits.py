"""Train a small convolutional network on handwritten digits with compressed gradients, sharded by FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_digits.py --compressor none qsgd topk efsignsgd eightbit

Data, command line and table are those of torch_digits.py. The code for grace is the line between those marked GRACE.
Methods that need whole tensors, such as powersgd, cannot compress sharded gradients.
"""

from __future__ import annotations

import argparse
import sys

import digits
import torch
import torch.nn.functional as F
from digits_torch import Network, Torchrun, outcome, tensors
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import grace


def train(run: digits.Run, data: digits.Data, args: argparse.Namespace) -> digits.Outcome:
    """Train one network and return its result."""
    torch.manual_seed(args.seed)
    model = Network()
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)

    # GRACE: everything that compressed gradients add to a script ----------------------------------------------------
    exchange = grace.torch.register(model, run.config)
    # GRACE: end -----------------------------------------------------------------------------------------------------

    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
    dataset = tensors(data.train)
    sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    with digits.Progress(run.label, steps, Torchrun.rank()) as progress:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.step(exchange.stats())
            progress.epoch(loss.item())
    whole = Network()
    whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    return outcome(whole, data, progress)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the ranks share the cores of one machine
    sys.exit(digits.main("fsdp", __doc__, Torchrun, train))
