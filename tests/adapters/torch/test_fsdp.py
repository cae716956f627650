"""Models that FSDP2 has sharded, whose gradients grace exchanges, on real ranks."""

from __future__ import annotations

import pytest

from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

TWO, FOUR = Launch(TORCH, "torchrun", 2), Launch(TORCH, "torchrun", 4)


@on(TWO, FOUR)
def test_means_are_those_of_plain_fsdp(launch):
    for rank in scenario("means_by_fsdp", launch):
        assert len(rank) == (4 if launch == TWO else 6)
        for label, found in rank.items():
            # What plain FSDP itself loses when it adds in 16 bits.
            rounding = {"bfloat16, 1": 0.01, "float16, 1": 0.002}.get(label, 1e-6)
            assert found["none"] == 0, (label, found)
            assert found["all"] <= rounding, (label, found)
            assert found["some dense"] <= rounding, (label, found)
            assert 1e-4 < found["qsgd"] < 0.02, (label, found)
            sent, dense = found["bytes"]
            assert sent < 0.6 * dense, (label, found)


@on(TWO, FOUR)
def test_second_gradients_of_shards_are_those_of_ddp(launch):
    for rank in scenario("second_gradients_of_shards", launch):
        assert "expected those of rank" in rank.pop("foreign")
        assert rank.pop("other tensors").startswith("StateError: checkpoint")
        assert "received none in a step that is none" in rank.pop("without")
        assert len(rank) == (2 if launch == TWO else 6)
        for label, found in rank.items():
            assert found["apart"] < 1e-5 < 1e-2 < found["moved"], (label, found)
            assert found["equal"] == [True] * 3, label
            assert set(found["kinds"]) == {True, False}
            assert all(found["alike"]), "both calls of a step draw the same"
            assert found["counted"] == [*range(1, 9)], "buffers return after the first of two calls"


@on(TWO)
def test_a_model_is_found_in_what_holds_it(launch):
    for rank in scenario("held_by_others_in_fsdp", launch):
        assert same(rank["gradients"])
        assert "received Net, which holds 2: first, middle. Register each" in rank["parts"]


@pytest.mark.parametrize("replicas", [1, 2])
@on(FOUR)
def test_one_rank_says_what_is_sent(launch, replicas):
    """Also if there are two groups of ranks that exchange, one for each part of the model."""
    (before, after), *others = scenario("announced_by_fsdp", launch, replicas)
    assert others == [[], [], []]
    assert f"topk compresses 7 of 7 tensors, and each of {launch.ranks // replicas} ranks sends" in before
    assert after.startswith("grace: from step 1, qsgd compresses 7 of 7 tensors")


@pytest.mark.parametrize("replicas", [1, 2])
@on(FOUR)
def test_what_is_applied_and_what_is_held_is_what_was_given(launch, replicas):
    for rank in scenario("conserved_by_fsdp", launch, replicas):
        assert rank["worst"] < 1e-6, rank
        assert rank["held"] > 0.1, rank
        # Each rank compresses its own gradients, or those of its replica.
        assert rank["apart"] > 1e-3, rank
        assert rank["frozen"] == [True, True], rank
        # It is used twice in one step, and takes part with zeros in the step that does not use it.
        assert rank["steps"] == {"": 7, "first": 7, "middle": 8}


@on(TWO, FOUR)
def test_a_bad_gradient_reaches_no_state_on_any_rank(launch):
    ranks = scenario("bad_by_fsdp", launch)
    rows = 6 if launch == TWO else 3
    for number, rank in enumerate(ranks):
        # The scale has one element, so that it holds nothing back.
        assert rank["kept"] == [f"last.weight[0:{50 * rows}]", "scale[0:1]"]
        assert rank["bad"] == (["last.weight"] if number == 0 else [])


@pytest.mark.parametrize("replicas", [1, 2])
@on(FOUR)
def test_a_resumed_run_continues_bit_for_bit(launch, replicas):
    for rank in scenario("resumed_by_fsdp", launch, replicas):
        assert rank["equal"]
        assert rank["own"]
        assert "StateError: checkpoint: the modules differ: 'first', 'middle'" in rank["refused"]
        assert "StateError: checkpoint: the units of compression differ" in rank["damaged"]
        assert rank["kept"]


