"""Pools of ranks: one launch serves many scenarios, and what fails says why and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.launch import Launch

pytestmark = pytest.mark.distributed

LAUNCH = Launch("tests.support.failing_worker", "mpirun", 2)


@pytest.fixture(autouse=True)
def fresh():
    """No result of another test is remembered, and the pool ends with the test."""
    ranks._ask.cache_clear()
    yield
    ranks.stop()


def test_one_launch_serves_many_scenarios_and_gives_results_in_the_order_of_ranks():
    assert ranks.scenario("number", LAUNCH, 5) == [5, 6]
    pool = ranks._pool
    assert ranks.scenario("number", LAUNCH, 7) == [7, 8]
    assert ranks._pool is pool


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("one_raises", 60, r"rank 0: Traceback (?s:.*)ValueError: rank 0 does not want to"),
        ("one_dies", 60, r"did not finish one_dies(?s:.*)the last words of a rank"),
        ("one_hangs", 1, r"did not finish one_hangs in time(?s:.*)the last words of a rank"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_rank_that_fails_is_told_and_the_next_scenario_has_a_new_pool(monkeypatch, name, limit, expected):
    monkeypatch.setattr(ranks, "SCENARIO_S", limit)
    with pytest.raises(AssertionError, match=expected):
        ranks.scenario(name, LAUNCH)
    failed = ranks._pool
    monkeypatch.undo()
    assert ranks.scenario("number", LAUNCH, 5) == [5, 6]
    assert ranks._pool is not failed


def test_a_launch_that_does_not_start_is_told():
    with pytest.raises(AssertionError, match=r"did not start(?s:.*)No module named"):
        ranks.scenario("number", LAUNCH._replace(worker="tests.support.no_such_worker"))


def test_a_killed_launch_leaves_no_files_of_mpirun_behind():
    # An mpirun that gets the process id of a killed one does not start where it finds that one's files.
    assert ranks.scenario("number", LAUNCH, 5) == [5, 6]
    assert ranks._pool is not None
    folder = Path(ranks._pool._folder.name)
    assert list(folder.glob("ompi.*")), f"mpirun keeps its files outside of {folder}"
    ranks._pool.kill()
    assert not folder.exists()
