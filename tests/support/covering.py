"""Covering arrays: few rows in which every pair of values of two factors occurs, in place of a full product."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]

# True under `--all`: the tests then run the full products. An environment variable, because parametrization at import
# and the processes that tests start must see it too.
ALL = os.environ.get("GRACE_TEST_ALL") == "1"


def product(factors: Mapping[str, Sequence[Any]], valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return every valid row, in the order of the factors and of their values."""
    rows = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [row for row in rows if valid(row)]


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    valid: Callable[[Row], bool] = lambda row: True,
    seed: int = 0,
    apart: Sequence[tuple[str, str]] = (),
) -> list[Row]:
    """Return valid rows that cover every pair of values of any two factors that some valid row contains.

    Two factors in `apart` need not meet in every pair: other tests combine them.

    Greedy: the next row is the one with the most pairs not covered yet; among equals a random generator with a fixed
    seed decides. The same arguments give the same rows. Rows keep the order of the full product.
    """
    candidates = product(factors, valid)
    order = list(range(len(candidates)))
    random.Random(seed).shuffle(order)
    # The places in `order` of the rows with a pair that no chosen row contains, and each row's number of such pairs.
    missing: dict[Any, list[int]] = {}
    for place, i in enumerate(order):
        for pair in pairs(candidates[i], apart):
            missing.setdefault(pair, []).append(place)
    counts = np.bincount(list(itertools.chain.from_iterable(missing.values())), minlength=len(order))
    chosen: list[int] = []
    while missing:
        best = order[int(counts.argmax())]
        chosen.append(best)
        for pair in pairs(candidates[best], apart):
            counts[missing.pop(pair, [])] -= 1
    return [candidates[i] for i in sorted(chosen)]


def rows(
    factors: Mapping[str, Sequence[Any]],
    valid: Callable[[Row], bool] = lambda row: True,
    seed: int = 0,
    apart: Sequence[tuple[str, str]] = (),
) -> list[Row]:
    """Return the rows to test: those of `pairwise`, or the full product under `--all`."""
    return product(factors, valid) if ALL else pairwise(factors, valid, seed, apart)


def pairs(row: Row, apart: Sequence[tuple[str, str]] = ()) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the pairs of a row: two factors that are not `apart`, with their values. One factor alone pairs itself."""
    if len(row) == 1:
        ((name, value),) = row.items()
        yield name, value, name, value
    for (a, x), (b, y) in itertools.combinations(row.items(), 2):
        if (a, b) not in apart and (b, a) not in apart:
            yield a, x, b, y
