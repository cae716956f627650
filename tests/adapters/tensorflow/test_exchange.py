"""The numerics of the TensorFlow adapter in real processes: with every launcher, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest

from grace.core.config.registry import compressors
from grace.core.methods.compressor import usual_communicator
from tests.support import cases, half_precision, nodes
from tests.support.cases import TENSORFLOW_MPI
from tests.support.covering import ALL, rows
from tests.support.launch import SUMMED, TENSORFLOW, Launch
from tests.support.ranks import on, same, scenario
from tests.support.registered import OF_SHARDS
from tests.support.steps import WAYS

pytestmark = pytest.mark.distributed

ALONE, GLOO_2, MPI_2, GLOO_4 = (
    Launch(TENSORFLOW, *launch)
    for launch in (("python", 1), ("horovodrun-gloo", 2), ("mpirun", 2), ("horovodrun-gloo", 4))
)
# Away from two ranks of horovodrun, without --all, only these methods, in graphs and in buckets.
ELSEWHERE = ("fp16", "threshold", "powersgd")
# By mpirun, only the collectives that two of them usually need. Halves have a test of their own there.
BY_MPIRUN = {(name, usual_communicator(compressors.example(name))) for name in ELSEWHERE if name != "fp16"}


def _exchanges(row):
    """Return whether a row needs a graph here. PyTorch's tests already cover how a step splits and sends."""
    if not cases.possible(row):
        return False
    launch = (row["launcher"], row["ranks"])
    if ALL:
        usual = (row["granularity"], row["mode"], *launch) == ("layer", "graph", "horovodrun-gloo", 2)
        usual = usual and row["communicator"] == usual_communicator(compressors.example(row["method"]))
        return usual or row["method"] in WAYS
    # test_graphs.py has typical methods in a graph, and all of them with --all.
    if launch == ("horovodrun-gloo", 2):
        return row["method"] in WAYS
    if (row["granularity"], row["mode"]) != ("bucket", "graph"):
        return False
    return launch == ("mpirun", 2) and (row["method"], row["communicator"]) in BY_MPIRUN


# For Keras, only the path of a method through a step matters. One process exchanges nothing.
TRAINED = [
    {"method": method, "launcher": launch.launcher, "ranks": launch.ranks}
    for launch in (ALONE, GLOO_2)
    for method in WAYS
]

_FACTORS = {
    **cases.method_factors(),
    "granularity": ["layer", "bucket", "model"],
    # By turns, every second step is eager.
    "mode": ["graph", "eager", "by turns"] if ALL else ["graph", "by turns"],
    **cases.launch_factors(TENSORFLOW),
}
# What a method, a communicator and a granularity make of each other does not depend on the framework. PyTorch has all
# pairs, and grace.mpi the combinations.
GIVEN = [
    *rows(_FACTORS, _exchanges),
    *(
        row
        for row in cases.rows_of_combinations(
            [("horovodrun-gloo", 2), ("horovodrun-gloo", 4)], granularity="layer", mode="graph"
        )
        # On four ranks, only what has more rounds or other partners than on two.
        if (row["method"] == "tree" if row["ranks"] == 4 else ALL or row["method"] in ("coded", "dore"))
    ),
]

each_training = on(*cases.launches(TENSORFLOW, TRAINED))
each_exchange = on(*cases.launches(TENSORFLOW, GIVEN), usual={GLOO_2})


@pytest.mark.slow
@each_training
def test_weights_are_identical_on_all_ranks_with_every_method(launch):
    ranks = scenario("trained", launch, cases.rows_of(launch, TRAINED))
    for label, result in ranks[0].items():
        assert same([rank[label]["weights"] for rank in ranks]), label
        assert result["finite"], label
        assert result["moved"], label


@pytest.mark.slow
@each_training
def test_reported_bytes_are_the_bytes_handed_to_collectives_by_fit(launch):
    for rank in scenario("trained", launch, cases.rows_of(launch, TRAINED)):
        for label, result in rank.items():
            # A single rank sends nothing. It reports the bytes that it would send.
            assert result["sent"] == (result["reported"] if launch.ranks > 1 else 0), label
            if result["fixed"]:
                assert result["predicted"] == result["reported"], label


