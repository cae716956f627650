"""The cost of a second compression: that the study supports what `auto` takes, and what the page says of bytes."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from tests.support.launch import ROOT


@pytest.fixture(scope="module")
def study_tables():
    pytest.importorskip("torch", reason="the study has tasks of PyTorch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "scripts" / "pages"), *sys.path])
        yield importlib.import_module("study_tables")


def test_auto_compresses_twice_where_it_costs_little_and_not_where_it_costs_more(study_tables):
    taken, others = study_tables.lost_by_second_compression()
    assert {"qsgd", "blockwise", "eden", "natural"} <= taken.keys()
    assert {"topk", "terngrad", "efsignsgd"} <= others.keys()
    # In points of the quality of uncompressed training, on the worse of two tasks.
    assert max(taken.values()) < 1.5 < 2.5 < min(others.values())


@pytest.mark.parametrize("name", ["topk", "dgc", "efsignsgd", "terngrad"])
def test_the_page_says_what_allgather_moves(name):
    page = (ROOT / "docs/communicators_and_memories.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "docs/results/moved_bytes.json").read_text(encoding="utf-8"))
    moved = {row["communicator"]: row["bytes"] for row in rows if row["method"] == name}
    cells = (f"{moved[program][size][0]:.2f}" for size in ("4", "8") for program in ("two_shot", "allgather"))
    assert f"| `{name}` | {' | '.join(cells)} |" in page
