"""Keras' optimizers that exchange what they need themselves, in real processes."""

from __future__ import annotations

import pytest

from tests.support.launch import TENSORFLOW, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

TWO, FOUR = (Launch(TENSORFLOW, "horovodrun-gloo", ranks) for ranks in (2, 4))
ALONE = Launch(TENSORFLOW, "python", 1)


@on(TWO, FOUR, ALONE)
@pytest.mark.parametrize("scaled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_bit_optimizers_of_keras_are_those_of_the_papers(launch, scaled):
    ranks = scenario("keras_one_bit", launch, scaled)
    for rank in ranks:
        assert rank["frozen"]
        for name in ("adam", *(["lamb"] if scaled else [])):
            assert max(rank[name]["off"]) < 1e-5, (name, rank[name]["off"])
            assert rank[name]["traces"] == 1, name
            assert all(again is True for again in rank[name]["resumed"]), name
            assert rank[name]["after"] == ranks[0][name]["after"]
        assert rank["adam"]["resumed"]
        # Only the steps after the warm-up exchange momenta.
        assert rank["adam"]["stats"]["step"] == 3
        sent, eighth = rank["adam"]["stats"]["wire_bytes"], rank["adam"]["stats"]["dense_bytes"] / 8
        # Shards of so small a net have as many scales and padding among four ranks as to make up an eighth.
        assert launch.ranks == 1 or sent < eighth or (launch.ranks == 4 and sent == eighth)


@on(TWO, FOUR)
def test_zero_one_adam_of_keras_is_that_of_the_paper(launch):
    ranks = scenario("keras_zero_one", launch)
    for rank in ranks:
        assert max(rank["off"]) < 1e-5, rank["off"]
        assert set(rank["resumed"]) == {True}
        assert rank["traces"] == 1
        # Four steps before the freeze, and the syncs after it.
        assert rank["stats"]["step"] == 7
    apart = [len({rank["after"][step] for rank in ranks}) for step in range(9)]
    own = launch.ranks
    assert apart == [1] * 6 + [own, own, 1]


@on(TWO, FOUR)
def test_the_second_moments_of_one_bit_adam_of_keras_settle_by_themselves(launch):
    ranks = scenario("keras_one_bit_settles", launch)
    assert same(ranks)
    assert ranks[0]["frozen"]
    # Those of equal gradients settle in eight of ten steps.
    assert ranks[0]["steps"] == 2


@pytest.mark.slow
@on(TWO, FOUR)
def test_layerwise_optimizers_of_keras_take_compressed_gradients(launch):
    ranks = scenario("keras_layerwise_optimizers", launch)
    assert same(ranks)
    assert ranks[0]["off"] < 1e-5


@pytest.mark.slow
@on(TWO)
def test_what_keras_optimizers_cannot_do_is_refused(launch):
    told = {
        "both": "total_steps = 9 gives freeze_step itself",
        "rate": "grace.tensorflow.optim.OneBitAdam: learning_rate must not be negative, received -1.0",
        "betas": "betas[0] must lie in [0, 1), received 1.0",
        "typo": "there is no argument 'weight_dacay'. Did you mean 'weight_decay'",
        "lamb": "grace.tensorflow.optim.Lamb: there is no option 'weight_dacay'. Did you mean 'weight_decay'",
        "outer": "cannot take outer steps",
        "neither": "expected freeze_step or total_steps, received neither",
        "scaler": "var_update_scaler must be at least 1, received 0",
        "wrapped": "already wrapped",
        "some": "expected gradients of all 4 variables, received 1",
        "differ": "MismatchError",
        "loss scaling": "dynamic loss scaling is not supported",
    }
    for errors in scenario("keras_optimizer_refusals", launch):
        for name, error in errors.items():
            assert told[name] in error, (name, error)
