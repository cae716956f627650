"""Rare usage of the TensorFlow adapter, in real processes."""

from __future__ import annotations

import pytest

from tests.support.cases import TENSORFLOW_MPI
from tests.support.covering import ALL
from tests.support.launch import TENSORFLOW, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

TWO = Launch(TENSORFLOW, "horovodrun-gloo", 2)
each_launcher = on(TWO, TENSORFLOW_MPI)


@each_launcher
def test_two_steps_in_one_graph_do_not_mix(launch):
    ranks = scenario("two_steps_in_one_graph", launch)
    assert same(ranks)
    mean = (1 + launch.ranks) / 2
    for method in ("none", "fp16", "bf16") if ALL else ("none",):
        # bfloat16 has 8 bits of precision.
        assert ranks[0][method] == pytest.approx([mean, 100 * mean], rel=2**-8), method
    assert ranks[0]["signsgd"] == [1.0, 1.0]


@on(TWO)
def test_an_optimizer_that_is_wrapped_after_steps_exchanges_in_fit(launch):
    ranks = scenario("wrapped_after_steps", launch)
    assert same(ranks)
    for label, result in ranks[0].items():
        assert (result["step"], result["new"], result["kept"]) == (3, True, True), label
    assert ranks[0]["kept"]["weights"] == ranks[0]["compiled again"]["weights"]


@on(TWO)
def test_an_exchange_knows_its_variables(launch):
    ranks = scenario("lists_of_variables", launch)
    assert same(ranks)
    # Half of 8 elements is sent in each of 4 steps: the sums are 4, 8, 8 and 8 with the exchange's own residual.
    assert ranks[0]["sums"] == [28.0, 2800.0]
    assert "built for the variables a, b, but received gradients of a, other" in ranks[0]["other"]


@on(TWO)
def test_models_that_their_first_batch_builds_are_broadcast_after_it(launch):
    ranks = scenario("lazy_model", launch)
    assert same(ranks)
    assert not ranks[0]["built"], "build the model later, or the test shows nothing"


@pytest.mark.slow
@on(TWO)
def test_half_precision_weights_are_broadcast(launch):
    assert same(scenario("half_precision_weights", launch))


@pytest.mark.slow
@on(TWO)
def test_a_frozen_layer_keeps_its_weights_and_its_residual(launch):
    ranks = scenario("frozen_layer", launch)
    assert len({rank["weights"] for rank in ranks}) == 1
    assert all(rank["kept"] and rank["step"] == 4 for rank in ranks)


@each_launcher
def test_gradients_may_change_their_form_after_the_first_step(launch):
    ranks = scenario("changing_kinds", launch)
    assert same(ranks)
    mean = (1 + launch.ranks) / 2
    assert ranks[0] == {"dense first": mean, "rows first": mean}


@on(TWO)
def test_ranks_at_different_iterations_are_told(launch):
    for result in scenario("different_iterations", launch):
        assert result.startswith("MismatchError"), result
        assert "iterations is 1 and 0" in result


@on(TWO)
def test_odds_and_ends(launch):
    for result in scenario("odds_and_ends", launch):
        assert "gradient_accumulation_steps of its optimizers" in result["multi"]
        assert "already built" in result["built twice"]
        assert "'process_set'" in result["process set"]
        assert result["saved"] == "SGD"
        assert result["tape is gone"]
        assert result["scaled"] == "topk"
        assert not result["not scaled"]
