"""Selections from the sum of a residual and a gradient, made in the pass that adds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from grace.core.memories.efsignsgd import EFSignMemory
from grace.core.memories.residual import Residual
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Key

if TYPE_CHECKING:
    from grace.core.ops.native import Native

Selection = tuple[Array, Array, Array, Array]
Feedback: TypeAlias = Residual | EFSignMemory
# The memories whose `terms` are the sum that they compress.
FEEDBACK = (Residual, EFSignMemory)


@composite()
def sum_top(ops: ArrayOps, x: Array, a: float, y: Array, b: float, k: int, out: Array | None = None) -> Selection:
    """Return a x + b y, whether it is finite, and its k largest magnitudes: values and ascending indices."""
    total, finite = ops.finite_sum(x, a, y, b, out)
    return total, finite, *ops.sparsify(total, k)


@sum_top.kernel()
def _(ops: Native, x: Array, a: float, y: Array, b: float, k: int, out: Array | None = None) -> Selection | None:
    dtype = ops.floating(x)
    if dtype is None or ops.floating(y) != dtype:
        return None
    n = ops.length(x)
    k = ops.min_size(k, n)
    total, values, indices, good = ops.run(
        "sum_top",
        [x, y],
        [k],
        [a, b],
        outputs=[dtype, dtype, "int32", "bool"],
        lengths=[n, k, k, 1],
        out=out,
    )
    return total, good, values, indices


@composite()
def sum_select(
    ops: ArrayOps, x: Array, a: float, y: Array, b: float, bound: float, strict: bool, out: Array | None = None
) -> Selection:
    """Return a x + b y, whether it is finite, and what `ops.select` returns of it."""
    total, finite = ops.finite_sum(x, a, y, b, out)
    return total, finite, *ops.select(total, bound, strict)


@sum_select.kernel()
def _(
    ops: Native, x: Array, a: float, y: Array, b: float, bound: float, strict: bool, out: Array | None = None
) -> Selection | None:
    dtype = ops.floating(x)
    if dtype is None or ops.floating(y) != dtype:
        return None
    total, values, indices, good = ops.run(
        "sum_select",
        [x, y, ops.full(1, bound, dtype)],
        [int(strict)],
        [a, b],
        outputs=[dtype, dtype, "int32", "bool"],
        lengths=[ops.length(x), None, None, 1],
        out=out,
    )
    return total, good, values, indices


@composite(one_graph=True)
def sum_sample(
    ops: ArrayOps, x: Array, a: float, y: Array, b: float, k: int, key: Key, out: Array | None = None
) -> Selection:
    """Return a x + b y with zeros in place of k elements of `ops.sample`, whether it was finite, and these elements."""
    total, finite = ops.finite_sum(x, a, y, b, out)
    indices = ops.sample(ops.length(total), k, key)
    values = ops.gather(total, indices)
    return ops.put_(total, indices, 0.0), finite, values, indices


@sum_sample.kernel()
def _(
    ops: Native, x: Array, a: float, y: Array, b: float, k: int, key: Key, out: Array | None = None
) -> Selection | None:
    dtype = ops.floating(x)
    if dtype is None or ops.floating(y) != dtype:
        return None
    outputs, lengths = [dtype, dtype, "int32", "bool"], [ops.length(x), k, k, 1]
    left, values, indices, good = ops.run(
        "sum_sample", [x, y], [k, *ops.key_integers(key)], [a, b], outputs=outputs, lengths=lengths, out=out
    )
    return left, good, values, indices
