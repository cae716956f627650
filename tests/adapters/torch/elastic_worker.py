"""A training script that elastic Horovod starts: the process of one host ends in the middle of a step.

Arguments: a file that exists after that, and the seconds per step then.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import grace.torch
from grace.torch.horovod import TorchState

STEPS, END = 14, 6
died, pause = Path(sys.argv[1]), float(sys.argv[2])
logging.basicConfig(level=logging.WARNING)
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 32)
optimizer = grace.torch.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5),
    model.named_parameters(),
    {"compressor": "topk", "compress_ratio": 0.01, "communicator": "two_shot", "check_replicas": 2},
)


def held() -> float:
    """Return the sum of what this rank holds back of the mean, also as the owner of shards."""
    state = optimizer.grace.state_dict()
    return sum(
        float(x.double().sum()) / (1 if name.startswith("mean of ") else state["size"])
        for name, entry in state["tensors"].items()
        for x in entry["memory"].values()
    )


def tell(what: str, batch: int) -> None:
    line = {"what": what, "rank": hvd.rank(), "size": hvd.size(), "batch": batch, "held": held(), "pid": os.getpid()}
    weights = sum(p.detach().double().sum().item() for p in model.parameters())
    print(json.dumps({**line, "step": optimizer.grace.run.step, "weights": weights}), flush=True)


@hvd.elastic.run  # type: ignore[untyped-decorator]
def train(state: TorchState) -> None:
    tell("enter", state.batch)
    while state.batch < STEPS:
        torch.manual_seed(10 * state.batch + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        if state.batch == END and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1" and not died.exists():
            died.touch()
            os._exit(1)
        optimizer.step()
        state.batch += 1
        if died.exists():
            time.sleep(pause)
        tell("commit", state.batch)
        state.commit()
    optimizer.grace.check_replicas()
    tell("done", state.batch)


train(TorchState(model=model, optimizer=optimizer, batch=0))