@each_exchange
def test_reported_bytes_are_the_bytes_handed_to_collectives(launch):
    listed = {cases.label_of(row): row for row in cases.rows_of(launch, GIVEN)}
    for rank in scenario("given", launch, list(listed.values())):
        for label, row in listed.items():
            result = rank[label]
            # Two ranks pad 16-bit floats to whole 32-bit integers.
            summed = row["communicator"] in ("allreduce", "auto", "hierarchical")
            half = row["method"] in ("fp16", "bf16") and summed and launch.ranks == 2
            assert result["sent"] == result["reported"] + half * result["padding"], label
            if result["fixed"]:
                assert result["predicted"] == result["reported"], label


@each_exchange
def test_real_exchange_equals_the_simulated_one(launch):
    listed = {cases.label_of(row): row for row in cases.rows_of(launch, GIVEN)}
    ranks = scenario("given", launch, list(listed.values()))
    for label, row in listed.items():
        assert same([rank[label]["merged"] for rank in ranks]), label
        assert ranks[0][label]["moved"], label
        # One of the ranks has simulated it.
        (result,) = [rank[label] for rank in ranks if "worst" in rank[label]]
        # Gathered payloads and 16-bit floats are added in the order of the ranks; sums of more than two others depend
        # on the algorithm. Matrix products depend on the library, and NumPy has another. A decomposition may depend on
        # where its operand lies in memory, seen with four processes.
        name = row["method"]
        summed = SUMMED - {"fp16", "bf16"} if row["granularity"] == "layer" else SUMMED
        inexact = name in ("gradiveq", "gradzip", "powersgd") or (
            name in {*summed, "atomo", "truncatedsvd"} and launch.ranks > 2
        )
        most = 2e-2 if name == "fp16" else 1e-4
        assert result["worst"] <= most * inexact, label


@each_exchange
def test_nan_and_inf_reach_all_ranks_and_no_residual(launch):
    for rank in scenario("given", launch, cases.rows_of(launch, GIVEN)):
        for label, result in rank.items():
            assert [step["finite"] for step in result["steps"]] == [True, True, False, False, True], label
            by_tensor = "/layer/" in label
            # On four ranks, "auto" is two_shot for some methods.
            if any(name in label for name in OF_SHARDS) or ("/auto/" in label and launch.ranks == 4):
                # Only the shard with the bad element is rolled back, which the simulation checks.
                continue
            for step in result["steps"][2:4]:
                assert step["others finite"] or not by_tensor, label
                assert step["state kept"] or not result["guarded"], label


@pytest.mark.slow
@on(ALONE, GLOO_2, TENSORFLOW_MPI)
def test_none_equals_one_process_on_the_joined_batch(launch):
    for rank in scenario("none_and_one_process", launch):
        for label, result in rank.items():
            assert result["moved"] > 0.005, label
            assert result["distance"] < 1e-6, label


@on(GLOO_2, TENSORFLOW_MPI)
def test_none_equals_the_tape_of_horovod(launch):
    for rank in scenario("none_and_horovod", launch):
        for label, result in rank.items():
            assert result["size"] > 0.01, label
            # On more ranks, Horovod may fuse other tensors, which changes the order of summation.
            assert result["distance"] <= (1e-6 if launch.ranks > 2 else 0.0), label


@pytest.mark.slow
@on(GLOO_2, TENSORFLOW_MPI)
def test_gradients_that_a_graph_knows_beforehand_are_exchanged_all_the_same(launch):
    ranks = scenario("constant_gradients", launch)
    assert same(ranks)
    size = launch.ranks
    of_even = len(range(0, size, 2)) / size
    for label, result in ranks[0].items():
        assert result["uniform"], label
        expected = [[of_even, of_even, step + (size - 1) / 2] for step in range(3)]
        assert result["merged"] == expected, label
    # Two equal tensors need two collectives of Horovod.
    assert ranks[0]["none"]["collectives"] == 3


@pytest.mark.slow
@on(GLOO_2)
def test_sum_and_predivision(launch):
    for rank in scenario("reductions", launch):
        for label, result in rank.items():
            assert result["size"] > 0.1, label
            # A sum of more than two ranks may have another order.
            assert result["sum"] <= (1e-5 if launch.ranks > 2 else 1e-6), label
            assert result["predivide"] <= 1e-6, label


