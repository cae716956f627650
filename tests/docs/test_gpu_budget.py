"""The table of what kernels move on a GPU has every kernel that runs there."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from grace.core.ops import native
from tests.support.launch import ROOT


@pytest.fixture(scope="module")
def budget():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        spec = importlib.util.spec_from_file_location("gpu_budget", ROOT / "benchmarks/gpu_budget.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(native.module is None, reason="the kernels are not built")
def test_every_kernel_has_a_row(budget):
    rows = json.loads((ROOT / "docs/results/gpu_budget.json").read_text(encoding="utf-8"))["rows"]
    expected = set(native.module.kernels()) - budget.ELSEWHERE
    assert {row["kernel"] for row in rows} == expected
    assert set(native.module.kernels()) >= budget.ELSEWHERE
    assert budget.WITHIN.keys() <= expected
    for row in rows:
        moved = (row["outside"] + row["within"]) * budget.SHOWN / budget.BANDWIDTH * 1e6
        assert row["microseconds"] == pytest.approx(moved, abs=0.1)


def test_steps_move_little_more_than_they_must(budget):
    rows = json.loads((ROOT / "docs/results/gpu_budget_steps.json").read_text(encoding="utf-8"))["rows"]
    assert {row["method"] for row in rows} == budget.LIMITS.keys()
    # Its scale comes between a pass that adds the residual and two more, and its codes are written in several passes.
    assert [row["method"] for row in rows if row["times"] > 1.15] == ["3lc"]
