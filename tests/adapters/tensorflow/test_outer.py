"""Outer steps of Keras' optimizers, which are those of a simulation bit for bit."""

from __future__ import annotations

import pytest

from tests.adapters.tensorflow.outer_cases import CASES, sizes_of
from tests.support.covering import ALL, rest_slow
from tests.support.launch import TENSORFLOW, Launch
from tests.support.ranks import on, scenario

pytestmark = pytest.mark.distributed

TWO, FOUR = (Launch(TENSORFLOW, "horovodrun-gloo", ranks) for ranks in (2, 4))


@on(FOUR)
@pytest.mark.parametrize("name", rest_slow([*CASES], 3))
def test_outer_steps_in_graphs_have_the_bits_of_a_simulation(launch, name):
    ranks = scenario("tf_outer_bits", launch, name)
    sizes = [str(size) for size in sizes_of(name)]
    if not ALL:
        sizes = sizes[-1:]
    of_all = [size for size in sizes if size == "4"]
    # Ranks 0 and 2 are a process set.
    assert [sorted(rank) for rank in ranks] == [sizes, of_all, sizes, of_all]
    for found in (each for rank in ranks for each in rank.values()):
        assert found["equal"] == [True] * 13, found
        assert found["resumed"] == [True] * (6 if ALL else 0), found
        assert found["common"]
        assert found["variates"]
        ours, theirs = found["stats"]
        assert theirs["rounds"] >= 4
        assert 0 < ours["utilisation"] < 1
        assert ours["needed_bandwidth"] > 0
        for timed in ("utilisation", "needed_bandwidth"):
            del ours[timed], theirs[timed]
        if name == "pairs, states":
            # A graph sends states as they are, at every second of 13 syncs; a simulation adds a stamp of 4 bytes.
            theirs["bytes_per_step"] -= 6 * 4 / 13
        assert ours.keys() == theirs.keys()
        for key, number in theirs.items():
            assert ours[key] == (number if number is None else pytest.approx(number, rel=1e-6)), key


# The first has what the last three have on their own.
PASSES = [
    (FOUR, "accumulated, overflow"),
    (FOUR, "scaled"),
    *((FOUR, name) for name in ("accumulated", "overflow")),
    (TWO, "accumulated, overflow"),
]


@pytest.mark.parametrize(("launch", "name"), rest_slow(PASSES, 2), ids=str)
def test_inner_steps_of_several_passes_or_left_out_by_a_rank_are_counted_alike(launch, name):
    scales = []
    for rank in scenario("tf_outer_passes", launch, name):
        assert rank["equal"] == [True] * 13, rank
        assert rank["rounds"][0] == rank["rounds"][1] >= 4
        # The mean loss of the last period: a fragment syncs after each step, or all do after the first and each third.
        of_all = [1.0] * 3 + [3.0] * 3 + [6.0] * 3 + [9.0] * 3 + [12.0]
        assert rank["losses"] == ([1.0 + i for i in range(13)] if name.startswith("accumulated") else of_all)
        scales.append(rank["scale"])
    if name.endswith("overflow"):
        assert scales == [2.0**5, 2.0**5, 2.0**5, 2.0**6][: launch.ranks], "each rank has a scale of its own"


@on(TWO)
@pytest.mark.parametrize("name", rest_slow(["Adam", "momentum", "Adagrad"], 1))
def test_states_that_are_reset_are_those_of_a_new_optimizer(launch, name):
    for apart in scenario("tf_outer_resets", launch, name):
        assert max(apart) < 1e-6, apart


@pytest.mark.slow
@on(TWO)
def test_what_other_ranks_have_saved_is_forgotten_or_refused(launch):
    for rank in scenario("tf_outer_of_others", launch):
        moved, loaded = rank["before"]
        assert moved == loaded > 0.1
        assert rank["after"] == [0.0, 0.0]
        assert rank["own"], "a broadcast must not change them"
        assert "StateError: checkpoint: with pairs, each rank goes on from weights of its own" in rank["pairs"]
