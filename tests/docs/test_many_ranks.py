"""The digits runs on 16 simulated ranks: what two_shot may cost, with the settings that the pages recommend."""

from __future__ import annotations

import json

import pytest

from tests.support.launch import ROOT

FOUND = json.loads((ROOT / "docs/results/many_ranks.json").read_text(encoding="utf-8"))
ROWS = {row["method"]: row for row in FOUND["rows"]}


@pytest.mark.parametrize(
    ("method", "setting"),
    [("qsgd", "two_shot"), ("terngrad", "two_shot"), ("topk", "two_shot"), ("efsignsgd", "finer")],
)
def test_two_shot_stays_within_two_points_of_dense_training(method, setting):
    assert ROWS[method][setting] >= ROWS["none"]["allreduce"] - 2


def test_the_rows_are_those_settings():
    assert "memory = residual" in ROWS["terngrad"]["options"]
    assert "`second` = qsgd with 7 levels" in FOUND["columns"]["finer"]["title"]
