"""Centroids of the elements of a tensor: one-dimensional k-means on a sample."""

from __future__ import annotations

from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Key

# Sizes and weights are integers, so that all sums are exact and all frameworks find equal centroids.
_UNIT = 1 << 19
_WEIGHT = 1 << 20
_SAMPLES = 4096
_SWEEPS = 20
# The random stream of the sample. Rounding draws from stream 0.
_SAMPLE = 1


def fit(ops: ArrayOps, x: Array, low: Array, high: Array, count: int, key: Key, power: int, ends: bool) -> Array:
    """Return `count` ascending centroids of x, in its dtype.

    x lies between the 0-d arrays low and high, which with `ends` are the first and the last centroid. They are fitted
    to 4,096 random elements; each counts ((x - low) / (high - low))^power.
    """
    n = ops.length(x)
    if n == 0:
        return ops.zeros(count, ops.dtype(x))
    if n > _SAMPLES:
        x = ops.gather(x, ops.sample(n, _SAMPLES, key, _SAMPLE))
    start, end = ops.cast(low, "float64"), ops.cast(high, "float64")
    reach = end - start
    share = (ops.cast(x, "float64") - start) / ops.where(reach > 0, reach, 1.0)
    found = centroids(ops, ops.sort(ops.floor(share * float(_UNIT))), count, power, ends)
    values = ops.cast(start + found * (1 / _UNIT) * reach, ops.dtype(x))
    if not ends:
        return values
    return ops.concat([ops.reshape(low, (1,)), values[1:-1], ops.reshape(high, (1,))])


def both_signs(ops: ArrayOps, magnitudes: Array) -> Array:
    """Return ascending magnitudes of both signs as ascending levels."""
    last = ops.length(magnitudes) - 1
    return ops.concat([-ops.gather(magnitudes, last - ops.arange(last + 1, "int32")), magnitudes])


@composite(one_graph=True)
def centroids(ops: ArrayOps, sizes: Array, count: int, power: int, ends: bool) -> Array:
    """Return the centroids of ascending sizes, which are integers in float64 from 0 to 2^19, as such integers.

    A size counts (size / 2^19)^power. In 20 sweeps, each size joins the nearest centroid, of two the lower, and each
    centroid moves to the mean of its cluster, rounded down; one without a cluster stays. With `ends`, the first
    centroid is 0 and the last 2^19, and they do not move.
    """
    weights = ops.full(ops.length(sizes), float(_WEIGHT), "float64")
    for _ in range(power):
        weights = weights * (sizes * (1 / _UNIT))
    weights = ops.floor(weights)
    sums = [_sums(ops, weights), _sums(ops, weights * sizes)]

    def sweep(state: Array) -> Array:
        old = state[:count]
        moved = _means(ops, sizes, sums, ops.floor((old[:-1] + old[1:]) * 0.5), old)
        if ends:
            moved = ops.concat([old[:1], moved[1:-1], old[-1:]])
        return ops.concat([moved, state[count:] + 1.0])

    # The last element counts the sweeps.
    state = ops.concat([_first(ops, sizes, count, ends), ops.zeros(1, "float64")])
    return ops.while_loop(lambda state: state[count] < _SWEEPS, sweep, state)[:count]


def _first(ops: ArrayOps, sizes: Array, count: int, ends: bool) -> Array:
    """Return centroids halfway between quantiles, which suit most sizes, and even steps, which suit the largest.

    From one of these alone, 20 sweeps end farther from the least distance.
    """
    n = ops.length(sizes)
    parts = count - 1 if ends else 2 * count
    shares = [j if ends else 2 * j + 1 for j in range(count)]
    quantiles = ops.gather(sizes, _constant(ops, [min(n - 1, n * share // parts) for share in shares], "int32"))
    if ends:
        steps = _constant(ops, [float(_UNIT * share // parts) for share in shares], "float64")
        inner = ops.floor((quantiles + steps) * 0.5)[1:-1]
        return ops.concat([ops.zeros(1, "float64"), inner, ops.full(1, float(_UNIT), "float64")])
    least = sizes[:1]
    steps = least + (sizes[-1:] - least) * _constant(ops, [share / parts for share in shares], "float64")
    return ops.floor((quantiles + steps) * 0.5)


def _means(ops: ArrayOps, sizes: Array, sums: list[Array], edges: Array, old: Array) -> Array:
    """Return the mean of the sizes up to each edge and of those above, rounded down; a cluster without any stays."""
    upto = ops.search_sorted(sizes, edges)
    first, last = ops.zeros(1, "int32"), ops.full(1, ops.length(sizes), "int32")
    places = ops.concat([first, upto, last])
    weight, total = (ops.gather(part, places) for part in sums)
    weight, total = weight[1:] - weight[:-1], total[1:] - total[:-1]
    return ops.where(weight > 0, ops.floor(total / ops.where(weight > 0, weight, 1.0)), old)


def _sums(ops: ArrayOps, x: Array) -> Array:
    """Return the sums of the first 0, 1, 2, ... elements of x, which are integers."""
    return ops.cast(ops.concat([ops.zeros(1, "int64"), ops.cumsum(ops.cast(x, "int64"))]), "float64")


def _constant(ops: ArrayOps, values: list[float] | list[int], dtype: str) -> Array:
    name = ("centroids", tuple(values), dtype)
    return ops.constant(name, lambda: ops.concat([ops.full(1, value, dtype) for value in values]))
