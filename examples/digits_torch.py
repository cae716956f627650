"""Shared code of the digits examples in PyTorch: network, data, and the ranks of torch.distributed."""

from __future__ import annotations

from typing import Any

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Network(nn.Module):
    """A network with two convolutions and one hidden layer: 151,306 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.output = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        return self.output(x)


def tensors(part: digits.Images) -> TensorDataset:
    """Return images and labels as a dataset of tensors."""
    return TensorDataset(torch.from_numpy(part.images).unsqueeze(1), torch.from_numpy(part.labels))


def outcome(model: nn.Module, data: digits.Data, progress: digits.Progress) -> digits.Outcome:
    """Return the result of a trained model: the share of test images that it classifies correctly, and so on."""
    images, labels = tensors(data.test).tensors
    model.eval()
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    return digits.Outcome(
        accuracy=accuracy,
        fingerprint=digits.fingerprint({name: value.numpy() for name, value in model.state_dict().items()}),
        per_step=progress.per_step(),
    )


class Torchrun:
    """The functions of Horovod that the examples need, by torch.distributed."""

    size, rank = staticmethod(dist.get_world_size), staticmethod(dist.get_rank)

    @staticmethod
    def init() -> None:
        """Connect the ranks."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")

    @staticmethod
    def broadcast_parameters(state: dict[str, torch.Tensor], root_rank: int) -> None:
        """Give all ranks the tensors of one of them."""
        for x in state.values():
            dist.broadcast(x, root_rank)

    @staticmethod
    def allgather_object(value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values
