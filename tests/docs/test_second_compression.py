"""The cost of a second compression: the table of two small models, and what its page says."""

from __future__ import annotations

import importlib
import json

import pytest

from grace.listing import of_literature
from tests.support.launch import ROOT

FOUND = json.loads((ROOT / "docs/results/second_compression.json").read_text(encoding="utf-8"))
ROWS = {(row["method"], row["setting"]): row for row in FOUND["rows"]}


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("second_compression")


def test_the_table_has_the_methods_of_the_first_tier_that_both_can_carry_and_names_what_auto_takes(benchmark):
    taken = {(c["compressor"], benchmark.setting(c)): benchmark.chosen(c) for c in benchmark.methods()}
    assert {key for key in taken if not of_literature(key[0])} <= ROWS.keys()
    assert {key: row["auto"] for key, row in ROWS.items()} == {key: taken.get(key) for key in ROWS}


@pytest.mark.parametrize(
    "row", [row for row in FOUND["rows"] if row["auto"] == "two_shot"], ids=lambda row: row["method"]
)
def test_where_auto_compresses_twice_it_costs_less_than_seeds_differ(benchmark, row):
    for task in benchmark.TASKS:
        assert row[f"{task}_added"] <= row[f"{task}_spread"], task


@pytest.mark.parametrize("name", ["topk", "dgc", "efsignsgd", "terngrad"])
def test_the_page_says_what_allgather_moves(name):
    page = (ROOT / "docs/communicators_and_memories.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "docs/results/moved_bytes.json").read_text(encoding="utf-8"))
    moved = {row["communicator"]: row["bytes"] for row in rows if row["method"] == name}
    cells = (f"{moved[program][size][0]:.2f}" for size in ("4", "8") for program in ("two_shot", "allgather"))
    assert f"| `{name}` | {' | '.join(cells)} |" in page


def test_the_page_says_what_more_elements_and_a_finer_second_compression_give():
    page = " ".join((ROOT / "docs/communicators_and_memories.md").read_text(encoding="utf-8").split())
    once, more = ROWS["topk", "compress_ratio 0.01"], ROWS["topk", "compress_ratio 0.02"]
    twice = {task: more[task] + more[f"{task}_added"] for task in ("factorisation", "characters")}
    finer = {task: once[task] + once[f"{task}_finer"] for task in twice}
    assert (
        f"still ends at {twice['factorisation']:.3f} instead of {once['factorisation']:.3f} (matrix factorisation) "
        f"and at {twice['characters']:.2f} instead of {once['characters']:.2f}." in page
    )
    assert f"ends at {finer['factorisation']:.3f} and {finer['characters']:.2f}, because" in page
    signs = ROWS["efsignsgd", ""]
    assert all(abs(signs[f"{task}_finer"]) <= signs[f"{task}_spread"] for task in twice)
