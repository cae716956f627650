"""One rank of a run that chooses its compressor by measurement, saves, and goes on: `resumed_auto.py FOLDER WAY SIZE`.

WAY is "ddp" or "fsdp". The first start trains for STEPS steps and saves after those of POINTS. A later one goes on from
each of these points, which SIZE ranks have saved. Each rank writes what it found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import grace.torch
from tests.adapters.torch import fsdp_scenarios, launched
from tests.adapters.torch.launched import my_rank, world_size
from tests.adapters.torch.model import batches, digest, make_net, sgd
from tests.support.auto import preferring
from tests.support.cases import EVERYTHING

#: Steps in which a method is on trial, and when it has been chosen.
POINTS = {"trial": 22, "chosen": 34}
STEPS = 40


class Job:
    """A model, its exchange and its optimizer."""

    def __init__(self, way: str, config: dict[str, Any]) -> None:
        if way == "ddp":
            self.net: Any = make_net()
            self.model = DistributedDataParallel(self.net)
            self._batches = list(batches(STEPS, my_rank()))
        else:
            self.net = self.model = fsdp_scenarios.shard(fsdp_scenarios.make())
            self._batches = list(fsdp_scenarios.batches(STEPS))
        self.exchange = grace.torch.register(self.model, config)
        self._optimizer = sgd(self.model, momentum=0.0)

    def step(self, number: int) -> str:
        """Train one step, and return its method and a digest of all that it leaves."""
        x, y = self._batches[number]
        F.cross_entropy(self.model(x), y).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        method = self.exchange.config.to_dict()["compressor"]["name"]
        return f"{method} {digest(self.weights.values())} {fsdp_scenarios.states_of(self.exchange)}"

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of this rank, or its parts of them."""
        named = self.net.named_parameters()
        return {name: (p.to_local() if isinstance(p, DTensor) else p).detach() for name, p in named}

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """The part of each tensor that this rank holds back."""
        return {name: fsdp_scenarios.held(self.exchange, name) for name, _ in self.net.named_parameters()}

    def save(self, path: Path) -> None:
        """Save all that a later process needs."""
        state = {"config": self.exchange.config.to_dict(), "exchange": self.exchange.state_dict(), "held": self.held}
        torch.save({**state, "weights": self.weights}, path)


def main() -> None:
    folder, way, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    launched.start([], torchrun=True)
    if not (folder / f"{way} steps 0").exists():
        with preferring("topk"):
            first = Job(way, {"compressor": "auto", **EVERYTHING})
            steps, points = [], {}
            for number in range(STEPS):
                steps.append(first.step(number))
                for point, at in POINTS.items():
                    if at == number + 1:
                        points[point] = [at, first.exchange.advisor._on_trial]
                        first.save(folder / f"{way} {point} {my_rank()}")
        found: dict[str, Any] = {"steps": steps, "points": points}
        # No rank looks for the file before all have.
        dist.barrier()
        (folder / f"{way} steps {my_rank()}").write_text(json.dumps(found))
    else:
        found = {point: resumed(folder, way, size, point) for point in POINTS}
        (folder / f"{way} on {world_size()} {my_rank()}").write_text(json.dumps(found))
    launched.end()


def resumed(folder: Path, way: str, size: int, point: str) -> dict[str, Any]:
    """Go on from a point: whether exactly, the steps that follow, and the change of the mean of what is held back."""
    saved = [torch.load(folder / f"{way} {point} {rank}") for rank in range(size)]
    job = Job(way, saved[0]["config"])
    exact = job.exchange.load_state_dict([each["exchange"] for each in saved])
    difference = 0.0
    for name, mine in job.held.items():
        dist.all_reduce(mine)
        mean = sum(each["held"][name] for each in saved) / size
        difference = max(difference, float((mine / world_size() - mean).abs().max()))
    if exact:
        for name, weight in job.weights.items():
            weight.copy_(saved[my_rank()]["weights"][name])
    with preferring("topk" if exact else "fp16"):
        steps = [job.step(number) for number in range(POINTS[point], STEPS)]
    return {"exact": exact, "difference": difference, "steps": steps, "auto": job.exchange.config.auto}


if __name__ == "__main__":
    main()
