"""Threshold-v: Dutta et al., AAAI 2020; the absolute bound of Sahu et al., NeurIPS 2021."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.methods.compressor import fixed_size
from tests.papers.common import make, normal, payload, send, simulate, state, step


@pytest.mark.parametrize("v", [0.1, 1.0, 10.0])
def test_error_is_at_most_d_v_squared(v):
    x = 3 * normal(500)
    assert np.sum((send(make("threshold", threshold=v), x) - x) ** 2) <= 500 * v**2


def test_exactly_the_elements_above_the_threshold_travel():
    x = np.array([0.5, -0.5, 0.50001, -2.0, 0.0], np.float32)
    sent = payload(make("threshold", threshold=0.5), x)
    assert sent["indices"].tolist() == [2, 3]
    assert sent["values"].tolist() == x[2:4].tolist()


def test_threshold_zero_sends_every_nonzero():
    x = np.array([0.0, 1e-45, -3.0], np.float32)
    assert payload(make("threshold", threshold=0.0), x)["indices"].tolist() == [1, 2]


def test_capacity_takes_the_largest():
    x = normal(100)
    sent = payload(make("threshold", threshold=0.1, capacity=0.1), x)
    assert sent["indices"].tolist() == np.sort(np.argsort(-np.abs(x))[:10]).tolist()
    few = payload(make("threshold", threshold=2.0, capacity=0.1), x)
    assert few["indices"].tolist() == np.flatnonzero(np.abs(x) > 2).tolist()


def test_residual_never_exceeds_the_threshold():
    """So |e|^2 <= d v^2 for the whole run, for any number of steps."""
    sim = simulate(2, (500,), make("threshold", threshold=0.7), "residual")
    for number in range(20):
        step(sim, [0.3 * normal(500, 2 * number + rank) for rank in range(2)])
        assert np.abs(state(sim, 0)).max() <= np.float32(0.7)


def test_the_size_follows_the_data():
    compressor = make("threshold", threshold=1.0)
    assert not fixed_size(compressor)
    lengths = [len(payload(compressor, scale * normal(1000))["values"]) for scale in (0.1, 1.0, 10.0)]
    assert lengths == [int((np.abs(scale * normal(1000)) > 1).sum()) for scale in (0.1, 1.0, 10.0)]
