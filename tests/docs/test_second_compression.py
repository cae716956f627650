"""What a second compression costs: the table of two small models, and short runs with default communicators."""

from __future__ import annotations

import importlib
import json
from functools import cache

import pytest

from tests.support.launch import ROOT

FOUND = json.loads((ROOT / "docs/results/second_compression.json").read_text(encoding="utf-8"))
ROWS = {(row["method"], row["setting"]): row for row in FOUND["rows"]}


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("second_compression")


@cache
def loss(benchmark, name, communicator="auto"):
    config = {"compressor": name, "communicator": communicator}
    return benchmark.train(benchmark.Factorisation, config, seed=0)


# By two_shot, topk ends at twice the loss of dense training.
@pytest.mark.parametrize(
    ("name", "times_dense"), [("topk", 1.25), ("efsignsgd", 2.0), ("qsgd", 1.02), ("powersgd", 1.1)]
)
def test_four_ranks_with_defaults_train_like_four_with_allgather(benchmark, name, times_dense):
    assert loss(benchmark, name) == pytest.approx(loss(benchmark, name, "allgather"), rel=0.01)
    assert loss(benchmark, name) <= times_dense * loss(benchmark, "none")


def test_by_two_shot_topk_trains_much_worse(benchmark):
    assert loss(benchmark, "topk", "two_shot") > 1.5 * loss(benchmark, "topk", "allgather")


def test_the_table_names_what_auto_takes(benchmark):
    by_row = {(config["compressor"], benchmark.setting(config)): config for config in benchmark.methods()}
    for key, row in ROWS.items():
        assert row["auto"] == benchmark.chosen(by_row[key]), key


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
