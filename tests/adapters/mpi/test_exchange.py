"""Tests of `grace.mpi` in real processes, on 2 and 4 ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from mpi4py.MPI import COMM_SELF

from grace import mpi
from grace.core.config.registry import compressors
from grace.core.errors import ConfigError
from grace.core.ops import native
from grace.core.wire.layout import WIRE_FORMAT
from tests.support import cases, half_precision, nodes, registered
from tests.support.covering import ALL, rows
from tests.support.launch import MPI, ROOT, Launch, command
from tests.support.ranks import on, same, scenario
from tests.support.steps import CUTS, METHODS, SPECS, WAYS, gradients, simulate

pytestmark = pytest.mark.distributed

SIZES = Launch(MPI, "mpirun", 2), Launch(MPI, "mpirun", 4)
# The exchange itself is tested with every number of ranks, and the rest with the usual one.
every_size, each_size = on(*SIZES, usual=SIZES), on(*SIZES)

# Every method with its defaults, and those of WAYS with every communicator, unit size and number of ranks. Under --all,
# all methods with all of these, and one row for each variant.
VARIANTS = [registered.name(compressor) for compressor in registered.extra_compressors()] if ALL else []


def _possible(row):
    variant = row["compressor"] in VARIANTS
    usual = (row["communicator"], row["cut"], row["ranks"]) == ("default", "layer", 2)
    if usual or variant or not (ALL or row["compressor"] in WAYS):
        return usual
    return row["communicator"] == "default" or cases.works(row["compressor"], row["communicator"])


EXCHANGES = rows(
    {
        "compressor": [*compressors, *VARIANTS],
        "communicator": ["default", "broadcast", "two_shot", "hierarchical", "sparse_allreduce"],
        "cut": ["layer", *(cut for cut in CUTS if cut != "bucket")],
        "ranks": [2, 4],
    },
    _possible,
)
COMBINATIONS = {row["method"] for row in cases.rows_of_combinations([("mpirun", 2)])}
EXCHANGES += [
    {"compressor": row["method"], "communicator": row["communicator"], "cut": "small buckets", "ranks": row["ranks"]}
    for row in cases.rows_of_combinations([("mpirun", 2), ("mpirun", 4)])
]


assert {row["compressor"] for row in EXCHANGES} == {*compressors, *VARIANTS, *COMBINATIONS}


def exchanged(launch):
    """Return the reports of every rank about the rows of a launch, by label."""
    chosen = [row for row in EXCHANGES if row["ranks"] == launch.ranks]
    results = scenario("exchanges", launch, chosen)
    assert all(len(rank) == len(chosen) for rank in results)
    return results


@every_size
def test_every_method_exchanges_what_the_simulation_does(launch):
    results = exchanged(launch)
    expected = compressors if ALL else set(compressors) - set(WAYS)
    assert launch.ranks > 2 or {label.split("/")[0].split("-")[0] for label in results[0]}.issuperset(expected)
    for label, result in results[0].items():
        if "refused" in result:
            assert all(rank[label]["exchange"] == result["refused"] for rank in results), label
            continue
        # One of the ranks has simulated it.
        (simulated,) = [rank[label] for rank in results if "worst" in rank[label]]
        if launch.ranks == 2 or not result["summed"]:
            assert simulated["equal"], label
        else:
            # Sums of more than two ranks depend on the algorithm, and so do the last bits of a 16-bit gradient.
            assert simulated["worst"]["wide"] <= 1e-4, label
            assert simulated["worst"]["half"] <= 2e-2, label
            # These are summed in the order of the ranks.
            assert simulated["worst"]["half sum"] == 0, label


@every_size
def test_merged_gradients_are_identical_on_all_ranks(launch):
    results = exchanged(launch)
    for label, result in results[0].items():
        assert all(rank[label].get("digests") == result.get("digests") for rank in results), label


@every_size
def test_reported_bytes_are_those_handed_to_collectives(launch):
    for rank in exchanged(launch):
        for label, result in rank.items():
            for sent, reported in result.get("bytes", []):
                assert sent == reported, label
            assert result.get("simulated bytes", result.get("bytes")) == result.get("bytes"), label


@every_size
def test_the_transport_keeps_its_contract(launch):
    assert all("test_announced_step" in rank for rank in scenario("transport_contract", launch))


@every_size
def test_names_of_processors_tell_the_ranks_of_a_node(launch):
    """All ranks know all names. So all know whether the ranks are numbered node by node, equally many on each."""
    ranks = scenario("ranks_of_nodes", launch)
    for rank in ranks:
        assert rank["here"] == launch.ranks
        for placed, found in nodes.FOUND[launch.ranks].items():
            alike = found[0] if len(set(found)) == 1 else 0
            expected = 1 if placed == "ba" else alike
            assert rank[placed]["local_size"] == expected, placed
            unknown = "" if expected else nodes.UNKNOWN.format(launch.ranks)
            assert rank[placed]["error"].startswith(unknown), placed
            assert bool(rank[placed]["error"]) == (not expected), placed


@each_size
def test_halves_are_added_in_float32_and_rounded_once(launch):
    half_precision.check(scenario("half_sums", launch))


@each_size
def test_sums_and_maxima(launch):
    results = scenario("reductions", launch)
    for label, result in results[0].items():
        if "/" not in label:
            continue
        wide = label.startswith(("float32", "float64"))
        assert result["close"] if wide else result["sum"], label
        assert result["max"], label
        assert result["dtypes"] == [True, True], label
        assert all(rank[label]["digest"] == result["digest"] for rank in results), label
    # 1 plus (ranks - 1) times half a unit in the last place. A tie rounds to the even neighbour.
    units = {2: 0, 4: 2}[launch.ranks]
    for rank in results:
        assert rank["float16 rounds once"] == [1 + units * 2.0**-10] * 3
        assert rank["bfloat16 rounds once"] == [1 + units * 2.0**-7] * 3
        assert rank["overflow"] is True


@each_size
def test_buffers_of_run_time_length_and_empty_ones(launch):
    for rank in scenario("lengths", launch):
        assert [label for label, right in rank.items() if not right] == []


@each_size
def test_residuals_follow_the_learning_rate(launch):
    results = scenario("learning_rates", launch)
    for rank in results:
        assert "corrects for the learning rate, but received none" in rank["error"]
        assert rank["digests"] == results[0]["digests"]


@each_size
def test_second_gradients_are_exchanged_as_in_a_simulation(launch):
    results = scenario("second_gradients", launch)
    for rank in results:
        assert rank["kinds"][0]
        assert not all(rank["kinds"])
        assert all("received none in a step that is none" in error for error in rank["errors"])
        assert (rank["kinds"], rank["digests"]) == (results[0]["kinds"], results[0]["digests"])


@each_size
def test_a_schedule_counts(launch):
    for rank in scenario("scheduled", launch):
        assert rank["methods"] == ["none", "none", "topk"]


@each_size
def test_collectives_may_be_waited_for_in_any_order(launch):
    for rank in scenario("waiting_orders", launch):
        assert [label for label, right in rank.items() if not right] == []


@each_size
def test_ranks_that_start_different_collectives_are_all_told(launch):
    for number, rank in enumerate(scenario("differing_calls", launch)):
        for label, errors in rank.items():
            # The error comes at the latest when the rank waits, and again at the next call.
            assert len(errors) >= 2, (label, errors)
            assert all(error.startswith("MismatchError") for error in errors), (label, errors)
            other = 0 if number == launch.ranks - 1 else launch.ranks - 1
            assert f"rank {number} started" in errors[0]
            assert number == launch.ranks - 1 or f"but rank {other} started" in errors[0]
        assert "sum float32 'a' of 4" in rank["length"][0]
        assert "sum float32 'a' of 2" in rank["length"][0]


@each_size
def test_a_rank_that_waits_says_so(launch):
    for number, rank in enumerate(scenario("stalled", launch)):
        assert rank["total"] == launch.ranks
        if number != 1:
            assert any("collective 'late' (allreduce sum float32)" in message for message in rank["messages"])
            assert any("all ranks to make their transport" in message for message in rank["messages"])


@each_size
def test_differing_configurations_are_told_on_every_rank(launch):
    for number, rank in enumerate(scenario("different_configurations", launch)):
        for label, error in rank.items():
            if label in ("none", "kernels, topk") or (label == "kernels, powersgd" and native.module_file() is None):
                assert error == ""
            elif label == "invalid":
                kind = "ConfigError" if number == launch.ranks - 1 else "MismatchError"
                assert error.startswith(kind), (label, error)
                assert "compress_ratio must be the share of elements to keep" in error
            else:
                assert error.startswith("MismatchError: rank"), (label, error)
        assert "compress_ratio is 0.2 and 0.1" in rank["option"]
        assert f"wire format is 0 and {WIRE_FORMAT}" in rank["wire format"]
        assert "payload format, signsgd is 2 and 1" in rank["format"]
        if native.module_file() is not None:
            assert "matrix products by is ['the library of numpy'] and ['kernels']" in rank["kernels, powersgd"]


@each_size
def test_replicas_that_part_are_named(launch):
    for rank in scenario("replicas", launch):
        assert (rank["equal"], rank["weights"]) == ("", "")
        began = (
            f"MismatchError: the weights or shared states of rank {launch.ranks - 1} and rank 0 differ before step 4"
        )
        assert rank["other weights"].startswith(f"{began}, in 'w' and 0 other tensors")
        assert rank["states"].startswith(f"{began}, in 'q of the compressor of w' and 0 other")


@each_size
def test_wrong_gradients_are_refused_before_anything_is_sent(launch):
    results = scenario("wrong_gradients", launch)
    for label, error in results[0]["errors"].items():
        expected = "a gradient of float32 for tensor 'v'" if label == "dtype" else "gradients of the shapes"
        assert error.startswith(f"StepError: step 0: expected {expected}"), label
    for rank in results:
        assert rank["step"] == 1
        assert rank["digest"] == results[0]["digest"]
        assert "closed" in rank["closed"]


@each_size
def test_resumed_exchange_is_bit_identical(launch):
    for rank in scenario("resume", launch):
        assert rank["mine"] is True
        assert rank["equal"] is True
        assert rank["partly"].startswith("MismatchError: the ranks are not at the same step")


@each_size
def test_outer_steps_are_those_of_the_simulation(launch):
    for rank in scenario("outer_steps", launch):
        assert rank["off"] == rank["resumed"] == [False] * 9
        assert "shape (40,)" in rank["error"]
        assert "StepError: outer steps: expected the weights of all tensors" in rank["missing"]


@each_size
def test_ranks_that_are_out_send_a_header(launch):
    ranks = scenario("outer_participation", launch)
    for rank in ranks:
        for name, found in rank.items():
            assert not any(found["off"]), name
            assert all(real == simulated for real, simulated in found["sent"]), name
    sent = [[real for real, _ in rank["allgather"]["sent"][2::2]] for rank in ranks]
    assert all(sync.count(16) == launch.ranks // 2 for sync in map(list, zip(*sent, strict=True)))
    if launch.ranks > 1:
        assert {real == 16 for rank in ranks for real, _ in rank["relevance"]["sent"]} == {False, True}


@each_size
def test_exchanges_of_other_communicators_do_not_mix(launch):
    for number, rank in enumerate(scenario("communicators_apart", launch)):
        peers = range(number % 2, launch.ranks, 2)
        assert rank["sizes"] == [len(peers), launch.ranks]
        assert rank["apart"] == sum(peers) / len(peers)
        assert rank["together"] == (launch.ranks - 1) / 2


def test_ranks_that_part_do_not_hang_at_their_end():
    """The error ends the process while MPI requests are still open."""
    code = """
