"""The optimizers that exchange what they need themselves, on a rank alone: rules, rows of zeros, dtypes."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from grace.errors import StateError  # noqa: E402
from grace.torch.optim import OneBitAdam  # noqa: E402

pytestmark = pytest.mark.usefixtures("alone")


def test_rows_that_never_occur_stay_and_the_others_are_learnt():
    """A sign is never zero, and where v is zero, eps alone would divide it."""
    rng, rows = np.random.default_rng(0), 64
    start, target = (torch.tensor(rng.standard_normal((rows, 32)), dtype=torch.float32) for _ in "st")
    never = torch.arange(rows) % 4 == 0
    weights = torch.nn.Parameter(start.clone())
    optimizer = OneBitAdam([weights], lr=0.02, total_steps=300, default_rules=False)

    def loss():
        return float((weights.detach() - target)[~never].square().mean())

    first = loss()
    for _ in range(300):
        occurs = torch.tensor(rng.random(rows) < 0.5) & ~never
        noise = torch.tensor(rng.standard_normal((rows, 32)), dtype=torch.float32)
        weights.grad = 1e-3 * (weights.detach() - target + noise) * occurs[:, None]
        optimizer.step()
        assert torch.equal(weights.detach()[never], start[never])
    assert optimizer.frozen
    assert optimizer.grace.run.step == 240
    assert loss() < 0.1 * first


@pytest.mark.parametrize("scaled", [True, False])
def test_no_element_makes_longer_steps_than_with_adam(scaled):
    """A sign is as long as the mean of the tensor; divided by a small second moment, it makes a step of any length."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.ones(40, 30)
    sizes[:3] = 1e-4
    weights = torch.nn.Parameter(torch.zeros(40, 30))
    optimizer = OneBitAdam([weights], lr=0.01, freeze_step=20, default_rules=False, scaled=scaled)
    longest = 0.0
    for _ in range(40):
        before = weights.detach().clone()
        weights.grad = sizes * torch.randn(40, 30, generator=generator)
        optimizer.step()
        longest = max(longest, float((weights.detach() - before).abs().max()))
    assert (longest < 0.04) == scaled
    assert longest < 0.04 or longest > 1


def test_the_warm_up_ends_by_the_rule_of_the_paper():
    """With gradients of constant size, v is (1 - beta2^t) g^2: within 4 % of its value 1 / (1 - beta2) steps before."""
    weights = torch.nn.Parameter(torch.zeros(40, 30))
    optimizer = OneBitAdam([weights], betas=(0.9, 0.9))
    sizes = [1 - 0.9**step for step in range(0, 100, 10)]
    expected = next(10 * i for i in range(2, 10) if sizes[i - 1] >= 0.96 * sizes[i])
    for step in range(1, 60):
        weights.grad = torch.full_like(weights, 0.5)
        optimizer.step()
        assert optimizer.frozen == (step >= expected), step
    assert optimizer.param_groups[0]["freeze_step"] == expected == 40


def test_a_second_moment_that_still_changes_is_not_frozen():
    weights = torch.nn.Parameter(torch.zeros(40, 30))
    optimizer = OneBitAdam([weights], betas=(0.9, 0.9))
    for step in range(60):
        weights.grad = torch.full_like(weights, 1.05**step)
        optimizer.step()
    assert not optimizer.frozen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_moments_of_other_dtypes_are_resumed_bit_by_bit(dtype):
    start = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    given = [torch.randn(40, 30, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(8)]

    def make(values):
        weights = torch.nn.Parameter(values.clone())
        return weights, OneBitAdam([weights], lr=0.01, freeze_step=3, default_rules=False)

    weights, optimizer = make(start)
    saved = []
    for gradient in given:
        saved.append(copy.deepcopy([weights.detach(), optimizer.state_dict()]))
        weights.grad = gradient
        optimizer.step()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert optimizer.state[weights]["exp_avg"].dtype == wide
    for i, (values, state) in enumerate(saved):
        again, other = make(values)
        other.load_state_dict(state)
        for gradient in given[i:]:
            again.grad = gradient
            other.step()
        assert torch.equal(again, weights), i


def test_residuals_of_other_ranks_are_merged_and_foreign_states_refused():
    def make(shape=(40, 30)):
        weights = torch.nn.Parameter(torch.ones(shape))
        return weights, OneBitAdam([weights], freeze_step=1, default_rules=False, communicator="allgather")

    weights, optimizer = make()
    for _ in range(3):
        weights.grad = torch.randn(40, 30)
        optimizer.step()
    mine = optimizer.state_dict()
    states = []
    for rank in range(3):
        state = copy.deepcopy(mine)
        state["grace"].update(rank=rank, size=3)
        (entry,) = state["grace"]["tensors"].values()
        entry["memory"]["residual"] *= rank
        states.append(state)
    _, other = make()
    other.load_state_dict(states)
    (merged,), (held,) = (x.state_dict()["grace"]["tensors"].values() for x in (other, optimizer))
    torch.testing.assert_close(merged["memory"]["residual"], held["memory"]["residual"])
    with pytest.raises(StateError, match="expected"):
        make((30, 30))[1].load_state_dict(mine)
