"""The page on measuring explains every column of the tables that the benchmarks print."""

from __future__ import annotations

import re
from pathlib import Path

from grace.bench import table
from grace.bench.step import table as step_table

PAGE = (Path(__file__).parent.parent.parent / "docs" / "measure.md").read_text(encoding="utf-8")


def explained(heading: str) -> set[str]:
    """Return the columns that the first table of columns below a heading explains."""
    rows = PAGE.partition(f"\n{heading}")[2].partition("| column | meaning |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| ([^|]*) \|", rows, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_columns_of_the_codec_benchmark_are_explained():
    assert explained("## Codecs") == set(table.HEAD) - {"numel"}


def test_columns_of_the_step_benchmark_are_explained():
    assert explained("## Training steps") == set(step_table.HEAD)
