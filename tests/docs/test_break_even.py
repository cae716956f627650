"""Tests of docs/_ext/break_even.py, the chart of the bandwidths at which methods pay."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def chart():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "_ext")
        yield importlib.import_module("break_even")


def test_saved_bytes_follow_the_collective(chart):
    # A ring allreduce of 4 bytes per element against one bit per element from each other rank.
    assert chart.saved_bytes("signsgd", 2) == 4 - 1 / 8
    assert chart.saved_bytes("signsgd", 16) == 7.5 - 15 / 8
    assert chart.saved_bytes("fp16", 16) == 7.5 / 2
    assert chart.saved_bytes("qsgd", 16) < 0


def test_at_the_break_even_both_take_the_same_time(chart):
    parameters, ranks = 25e6, 4
    bandwidth = chart.break_even("topk", ranks, parameters) * 1e9 / 8
    codec = chart.codecs()["topk"]
    dense = 1.5 * 4 * parameters / bandwidth
    sparse = 3 * 0.08 * parameters / bandwidth
    assert codec.fixed + codec.per_element * parameters + sparse == pytest.approx(dense, rel=1e-4)


def test_a_codec_takes_what_was_measured(chart):
    row = chart.measurements.rows_of("codec")["topk"]
    codec = chart.codecs()["topk"]
    assert codec.fixed + 25e6 * codec.per_element == pytest.approx(row["torch"] * 8.5e-3)
    assert codec.fixed + 1000 * codec.per_element == pytest.approx(row["small_torch"] * 1e-6)


def test_a_method_that_sends_more_never_pays(chart):
    assert chart.break_even("qsgd", 16, 25e6) == 0
    assert "never" in next(line for line in chart.table() if line.startswith("| [qsgd]"))
