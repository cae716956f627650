"""Few rows contain every possible value, or every possible pair of values, and are the same each time."""

from __future__ import annotations

import random

import pytest

from tests.support import covering

FACTORS = {
    "method": list("abcdefgh"),
    "communicator": [1, 2, 3],
    "granularity": ["model", "tensor"],
    "ranks": [1, 2, 4],
}


def constraint(row):
    """Method a excludes communicator 1; method b needs four ranks."""
    return not (row["method"] == "a" and row["communicator"] == 1) and (row["method"] != "b" or row["ranks"] == 4)


@pytest.mark.parametrize("valid", [lambda row: True, constraint])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_pair_that_can_occur_is_covered_by_few_valid_rows(valid, seed):
    product = covering.product(FACTORS, valid)
    rows = covering.pairwise(FACTORS, valid, seed)
    possible = {pair for row in product for pair in covering.pairs(row)}
    assert {pair for row in rows for pair in covering.pairs(row)} == possible
    assert all(row in product for row in rows)
    assert [product.index(row) for row in rows] == sorted({product.index(row) for row in rows})
    # The two largest factors alone need 24 rows; the product has 144.
    assert len(rows) <= 30


def test_the_same_arguments_give_the_same_rows_whatever_the_global_generator_says():
    random.seed(1)
    first = covering.pairwise(FACTORS, constraint)
    random.seed(2)
    assert covering.pairwise(FACTORS, constraint) == first
    assert covering.pairwise(FACTORS, constraint, seed=1) != first


def test_one_factor_or_two_give_the_product():
    assert covering.pairwise({"a": [1, 2, 3]}) == [{"a": 1}, {"a": 2}, {"a": 3}]
    factors = {"a": [1, 2], "b": [3, 4]}
    assert covering.pairwise(factors) == covering.product(factors)
    assert covering.pairwise(factors, lambda row: False) == []


@pytest.mark.parametrize("valid", [lambda row: True, constraint])
def test_every_value_that_can_occur_does_so_once_or_a_little_more(valid):
    product, rows = covering.product(FACTORS, valid), covering.once(FACTORS, valid)
    assert {item for row in rows for item in row.items()} == {item for row in product for item in row.items()}
    assert all(row in product for row in rows)
    assert rows == covering.once(FACTORS, valid)
    # The longest factor has eight values. The others take turns, and so do their pairs.
    assert len(rows) == 8
    assert [sum(row["communicator"] == value for row in rows) for value in (1, 2, 3)] in (
        [3, 3, 2],
        [2, 3, 3],
        [3, 2, 3],
    )
    assert len({(row["communicator"], row["granularity"]) for row in rows}) == 6


def test_one_factor_gives_its_values_and_nothing_valid_no_row():
    assert covering.once({"a": [1, 2, 3]}) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert covering.once({"a": [1, 2], "b": [3, 4]}, lambda row: False) == []
    # A value that only some values of the longest factor may have.
    rows = covering.once({"a": [1, 2, 3], "b": [4, 5]}, lambda row: row["b"] == 4 or row["a"] == 3)
    assert {"a": 3, "b": 5} in rows


@pytest.mark.parametrize("everything", [False, True])
def test_all_runs_every_pair(monkeypatch, everything):
    monkeypatch.setattr(covering, "ALL", everything)
    chosen = covering.pairwise if everything else covering.once
    assert covering.rows(FACTORS, constraint) == chosen(FACTORS, constraint)
