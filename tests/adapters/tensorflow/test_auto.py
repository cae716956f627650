"""The compressor "auto" in TensorFlow: the decision of the core, between two steps, where no graph runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.launch import TENSORFLOW, Launch
from tests.support.ranks import on, scenario

pytestmark = pytest.mark.distributed


@on(*(Launch(TENSORFLOW, "horovodrun-gloo", ranks) for ranks in (2, 3)))
def test_auto_decides_on_all_ranks_in_the_same_step_and_equals_a_change_by_hand(launch):
    ranks = scenario("tf_auto", launch)
    assert len(ranks) == launch.ranks
    for way in ("fit", "hand", "tape"):
        found = [rank[way] for rank in ranks]
        assert all(rank == found[0] for rank in found)
        # 5 steps are not counted, and 10 are.
        assert (found[0]["since"], found[0]["compressor"]) == (15, "topk")
        ours, by_hand = found[0]["digests"]
        assert ours == by_hand, way
    for rank in ranks:
        for text in rank["refused"]:
            assert "a graph of yours would have to be traced again" in text


def test_a_change_keeps_the_function_that_a_model_has_made_of_its_train_function():
    pytest.importorskip("keras")
    replaced = pytest.importorskip("grace.tensorflow.replaced")
    exchange = SimpleNamespace(history=[], advisor=SimpleNamespace(decide=lambda: exchange.history.append("change")))

    def keras_make(made, force):
        made.train_function = lambda batch: f"new {batch}"

    model = SimpleNamespace(train_step=None)
    train = replaced._make_train_function(lambda batch: f"old {batch}", lambda: model, exchange, keras_make)
    model.train_function = own = lambda batch: f"own {train(batch)}"
    assert model.train_function(1) == "own new 1"
    assert model.train_function is own
