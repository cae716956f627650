"""One rank of outer steps whose last rank is killed during a step: `killed_outer_steps.py FOLDER STEP`.

The ranks go on from the last step that each has saved in FOLDER. The last one is killed before inner step STEP, or when
its change has been sent. Without a STEP (-1), the ranks train for two periods, compare their weights with a simulation,
in which nobody is lost, and write the result to FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import grace
from tests.adapters.torch import launched
from tests.adapters.torch.launched import my_rank, world_size
from tests.adapters.torch.model import digest, make_net, sgd, train, wrap
from tests.support.cases import EVERYTHING

CONFIG: dict[str, Any] = {"compressor": "topk", **EVERYTHING}
OUTER = {"every": 6, "lr": 0.7, "momentum": 0.9, "fragments": 2, "delay": 2, "alpha": 0.5}
#: The inner steps of two periods.
STEPS = 12


def main() -> None:
    folder, fatal = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    launched.start([], torchrun=True)
    net = make_net()
    optimizer = wrap(net, CONFIG, outer=OUTER, timeout=60)
    start = 0
    while all((folder / f"{rank} {start + 1}").exists() for rank in range(world_size())):
        start += 1
    # No rank saves more before all have looked.
    torch.distributed.barrier()
    if start:
        saved = torch.load(folder / f"{my_rank()} {start}", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(start, STEPS):
        if step == fatal and my_rank() == world_size() - 1:
            (folder / f"killed {step}").touch()
            if step % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            _die_after_sending(optimizer.grace.outers[0])
        train(net, optimizer, 1, start=step)
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / f"half {my_rank()}")
        (folder / f"half {my_rank()}").replace(folder / f"{my_rank()} {step + 1}")
    same = digest(list(net.parameters())) == digest(list(_simulated()[my_rank()].parameters()))
    (folder / f"result {my_rank()}").write_text(str(same))
    launched.end()


def _die_after_sending(outer: Any) -> None:
    send = outer.send

    def die(*given: Any) -> None:
        send(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    outer.send = die


def _simulated() -> list[Any]:
    """Return the models of all ranks after two periods of a run in one process."""
    everyone = [make_net() for _ in range(world_size())]
    inner = [sgd(net) for net in everyone]
    shapes = {name: tuple(p.shape) for name, p in everyone[0].named_parameters()}
    sim = grace.Simulation(world_size(), shapes, CONFIG, framework="torch", outer=OUTER)
    sim.begin({name: p.detach() for name, p in everyone[0].named_parameters()})
    for step in range(STEPS):
        for rank, (net, own) in enumerate(zip(everyone, inner, strict=True)):
            train(net, own, 1, start=step, rank=rank)
        met = sim.step([{name: p.detach() for name, p in net.named_parameters()} for net in everyone])
        for net, new in zip(everyone, met, strict=True):
            net.load_state_dict(new)
    return everyone


if __name__ == "__main__":
    main()
