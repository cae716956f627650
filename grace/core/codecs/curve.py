"""Sorted values as a curve of straight pieces between free knots."""

from __future__ import annotations

from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array


def free_knots(ops: ArrayOps, ordered: Array, pieces: int) -> Array:
    """Return pieces + 1 ascending positions (int32) in sorted values (float64, at least one), the ends among them.

    Of a line from end to end, each round takes the value farthest from the curve as another knot. If the curve meets
    all values, knots repeat.
    """
    count = ops.length(ordered)
    positions = ops.arange(count, "int32")

    def add(state: Array) -> Array:
        knots = state[:-1]
        distance = ops.abs(ordered - along(ops, knots, ops.gather(ordered, knots), positions))
        farthest = ops.reshape(ops.top_indices(distance, 1), (1,))
        # The last knot is there once for each that is still to be found.
        return ops.concat([ops.sort(ops.concat([knots[:-1], farthest])), state[-1:] + 1])

    # The last element counts the pieces.
    start = ops.concat([ops.zeros(1, "int32"), ops.full(pieces, count - 1, "int32"), ops.full(1, 1, "int32")])
    return ops.while_loop(lambda state: state[-1] < pieces, add, start)[:-1]


def along(ops: ArrayOps, knots: Array, heights: Array, positions: Array) -> Array:
    """Return the curve through the knots and their heights at some positions (int32), in float64."""
    heights = ops.cast(heights, "float64")
    piece = ops.cast(ops.search_sorted(knots, positions), "int64") - 1
    left = ops.cast(ops.clip(piece, 0, ops.length(knots) - 2), "int32")
    start, width = ops.gather(knots, left), ops.gather(knots, left + 1) - ops.gather(knots, left)
    share = ops.cast(positions - start, "float64") / ops.cast(ops.where(width > 0, width, 1), "float64")
    low = ops.gather(heights, left)
    return low + (ops.gather(heights, left + 1) - low) * share
