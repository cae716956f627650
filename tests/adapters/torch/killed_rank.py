"""One rank of a run in which the last rank is killed during a step: `killed_rank.py CONFIG`, with JSON as CONFIG.

It prints "lost" before the last rank is killed, and otherwise behaves like any training script.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.nn.functional as F

from tests.adapters.torch import launched
from tests.adapters.torch.model import batches, make_net, wrap

LAST_STEP = 3


def main() -> None:
    torch.set_num_threads(1)
    launched.start([], torchrun="MASTER_ADDR" in os.environ)
    model = make_net()
    optimizer = wrap(model, json.loads(sys.argv[1]))
    for step, (x, y) in enumerate(batches(20, launched.my_rank())):
        if step == LAST_STEP and launched.my_rank() == launched.world_size() - 1:
            # The gradients of later layers are being exchanged by then. The gradient of this layer is never sent.
            model.conv.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        if step == LAST_STEP:
            print("lost", flush=True)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main()