@on(FOUR)
def test_more_and_fewer_ranks_continue_with_what_others_held(launch):
    for rank in scenario("moved_by_fsdp", launch):
        assert rank.pop("held") > 0.01
        assert rank.pop("exact") == [False, False]
        assert "is not sharded by rows" in rank.pop("columns")
        for changes in (rank.pop("2 to 4"), rank.pop("4 to 2")):
            assert len(changes) == 7
            assert max(changes.values()) < 1e-6, changes
        assert not rank


@pytest.mark.parametrize("replicas", [1, 2])
@on(FOUR)
def test_a_distributed_checkpoint_keeps_the_states_of_all_parts(launch, replicas):
    for rank in scenario("distributed_checkpoint_by_fsdp", launch, replicas):
        assert rank["exact"] == [True, True]
        assert rank["equal"] == [True, True]
        # The ranks hold different states, so that one cannot stand for another.
        assert rank["apart"] == 4
        # A model with replicas refuses what one without them has saved, and the other way round.
        mine, other = ("part ", "a model without replicas")[:: 1 if replicas == 1 else -1]
        assert f"StateError: checkpoint: expected states of {mine}" in rank["refused"]
        assert f"received those of {other}" in rank["refused"]


@on(TWO)
def test_a_failed_step_is_dropped_and_taken_again(launch):
    first, *others = scenario("discarded_by_fsdp", launch)
    assert first["errors"][0] == "ZeroDivisionError: for this test"
    assert all(rank["errors"][0].startswith("WaitError: rank") for rank in others)
    for rank in (first, *others):
        assert "has failed with an error before" in rank["errors"][1]
        assert rank["states"]
        assert rank["gradients"]
        assert rank["equal"]
        assert rank["finished"]
        # Without roll-back.
        begun, dropped, again = rank["norms"]
        assert all(begun)
        assert all(again)
        assert not any(dropped)


@on(TWO)
def test_a_rank_that_waits_for_a_dense_reduction_says_so_and_ends(launch):
    first, late = scenario("waits_by_fsdp", launch)
    assert late == ""
    what = "step 1, the dense gradients of module ''"
    assert first.startswith(f"WaitError: rank 0 of 2 has waited 1 s for rank 1: {what}. Expected all ranks")


@on(FOUR)
def test_a_rank_of_another_part_that_stays_away_is_an_error(launch):
    """The ranks of different parts exchange small values only, for advice. They connect for them once."""
    ranks = scenario("absent_from_parts", launch)
    assert all(sorted(values) == [0, 1, 2, 3] for rank in ranks for values in rank["together"])
    assert [rank["connected"] for rank in ranks] == [1] * 4
    # Rank 1 waits for the other replica of its part, and the others for the other part of their replica.
    for rank in ranks[:3]:
        assert rank["error"].startswith("WaitError: rank "), rank
        assert "this test" in rank["error"], rank


@on(TWO)
def test_the_configuration_of_loco_feeds_back_what_it_loses_and_forgets_it_now_and_then(launch):
    for rank in scenario("loco_by_fsdp", launch):
        first, *_, last = rank["errors"]
        assert 0 < last < first / 8, rank["errors"]
        assert rank["memories"] == [[["torch.uint8"], step != 9] for step in range(10)]


@on(TWO)
def test_a_step_that_the_scaler_skips_changes_no_residual(launch):
    for rank in scenario("scaled_by_fsdp", launch):
        assert rank["scaled"]["after"] == rank["unscaled"]["after"]
        for label in ("overflow", "accumulated"):
            assert rank[label]["kept"] == [[False, False], [True, True], [False, False]]
            assert rank[label]["scale"] == 32.0
        (told,) = rank["not passed"]
        assert "pass it as grad_scaler" in told


@on(TWO, FOUR)
def test_scaled_gradients_reduced_in_16_bits_do_not_vanish_without_their_scale(launch):
    for rank in scenario("small_by_fsdp", launch):
        assert len(rank) == (1 if launch == TWO else 2)
        for found in rank.values():
            # Smaller than any float16 but 0.
            assert 0 < found["largest"] < 2**-25
            assert found["difference"] <= 0.002, found


