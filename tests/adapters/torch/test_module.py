"""`grace.torch.register` with plain models, in real processes."""

from __future__ import annotations

import pytest

from grace.advice.candidates import changes
from tests.adapters.torch.test_optimizer import assert_second_gradients
from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

TWO, THREE = (Launch(TORCH, "torchrun", ranks) for ranks in (2, 3))


@on(TWO, THREE)
def test_a_plain_model_trains_as_in_ddp(launch):
    ranks = scenario("trained_plainly", launch)
    for label in ranks[0]:
        # The last of three ranks fills up its slice of a sum.
        assert all(same([sent for *_, sent in rank[label]]) for rank in ranks), label
        assert same([found for rank in ranks for *found, _ in rank[label]]), label


@on(TWO, THREE)
def test_a_closure_gives_registered_models_second_gradients(launch):
    ranks = scenario("second_gradients_of_models", launch)
    assert_second_gradients(ranks)
    for rank in ranks:
        assert "received none in a step that is none" in rank["without"]
        assert rank["dropped"] == 0
        assert "no step here takes one" in rank["static"]
        assert "a rank gets only its own parts of the mean" in rank["sharded"]
        assert rank["by a trainer"].startswith("ConfigError: grace.torch.trainers: ")


@on(TWO)
def test_layers_computed_again_train_alike_without_ddp(launch):
    ranks = scenario("computed_again", launch)
    for last in (True, False):
        found = [rank[f"{again}, {last}"] for rank in ranks for again in ("", "reentrant", "not reentrant", "compiled")]
        assert same(found)
        frozen = "layers.1" if last else "first"
        assert found[0]["without"] == [f"{layer}.{part}" for layer in (frozen, "unused") for part in ("weight", "bias")]
        assert f"{frozen}.weight" not in found[0]["names"]
        assert found[0]["buffer"] == [0.0, 0.0]
        assert (found[0]["steps"], found[0]["steps of a copy"], found[0]["freed"]) == (3, 0, True)


@on(TWO)
def test_what_cannot_work_without_ddp_is_refused(launch):
    again = "ConfigError: grace.torch.register: the model cannot be used, because it is registered already"
    beginnings = {
        "twice": again,
        "a part": again,
        "then in ddp": again,
        "ddp and plain": "ConfigError: grace.torch.register: grace.torch.register() exchanges the gradients of these",
        "converted": "StepError: parameter 'head.bias' was torch.float32 on cpu when the model was registered, and is",
        "unfrozen": "StepError: parameter 'head.weight' was frozen when the model was registered",
        "sparse": "StepError: tensor '0.weight' has a sparse gradient",
        "shared": "StepError: parameter 'layers.0.",
    }
    for number, rank in enumerate(scenario("refused_plainly", launch)):
        for label, beginning in beginnings.items():
            assert rank[label].startswith(beginning), (label, rank[label])
        assert "pass use_reentrant=False" in rank["shared"]
        assert rank["on one rank"].startswith("MismatchError: " if number else "ConfigError: ")
        # Both ranks use row 1, and rank 0 alone row 3.
        first, third = rank["sparse and dense"]
        assert first == pytest.approx(2 * third)


@on(TWO)
def test_a_step_is_dropped_after_an_interruption(launch):
    ranks = scenario("interrupted_pass", launch)
    assert same([rank[label] for rank in ranks for label in ("interrupted", "whole")])
    for rank in ranks:
        assert rank["first"] == "ArithmeticError: interrupted"
        assert "got a second gradient before its exchange was complete" in rank["second"]


@on(TWO)
def test_advice_and_auto_are_equal_on_all_ranks(launch):
    ranks = scenario("advised", launch)
    assert same(ranks)
    for way in ("ddp", "plain", "wrapped"):
        for method in ("none", "qsgd"):
            found = ranks[0][f"{way}, {method}"]
            assert found["when"] == [False, False, False, False, True, False]
            advice = found["advice"]
            rows = {row["label"]: row for row in advice["rows"]}
            assert rows[method]["measured"]
            assert set(rows) == {*changes(), "8 local steps"}
            assert advice["left_out"] == {}
            assert "AdamW" in rows["topk"]["reason"]
            assert found["auto"] is None
        found = ranks[0][f"{way}, auto"]
        assert found["auto"]["step_seconds"]["none"] > 0
        assert found["config"]["compressor"]["name"] == found["auto"]["compressor"]
        assert found["config"]["auto"]
        assert ranks[0][f"{way}, twice"].startswith("StepError: ")


@on(THREE)
def test_auto_goes_on_with_the_method_of_a_checkpoint_and_decides_again(launch):
    """On as many ranks as saved it, and on more of them, with the residuals."""
    for rank, found in enumerate(scenario("resumed_with_auto", launch)):
        assert (found["saved"][0], found["saved"][-1]) == ("none", "topk")
        assert ("on 2" in found) == (rank < 2)
        for size in (2, 3):
            if rank < size:
                exact, difference, methods, auto = found[f"on {size}"]
                assert exact == (size == 2)
                assert difference < 1e-5
                assert (methods[0], methods[-1], auto) == ("topk", "fp16", True)
