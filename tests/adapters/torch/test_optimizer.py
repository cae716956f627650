"""The PyTorch adapter in real processes: with every launcher, on 1, 2 and 4 ranks."""

from __future__ import annotations

import collections

import pytest

from grace.core.config.registry import compressors
from grace.core.wire.layout import WIRE_FORMAT
from tests.support import cases, half_precision, nodes
from tests.support.covering import ALL, pairwise
from tests.support.launch import SUMMED, TORCH, Launch
from tests.support.ranks import on, same, scenario
from tests.support.registered import OF_SHARDS
from tests.support.steps import WAYS

pytestmark = pytest.mark.distributed


def _possible(row):
    """Return whether a row is possible and worth its time.

    Without --all, these are the methods of WAYS: here it matters which collectives are used. Contracts and simulations
    have all methods, and grace.mpi has all of them on real ranks.
    """
    return cases.possible(row) and (ALL or row["method"] in WAYS)


# Methods and communicators with granularities of the model and launches.
EXCHANGES = pairwise(
    {
        **cases.method_factors(),
        "granularity": list(cases.GRANULARITIES),
        "view": [False, True],
        **cases.launch_factors(TORCH),
    },
    _possible,
) + cases.rows_of_combinations([("horovodrun-gloo", 2), ("mpirun", 4)], granularity="bucket", view=False)
# The dtypes of every method are tested in one process (tests/support/steps.py).
DTYPES = pairwise(
    {
        "method": cases.method_factors()["method"],
        "dtype": ["float16", "bfloat16", "float64"],
        **cases.launch_factors(TORCH),
    },
    _possible,
)
ALONE = Launch(TORCH, "python", 1)
# Methods that do not depend on shapes.
JOINED = {name for name in compressors if compressors.example(name).joins}

LAUNCHES = cases.launches(TORCH, EXCHANGES)
# One exchange is tested with every launch, training with the usual ones.
each_launch = on(*LAUNCHES, usual=LAUNCHES)
usual_launches = on(*LAUNCHES)
usual_ranks = on(*LAUNCHES[1:])
# For what does not depend on the launcher.
some_launches = on(
    ALONE, *(Launch(TORCH, *launch) for launch in (("horovodrun-gloo", 2), ("torchrun", 2), ("mpirun", 4)))
)
four_ranks = on(*(launch for launch in LAUNCHES if launch.ranks == 4))


def exchanges(name, launch):
    """Return the rows of a launch by label, and the reports of all ranks about each row."""
    chosen = cases.rows_of(launch, EXCHANGES)
    return {cases.label_of(row): row for row in chosen}, scenario(name, launch, chosen)


@usual_launches
def test_weights_are_identical_on_all_ranks_with_every_method_and_communicator(launch):
    listed, ranks = exchanges("trained", launch)
    for label in listed:
        assert same([rank[label]["weights"] for rank in ranks]), label
        assert ranks[0][label]["finite"], label


@usual_launches
def test_reported_bytes_are_the_bytes_handed_to_collectives_in_training(launch):
    check_bytes(exchanges("trained", launch)[1])


@each_launch
def test_reported_bytes_are_the_bytes_handed_to_collectives(launch):
    check_bytes(exchanges("given", launch)[1])


def check_bytes(ranks):
    for rank in ranks:
        for label, result in rank.items():
            assert result["reported"] == result["sent"], label
            if result.get("fixed"):
                assert result["predicted"] == result["sent"], label


@usual_launches
def test_resumed_run_is_bit_identical(launch):
    listed, ranks = exchanges("trained", launch)
    for label, row in listed.items():
        result = ranks[0][label]
        # With more than two ranks, a sum depends on its position in Horovod's fused buffer. This differs between runs,
        # even without grace.
        summed = row["method"] in SUMMED and launch.ranks > 2
        assert result["equal"] or (summed and result["distance"] < 1e-4), (label, result["distance"])


