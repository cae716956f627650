"""Replicas that part are noticed on every rank, with the name of the tensor: a forgotten broadcast, and later drift."""

from __future__ import annotations

import pytest

from tests.support.covering import ALL
from tests.support.launch import TENSORFLOW, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed


def _plain(error):
    """Return an error of a graph without the backslashes that TensorFlow puts before quotation marks."""
    return error.replace("\\", "")


two_ranks = on(Launch(TENSORFLOW, "horovodrun-gloo", 2))


@pytest.mark.slow
@two_ranks
def test_replicas_that_start_with_other_weights_are_refused_at_the_second_step(launch):
    for errors in scenario("forgotten_broadcast", launch):
        for label, error in errors.items():
            if label.startswith("broadcast"):
                assert error == "", label
                continue
            began = "MismatchError: the weights of rank 1 and rank 0 differ before the second step, in 'net/hidden/"
            assert began in _plain(error), label
            assert "BroadcastGlobalVariablesCallback(0) to fit()" in error, label
            assert "hvd.broadcast_variables([v.value for v in model.weights], root_rank=0)" in error, label
            assert error.startswith("MismatchError" if label in ("loop", "tapes") else "InvalidArgumentError"), label


@two_ranks
def test_a_replica_that_parts_is_named(launch):
    labels = ["weight", "local", "state", "residual", "off"] if ALL else ["weight", "residual"]
    for errors in scenario("drifting_replicas", launch, labels):
        assert errors.pop("off", "") == "", "without the option nothing is noticed"
        assert errors.pop("residual") == "", "residuals may differ"
        for label, error in errors.items():
            step = 2 if label == "local" else 4
            place = "q of the compressor of net/hidden/kernel" if label == "state" else "net/hidden/bias"
            began = "MismatchError: the weights or shared states of rank 1 and rank 0 differ"
            assert f"{began} before step {step}, in '{place}' and " in _plain(error), (label, error)


@pytest.mark.slow
@two_ranks
def test_a_checkpoint_can_be_loaded_after_a_step_has_failed(launch):
    for rank in scenario("loaded_after_an_error", launch):
        assert "differ before step 6, in 'net/hidden/" in _plain(rank["error"])
        whole, again = rank["weights"]
        assert again == whole
        assert rank["step"] == 8


@two_ranks
def test_replicas_are_compared_by_hand(launch):
    ranks = scenario("compared_by_hand", launch)
    assert same(ranks)
    equal, other = ranks[0]
    assert equal == ""
    assert other.startswith(
        "MismatchError: the weights or shared states of rank 1 and rank 0 differ before step 0, in "
    )
    assert "'net/out/kernel' and 0 other" in other