import numpy as np
from grace.mpi import MPITransport
transport = MPITransport()
names = "xyz" if transport.rank else "yx"
handles = [transport.allreduce(np.zeros(3, np.float32), op="sum", name=name) for name in names]
handles[0].wait()
"""
    done = run_script(code, ranks=2)
    assert done.returncode != 0
    assert "MismatchError: rank" in done.stderr


@each_size
def test_calls_that_fail_on_one_rank_are_dropped_on_all(launch):
    results = scenario("discarded", launch)
    for number, rank in enumerate(results):
        last = number == launch.ranks - 1
        assert [label for label, result in rank.items() if not result["equal"]] == []
        assert rank["merge"]["error"] == "ZeroDivisionError: for this test"
        assert rank["without roll-back"]["error"].startswith("" if last else "WaitError")
        assert rank["compress"]["error"].startswith("ZeroDivisionError" if last else "WaitError"), number
        assert rank["parted"]["error"].startswith("MismatchError: the steps under way were dropped")
        assert len(rank["alone"]["error"]) == (6 if last else 2 if number == 0 else 0)
        for error in rank["alone"]["error"]:
            assert error.startswith("WaitError: rank ")
            assert "all ranks to call discard()" in error
        if not last:
            for label in ("compress", "skipped"):
                assert "step 2, the gradient of '" in rank[label]["error"]
                assert f"rank {launch.ranks - 1} drops the step" in rank[label]["error"]
            assert "'timeout' = 1 s" in rank["limit"]["error"]


ENDINGS = {"raises": "1 / 0", "ends": "break"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_ends_lets_the_others_end(ending):
    """They would wait for ever. Nobody has called `MPI_Abort`, so every rank says what it knows."""
    code = f"""
