"""Table II of the GRACE paper: the models have as many parameters and gradient vectors, and take the data's shapes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the models are PyTorch's")

from grace.report.models import TABLE_II, Lstm, Ncf, Offset, ResNet, UNet  # noqa: E402

# Shapes of a batch, and of what the model makes of it.
IMAGE, IMAGENET, GRAY, WORDS = (2, 3, 32, 32), (2, 3, 224, 224), (2, 1, 512, 512), (2, 35)
SHAPES = {
    "ResNet-20": (IMAGE, (2, 11)),
    "DenseNet40-K12": (IMAGE, (2, 11)),
    "custom ResNet-9": (IMAGE, (2, 10)),
    "VGG16": (IMAGE, (2, 11)),
    "ResNet-50": (IMAGENET, (2, 1001)),
    "VGG19": (IMAGENET, (2, 1001)),
    "LSTM": (WORDS, (2, 35, 10_000)),
    "U-Net": (GRAY, GRAY),
}


@pytest.mark.parametrize("row", TABLE_II, ids=lambda row: row.name)
def test_counts_are_those_of_the_paper(row):
    assert row.counts() == (row.parameters, row.vectors)


@pytest.mark.parametrize("row", [row for row in TABLE_II if row.name in SHAPES], ids=lambda row: row.name)
def test_a_model_takes_the_shapes_of_its_data(row):
    given, found = SHAPES[row.name]
    with torch.device("meta"):
        x = torch.zeros(given, dtype=torch.int64 if row.name == "LSTM" else torch.float32)
        assert row.make()(x).shape == found


def test_the_filter_ranks_items_for_users():
    with torch.device("meta"):
        pairs = torch.zeros((3, 7), dtype=torch.int64)
        assert Ncf()(pairs, pairs).shape == (3, 7)


def test_normalization_with_an_offset_learns_no_scale():
    layer = Offset(2)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), torch.nn.BatchNorm2d(2)(x))
    # The scale is no part of what is trained, but a checkpoint has it.
    assert set(layer.state_dict()) == set(torch.nn.BatchNorm2d(2).state_dict())


def test_the_lstm_is_pytorchs_with_the_kernels_joined():
    embedding, *layers, output = ours = Lstm(7, 5)
    theirs = torch.nn.LSTM(5, 5, 2, batch_first=True)
    for i, layer in enumerate(layers):
        values = {
            "weight_ih": layer.weight[:, :5],
            "weight_hh": layer.weight[:, 5:],
            "bias_ih": layer.bias,
            "bias_hh": torch.zeros(20),
        }
        for name, value in values.items():
            # PyTorch's gates are in the order input, forget, cell, output, and so are ours.
            getattr(theirs, f"{name}_l{i}").data.copy_(value)
    words = torch.tensor([[1, 2, 3, 6], [0, 4, 5, 1]])
    torch.testing.assert_close(ours(words), output(theirs(embedding(words))[0]))


@pytest.mark.parametrize(
    "make", [lambda: ResNet(1, (8, 16), 1, 3), lambda: UNet(1, 8, (8, 16), 16)], ids=["resnet", "unet"]
)
def test_every_parameter_has_a_gradient(make):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model, x = make(), torch.randn(4, 1, 16, 16)
    model(x).square().sum().backward()
    assert all(bool((p.grad != 0).any()) for p in model.parameters())
