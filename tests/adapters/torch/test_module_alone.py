"""Dense gradients of a registered plain model, and a dropped step, in a single process."""

from __future__ import annotations

import functools
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import grace.torch  # noqa: E402
from grace.torch.distributed import module  # noqa: E402
from grace.torch.distributed.transport import ProcessGroupTransport  # noqa: E402

pytestmark = pytest.mark.usefixtures("alone")


class Parts(torch.nn.Module):
    """Matrices of three dtypes, which are their own gradients."""

    def __init__(self):
        super().__init__()
        kinds = [torch.float32] * 4 + [torch.float64, torch.complex64, torch.float32]
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(10, 5 + i, dtype=kind)) for i, kind in enumerate(kinds)
        )

    def forward(self):
        return sum(0.5 * part.abs().square().sum() for part in self.parts)


def test_dense_gradients_share_allreduces(monkeypatch):
    # Room for two of the matrices of float32.
    monkeypatch.setattr(module, "_BUCKET_BYTES", 4 * 10 * 16)
    model, sent = Parts(), []
    grace.torch.register(model, {"compressor": "none"})
    real = ProcessGroupTransport.allreduce

    def allreduce(self, x, **options):
        if x.is_floating_point():
            sent.append((x.dtype, len(x)))
        return real(self, x, **options)

    lengths = []
    with mock.patch.object(ProcessGroupTransport, "allreduce", allreduce):
        for _ in range(3):
            sent.clear()
            model.zero_grad()
            model().backward()
            lengths.append(list(sent))
            for part in model.parts:
                torch.testing.assert_close(part.grad, part.detach())
    # From the last parameter on. The gradient of two floats an element, and that of float64, share with none.
    expected = [(torch.float32, 110), (torch.float32, 200), (torch.float64, 90), (torch.float32, 150)]
    assert lengths == [[*expected, (torch.float32, 110)]] * 3


def test_a_dropped_step_keeps_the_change_with_which_it_began():
    """The compressor "auto" changes its method there."""
    weight = torch.nn.Parameter(torch.randn(64, 64))
    config = {"compressor": "topk", "compress_ratio": 0.1}
    optimizer = grace.torch.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), config=config)
    change = functools.partial(optimizer.grace.change, compress_ratio=0.5)
    with mock.patch.object(optimizer.grace, "step_begins", change):
        weight.square().sum().backward()
    optimizer.grace.discard()
    (item,) = optimizer.grace.plan.exchanged
    assert item.compressor.compress_ratio == 0.5