import numpy as np
from grace import mpi
mpi.transport.NOTES_SECONDS = 0.5
exchange = mpi.MPIExchange({{"w": (40, 40)}}, {{"compressor": "topk"}})
for step in range(3):
    if step == 2 and exchange.rank == 1:
        {ENDINGS[ending]}
    exchange({{"w": np.ones((40, 40), np.float32)}})
"""
    done = run_script(code, ranks=3)
    assert done.returncode != 0
    told = "has failed with ZeroDivisionError: division by zero" if ending == "raises" else "has ended"
    for rank in (0, 2):
        assert f"WaitError: rank {rank} of 3 cannot complete step 2, the gradient of 'w'" in done.stderr
    # The first of them may have told the other of its own error.
    assert done.stderr.count(f"rank 1 {told}") >= 2


def run_script(code, ranks):
    return subprocess.run(
        [*command("mpirun", ranks), sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_one_process_alone_compresses_too():
    simulation = simulate(METHODS["topk"], size=1)
    exchange = mpi.MPIExchange(SPECS, simulation.config, comm=COMM_SELF)
    for step in range(3):
        given = gradients(simulation, step)
        expected, merged = simulation.step(given)[0], exchange(given[0])
        assert all(np.array_equal(merged[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match="compress_ratio"):
        mpi.MPIExchange(SPECS, {"compressor": "topk", "compress_ratio": 2.0}, comm=COMM_SELF)


def test_a_misspelled_argument_is_told_with_the_nearest_one():
    topk = {"compressor": "topk"}
    with pytest.raises(ConfigError, match=r"MPIExchange: there is no argument 'avrage'\. Did you mean 'average'"):
        mpi.MPIExchange(SPECS, topk, comm=COMM_SELF, avrage=False)
    with pytest.raises(ConfigError, match="Did you mean 'compress_ratio'"):
        mpi.MPIExchange(SPECS, topk, comm=COMM_SELF, compress_rate=0.1)
    exchange = mpi.MPIExchange(SPECS, topk, comm=COMM_SELF, compress_ratio=0.1)
    assert exchange.config.method.compressor.compress_ratio == 0.1


def test_a_call_after_one_that_failed_exchanges_its_own_gradients(monkeypatch):
    simulation = simulate(METHODS["qsgd"], size=1)
    exchange = mpi.MPIExchange(SPECS, simulation.config, comm=COMM_SELF)

    def fail(self, payloads, site):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(type(METHODS["qsgd"].compressor), "merge", fail)
        with pytest.raises(ZeroDivisionError):
            exchange(gradients(simulation, 1)[0])
    given = gradients(simulation, 0)
    expected, merged = simulation.step(given)[0], exchange(given[0])
    assert all(np.array_equal(merged[name], expected[name]) for name in expected)


@on(*SIZES)
def test_auto_changes_on_all_ranks_in_one_step_when_the_link_falls(launch):
    ranks = scenario("chosen_by_auto", launch)
    assert same(ranks)
    found = ranks[0]
    # On a busy machine, an exchange over the fast link takes long as well. tests/advice has a clock of its own.
    assert set(found["methods"][:14]) == {"none"}
    assert found["methods"][79:81] == ["topk", "none"]
    # What topk held back was sent when it ended.
    assert found["lost"] < 1e-6 * len(found["methods"]) * launch.ranks
    assert not found["auto"]
    assert found["advice"]["sentence"].startswith("Compression pays ")
    assert found["advice"]["change ends it"] == "topk"
