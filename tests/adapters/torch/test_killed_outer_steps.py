"""Ranks that take outer steps, lose one of them, and go on from what they have saved: with the same bits."""

from __future__ import annotations

import pytest

from tests.support.covering import ALL
from tests.support.ranks import run_script

pytestmark = pytest.mark.distributed

# Inner steps of two periods, counted from 0, in which a rank is lost: here one that has sent a change.
LOST = range(12) if ALL else (2,)


def test_a_rank_may_be_killed_at_any_step_of_two_periods(tmp_path):
    """Real ranks, which are started again and go on from what they have saved: their bits are those of a simulation."""
    script = "tests/adapters/torch/killed_outer_steps.py"
    for step in (*LOST, -1):
        done = run_script(script, 2, str(tmp_path), str(step))
        assert (done.returncode == 0) == (step < 0), done.stdout + done.stderr
        assert step < 0 or (tmp_path / f"killed {step}").exists(), done.stdout + done.stderr
    assert [(tmp_path / f"result {rank}").read_text() for rank in range(2)] == ["True", "True"]