@pytest.mark.slow
@on(GLOO_4)
def test_process_sets_train_apart(launch):
    ranks = scenario("process_sets", launch, *([] if ALL else [["topk", "broadcast"]]))
    assert same([rank.pop("together") for rank in ranks])
    for label in ranks[0]:
        assert ranks[0][label] == ranks[2][label], label
        assert ranks[1][label] == ranks[3][label], label
        assert ranks[0][label] != ranks[1][label], label


@pytest.mark.slow
@on(GLOO_2)
def test_two_optimizers_and_a_tape_do_not_mix(launch):
    ranks = scenario("two_optimizers", launch)
    assert same(ranks)
    assert len(set(ranks[0]["weights"])) == 3
    assert len(ranks[0]["collectives"]) == 3


@pytest.mark.slow
@on(GLOO_2)
def test_models_built_on_some_ranks_only_matter_to_nobody_or_are_named_by_an_error(launch):
    ranks = scenario("different_numbers_of_models", launch)
    assert same(ranks)
    assert "Error" not in ranks[0]["named"]
    assert ranks[0]["numbered"].startswith("MismatchError")
    assert "dense/kernel" in ranks[0]["numbered"]


@pytest.mark.slow
@on(GLOO_2)
def test_the_keras_optimizer_of_horovod_diverges_and_that_of_grace_does_not(launch):
    ranks = scenario("hazard", launch)
    assert same([rank["grace"] for rank in ranks])
    assert not same([rank["horovod"] for rank in ranks]), (
        "horovod.tensorflow.keras.DistributedOptimizer now synchronises under Keras 3: "
        "the warning about it in README.md can go, and this test with it."
    )


@pytest.mark.slow
@on(GLOO_2)
def test_batches_of_any_size_use_one_trace_and_the_order_of_traces_does_not_matter(launch):
    ranks = scenario("shapes", launch)
    assert same(ranks)
    assert ranks[0]["traces of fit"] == 1
    assert ranks[0]["traces of steps"] == 1
    assert ranks[0]["traces of the function"] == 2
    assert len(ranks[0]["collectives"]) > 1


@pytest.mark.slow
@on(GLOO_2)
def test_dtypes_empty_tensors_and_frozen_layers(launch):
    ranks = scenario("dtypes", launch, ["none", "topk", "bf16", "powersgd"] if ALL else ["topk", "powersgd"])
    for label, result in ranks[0].items():
        assert same([rank[label]["merged"] for rank in ranks]), label
        assert result.get("moved", True), label
        assert result.get("finite", True), label
        assert result.get("dtypes", True), label
    assert ranks[0]["frozen"]["kept"]
    assert not ranks[0]["frozen"]["planned"]


@pytest.mark.slow
@on(GLOO_2, TENSORFLOW_MPI)
def test_checkpoint_of_another_rank_loads_with_a_message(launch):
    ranks = scenario("foreign_checkpoint", launch)
    assert same([rank["weights"] for rank in ranks])
    assert ranks[0]["messages"] == [[], []]
    assert ranks[0]["as with it"]
    assert not ranks[0]["as without a past"]
    for number, rank in enumerate(ranks[1:], 1):
        for messages in rank["messages"]:
            (message,) = messages
            assert f"rank 0 of {launch.ranks} saved this checkpoint, and rank {number}" in message
            assert "residuals start from zero" in message
        assert rank["as without a past"]
        assert not rank["as with it"]
    assert all(rank["step"] == 4 for rank in ranks)


@pytest.mark.slow
@on(GLOO_2)
def test_checkpoint_that_only_some_ranks_load_is_noticed_by_all(launch):
    for rank in scenario("partly_loaded", launch, ["topk", "powersgd", "rules"] if ALL else ["powersgd", "rules"]):
        for label, error in rank.items():
            assert "MismatchError: the ranks are not at the same step" in error, (label, error)
            assert "Let every rank load" in error, label


@each_exchange
def test_an_exchange_that_goes_on_from_a_checkpoint_is_bit_identical(launch):
    listed = {cases.label_of(row): row for row in cases.rows_of(launch, GIVEN)}
    ranks = scenario("given", launch, list(listed.values()))
    for label, row in listed.items():
        # With more than two ranks a sum depends on where Horovod put it in a fused buffer.
        summed = row["method"] in SUMMED and launch.ranks > 2
        assert ranks[0][label]["resumed"] <= 1e-4 * summed, label


