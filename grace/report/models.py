"""The models of the GRACE paper's Table II for PyTorch, with as many parameters and gradient vectors as there.

The paper took them from TensorFlow's benchmarks and NVIDIA's examples. Its counts follow from details of those, which
the classes state: 11 and 1,001 classes, for instance, since the benchmarks add one for the background. The tasks of the
study train small versions of some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from grace.bench.step.models import HIDDEN, ITEMS, USERS, VGG, WORDS

# Classes of CIFAR-10 and of ImageNet, and one for the background.
SMALL_IMAGES, IMAGENET = 11, 1001
# Channels of VGG19's convolutions; None is a pooling layer.
VGG19 = tuple(
    width
    for channels, times in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
    for width in (*[channels] * times, None)
)


def _convolution(inputs: int, outputs: int, stride: int = 1, size: int = 3, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=bias)


class Offset(nn.BatchNorm2d):
    """Batch normalization with an offset for each channel, and no scale."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        ones = self.weight.detach()
        del self.weight
        self.register_buffer("weight", ones)


class _PreActivated(nn.Module):
    """Two convolutions, normalization and activation before each, and the input added (He et al., 2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Offset(channels),
            nn.ReLU(),
            _convolution(channels, width, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            _convolution(width, width),
        )
        self.before, self.stride = (width - channels) // 2, stride
        self.after = width - channels - self.before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        straight = x[:, :, :: self.stride, :: self.stride]
        return self.body(x) + functional.pad(straight, (0, 0, 0, 0, self.before, self.after))


class ResNet(nn.Sequential):
    """Residual network for small images, with two convolutions per block (He et al., 2016).

    Three groups of three blocks with 16, 32 and 64 channels are the paper's ResNet-20: the second version, with the
    activation before the convolution. The normalization that begins a block has an offset only.
    """

    def __init__(
        self, channels: int = 3, widths: Sequence[int] = (16, 32, 64), blocks: int = 3, classes: int = SMALL_IMAGES
    ) -> None:
        before = widths[0]
        layers: list[nn.Module] = [_convolution(channels, before), nn.BatchNorm2d(before), nn.ReLU()]
        for group, width in enumerate(widths):
            for i in range(blocks):
                layers.append(_PreActivated(before, width, 2 if group and not i else 1))
                before = width
        layers += [Offset(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
        super().__init__(*layers)


class _Appended(nn.Sequential):
    """Layers whose output is appended to their input as further channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, super().forward(x)], 1)


