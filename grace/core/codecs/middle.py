"""Values in the middle of those of all ranks: the median and the trimmed mean."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array


def middle(ops: ArrayOps, rows: Sequence[Array], trim: int | None) -> Array:
    """Return the mean of the values in the middle of each element's values, without the `trim` outer ones on each side.

    Without `trim` it is the median: of an even number of rows, the mean of the two in the middle.
    """
    least = (len(rows) - 1) // 2 if trim is None else trim
    ordered = ops.sort(ops.stack(rows, axis=1))
    kept = [ordered[:, place] for place in range(least, len(rows) - least)]
    total = functools.reduce(lambda total, x: total + x, kept)
    return total if len(kept) == 1 else total / ops.cast(len(kept), ops.dtype(total))