@on(TWO, FOUR)
def test_other_ways_of_fsdp_give_the_same_means(launch):
    for rank in scenario("rare_by_fsdp", launch):
        assert len(rank) == (5 if launch == TWO else 9)
        assert max(rank.values()) <= 1e-6, rank


@on(TWO, FOUR)
def test_modules_that_the_ranks_reduce_in_another_order_are_named(launch):
    *others, last = scenario("mismatched_by_fsdp", launch)
    texts = (
        "step 1 of module 'middle', the gradient of 'middle.",
        "step 1 of module '', the gradient of 'scale' and 2 ",
    )
    for rank, error in enumerate((*others, last)):
        assert error.startswith(f"MismatchError: rank {rank} started ")
        mine, theirs = texts if error != last else texts[::-1]
        assert f"Rank {rank} knows them as {mine}" in error
        assert f", and as {theirs}" in error


replicated = pytest.mark.parametrize("replicas", [1, 2])


@replicated
@on(FOUR)
def test_models_may_get_their_storage_after_they_are_registered(launch, replicas):
    for rank in scenario("converted_by_fsdp", launch, replicas):
        assert same(rank["weights"])
        assert "grace.torch.register() exchanges the gradients of these parameters already" in rank["wrapped"]


@replicated
@on(FOUR)
def test_a_model_that_was_converted_after_it_was_registered_is_refused(launch, replicas):
    for rank in scenario("converted_by_fsdp", launch, replicas):
        compressed, dense = rank["errors"]
        assert compressed.startswith("StepError: module '")
        assert "': expected gradients of float32, received bfloat16: the model was converted after" in compressed
        assert dense == ""


@replicated
@on(FOUR)
def test_each_module_is_registered_once(launch, replicas):
    for rank in scenario("registered_twice_by_fsdp", launch, replicas):
        assert rank["steps"] == 1
        for label, module in (("again", ""), ("its part", ""), ("the whole", "middle")):
            expected = (
                f"ConfigError: grace.torch.register: the FSDP module '{module}' cannot be used, because it is regis"
            )
            assert rank[label].startswith(expected), (label, rank[label])
        # FSDP reduces within a replica as before.
        assert rank["other"] == "" if replicas > 1 else "its reduce-scatter is not FSDP's own" in rank["other"]


@on(FOUR)
def test_what_cannot_work_is_refused_on_all_ranks(launch):
    ranks = scenario("refused_by_fsdp", launch)
    for label in ("this rank", "this rank of replicas"):
        one, *others = [rank.pop(label) for rank in ranks]
        assert one.startswith("ConfigError: topk: compress_ratio")
        assert all(error.startswith("MismatchError: grace.torch.register failed on rank 0") for error in others)
    beginnings = {
        "compressor": "IncompatibleError: parameters that are sharded over the ranks cannot be exchanged by PowerSGD",
        "learning": "IncompatibleError: parameters that are sharded over the ranks cannot be exchanged by HardThres",
        "memory": "IncompatibleError: parameters that are sharded over the ranks cannot be exchanged with Diana",
        "clipping": "IncompatibleError: parameters that are sharded over the ranks cannot be exchanged with DGCMemory",
        "communicator": "ConfigError: communicator 'allgather' brings every rank the whole mean",
        "ranks": "MismatchError: rank 1 and rank 0 were started differently: configuration",
        "unfrozen": "StepError: a parameter of module 'middle' was frozen when the model was registered",
        "late": "ConfigError: grace.torch.register: the parameters of module '' are not sharded at the moment",
        "replicas": "MismatchError: the weights of rank 1 and rank 0 differ before the first step",
    }
    assert same([{label: error[:40] for label, error in rank.items()} for rank in ranks])
    for label, error in ranks[0].items():
        assert error.startswith(beginnings[label]), (label, error)
    assert ranks[0].keys() == beginnings.keys()


@on(TWO, FOUR)
def test_auto_changes_on_all_ranks_in_one_step(launch):
    """Also those that hold other parts of the model, which do not exchange gradients with each other."""
    first, *others = scenario("chosen_by_auto", launch)
    assert set(first["methods"]) == {"none", "qsgd"}
    assert first["auto"]["compressor"] == "qsgd"
    assert set(first["auto"]["step_seconds"]) == {"none", "qsgd"}
    for rank in others:
        assert (rank["methods"], rank["auto"]) == (first["methods"], first["auto"])
