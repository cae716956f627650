"""The optimizers that exchange what they need themselves, in real processes."""

from __future__ import annotations

import pytest

from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, scenario

pytestmark = pytest.mark.distributed

LAUNCHES = [
    Launch(TORCH, "python", 1),
    Launch(TORCH, "torchrun", 2),
    Launch(TORCH, "horovodrun-gloo", 2),
    Launch(TORCH, "torchrun", 4),
]


@on(*LAUNCHES, usual=LAUNCHES[1:2])
@pytest.mark.parametrize("scaled", [False, True])
def test_one_bit_adam_is_pytorchs_adam_at_first_and_then_the_papers_recursion(launch, scaled):
    ranks = scenario("one_bit_adam", launch, scaled)
    assert len({rank["weights"] for rank in ranks}) == 1
    for rank in ranks:
        assert max(rank["off"]) < 1e-6, rank["off"]
        assert rank["resumed"] == [True] * 9
        # Only the steps after the warm-up exchange momenta.
        assert rank["step"] == 5
        assert rank["share"] < 1 / 25 or launch.ranks == 1


@on(LAUNCHES[1], LAUNCHES[2])
def test_one_bit_adam_is_used_like_any_optimizer(launch):
    ranks = scenario("one_bit_adam_in_use", launch)
    for rank in ranks:
        assert rank["groups"]["apart"] == ranks[0]["groups"]["apart"]
        assert rank["groups"]["frozen"]
        assert rank["groups"]["lr"] == pytest.approx([0.01 / 16, 0.003 / 16])
        assert rank["groups"]["freeze_step"] == 2
        assert rank["scaler"]["weights"] == ranks[0]["scaler"]["weights"]
        # Two of eight steps are skipped on all ranks, and leave no trace.
        assert rank["scaler"]["steps"] == 6
        assert rank["scaler"]["off"] < 1e-6
        assert rank["dropped"] == ranks[0]["dropped"]
    assert [rank["scaler"]["scale"] for rank in ranks] == [16.0, 64.0]


@on(LAUNCHES[1], LAUNCHES[2])
def test_what_one_bit_adam_cannot_do_is_refused(launch):
    told = {
        "group": "add_param_group() was called after the optimizer was made",
        "copy": "cannot be copied or pickled",
        "pickle": "cannot be copied or pickled",
        "both": "total_steps = 9 gives freeze_step itself, 20% of it; leave one of the two out",
        "total": "total_steps must be at least 2, received 1",
        "freeze": "freeze_step must be at least 1",
        "lr": "lr must not be negative, received -1.0",
        "betas": "betas[0] must lie in [0, 1), received 1.0",
        "eps": "eps must be positive, received 0.0",
        "decay": "weight_decay must not be negative, received -1.0",
        "typo": "there is no argument 'weight_dacay'. Did you mean 'weight_decay'",
        "lamb": "grace.torch.optim.Lamb: there is no option 'weight_dacay'. Did you mean 'weight_decay'",
        "outer": "cannot take outer steps",
        "backend": "grace.torch.optim.OneBitAdam: the argument 'backend' must be",
        "differ": "MismatchError",
        "wrapped": "already wrapped",
        "load": "expected a state written by grace",
        "registered": "exchanges the gradients of these parameters already",
        "alone": "MismatchError",
        "outside": "this process is not in the process set",
    }
    for errors in scenario("one_bit_adam_refusals", launch):
        for name, error in errors.items():
            assert told[name] in error, (name, error)
        assert told.keys() - errors.keys() <= {"registered", "outside"}


@on(*LAUNCHES, usual=LAUNCHES[1:2])
def test_zero_one_adam_is_the_recursion_of_the_paper(launch):
    ranks = scenario("zero_one_adam", launch)
    for rank in ranks:
        # Two orders of steps on gradients of float32, whose noise is divided by small second moments.
        assert rank["off"] < 5e-5, rank["off"]
        assert rank["resumed"] == [True] * 26
        # Four steps before the freeze, and the syncs after it.
        assert rank["step"] == 8
        assert rank["frozen"]
        errors = rank["errors"]
        assert "expected freeze_step or total_steps, received neither" in errors["neither"]
        assert "var_update_scaler must be at least 1, received 0" in errors["scaler"]
        assert "every must be at least 1 inner step, received 0" in errors["every"]
        assert "a GradScaler calls step()" in errors["grad_scaler"]
        assert "ranks saved it between two syncs" in errors["ranks"]
    apart = [len({rank["after"][step] for rank in ranks}) for step in range(13)]
    own = launch.ranks
    assert apart == [1] * 6 + [own, own, 1, own, own, 1, own]


@on(*LAUNCHES[1:], usual=LAUNCHES[2:3])
def test_lamb_and_lans_are_those_of_the_papers(launch):
    ranks = scenario("lamb_and_lans", launch)
    for label in ranks[0]:
        for rank in ranks:
            assert rank[label]["off"] < 1e-4, label
            assert rank[label]["resumed"] == [True] * 8, label
            assert rank[label]["after"] == ranks[0][label]["after"], label
