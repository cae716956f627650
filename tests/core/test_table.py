"""Tables of plain text have columns of one width."""

from __future__ import annotations

import pytest

from grace.core.observe.table import align


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [["name", "n"], ["a", "1,000"], ["", "20"]]
    assert align(rows, right=[1]) == ["name      n", "a     1,000", "         20"]


def test_a_line_ends_with_its_last_cell():
    assert align([["a", "long"], ["b", ""]]) == ["a  long", "b"]


def test_a_line_alone_keeps_the_least_widths():
    assert align([["a", "1"]], right=[1], least=[4, 3]) == ["a       1"]


def test_rows_have_equally_many_cells():
    with pytest.raises(ValueError, match="shorter"):
        align([["a", "b"], ["c"]])