@each_launch
def test_real_exchange_equals_the_simulated_one(launch):
    listed, ranks = exchanges("given", launch)
    for label, row in listed.items():
        assert same([rank[label]["merged"] for rank in ranks]), label
        name, by_tensor = row["method"], row["granularity"] == "layer"
        # Gathered payloads and 16-bit floats are added in the order of the ranks; sums of more than two others depend
        # on the algorithm. A decomposition may depend on where its operand lies in memory, seen with four processes.
        inexact = name in ("atomo", "truncatedsvd") or name in (SUMMED - {"fp16", "bf16"} if by_tensor else SUMMED)
        most = (2e-2 if name == "fp16" else 1e-4) * (inexact and launch.ranks > 2)
        # One of the ranks has simulated it.
        (simulated,) = [rank[label] for rank in ranks if "worst" in rank[label]]
        assert simulated["as simulated"], label
        assert simulated["worst"] <= most, label


@each_launch
def test_nan_and_inf_reach_all_ranks_and_no_residual(launch):
    listed, ranks = exchanges("given", launch)
    for label, row in listed.items():
        for rank in ranks:
            result = rank[label]
            assert [step["finite"] for step in result["steps"]] == [True, True, False, True, False, True], label
            assert result["states finite"], label
            if row["granularity"] == "layer":
                assert all(step["others finite"] for step in result["steps"]), label
                assert not result["guarded"] or all(result["steps"][i]["state kept"] for i in (2, 4)), label


@each_launch
def test_granularity_decides_what_is_one_unit(launch):
    listed, ranks = exchanges("given", launch)
    for label, row in listed.items():
        units, tensors = ranks[0][label]["units"]
        assert same([rank[label]["units"] for rank in ranks]), label
        if row["method"] == "none" and row["communicator"] in ("allreduce", "auto"):
            # The library exchanges its tensors.
            assert units == 0, label
        elif row["communicator"] in OF_SHARDS or (row["communicator"], launch.ranks) == ("auto", 4):
            # Its units are shards.
            assert units >= tensors or row["granularity"] != "layer", label
        elif row["granularity"] == "layer":
            assert units == tensors, label
        elif row["granularity"] == "model" and row["method"] in JOINED:
            assert units == 1, label


@on(Launch(TORCH, "horovodrun-mpi", 2))
def test_horovodrun_over_mpi_works(launch):
    assert same(scenario("unused_parameters", launch))
    assert all(rank["plain"]["equal"] for rank in scenario("none_and_horovod", launch))


@each_launch
def test_none_equals_plain_reductions(launch):
    for rank in scenario("none_and_horovod", launch):
        for label, result in rank.items():
            assert result["moved"] > 0.01, label
            # On more ranks, Horovod may fuse other tensors, which changes the order of summation.
            fused = launch.ranks > 2 and launch.launcher != "torchrun"
            assert result["equal"] or (fused and result["distance"] < 1e-5), label


@on(
    *(Launch(TORCH, launcher, ranks) for launcher, ranks in (("mpirun", 2), ("horovodrun-gloo", 4))),
    *(Launch(TORCH, "torchrun", ranks) for ranks in (2, 3, 4)),
    usual=LAUNCHES,
)
def test_the_transport_keeps_its_contract(launch):
    groups = []
    for rank in scenario("transport_contract", launch):
        groups += rank
        assert all("test_announced_step" in ran for ran in rank.values())
    expected = {str(list(range(launch.ranks))): launch.ranks}
    if launch.ranks == 4:
        expected |= {"[0, 2]": 2, "[1, 3]": 2, "[0, 2, 3]": 3}
    assert collections.Counter(groups) == expected


@on(Launch(TORCH, "torchrun", 2), Launch(TORCH, "torchrun", 4))
def test_ranks_of_a_group_without_a_store_meet_all_the_same(launch):
    ranks = scenario("without_a_store", launch)
    assert same([weights for rank in ranks for weights in rank["weights"]])
    for number, rank in enumerate(ranks):
        assert rank["late"].startswith(f"WaitError: rank {number} of {launch.ranks} has waited 1 s for ")
        assert "all ranks to make their transport" in rank["late"]
        assert [str(found) for found in rank["groups"].values()] == list(rank["groups"])
    assert sum(len(rank["groups"]) for rank in ranks) == (7 if launch.ranks == 4 else 0)


@on(
    *(Launch(TORCH, *launch) for launch in (("mpirun", 2), ("horovodrun-gloo", 4), ("torchrun", 2), ("torchrun", 4))),
    usual=LAUNCHES,
)
def test_the_launcher_tells_the_ranks_of_a_node(launch):
    """Ranks that are not numbered node by node, or not equally many on each node, are refused on all ranks."""
    ranks = scenario("ranks_of_nodes", launch)
    assert [rank["here"] for rank in ranks] == [launch.ranks] * launch.ranks
    nodes.check(ranks, together=True)


