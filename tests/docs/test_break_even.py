"""Tests of scripts/pages/break_even.py, the chart of the bandwidths at which methods pay."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def chart():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts" / "pages")
        yield importlib.import_module("break_even")


def test_saved_bytes_follow_the_collective(chart):
    # A ring allreduce of 4 bytes per element against one bit per element from each other rank.
    assert chart.saved_bytes("signsgd", 2) == 4 - 1 / 8
    assert chart.saved_bytes("signsgd", 16) == 7.5 - 15 / 8
    assert chart.saved_bytes("fp16", 16) == 7.5 / 2
    # One byte per element, and a float for each of the buckets of 512, to the owners of shards and back.
    assert chart.saved_bytes("qsgd", 16) == 7.5 * (1 - (1 + 4 / 512) / 4)


def test_at_the_break_even_both_take_the_same_time(chart):
    parameters, ranks = 25e6, 4
    bandwidth = chart.break_even("qsgd", ranks, parameters) * 1e9 / 8
    codec = chart.codec("qsgd")
    dense = 1.5 * 4 * parameters / bandwidth
    quantized = 1.5 * (1 + 4 / 512) * parameters / bandwidth
    # Four shards, and the mean of one.
    shards = 5 * codec.fixed + codec.per_element * parameters * 5 / 4
    assert shards + quantized == pytest.approx(dense, rel=1e-4)


def test_what_is_not_cut_into_shards_is_compressed_once(chart):
    for method, ranks in (("qsgd", 2), ("topk", 16), ("signsgd", 16), ("powersgd", 16)):
        assert chart.codec_seconds(method, ranks, 25e6) == chart.codec(method).seconds(25e6)


def test_a_codec_takes_what_was_measured(chart):
    row = chart.measurements.rows_of("codec")["topk"]
    codec = chart.codec("topk")
    assert codec.fixed + 25e6 * codec.per_element == pytest.approx(row["torch"] * 15.5e-3)
    assert codec.fixed + 1000 * codec.per_element == pytest.approx(row["small_torch"] * 1e-6)
    assert "a copy of 25 million float32 taken as 15.5 ms" in (ROOT / "docs/choose.md").read_text(encoding="utf-8")


def test_every_method_sends_less(chart):
    """The chart has no words for a method that never pays."""
    assert all(chart.saved_bytes(method, ranks) > 0 for method in chart.METHODS for ranks in chart.RANKS)


def test_the_table_names_what_auto_takes(chart):
    cells = {
        line.split("]")[0][3:]: line.split(" | ")[1]
        for line in chart.table(chart.Block([], ROOT / "docs" / "choose.md", ""))[2:]
    }
    assert cells["topk"] == "allgather"
    assert cells["qsgd"] == "allgather, two_shot from 3 ranks"
    assert cells["signsgd"] == "allgather"
    assert cells["fp16"] == "allreduce"


def test_labels_at_the_ends_of_lines_do_not_overlap(chart):
    ends = [20.0, 21.0, 3.0, 20.5]
    places = chart.spread(ends, apart=1.5)
    assert places[2] == pytest.approx(3)
    first, second, third = (places[index] for index in (0, 3, 1))
    assert second / first == pytest.approx(1.5)
    assert third / second == pytest.approx(1.5)
    assert first * second * third == pytest.approx(20.0 * 20.5 * 21.0)
    # The line that comes next is pushed away as well.
    assert sorted(chart.spread([*ends, 31.0], apart=1.5)) == pytest.approx(
        chart.spread(sorted([*ends, 31.0]), apart=1.5)
    )
    assert min(b / a for a, b in pairwise(sorted(chart.spread([*ends, 31.0], apart=1.5)))) >= 1.5 - 1e-9
