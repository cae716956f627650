"""Few rows in place of a full product: with every value of each factor, or with every pair of values of two factors."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

Row = dict[str, Any]

# True under `--all`: the tests then meet every pair of values. An environment variable, because parametrization at
# import and the processes that tests start must see it too.
ALL = os.environ.get("GRACE_TEST_ALL") == "1"


def rest_slow(values: Sequence[Any], ordinary: int) -> list[Any]:
    """Return the values of a parameter. Those after the first `ordinary` ones run under `--all` only."""
    slow = (pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in values[ordinary:])
    return [*values[:ordinary], *slow]


def product(factors: Mapping[str, Sequence[Any]], valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return every valid row, in the order of the factors and of their values."""
    rows = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [row for row in rows if valid(row)]


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    valid: Callable[[Row], bool] = lambda row: True,
    seed: int = 0,
) -> list[Row]:
    """Return valid rows that cover every pair of values of any two factors that some valid row contains.

    Greedy: the next row is the one with the most pairs not covered yet; among equals a random generator with a fixed
    seed decides. The same arguments give the same rows. Rows keep the order of the full product.
    """
    candidates = product(factors, valid)
    order = list(range(len(candidates)))
    random.Random(seed).shuffle(order)
    # The places in `order` of the rows with a pair that no chosen row contains, and each row's number of such pairs.
    missing: dict[Any, list[int]] = {}
    for place, i in enumerate(order):
        for pair in pairs(candidates[i]):
            missing.setdefault(pair, []).append(place)
    counts = np.bincount(list(itertools.chain.from_iterable(missing.values())), minlength=len(order))
    chosen: list[int] = []
    while missing:
        best = order[int(counts.argmax())]
        chosen.append(best)
        for pair in pairs(candidates[best]):
            counts[missing.pop(pair, [])] -= 1
    return [candidates[i] for i in sorted(chosen)]


def once(factors: Mapping[str, Sequence[Any]], valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return valid rows in which every value of every factor occurs that occurs in a valid row.

    Each value of the longest factor meets one value of every other factor, in turn; then follow values that are
    missing. A row is chosen for having values, and pairs of them, that other rows have least.
    """
    candidates = product(factors, valid)
    used: Counter[Any] = Counter()
    chosen: list[Row] = []
    for factor, values in sorted(factors.items(), key=lambda item: -len(item[1])):
        for value in values:
            found = [row for row in candidates if row[factor] == value]
            if found and not used[factor, value]:
                chosen.append(min(found, key=lambda row: sum(used[x] for x in (*row.items(), *pairs(row)))))
                used.update([*chosen[-1].items(), *pairs(chosen[-1])])
    return chosen


def rows(factors: Mapping[str, Sequence[Any]], valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return the rows to test: those of `once`, or those of `pairwise` under `--all`."""
    return pairwise(factors, valid) if ALL else once(factors, valid)


def pairs(row: Row) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the pairs of a row: two factors with their values. One factor alone pairs itself."""
    if len(row) == 1:
        ((name, value),) = row.items()
        yield name, value, name, value
    for (a, x), (b, y) in itertools.combinations(row.items(), 2):
        yield a, x, b, y