class DenseNet(nn.Sequential):
    """DenseNet with 40 layers and a growth of 12 channels (Huang et al., 2017).

    A transition keeps 24 channels, twice the growth, as in TensorFlow's benchmarks; in the original it keeps all. This
    is why the paper's model has a third of the original's parameters.
    """

    def __init__(self, channels: int = 3, layers: int = 12, growth: int = 12, classes: int = SMALL_IMAGES) -> None:
        width = 16
        stack: list[nn.Module] = [_convolution(channels, width, bias=True)]
        for group in range(3):
            if group:
                stack += [nn.BatchNorm2d(width), nn.ReLU(), _convolution(width, 2 * growth, size=1, bias=True)]
                stack += [nn.ReLU(), nn.AvgPool2d(2)]
                width = 2 * growth
            for _ in range(layers):
                stack.append(_Appended(nn.BatchNorm2d(width), nn.ReLU(), _convolution(width, growth, bias=True)))
                width += growth
        stack += [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
        super().__init__(*stack)


def _normalized(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> list[nn.Module]:
    return [_convolution(inputs, outputs, stride, size), nn.BatchNorm2d(outputs), nn.ReLU()]


class _Added(nn.Sequential):
    """Layers whose output is added to their input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class ResNet9(nn.Sequential):
    """Residual network of nine layers that learns CIFAR-10 in 24 epochs, the fastest of its time (Page, 2018).

    It has 10 classes, and its last layer has no bias.
    """

    def __init__(self, channels: int = 3, classes: int = 10) -> None:
        super().__init__(
            *_normalized(channels, 64),
            *_normalized(64, 128),
            nn.MaxPool2d(2),
            _Added(*_normalized(128, 128), *_normalized(128, 128)),
            *_normalized(128, 256),
            nn.MaxPool2d(2),
            *_normalized(256, 512),
            nn.MaxPool2d(2),
            _Added(*_normalized(512, 512), *_normalized(512, 512)),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(512, classes, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of images, an eighth of what the last layer gives."""
        return super().forward(x) / 8


class _Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels, and the input added (He et al., 2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_normalized(channels, width, size=1),
            *_normalized(width, width, stride),
            _convolution(width, outputs, size=1),
            nn.BatchNorm2d(outputs),
        )
        self.straight = nn.Identity()
        if channels != outputs:
            self.straight = nn.Sequential(_convolution(channels, outputs, stride, 1), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.straight(x))


class ResNet50(nn.Sequential):
    """Residual network of 50 layers for ImageNet (He et al., 2016)."""

    def __init__(self, classes: int = IMAGENET) -> None:
        layers: list[nn.Module] = [*_normalized(3, 64, 2, 7), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for group, blocks in enumerate((3, 4, 6, 3)):
            width = 64 << group
            for i in range(blocks):
                layers.append(_Bottleneck(channels, width, 2 if group and not i else 1))
                channels = 4 * width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Vgg(nn.Module):
    """VGG (Simonyan and Zisserman, 2015).

    The paper's VGG16 is for images of 32 x 32 pixels, with one hidden layer of 512 units. Neither it nor VGG19 has
    batch normalization.

    widths: channels of the convolutions; None is a pooling layer.
    hidden: units of the layers between the convolutions and the classes.
    pixels: what is left of the width and height of an image after the last pooling layer.
    """

    def __init__(
        self,
        widths: Sequence[int | None] = VGG,
        hidden: Sequence[int] = (512,),
        classes: int = SMALL_IMAGES,
        *,
        normalize: bool = False,
        pixels: int = 1,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in widths:
            if width is None:
                layers.append(nn.MaxPool2d(2))
            else:
                norm = [nn.BatchNorm2d(width)] if normalize else []
                layers += [_convolution(channels, width, bias=True), *norm, nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*layers)
        layers = []
        for inputs, outputs in pairwise([channels * pixels**2, *hidden]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.classifier = nn.Sequential(*layers, nn.Linear(hidden[-1], classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of images."""
        return self.classifier(self.features(x).flatten(1))


class Ncf(nn.Module):
    """Neural collaborative filter: factorization of a matrix beside a perceptron (He et al., 2017).

    As in NVIDIA's example, a user and an item have one vector each, the first `factors` elements of which are for the
    factorization, and the others for the perceptron.
    """

    def __init__(
        self, users: int = USERS, items: int = ITEMS, factors: int = 64, layers: Sequence[int] = (256, 256, 128, 64)
    ) -> None:
        super().__init__()
        self.factors = factors
        self.users, self.items = (nn.Embedding(n, factors + layers[0] // 2) for n in (users, items))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.01)
        stack: list[nn.Module] = []
        for inputs, outputs in pairwise(layers):
            stack += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*stack)
        self.output = nn.Linear(factors + layers[-1], 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Return the logit of each pair of a user and an item."""
        u, i = self.users(user), self.items(item)
        deep = self.layers(torch.cat([u[..., self.factors :], i[..., self.factors :]], -1))
        wide = u[..., : self.factors] * i[..., : self.factors]
        return self.output(torch.cat([wide, deep], -1)).squeeze(-1)


class _Recurrent(nn.Linear):
    """Layer of an LSTM with one kernel for input and state, and one bias, as in TensorFlow."""

    def __init__(self, width: int) -> None:
        super().__init__(2 * width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states [batch, time, width] for an input of this shape; the first state is zero."""
        width = x.shape[2]
        kernel, recurrent = self.weight.split(width, 1)
        of_input = functional.linear(x, kernel, self.bias)
        state = cell = x.new_zeros(len(x), width)
        states = []
        for gates in of_input.unbind(1):
            take, keep, new, give = torch.addmm(gates, state, recurrent.T).chunk(4, 1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(take) * torch.tanh(new)
            state = torch.sigmoid(give) * torch.tanh(cell)
            states.append(state)
        return torch.stack(states, 1)


class Lstm(nn.Sequential):
    """Language model with layers of an LSTM (Zaremba et al., 2014; its medium size, without dropout)."""

    def __init__(self, symbols: int = WORDS, width: int = HIDDEN, layers: int = 2) -> None:
        super().__init__(
            nn.Embedding(symbols, width), *(_Recurrent(width) for _ in range(layers)), nn.Linear(width, symbols)
        )


def _two(inputs: int, middle: int, outputs: int) -> list[nn.Module]:
    return [_convolution(inputs, middle, bias=True), nn.ReLU(), _convolution(middle, outputs, bias=True), nn.ReLU()]


def _doubled(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.ConvTranspose2d(inputs, outputs, 2, 2), nn.ReLU()]


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015) in the size that NVIDIA's example calls tinyUNet.

    The image is halved after `first` and after each of `widths`. On the way up, a level has half of its channels.
    """

    def __init__(
        self, channels: int = 1, first: int = 32, widths: Sequence[int] = (32, 64, 128), bottom: int = 256
    ) -> None:
        super().__init__()
        levels = [channels, first, *widths]
        self.down = nn.ModuleList(nn.Sequential(*_two(a, b, b)) for a, b in pairwise(levels))
        self.bottom = nn.Sequential(*_two(widths[-1], bottom, bottom), *_doubled(bottom, bottom // 2))
        self.up = nn.ModuleList()
        below = bottom // 2
        for width in reversed(widths):
            half = width // 2
            self.up.append(nn.Sequential(*_two(below + width, width, half), *_doubled(half, half)))
            below = half
        self.output = nn.Sequential(*_two(below + first, first, first), _convolution(first, 1, size=1, bias=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logit of each pixel."""
        passed = []
        for level in self.down:
            passed.append(level(x))
            x = functional.max_pool2d(passed[-1], 2)
        x = self.bottom(x)
        for level in self.up:
            x = level(torch.cat([x, passed.pop()], 1))
        return self.output(torch.cat([x, passed.pop()], 1))


class Row(NamedTuple):
    """A row of Table II: task, model, data set, and what the paper says of the model."""

    task: str
    name: str
    data: str
    make: Callable[[], nn.Module]
    parameters: int
    vectors: int

    def counts(self) -> tuple[int, int]:
        """Return the number of our model's parameters, and that of its gradient vectors, without memory for them."""
        with torch.device("meta"):
            sizes = [p.numel() for p in self.make().parameters()]
        return sum(sizes), len(sizes)


_vgg19 = partial(Vgg, VGG19, (4096, 4096), IMAGENET, pixels=7)
TABLE_II = (
    Row("image classification", "ResNet-20", "CIFAR-10", ResNet, 269_467, 51),
    Row("image classification", "DenseNet40-K12", "CIFAR-10", DenseNet, 357_491, 158),
    Row("image classification", "custom ResNet-9", "CIFAR-10", ResNet9, 6_573_120, 25),
    Row("image classification", "VGG16", "CIFAR-10", Vgg, 14_982_987, 30),
    Row("image classification", "ResNet-50", "ImageNet", ResNet50, 25_559_081, 161),
    Row("image classification", "VGG19", "ImageNet", _vgg19, 143_671_337, 38),
    Row("recommendation", "NCF", "MovieLens-20M", Ncf, 31_832_577, 10),
    Row("language modeling", "LSTM", "PTB", Lstm, 19_775_200, 7),
    Row("image segmentation", "U-Net", "DAGM2007", UNet, 1_850_305, 46),
)
