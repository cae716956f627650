"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def align(rows: Sequence[Sequence[str]], right: Collection[int] = (), least: Sequence[int] = ()) -> list[str]:
    """Return a line per row, with columns of equal width; those in `right` are aligned to the right.

    `least` are the least widths of the columns, for tables that are printed line by line.
    """
    least = least or [0] * len(rows[0])
    widths = [max(low, *map(len, column)) for low, *column in zip(least, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
