"""Usage of the TensorFlow adapter in real processes: Keras' features, mixed precision, files, callbacks, tapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.cases import TENSORFLOW_MPI
from tests.support.covering import ALL
from tests.support.launch import TENSORFLOW, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

TWO, FOUR = (Launch(TENSORFLOW, "horovodrun-gloo", ranks) for ranks in (2, 4))
# For what another launcher and number of ranks could change.
each_launcher = on(TWO, TENSORFLOW_MPI)

# What Keras does with a gradient does not depend on the method that exchanged it, and every scenario traces its own
# graphs. Without --all, one method and fewer optimizers, files and kinds of rows therefore take part.
SCALED = ["topk", "powersgd"]
METHODS = ["none", *SCALED] if ALL else ["topk"]
COMPRESSED = ["global_clipnorm", "use_ema", "accumulation", "adam", "several"] if ALL else ["accumulation", "several"]
SAVED = ["topk", "by name", "unregistered", "accumulating", "mixed precision"]
EMBEDDED = ["rows", "rows beside topk", "as dense", "accumulated", "compressed"]
if ALL:
    SAVED += ["powersgd", "adam", "scaled inside"]
    EMBEDDED += ["clipped", "scaled"]

# The largest difference of weights after a few steps with another order of summation.
ROUNDING = 1e-6


@pytest.mark.slow
@on(TWO)
def test_every_way_to_train_gives_the_same_bits(launch):
    ranks = scenario("ways_to_train", launch, METHODS)
    assert same(ranks)
    for label, ways in ranks[0].items():
        assert len(set(ways.values())) == 1, (label, ways)
    assert len(ranks[0]["topk"]) == 8
    assert len({ways["graph"] for ways in ranks[0].values()}) == len(METHODS)


@pytest.mark.slow
@on(TWO)
def test_options_of_optimizers_see_the_merged_gradient(launch):
    ranks = scenario("options_of_optimizers", launch, COMPRESSED)
    assert same(ranks)
    for label, result in ranks[0].items():
        assert result["distance"] < ROUNDING, label
        assert result["moved"] > 1e-3, label
    for label in ("clipnorm", "global_clipnorm", "clipvalue"):
        assert ranks[0][label]["moved"] < ranks[0]["momentum"]["moved"] / 5, label


@pytest.mark.slow
@on(TWO)
def test_every_built_in_optimizer_exchanges(launch):
    ranks = scenario("all_optimizers", launch)
    assert same(ranks)
    assert len(ranks[0]) >= 13
    for label, result in ranks[0].items():
        assert result["distance"] < ROUNDING, label
        assert result["moved"] > 1e-5, label


@pytest.mark.slow
@on(TWO)
def test_accumulated_gradients_travel_once(launch):
    ranks = scenario("passes_per_step", launch)
    assert same(ranks)
    result = ranks[0]
    # Four passes are two steps. Each sends as much as one pass would.
    assert all(values["step"] == 2 for values in result.values())
    assert [result[label]["bytes"] for label in ("sum", "mean", "of Keras", "sum of topk")] == [848, 848, 848, 432]
    assert result["mean"]["weights"] == result["of Keras"]["weights"]
    assert result["sum"]["distance"] < ROUNDING
    assert result["mean"]["distance"] < ROUNDING
    assert result["sum"]["weights"] != result["mean"]["weights"]


def moved(history: list[dict[str, Any]]) -> list[list[str]]:
    return [step["moved"] for step in history]


@pytest.mark.slow
@on(TWO)
def test_overflow_on_one_rank_skips_the_step_on_all(launch):
    ranks = scenario("overflow_in_fit", launch, ["none", *SCALED] if ALL else ["none", "topk"])
    assert same(ranks)
    for label, result in ranks[0].items():
        everything = ["weights", "momenta", *(["states"] if not label.startswith("none") else [])]
        assert moved(result["history"]) == [everything, [], everything, everything], label
        assert [step["scale"] for step in result["history"]] == [2.0**15, 2.0**14, 2.0**14, 2.0**14], label
        assert result["finite"], label


@each_launcher
def test_one_bad_tensor_rolls_back_all_of_them(launch):
    ranks = scenario("overflow_by_hand", launch)
    assert same(ranks)
    for label, result in ranks[0].items():
        everything = ["weights", "momenta", *(["states"] if not label.startswith("none") else [])]
        expected = [everything, [], everything]
        if "accumulating" in label:
            # The second pass does not count. The third pass completes the first step, the fifth pass the second step.
            expected = [[], [], everything, [], everything]
        assert moved(result["history"]) == expected, label
        scales = [step["scale"] for step in result["history"]]
        assert scales == [2.0**10] + [2.0**9] * (len(scales) - 1), label
        assert result["finite"], label
    # Not compared with mixed precision: TensorFlow may fuse float16 operations in graphs, and rounds less often then.
    assert ranks[0]["topk, graph"] == ranks[0]["topk, eager"]


@pytest.mark.slow
@on(TWO)
def test_memories_do_not_depend_on_the_scale(launch):
    ranks = scenario("scale_of_the_day", launch, ["none", *SCALED] if ALL else ["topk"])
    for rank in ranks:
        for label, kinds in rank.items():
            assert [kinds[kind][2] for kind in ("without", "fixed", "growing")] == [1.0, 2.0**10, 2.0**12], label
            assert kinds["without"][:2] == kinds["fixed"][:2] == kinds["growing"][:2], label
    assert same([[kinds["fixed"][0] for kinds in rank.values()] for rank in ranks])


@pytest.mark.slow
@on(TWO)
def test_saved_models_go_on_exactly(launch):
    ranks = scenario("saved_models", launch, SAVED)
    assert same(ranks)
    for label, result in ranks[0].items():
        assert result["state"], label
        whole, resumed = result["weights"]
        assert whole == resumed, label
        first, second = result["types"]
        assert first == second, label
    assert ranks[0]["mixed precision"]["types"][0] == "LossScaleOptimizer"


@pytest.mark.slow
@on(TWO)
def test_checkpoints_of_tensorflow_go_on_exactly(launch):
    ranks = scenario("checkpoints", launch)
    assert same(ranks)
    for label, (whole, resumed) in ranks[0].items():
        assert whole == resumed, label


@pytest.mark.slow
@on(TWO)
def test_one_file_for_all_ranks_starts_foreign_memories_from_zero(launch):
    ranks = scenario("one_file", launch)
    assert same([rank["weights"] for rank in ranks])
    assert same([rank["inherited"][1] for rank in ranks])
    for number, rank in enumerate(ranks):
        assert rank["inherited"][0] == (number == 0)
        loaded, expected = rank["weights"]
        assert loaded == expected
        assert rank["states"]
        assert rank["step"] == 5


@on(TWO)
def test_configurations_survive_a_round_trip(launch):
    ranks = scenario("round_trip", launch)
    assert same(ranks)
    for label in ("from_config", "serialize", "again"):
        assert ranks[0][label] == [True, 3.0, True], label
    assert ranks[0]["passes"] == [2, 2]
    assert ranks[0]["earlier"].startswith("StateError: saved optimizer: expected the key 'outer' in its configuration")


@pytest.mark.slow
@on(Launch(TENSORFLOW, "python", 1))
def test_a_fresh_process_loads_without_horovod_and_goes_on(launch):
    (result,) = scenario("fresh_process", launch)
    fresh = result["result"]
    for key, value in result["expected"].items():
        assert fresh[key] == value, key
    assert not fresh["initialized"]
    for key in ("wrapped", "taped", "step"):
        assert "call hvd.init() first" in fresh[key], key
    assert "tf.distribute strategies" in fresh["mirrored"]
    assert result["torch"]["backend"] == "torch"
    assert result["torch"]["refused"].startswith("ConfigError")
    assert "KERAS_BACKEND=tensorflow" in result["torch"]["refused"]


@pytest.mark.slow
@each_launcher
def test_ranks_start_alike_and_keep_their_memories(launch):
    ranks = scenario("broadcast", launch)
    last = len(ranks) - 1
    assert len({rank["own"] for rank in ranks}) == len(ranks)
    assert len({rank["apart"] for rank in ranks}) == len(ranks)
    for rank in ranks:
        assert rank["first"] == ranks[0]["first"]
        assert rank["first"][0] == ranks[0]["own"]
        assert rank["second"] == ranks[0]["second"]
        assert rank["second"][0] == ranks[last]["apart"]
        assert rank["states"]
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["different"].startswith("MismatchError: rank 1 and rank 0 were started differently: variable 1 is ")


@pytest.mark.slow
@on(TWO)
def test_repeated_fits_trace_no_graph_again_and_keep_no_variable(launch):
    """TensorFlow warns of a graph that is traced again and again after the fifth time."""
    ranks = scenario("repeated_fits", launch)
    assert same([rank["weights"] for rank in ranks])
    for rank in ranks:
        assert rank["traces"] == 1
        assert rank["warnings"] == []
        assert rank["kept"] == 0


@each_launcher
def test_metrics_are_averaged_over_ranks(launch):
    ranks = scenario("metrics", launch)
    names = {"loss", "mae", "val_loss", "val_mae"}
    for rank in ranks:
        assert set(rank["own"]) == set(rank["history"]) == names
        for name in names:
            mean = sum(other["own"][name] for other in ranks) / len(ranks)
            assert rank["history"][name] == pytest.approx(mean, rel=1e-9)
        assert rank["different"].startswith("MismatchError: expected the same metrics on all ranks")
        assert "only some ranks have mae;" in rank["different"]
    assert ranks[0]["own"]["loss"] != ranks[1]["own"]["loss"]


@pytest.mark.slow
@on(TWO)
def test_callbacks_that_decide_do_so_alike(launch):
    ranks = scenario("learning_rates", launch)
    assert same(ranks)
    assert ranks[0]["rates"] == pytest.approx([0.05, 0.05, 0.025, 0.0125])
    count, averages = ranks[0]["averages"]
    assert count == 4
    assert ranks[0]["weights"] == averages


@on(TWO)
def test_statistics_reach_history_and_tensorboard(launch):
    keys = ["grace_dense_bytes", "grace_ratio", "grace_relative_error", "grace_residual_norm", "grace_wire_bytes"]
    for rank in scenario("statistics", launch):
        for label, expected in {
            "with norms": keys,
            "without": [k for k in keys if k.endswith(("bytes", "ratio"))],
        }.items():
            result = rank[label]
            assert sorted(result["history"]) == expected, label
            assert result["traces"] == 1, label
            assert result["written"] == [f"epoch_{key}" for key in expected], label
            assert result["history"]["grace_wire_bytes"] == [432, 432]
            assert result["history"]["grace_dense_bytes"] == [848, 848]
            assert result["stats"] == {"step": 6, "wire_bytes": 432, "dense_bytes": 848}
            assert all("StepError" in error for error in result["early"])
            for word in ("net/hidden/kernel", "topk", "residual", "allgather", "432 on the wire"):
                assert word in result["report"]
        assert all(0 < error < 1 and norm > 0 for error, norm in rank["with norms"]["norms"])
        assert rank["without"]["norms"] == [[None, None]] * 4
        assert "set it before the first step" in rank["without"]["late"]
        assert rank["refused"].startswith("ConfigError: StatisticsCallback")


@on(Launch(TENSORFLOW, "horovodrun-gloo", 4))
def test_process_sets_train_apart(launch):
    ranks = scenario("apart", launch)
    for number, rank in enumerate(ranks):
        other = ranks[(number + 2) % 4]
        assert rank == other
        assert rank["weights"][0] == rank["weights"][1]
        assert "set it before the first step" in rank["unset"]
    assert ranks[0]["weights"] != ranks[1]["weights"]
    assert ranks[0]["loss"] != ranks[1]["loss"]


@pytest.mark.slow
@on(TWO)
def test_embeddings_travel_as_rows_or_compressed(launch):
    ranks = scenario("embeddings", launch, EMBEDDED)
    assert same(ranks)
    result = ranks[0]
    # 12 words of 40 float32 and an int32 index each, the small matrix, and the biases.
    rows = {"dense.0.values": 1920, "dense.0.indices": 48, "dense.1": 960, "dense.2": 8}
    for label in set(EMBEDDED) - {"as dense", "accumulated", "compressed"}:
        assert result[label]["sent"] == rows, label
        assert result[label]["gathered"] == 1920 + 48, label
    for label in ("as dense", "accumulated"):
        assert result[label]["sent"] == {"dense.0": 5120, "dense.1": 960, "dense.2": 8}, label
    # 128 float32 values with int32 indices, and a header. The biases share a bucket with compressed tensors.
    assert result["compressed"]["sent"] == {"bucket.1.0.0": 128 * 8 + 16, "dense.1": 960, "bucket.0.0.0": 8}
    for label, values in result.items():
        assert values["reported"] == sum(values["sent"].values()), label
        assert values["distance"] < ROUNDING or label == "compressed", label
    assert 0 < result["compressed"]["distance"] < 0.1


@pytest.mark.slow
@on(TWO, TENSORFLOW_MPI)
def test_rows_of_any_number_are_gathered(launch):
    ranks, size = scenario("rows_of_a_table", launch), launch.ranks
    for label in ("average", "sum", "compressed"):
        assert same([rank[label]["table"] for rank in ranks]), label
    # Row i is looked up by the ranks from i on, and in the second step also by the one before.
    counts = [(i < rank + 1) + (i < rank + 2) for rank in range(size) for i in range(32)]
    lookups = [sum(counts[i::32]) for i in range(32)]
    assert ranks[0]["sum"]["column"] == pytest.approx([1.0 - n for n in lookups])
    assert ranks[0]["average"]["column"] == pytest.approx([1.0 - n / size for n in lookups])
    for number, rank in enumerate(ranks):
        assert rank["sum"]["sent"] == (number + 2) * (40 * 4 + 4)
        assert rank["compressed"]["sent"] == 128 * 8 + 16


@on(TWO)
def test_a_rank_without_rows_takes_part(launch):
    ranks = scenario("without_rows", launch)
    assert same([rank["weights"] for rank in ranks])
    # The optimizer has momentum.
    assert ranks[0]["moved"] == [True, True, True]


@pytest.mark.slow
@on(TWO)
def test_tapes_give_the_same_bits_as_optimizers(launch):
    ranks = scenario("tapes", launch, METHODS)
    assert same(ranks)
    assert len(ranks[0]["topk"]) == 5
    for label, ways in ranks[0].items():
        assert len(set(ways.values())) == 1, (label, ways)


@pytest.mark.slow
@on(TWO)
def test_an_exchange_in_a_checkpoint_goes_on_exactly(launch):
    ranks = scenario("tape_checkpoint", launch)
    assert same(ranks)
    whole, resumed = ranks[0]["weights"]
    assert whole == resumed
    assert ranks[0]["step"] == 5


@pytest.mark.slow
@each_launcher
def test_local_sources_stay_local(launch):
    ranks = scenario("local_sources", launch)
    for label, factor in {"scaled": 1 / launch.ranks, "as it is": 1.0}.items():
        assert same([rank[label]["others"] for rank in ranks]), label
        for rank in ranks:
            assert rank[label]["factor"] == pytest.approx(factor)
            assert rank[label]["error"] == 0
            assert rank[label]["exchanged"] == ["net/hidden/bias", "net/out/kernel", "net/out/bias"]


@each_launcher
def test_a_tape_is_asked_in_several_ways(launch):
    ranks, size = scenario("shapes_of_sources", launch), launch.ranks
    mean = 2.0 * sum(rank + 1 for rank in range(size)) / size
    for rank in ranks:
        assert rank["single"] == rank["used"] == [mean, mean]
        assert rank["on rank 0"] == [1 / size, 1 / size]
        assert rank["nowhere"]


@on(TWO)
def test_a_tape_takes_the_arguments_of_tensorflow(launch):
    """A source that a rank does not use has zeros there; one that no rank uses has what the caller asks for."""
    for rank in scenario("unconnected", launch):
        row, nothing = [[0.0, 0.0], [0.5, 0.5], [0.0, 0.0]], [0.0, 0.0]
        first = {"a": [1.5, 1.5], "b": [0.5, 0.5], "later": None, "embeddings": row, "own": None}
        assert rank["none"] == [first, first]
        zeros = {**first, "later": nothing, "own": [0.0]}
        assert rank["zero"] == [zeros, {**zeros, "later": [1.0, 1.0]}]
        doubled = [{k: (2 * np.array(v)).tolist() for k, v in step.items()} for step in rank["zero"]]
        assert rank["text"] == doubled
        assert rank["horovod"] == [0, [1.0, 1.0]]


@pytest.mark.slow
@on(TWO, FOUR)
def test_nothing_is_lost_of_gradients_that_some_ranks_lack(launch):
    """On four ranks also in a process set of three."""
    topk = {"compressor": "topk", "compress_ratio": 0.25}
    listed = [
        {**topk, "communicator": "two_shot"},
        {**topk, "communicator": "sparse_allreduce", "reduction": "tree"},
    ]
    if ALL or launch.ranks == 2:
        listed += [
            {**topk, "communicator": "allgather"},
            {**topk, "communicator": "sparse_allreduce"},
        ]
    ranks = scenario("unused_in_turn", launch, listed)
    for label in set().union(*ranks):
        found = [rank[label] for rank in ranks if label in rank]
        assert same(found), label
        assert found[0]["given"] > 1
        assert found[0]["lost"] < 1e-5, label


@pytest.mark.slow
@on(TWO)
def test_two_models_have_their_own_memories_and_take_them_along(launch):
    ranks = scenario("two_models", launch)
    assert same(ranks)
    one, two, first, second = ranks[0]["weights"]
    assert [one, two] == [first, second]
    assert one != two
    assert ranks[0]["kept"] == 4
    assert ranks[0]["afterwards"] == 0
