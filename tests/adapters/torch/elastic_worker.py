"""A training script that elastic Horovod starts: the process of one host ends in the middle of a step.

Arguments: what the ranks exchange, a file that exists after that, and the seconds per step then.
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
kind, died, pause = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
logging.basicConfig(level=logging.WARNING)
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 32)
config = {"compressor": "topk", "compress_ratio": 0.01, "communicator": "two_shot", "check_replicas": 2}
if kind == "0/1 Adam":
    # It syncs after steps 4, 9 and 14.
    optimizer = grace.torch.optim.ZeroOneAdam(model.named_parameters(), lr=0.01, freeze_step=4, every=5, config=config)
else:
    # The process ends in mid-period, after a sync, and the last step is a sync.
    outer = {"outer": {"every": 4, "lr": 1.0, "momentum": 0.5, "warmup": 2}} if kind == "outer" else {}
    optimizer = grace.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), model.named_parameters(), {**config, **outer}
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
    steps = {
        "gradients": lambda: optimizer.grace.run.step,
        "outer": lambda: optimizer.grace.stats()["outer"]["steps"],
        "0/1 Adam": lambda: optimizer.param_groups[0]["step"],
    }
    print(json.dumps({**line, "step": steps[kind](), "weights": weights}), flush=True)


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
