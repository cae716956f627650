"""Model, data and helpers of PyTorch's scenarios."""

from __future__ import annotations

import gc
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import grace.torch
from tests.adapters.torch.launched import my_rank, world_size


class Net(torch.nn.Module):
    """A network with a convolution, two matrices, vectors, a scalar and two branches. `forward` can skip one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 6, 3)
        self.left = torch.nn.Linear(216, 40)
        self.right = torch.nn.Linear(216, 40)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.head = torch.nn.Linear(40, 10)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)).flatten(1)

    def forward(self, x: torch.Tensor, right: bool = True) -> torch.Tensor:
        h = self.features(x)
        h = self.left(h) + self.right(h) if right else self.left(h)
        return self.head(torch.relu(h * self.scale))


def make_net(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def batches(steps: int, rank: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return data that differ between ranks and are equal in every scenario."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        yield torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def digest(tensors: Any) -> str:
    """Return a hash of the exact bits of several tensors."""
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(t.detach().to(torch.float64).contiguous().numpy().tobytes())
    return sha.hexdigest()


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.01, "momentum": 0.5, **options})


def wrap(model: torch.nn.Module, config: dict[str, Any], **arguments: Any) -> Any:
    """Return a wrapped optimizer, which compares the replicas every second step unless the configuration says else."""
    optimizer = arguments.pop("optimizer", None) or sgd(model)
    config = {"check_replicas": 2, **config}
    return grace.torch.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), config=config, **arguments
    )


def exchange(optimizer: Any) -> None:
    """Exchange the current gradients and end the step, so that the next gradients can be set."""
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


def train(model: Net, optimizer: Any, steps: int, *, seed: int = 0, start: int = 0, rank: int | None = None) -> float:
    """Train on the batches `start` to `start + steps` of this rank, or of another one. Return the last loss."""
    loss = torch.zeros(())
    data = batches(start + steps, my_rank() if rank is None else rank, seed)
    for x, y in itertools.islice(data, start, None):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@contextmanager
def spy(optimizer: Any, *, comparisons: bool = False) -> Iterator[list[tuple[str, int]]]:
    """Record the name and bytes of each collective that this rank starts; `comparisons`: those of replicas as well."""
    transport, sent = optimizer.grace.run.transport, []
    start = transport.start

    def watched(collective: Any, name: str) -> Any:
        mine = collective.kind != "broadcast" or collective.root == transport.rank
        if mine and (comparisons or not name.endswith("/replicas")):
            parts, rank = collective.buffers, transport.rank
            leaving = parts if collective.kind != "alltoall" else [*parts[:rank], *parts[rank + 1 :]]
            sent.append((name, sum(part.numel() * part.element_size() for part in leaving)))
        return start(collective, name)

    transport.start = watched
    try:
        yield sent
    finally:
        del transport.start


def flat(states: dict[str, Any] | None) -> str:
    """Return a hash of all arrays of a tensor's states."""
    if states is None:
        return ""
    return digest(states[kind][key] for kind in ("memory", "compressor") for key in sorted(states[kind]))


def outcome(call: Callable[[], Any]) -> str:
    """Return the error of a call as text, empty if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def warned_of_scaler(model: Any, config: Any, data: Any, used: bool = True) -> list[str]:
    """Train with a GradScaler, used or not, that `register` does not get; return the warnings of it."""
    gc.collect()
    grace.torch.register(model, config)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            (scaler.scale(loss) if used else loss).backward()
    return [str(warning.message) for warning in caught if "GradScaler" in str(warning.message)]


def backward_of_a_late_rank(loss: torch.Tensor) -> str:
    """Run the backward pass on the last rank after all others have timed out waiting for it; the error of this rank."""
    late, tell = my_rank() == world_size() - 1, dist.new_group()
    if late:
        dist.barrier(tell)
    error = outcome(loss.backward)
    if not late:
        dist.barrier(tell)
    return error