@pytest.mark.slow
@on(GLOO_2)
def test_fresh_models_go_on_from_checkpoints_of_every_kind(launch):
    ranks = scenario("resume", launch, *([] if ALL else [{"topk": ["deferred"], "powersgd": ["built", "loaded"]}]))
    assert same(ranks)
    for label, result in ranks[0].items():
        assert result["moved"] > 0.001, label
        assert result["equal"], label


@pytest.mark.slow
@on(GLOO_2)
def test_a_tape_goes_on_from_a_checkpoint(launch):
    ranks = scenario("resume_tape", launch)
    assert same(ranks)
    for label, result in ranks[0].items():
        assert result["moved"] > 0.001, label
        assert result["equal"], label


@on(GLOO_2)
def test_second_gradients_are_exchanged_as_in_a_simulation(launch):
    for rank in scenario("second_gradients", launch):
        for memory, result in rank.items():
            assert result["full"][0], memory
            assert set(result["full"]) == {True, False}, memory
            assert result["equal"], memory
            assert "StepError: a memory takes second gradients in each step that is no full round" in result["error"]


@on(GLOO_2, Launch(TENSORFLOW, "horovodrun-gloo", 3))
def test_a_closure_is_evaluated_at_earlier_weights_as_well(launch):
    """With the same random numbers, and from checkpoints that have these weights."""
    for rank in scenario("second_gradients_of_closures", launch):
        for memory, result in rank.items():
            assert set(result["full"]) == {True, False}, memory
            assert False in result["full"][4:], memory
            assert result["simulated"] == [True] * 8, memory
            assert result["restored"] == result["copied"] == [True] * 4, memory
            assert "inside a tf.function, the kind of the step is not known" in result["error"]


@on(GLOO_2, MPI_2, GLOO_4)
def test_the_transport_keeps_its_contract(launch):
    """Eagerly and in graphs, among all ranks and in process sets of some of them."""
    for rank in scenario("transport_contract", launch):
        assert len(rank) >= 2
        assert all("test_announced_step" in ran for ran in rank.values())


@on(GLOO_2, GLOO_4)
def test_a_collective_runs_on_ranks_that_do_not_read_its_result(launch):
    """TensorFlow would leave it out of their graphs, and the other ranks would wait."""
    first, *others = scenario("unread_results", launch)
    size = launch.ranks
    for i in range(2):
        numbers = [[rank + i, 1, 2, 3] for rank in range(size)]
        expected = [
            [sum(column) for column in zip(*numbers, strict=True)],
            [x for rank in range(size) for x in numbers[rank][: rank + 1]],
            [x for each in numbers for x in each],
            [],
            numbers[-1],
            [x for each in numbers for x in each],
        ]
        assert first[f"step {i}"] == [*expected, *expected]
        assert all(rank[f"step {i}"] == [] for rank in others)


@pytest.mark.slow
@on(GLOO_4)
def test_three_ranks_exchange_by_every_way_to_add_and_by_shards(launch):
    listed = [{"name": "sparse_allreduce", "reduction": reduction} for reduction in ("split", "union", "tree")]
    listed += ["two_shot", {"name": "hierarchical", "local_size": 3}]
    ranks = scenario("three_ranks", launch, listed)
    assert ranks.pop(1) == {}
    for rank in ranks:
        assert len(rank) == len(listed)
        for label, result in rank.items():
            assert result["moved"] > 0, label
            # Horovod decides in which order it adds a node's gradients.
            assert result["worst"] <= (1e-6 if "hierarchical" in label else 0), label


@on(GLOO_2, GLOO_4)
def test_horovod_tells_the_ranks_of_a_node(launch):
    """Ranks that are not numbered node by node, or not equally many on each node, are refused. An option wins."""
    ranks = scenario("ranks_of_nodes", launch)
    nodes.check(ranks, together=False)
    for rank in ranks:
        assert rank["here"] == launch.ranks
        # The numbers of the ranks of a process set say nothing about nodes.
        assert all(found == 0 for label, found in rank.items() if label.startswith("set"))
        assert all(rank[placed]["named"] == "" for placed in nodes.FOUND[launch.ranks])


@on(MPI_2, GLOO_4)
def test_halves_are_added_in_float32_and_rounded_once(launch):
    half_precision.check_sets(scenario("half_sums", launch))
