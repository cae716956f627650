"""Dense gradients of a registered plain model, and steps and loads that fail, in a single process."""

from __future__ import annotations

import copy
import functools
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import grace.torch  # noqa: E402
from grace.core.errors import StateError, StepError, WaitError  # noqa: E402
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


def test_a_model_that_could_not_be_registered_is_left_alone():
    """Another rank did not come. The exchange may live on, in a traceback or until Python looks for garbage."""
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        mock.patch.object(module.ModuleExchange, "attach", side_effect=WaitError("the other rank ended")),
        pytest.raises(WaitError) as failed,
    ):
        grace.torch.register(model, compressor="topk")
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    grace.torch.register(model, compressor="topk")
    assert failed.value.args == ("the other rank ended",)


def test_a_checkpoint_that_is_refused_leaves_the_weights_of_second_gradients():
    weight = torch.nn.Parameter(torch.randn(64, 64))
    config = {"compressor": "qsgd", "memory": "marina", "default_rules": False}
    optimizer = grace.torch.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), config=config)

    def closure():
        optimizer.zero_grad()
        weight.square().sum().backward()

    optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step(closure)
    ((name, before),) = optimizer.grace.earlier.items()
    with pytest.raises(StateError, match="one that PyTorch refuses"):
        optimizer.load_state_dict({**saved, "param_groups": []})
    assert optimizer.grace.earlier[name] is before
    optimizer.load_state_dict(saved)
    assert not torch.equal(optimizer.grace.earlier[name], before)


@pytest.mark.parametrize("ddp", [False, True])
def test_an_optimizer_of_other_parameters_than_those_registered_is_an_error(ddp):
    """Those of another model are none of ours."""
    plain = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 5))
    model = torch.nn.parallel.DistributedDataParallel(plain) if ddp else plain
    grace.torch.register(model, compressor="topk")

    def step():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(4, 30)).sum().backward()
        optimizer.step()

    step()
    other = torch.nn.Linear(30, 20)
    other(torch.randn(4, 30)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    plain.load_state_dict({name: x.clone() for name, x in plain.state_dict().items()}, assign=True)
    with pytest.raises(StepError, match=r"parameter '0.weight' is not the one of the model that was registered"):
        step()


@pytest.mark.parametrize("ddp", [False, True])
def test_batch_norm_counts_a_batch_once_though_it_is_evaluated_twice(ddp):
    plain = torch.nn.Sequential(torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 60))
    model = torch.nn.parallel.DistributedDataParallel(plain) if ddp else plain
    config = {"compressor": "qsgd", "memory": "marina", "default_rules": False}
    exchange, expected = grace.torch.register(model, config), torch.nn.BatchNorm1d(30)
    optimizer, passes = torch.optim.SGD(model.parameters(), lr=0.1), 0

    def closure():
        nonlocal passes
        passes += 1
        optimizer.zero_grad()
        model(x).square().sum().backward()

    for _ in range(3):
        x = torch.randn(4, 30)
        exchange.evaluate(closure)
        optimizer.step()
        expected(x)
    assert passes > 3
    for (name, buffer), other in zip(plain[0].named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other), name
