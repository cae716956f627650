"""Models of the GRACE paper's Table II for PyTorch, trained on random data.

Their layers and numbers of parameters match the paper's models. They learn nothing useful.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from grace.bench.step.models import (
    CLASSES,
    HIDDEN,
    ITEMS,
    MLP,
    TOKENS,
    USERS,
    WORDS,
)
from grace.report import models


class Mlp(nn.Sequential):
    """Three dense layers, 25.2 M parameters."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(pairwise(MLP)):
            layers += [nn.ReLU()] if i else []
            layers.append(nn.Linear(inputs, outputs))
        super().__init__(*layers)

    def loss(self) -> torch.Tensor:
        """Return the loss on four random examples."""
        return functional.cross_entropy(self(torch.randn(4, MLP[0])), torch.randint(MLP[-1], (4,)))


class Vgg(models.Vgg):
    """VGG16 for 32 x 32 images with batch normalization, 15 M parameters (Simonyan and Zisserman, 2015)."""

    def __init__(self) -> None:
        super().__init__(classes=CLASSES, normalize=True)

    def loss(self) -> torch.Tensor:
        """Return the loss on two random images."""
        return functional.cross_entropy(self(torch.randn(2, 3, 32, 32)), torch.randint(CLASSES, (2,)))


class _Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.widen, self.stride = width - channels, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        straight = x[:, :, :: self.stride, :: self.stride]
        return functional.relu(self.body(x) + functional.pad(straight, (0, 0, 0, 0, 0, self.widen)))


class ResNet(nn.Sequential):
    """ResNet-20 for 32 x 32 images, 0.27 M parameters (He et al., 2016)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        channels = 16
        for width in (16, 32, 64):
            for i in range(3):
                layers.append(_Block(channels, width, 2 if i == 0 and width > 16 else 1))
                channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))

    def loss(self) -> torch.Tensor:
        """Return the loss on eight random images."""
        return functional.cross_entropy(self(torch.randn(8, 3, 32, 32)), torch.randint(CLASSES, (8,)))


class Lstm(nn.Module):
    """Language model with two LSTM layers of 650, 19.8 M parameters (Zaremba et al., 2014, medium)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True)
        self.output = nn.Linear(HIDDEN, WORDS)

    def loss(self) -> torch.Tensor:
        """Return the loss on two random sequences of eight words."""
        words = torch.randint(WORDS, (2, 9))
        found = self.output(self.lstm(self.embedding(words[:, :-1]))[0])
        return functional.cross_entropy(found.flatten(0, 1), words[:, 1:].flatten())


class Ncf(models.Ncf):
    """Neural collaborative filter of the size of MovieLens-20M, 31.8 M parameters (He et al., 2017)."""

    def loss(self) -> torch.Tensor:
        """Return the loss on 256 random pairs of user and item."""
        found = self(torch.randint(USERS, (256,)), torch.randint(ITEMS, (256,)))
        return functional.binary_cross_entropy_with_logits(found, torch.randint(2, (256,)).float())


class Transformer(nn.Module):
    """Four encoder layers of width 512 over 8,000 tokens, 20.8 M parameters (Vaswani et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.output = nn.Linear(512, TOKENS)

    def loss(self) -> torch.Tensor:
        """Return the loss on two random sequences of 16 tokens."""
        tokens = torch.randint(TOKENS, (2, 17))
        found = self.output(self.encoder(self.embedding(tokens[:, :-1])))
        return functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "vgg": Vgg,
    "lstm": Lstm,
    "ncf": Ncf,
    "resnet": ResNet,
    "transformer": Transformer,
}


def builder(name: str) -> Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]:
    """Return the function that makes a model and its loss."""

    def build() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        model = MODELS[name]()
        return model, model.loss

    return build