@on(Launch(TORCH, "torchrun", 4))
def test_a_rank_says_what_the_others_wait_for(launch):
    """Also if they wait at another transport; what they waited for before is forgotten when they connect again."""
    one, other = (f"collective '{name}' (allreduce sum torch.float32)" for name in ("one", "other"))
    told = [[text.partition("Of the others, ")[2] for text in rank] for rank in scenario("missing_rank", launch)]
    assert told == [
        [
            f"ranks 1, 2 wait for {other}; rank 3 reports no wait.",
            f"rank 1 reports no wait; ranks 2, 3 wait for {other}.",
        ],
        [f"rank 0 waits for {one}; rank 2 waits for the same; rank 3 reports no wait."],
        [
            f"rank 0 waits for {one}; rank {beside} waits for the same; rank {missing} reports no wait."
            if beside < missing
            else f"rank 0 waits for {one}; rank {missing} reports no wait; rank {beside} waits for the same."
            for beside, missing in ((1, 3), (3, 1))
        ],
        [f"rank 0 waits for {one}; rank 1 reports no wait; rank 2 waits for the same."],
    ]


@on(Launch(TORCH, "torchrun", 2), Launch(TORCH, "torchrun", 4))
def test_data_start_while_the_program_computes(launch):
    """Headers come first; a thread of the transport starts the data when they have arrived."""
    assert all(rank == [True] * 4 for rank in scenario("data_without_calls", launch))


@on(Launch(TORCH, "torchrun", 2), Launch(TORCH, "torchrun", 4))
def test_a_failure_at_one_transport_ends_a_wait_at_the_other(launch):
    for rank in scenario("fails_beside", launch):
        assert rank["waited"].startswith("MismatchError"), rank
        assert rank["after"] == ""


@on(Launch(TORCH, "mpirun", 2), Launch(TORCH, "horovodrun-gloo", 4), Launch(TORCH, "torchrun", 4), usual=LAUNCHES)
def test_halves_are_added_in_float32_and_rounded_once(launch):
    half_precision.check_sets(scenario("half_sums", launch))


@usual_launches
def test_nothing_depends_on_the_order_of_the_hooks(launch):
    ranks = scenario("hook_order", launch)
    for label, (same_order, opposite_order) in ranks[0].items():
        assert same([rank[label] for rank in ranks])
        if launch.ranks <= 2:
            assert same_order == opposite_order, label


@usual_launches
def test_unused_parameters_do_not_hang_and_still_synchronise(launch):
    ranks = scenario("unused_parameters", launch)
    assert same(ranks)
    assert all(result["right moved"] for result in ranks[0].values())


@usual_ranks
def test_checkpoint_of_another_rank_loads_with_a_warning(launch):
    ranks = scenario("foreign_checkpoint", launch)
    assert ranks[0]["messages"] == []
    assert ranks[0]["residual"] > 0
    for rank in ranks[1:]:
        assert "residuals start from zero" in rank["messages"][0]
        assert rank["residual"] == 0
    for rank in ranks:
        assert rank["step"] == 3
        assert "no state of grace" in rank["without"][0]
        assert rank["merged"]


@on(ALONE)
def test_a_damaged_checkpoint_is_refused_and_nothing_of_it_loaded(launch):
    for rank in scenario("damaged_checkpoint", launch):
        told = rank["refused"]
        assert [kind for kind, text in told.items() if not text.startswith("StateError: checkpoint")] == []
        assert rank["changed"] == []
        assert "received {'residual': 'float16" in told["half"]
        assert "expected a torch.Tensor, received ndarray" in told["numpy"]
        assert "received one that PyTorch refuses (ValueError: " in told["groups"]
        assert "received one that PyTorch refuses (KeyError: " in told["no groups"]
        assert rank["loaded"] == 1


@usual_ranks
def test_checkpoint_that_only_some_ranks_load_is_noticed_by_all(launch):
    for rank in scenario("partly_loaded", launch):
        for label, error in rank.items():
            assert error.startswith("MismatchError: the ranks are not at the same step"), (label, error)
            assert "Let every rank load" in error


@usual_launches
def test_the_buffers_of_gradients_are_left_alone(launch):
    for result in scenario("gradient_buffers", launch):
        assert result["norms"] == pytest.approx([result["norms"][0]] * 3, rel=1e-6)
        assert result["size"] > 0
        assert result["lost"] < 1e-5


