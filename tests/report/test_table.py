"""The table of `grace report`: means, noise, differences and relative qualities of results."""

from __future__ import annotations

import random

import pytest

from grace.report.data_sets import BUILT_IN
from grace.report.methods import DENSE
from grace.report.table import WIDTH, printed, tables
from grace.report.task import find_task


def result(method, seed, quality, *, task="mf", data=BUILT_IN, ranks=4, sent=50, **more):
    cell = {"task": task, "method": method, "ranks": ranks, "seed": seed}
    more["setting"] = {"data": data}
    return {"cell": cell, "quality": quality, "diverged": quality is None, "bytes": sent, "dense_bytes": 200, **more}


def error(text):
    return {"cell": {"task": "mf", "method": "broken", "ranks": 4, "seed": 0}, "error": text}


DENSE_RUNS = [result(DENSE, seed, quality, sent=200) for seed, quality in enumerate((0.1, 0.13, 0.11))]


def test_a_row_has_the_mean_its_range_and_the_difference_from_the_same_seeds():
    runs = [*DENSE_RUNS, result("a", 0, 0.11), result("a", 1, 0.16)]
    (table,) = tables(runs)
    assert (table.task, table.ranks, table.noise) == ("mf", 4, pytest.approx(0.03))
    dense, row = table.rows
    assert (dense.method, dense.relative, dense.difference, dense.bytes) == (DENSE, 1, 0, 1)
    assert (row.method, row.seeds, row.low, row.high, row.bytes) == ("a", (0, 1), 0.11, 0.16, 0.25)
    assert row.quality == pytest.approx(0.135)
    # Seed 2 of uncompressed training has no counterpart.
    assert row.difference == pytest.approx(0.135 - 0.115)
    # A lower loss is better.
    assert row.relative == pytest.approx(0.115 / 0.135)


def test_where_more_is_better_so_is_the_relative_quality(monkeypatch):
    monkeypatch.setattr(type(find_task("mf")), "higher_is_better", True)
    (table,) = tables([*DENSE_RUNS, result("a", 0, 0.09), result("b", 0, 0.12)])
    assert [(row.method, row.relative) for row in table.rows[1:]] == [
        ("b", pytest.approx(1.2)), ("a", pytest.approx(0.9))
    ]  # fmt: skip


def test_the_title_names_data_of_a_folder():
    pytest.importorskip("torch", reason="ncf is a task of PyTorch")
    own, other = tables([result(DENSE, 0, 0.1), result(DENSE, 0, 0.6, task="ncf", data="MovieLens-20M (9 bytes)")])
    assert (own.title, other.title) == (
        find_task("mf").title,
        "neural collaborative filtering on MovieLens-20M (9 bytes)",
    )
    assert "ncf: neural collaborative filtering on MovieLens-20M (9 bytes), hit rate" in printed(
        [result(DENSE, 0, 0.6, task="ncf", data="MovieLens-20M (9 bytes)")]
    )


def test_uncompressed_training_comes_first_and_then_the_best_and_what_diverged_last():
    runs = [result("a", 0, None), result("b", 0, 0.2), result("c", 0, 0.05), *DENSE_RUNS]
    (table,) = tables(runs)
    assert [row.method for row in table.rows] == [DENSE, "c", "b", "a"]
    assert table.rows[-1].quality is table.rows[-1].relative is None


def test_one_seed_that_diverges_leaves_no_mean():
    (table,) = tables([*DENSE_RUNS, result("a", 0, 0.1), result("a", 1, None)])
    assert table.rows[-1].diverged == (1,)
    assert table.rows[-1].quality is None
    assert "diverged: 1 of 2" in printed([*DENSE_RUNS, result("a", 0, 0.1), result("a", 1, None)])


def test_what_is_unknown_is_not_guessed():
    (table,) = tables([DENSE_RUNS[0], result("a", 1, 0.2)])
    assert table.noise is None
    assert table.rows[-1].difference is table.rows[-1].relative is None
    assert "noise unknown" in printed([DENSE_RUNS[0], result("a", 1, 0.2)])
    (table,) = tables([result("a", 1, 0.2)])
    assert table.rows[0].relative is None


def test_how_far_16_bits_are_from_uncompressed_training_is_noise():
    """Three seeds may be equal by chance: accuracies of a thousand images were 0.94 to 0.941."""
    equal = [result(DENSE, seed, 0.1, sent=200) for seed in range(3)]
    more = [result("fp16", 0, 0.11), result("bf16", 1, 0.06), result("bf16", 2, None), result("fp16", 7, 0.5)]
    assert tables(equal)[0].noise == 0
    (table,) = tables([*equal, *more, result("a", 0, 0.5)])
    assert table.noise == pytest.approx(0.04)
    assert tables([equal[0], *more])[0].noise is None


def test_there_is_a_table_for_each_number_of_ranks():
    found = tables([*DENSE_RUNS, result(DENSE, 0, 0.3, ranks=8), result("a", 0, 0.6, ranks=8)])
    assert [(table.ranks, len(table.rows)) for table in found] == [(4, 1), (8, 2)]
    assert found[1].rows[1].relative == pytest.approx(0.5)


def test_the_same_results_give_the_same_text_in_any_order():
    runs = [*DENSE_RUNS, *(result(m, s, 0.1 + s / 70 + len(m) / 100) for m in ("a", "bb", "ccc") for s in range(3))]
    text = printed(runs)
    for seed in range(5):
        random.Random(seed).shuffle(runs)
        assert printed(runs) == text


def test_the_text_names_all_and_fits_100_columns():
    long = "topk:compress_ratio=0.1:communicator=allgather:memory=diana:alpha=1.0"
    perplexities = [result(long, seed, 1234.5 + seed) for seed in range(2)]
    runs = [*DENSE_RUNS, *perplexities, result("a", 0, 0.11 - 1e-9), result("b", 0, 0.1), error("no " * 90)]
    text = printed(runs)
    assert max(map(len, text.splitlines())) <= WIDTH
    lines = text.splitlines()
    assert lines[0] == "mf: matrix factorization, loss (lower is better), 4 ranks; noise 0.0300"
    assert lines[2].split() == ["none", "0.1133", "0.1000", "to", "0.1300", "0", "100.0", "100.00"]
    assert lines[3].split() == ["b", "0.1000", "one", "seed", "+0.0000", "±0.0300", "100.0", "25.00"]
    assert lines[5].startswith("topk:compress_ratio=0.1:co...")
    assert "error: broken" not in text
    assert "error: mf, broken, 4 ranks, seed 0: no no" in text


def test_a_difference_that_is_no_more_than_rounding_has_no_minus():
    assert "-0.0000" not in printed([*DENSE_RUNS, result("a", 0, 0.1 - 1e-9)])
