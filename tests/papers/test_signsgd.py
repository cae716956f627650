"""Bernstein et al., "signSGD with majority vote", ICLR 2019."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.papers.common import bits_per_element, make, normal, send, simulate, step


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("average", [True, False])
def test_majority_vote_over_all_outcomes(ranks, average):
    """The result is the sign of the sum of signs, 0 for a tie. It does not grow with the number of ranks."""
    outcomes = np.array(list(itertools.product([-1, 1], repeat=ranks)), np.float32)
    sim = simulate(ranks, (len(outcomes),), make("signsgd"), average=average)
    merged = step(sim, [2.5 * outcomes[:, rank] for rank in range(ranks)])
    assert np.array_equal(merged, np.sign(outcomes.sum(axis=1)))
    assert (0 in merged) == (ranks % 2 == 0)


def test_zeros_of_both_signs_count_as_positive_in_one_of_two_steps():
    x = np.array([0.0, -0.0, -1e-45, 1e-45], np.float32)
    sent = [send(make("signsgd"), x, step=step).tolist() for step in range(2)]
    assert sorted(sent) == [[-1, -1, -1, 1], [1, 1, -1, 1]]


def test_only_the_sign_matters():
    x = normal(1001)
    assert np.array_equal(send(make("signsgd"), x), send(make("signsgd"), x**3 * 1000))


def test_a_minority_of_adversaries_is_outvoted():
    """Fault tolerance: 2 of 5 ranks that send the opposite, of any size, do not change the result."""
    x = normal(300)
    sim = simulate(5, (300,), make("signsgd"))
    assert np.array_equal(step(sim, [x, x, x, -1e6 * x, -1e6 * x]), np.sign(x))


def test_one_bit_per_element():
    assert bits_per_element(make("signsgd"), 2**14) == 1