@usual_launches
def test_closures_are_exchanged_and_lbfgs_is_refused(launch):
    ranks = scenario("closures", launch)
    assert same([rank["weights"] for rank in ranks])
    assert all(rank["equal"] for rank in ranks)
    assert "LBFGS" in ranks[0]["refused"]


def assert_second_gradients(ranks):
    """Check that weights are those of a simulation, equal on all ranks and after a load, and random numbers, too."""
    for rank in ranks:
        assert rank["wrong"] == []
        assert {len(drawn) for drawn in rank["drawn"]} == {1, 2}
        assert all(len(set(drawn)) == 1 for drawn in rank["drawn"])
        assert rank["weights"] == ranks[0]["weights"]
        assert all(one == resumed for one, resumed in rank["weights"])
        assert "closure computes all at once" in rank["both"]


@usual_launches
def test_a_closure_at_earlier_weights_gives_second_gradients(launch):
    ranks = scenario("second_gradients", launch)
    assert_second_gradients(ranks)
    for rank in ranks:
        assert "step() was called without a closure" in rank["without"]
        assert "no step here takes one" in rank["scaled"]


@usual_launches
def test_a_second_synchronize_exchanges_nothing(launch):
    ranks = scenario("synchronized_twice", launch)
    assert same(ranks)
    once, twice = ranks[0]["weights"]
    assert once == twice
    assert "load_state_dict() was called after backward()" in ranks[0]["refused"]
    # zero_grad() undoes an exchange that nobody has applied, but not one before other states were loaded.
    assert all(rank["loaded"] for rank in ranks)


@usual_launches
def test_contract_of_horovod_is_kept(launch):
    ranks = scenario("contract_of_horovod", launch)
    assert same(ranks)
    result = ranks[0]
    assert result["instance"]
    assert result["lr"] == 0.005
    assert result["zeroed"]
    assert result["cleared"]
    assert "zero_grad() was called after backward()" in result["early"]


@usual_launches
def test_gradients_changed_before_the_step_are_refused(launch):
    """Each rank would clip its own gradients, and the replicas would part."""
    for rank in scenario("changed_gradients", launch):
        for label, error in rank.items():
            if label.startswith("leave"):
                assert error == "", label
            else:
                assert error.startswith("StepError: the gradient of tensor '"), (label, error)
                assert "call optimizer.synchronize() first" in error


@usual_ranks
def test_replicas_that_start_with_other_weights_are_refused(launch):
    for rank in scenario("forgotten_broadcast", launch):
        assert rank.pop("broadcast") == ""
        for label, error in rank.items():
            assert error.startswith("MismatchError: the weights of rank 1 and rank 0 differ before the first"), label
            assert "in 'head.bias' and 0 other tensors" in error
            advice = (
                "torch.distributed.broadcast(x, 0)" if launch.launcher == "torchrun" else "hvd.broadcast_parameters"
            )
            assert advice in error


@usual_launches
def test_a_parameter_that_is_unfrozen_after_wrapping_is_refused_by_name(launch):
    for rank in scenario("unfrozen", launch):
        for label, result in rank.items():
            expected = "StepError: parameter 'left.weight' was frozen when the optimizer was wrapped"
            assert result["error"].startswith(expected), label
            assert result["kept"], label


@some_launches
def test_a_parameter_that_is_frozen_in_mid_run_keeps_its_weight_and_its_residual(launch):
    ranks = scenario("frozen_in_mid_run", launch)
    for label in ranks[0]:
        assert same([rank[label]["weights"] for rank in ranks]), label
        for rank in ranks:
            assert all(rank[label][what] for what in ("kept", "others moved", "no gradient", "moved later")), label


@some_launches
def test_loss_scaler_skips_the_same_step_on_all_ranks_and_no_residual_moves(launch):
    ranks = scenario("mixed_precision", launch)
    for label, result in ranks[0].items():
        if not label.endswith("/overflow"):
            continue
        assert same([rank[label]["history"] for rank in ranks]), label
        assert same([rank[label]["weights"] for rank in ranks]), label
        assert [step["moved"] for step in result["history"]] == [True, False, True, True], label
        assert [step["scale"] for step in result["history"]] == [64.0, 32.0, 32.0, 32.0], label
        for rank in ranks:
            # Plain Horovod exchanges the tensors of "none", and no state exists.
            kept = [step["states kept"] for step in rank[label]["history"]]
            assert kept == ([True] * 4 if label.startswith("none") else [False, True, False, False]), label


