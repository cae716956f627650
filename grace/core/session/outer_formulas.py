"""Formulas of a sync for one tensor, on arrays of any framework, eager or in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grace.core.config.outer import OuterSteps
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, State, TensorSpec


def outer_update(
    outer: OuterSteps,
    ops: ArrayOps,
    spec: TensorSpec,
    anchor: Array,
    change: Array,
    own: Array,
    kept: State,
    *,
    warming: Any,
) -> tuple[Array, Array, State]:
    """Return the weights of all ranks after a sync, those of this rank, and the state of the outer optimizer.

    All arrays are flat. `anchor` has the weights after the last sync, `change` the mean over the ranks of (anchor -
    weights), `own` the weights of this rank now, and `kept` the state of the outer optimizer. While `warming`, a bool
    or a 0-d condition, the ranks take the mean.
    """
    anchor, change = ops.cast(anchor, spec.work_dtype), ops.cast(change, spec.work_dtype)

    def mean() -> list[Array]:
        return [anchor - change, anchor - change, *kept.values()]

    def step() -> list[Array]:
        new, after = outer.optimizer.step(ops, anchor, change, kept)
        mixed = outer.mix(ops, anchor, new, ops.cast(own, spec.work_dtype)) if outer.keeps_own else new
        return [new, mixed, *(after[key] for key in kept)]

    common, mixed, *states = ops.choose(warming, mean, step) if outer.warmup else step()
    return ops.cast(common, spec.dtype), ops.cast(mixed, spec.dtype), dict(zip(kept, states, strict=True))


def products(ops: ArrayOps, change: Array, mean: Array) -> list[Array]:
    """Return |d|^2, |m|^2 and <d, m> of a change d and the mean change m, as 0-d float64 arrays."""
    own, of_all = (ops.cast(ops.reshape(x, (-1,)), "float64") for x in (change, mean))
    return [ops.sum(own * own), ops.sum(of_all * of_all), ops.sum(own * of_all)]


def count_agreeing(ops: ArrayOps, change: Array, last: Array) -> Array:
    """Return how many elements of a change have the signs of the last mean change, as a 0-d int64 array."""
    same = ((change > 0) & (last > 0)) | ((change < 0) & (last < 0)) | ((change == 0) & (last == 0))
    return ops.sum(ops.cast(same, "int64"))


def with_variate(ops: ArrayOps, spec: TensorSpec, change: Array, variate: Array, rate: Any) -> Array:
    """Return what gradients alone would have moved: change + h * (sum of the learning rates)."""
    return ops.cast(ops.weighted_sum(ops.cast(change, spec.work_dtype), 1, variate, rate), spec.dtype)


def correct(ops: ArrayOps, spec: TensorSpec, gradient: Array, variate: Array) -> Array:
    """Return a flat gradient less the control variate, in the dtype of the gradient."""
    return ops.cast(ops.cast(ops.reshape(gradient, (-1,)), spec.work_dtype) - variate, ops.dtype(gradient))


def next_variate(
    ops: ArrayOps, spec: TensorSpec, variate: Array, change: Array, mean: Array, *, kept: Any, factor: Any
) -> Array:
    """Return the next control variate, kept * h + factor * (change of this rank - mean change)."""
    own, of_all = (ops.cast(ops.reshape(x, (-1,)), spec.work_dtype) for x in (change, mean))
    return ops.weighted_sum(variate, kept, own - of_all, factor)


def mean_in_part(
    ops: ArrayOps, spec: TensorSpec, server: Array, merged: Array, *, shifts: Any, rate: Any, share: Any
) -> tuple[Array, Array]:
    """Return the mean change of the ranks that contribute, a share of all, and the new mean c of all variates.

    All arrays are flat. With a memory that `shifts`, c is the mean of the shifts, in units of the weights, and `merged`
    the new c, which has moved by the mean over all ranks. Else `merged` is the mean change, and c is in units of
    gradients.
    """
    merged = ops.cast(ops.reshape(merged, (-1,)), spec.work_dtype)

    def follows() -> list[Array]:
        return [ops.weighted_sum(server, 1 - 1 / share, merged, 1 / share), ops.copy(merged)]

    def learns() -> list[Array]:
        return [ops.copy(merged), ops.weighted_sum(server, 1 - share, merged, share / rate)]

    change, new = ops.choose(shifts, follows, learns)
    return ops.cast(change, spec.dtype), new


def next_variate_in_part(
    ops: ArrayOps,
    spec: TensorSpec,
    variate: Array,
    own: Array,
    servers: tuple[Array, Array],
    *,
    shifts: Any,
    inside: Any,
    factor: Any,
) -> Array:
    """Return the next control variate, if a part of the ranks contributes, of which this one is `inside` or not.

    h = c_r - c, where c has the values `servers` before and after. With a memory that `shifts`, c_r is its shift, which
    is `own`. Else a rank that is inside has c_r <- c_r - c + factor * (its change).
    """
    before, after = servers
    own = ops.cast(ops.reshape(own, (-1,)), spec.work_dtype)

    def moved() -> Array:
        return ops.choose(inside, lambda: ops.weighted_sum(variate, 1, own, factor), lambda: variate + before) - after

    return ops.choose(shifts, lambda: ops.weighted_sum(own, factor, after, -factor), moved)


def weigh(ops: ArrayOps, tensors: Sequence[Array], factor: Array | None) -> list[Array]:
    """Return tensors times a 0-d factor, rounded to their dtype; None stands for 1."""
    return list(tensors) if factor is None else [x * ops.cast(factor, ops.dtype(x)) for x in tensors]