@some_launches
def test_training_does_not_depend_on_the_loss_scale(launch):
    for rank in scenario("mixed_precision", launch):
        for form in {label.partition("/")[0] for label in rank if label.endswith("/unscaled")}:
            grown, backed_off = rank[f"{form}/growth"], rank[f"{form}/overflow"]
            assert [step["scale"] for step in grown["history"]] == [128.0, 256.0, 512.0, 1024.0]
            # Horovod's sum of more than two addends depends on their order, which differs between runs.
            if launch.ranks > 2 and form in ("powersgd", "none"):
                continue
            for scaled, unscaled in ((grown, rank[f"{form}/unscaled"]), (backed_off, rank[f"{form}/left out"])):
                assert scaled["weights"] == unscaled["weights"], form
                assert scaled["states"] == unscaled["states"], form


@some_launches
def test_loss_scalers_that_cannot_work_are_refused(launch):
    for rank in scenario("mixed_precision", launch):
        (error,) = rank["not told, topk, usual"]
        assert error.startswith("StepError: gradients were changed between backward() and step()")
        assert "grad_scaler=scaler" in error
        assert "expected a torch.amp.GradScaler as grad_scaler, received float" in rank["no scaler"]


@some_launches
def test_a_loss_scaler_that_was_not_passed_is_told_once(launch):
    for rank in scenario("mixed_precision", launch):
        for label in ("topk, clipped", "none, usual"):
            (warning,) = rank[f"not told, {label}"]
            assert warning.startswith("GraceWarning: grace.torch.DistributedOptimizer: a torch.amp.GradScaler"), label
        # The mean of scaled gradients is complete, and nothing depends on the scale.
        assert rank["not told, none, clipped"] == []


@usual_launches
def test_backward_passes_per_step_accumulate(launch):
    ranks = scenario("accumulation", launch)
    assert same([rank["weights"] for rank in ranks])
    assert all(rank["distance"] < 1e-9 for rank in ranks)


@usual_launches
def test_sum_and_predivision(launch):
    for result in scenario("reductions", launch):
        assert result["size"] > 0
        assert result["sum"] <= 1e-6
        # Horovod reduces dense tensors, and its scaling by powers of two is exact.
        assert result["predivide"] <= 1e-6


@on(*cases.launches(TORCH, DTYPES))
def test_dtypes(launch):
    ranks = scenario("dtypes", launch, cases.rows_of(launch, DTYPES))
    for label, result in ranks[0].items():
        assert same([rank[label]["weights"] for rank in ranks]), label
        assert result["moved"], label
        assert result["finite"], label
        assert result["dtype"], label


@usual_launches
def test_layouts_and_frozen_parameters(launch):
    ranks = scenario("layouts", launch)
    assert same(ranks)
    assert ranks[0]["kept"]
    assert not ranks[0]["planned"]


@usual_launches
def test_sparse_gradients_work_or_are_refused_by_name(launch):
    ranks = scenario("sparse_gradients", launch)
    assert same(ranks)
    assert "tensor 'weight' has a sparse gradient" in ranks[0]["refused"]
    assert "sparse_as_dense=True" in ranks[0]["refused"]


@usual_launches
def test_a_sparse_gradient_that_one_rank_lacks_arrives_or_is_refused(launch):
    for rank in scenario("unused_embedding", launch):
        if launch.launcher == "torchrun":
            assert all(rank[case].startswith("MismatchError") for case in ("unused", "mixed")), rank
        else:
            assert rank["unused"] == ""
            assert launch.ranks == 1 or "'weight' is sparse on some ranks and dense on others" in rank["mixed"]


@usual_launches
def test_sending_starts_during_the_backward_pass(launch):
    for result in scenario("overlap", launch):
        (sent_by_then,) = result["before the last gradient"]
        assert sent_by_then >= result["total"] // 2


@usual_launches
def test_two_optimizers_do_not_mix(launch):
    ranks = scenario("two_optimizers", launch)
    assert same(ranks)
    first, second = ranks[0]["weights"]
    assert first != second


@on(ALONE)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(launch):
    (result,) = scenario("refusals", launch)
    assert "'compression'" in result["compression"]
    assert "'groups'" in result["groups"]
    assert "'num_groups'" in result["num_groups"]
    assert "'op'" in result["op"]
    assert "Did you mean 'compress_ratio'?" in result["typo"]
    assert "there is no argument 'sparse_as_dens'. Did you mean 'sparse_as_dense'?" in result["typo of an argument"]
    assert "Did you mean 'backward_passes_per_step'?" in result["unknown argument"]
    assert "already wrapped" in result["wrapped"]
    assert "torch.optim.Optimizer" in result["not an optimizer"]
    assert "before you wrap the optimizer" in result["add_param_group"]
    assert "is not registered with Horovod" in result["process set"]


@on(Launch(TORCH, "horovodrun-gloo", 2))
def test_the_backend_chooses_between_two_initialized_libraries(launch):
    ranks = scenario("both_libraries", launch)
    for rank in ranks:
        assert {backend: result["transport"] for backend, result in rank.items()} == {
            "None": "HorovodTransport",
            "horovod": "HorovodTransport",
            "torch": "ProcessGroupTransport",
        }
    assert same([result["weights"] for rank in ranks for result in rank.values()])


@on(Launch(TORCH, "horovodrun-gloo", 2))
def test_a_scaler_may_get_the_optimizer_or_the_wrapper_around_it(launch):
    for rank in scenario("scaled_inside_a_wrapper", launch):
        assert rank["plain"] == rank["inside"] == rank["wrapper"]
        assert rank["plain"][2] == [1024.0, 512.0, 512.0, 512.0]


@on(Launch(TORCH, "horovodrun-gloo", 2))
def test_a_wrapper_that_takes_on_the_class_trains_alike(launch):
    for rank in scenario("inside_a_wrapper", launch):
        assert rank["wrapper"] == rank["plain"]
        assert rank["plain"][1:] == ["True"]


@on(Launch(TORCH, "horovodrun-gloo", 2))
def test_two_optimizers_train_in_two_threads(launch):
    ranks = scenario("two_threads", launch)
    assert same(ranks)
    assert ranks[0][0] == ranks[0][1]


@on(ALONE)
def test_copies_are_refused(launch):
    (result,) = scenario("copies", launch)
    assert len(result) == 6
    for name, error in result.items():
        assert error.startswith("GraceError: a wrapped optimizer cannot be copied or pickled"), name


@on(ALONE)
def test_momentum_twice_is_told(launch):
    (result,) = scenario("momentum_twice", launch)
    assert [len(told) for told in result.values()] == [1, 1, 0, 0]
    assert result["sgd"][0].startswith(
        "GraceWarning: the optimizer has momentum 0.5, and so has Momentum(momentum=0.9)"
    )
    assert "the optimizer has momentum 0.9" in result["adam"][0]


@usual_ranks
def test_refusals_do_not_hang_other_ranks(launch):
    assert all(all(rank.values()) for rank in scenario("refusals", launch))


@four_ranks
def test_process_sets_train_apart(launch):
    ranks = scenario("process_sets", launch)
    assert same([rank.pop("together") for rank in ranks])
    for label in ranks[0]:
        assert ranks[0][label] == ranks[2][label], label
        assert ranks[1][label] == ranks[3][label] or label == "only even", label
        assert ranks[0][label] != ranks[1][label], label


@usual_launches
def test_statistics_with_norms(launch):
    for result in scenario("statistics", launch):
        assert result["cheap"] == [None, None]
        assert 0 < result["relative_error"] < 1
        assert result["residual_norm"] > 0
        for word in ("left.weight", "topk", "residual", "allgather", "bytes"):
            assert word in result["report"]


@usual_ranks
def test_ranks_that_differ_are_told_at_construction(launch):
    ranks = scenario("different_configurations", launch)
    for rank, result in enumerate(ranks):
        for label, word in {
            "ratio": "compress_ratio",
            "parameters": "head",
            "typo": "topkk",
            "wire format": f"wire format is 0 and {WIRE_FORMAT}",
            "payload format": "payload format, signsgd is 2 and 1",
        }.items():
            assert word in result[label]["refused"], (rank, label)
            assert result[label]["seconds"] < 30
        assert result["ratio"]["refused"].startswith("MismatchError")
        assert result["agreed"]["refused"] == ""
