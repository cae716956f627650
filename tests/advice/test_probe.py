"""The probe of a link: its points and the fit, on stand-ins whose times are known."""

from __future__ import annotations

import time

import numpy as np
import pytest

from grace.advice import probe
from grace.advice.probe import Point, fit, measure
from grace.core.errors import ConfigError


def zeros(n):
    return np.zeros(n, np.float32)


def points(ranks, bandwidth, latency, sizes=probe.SIZES):
    """Return the points of a link that does exactly what the formula says."""
    share = 2 * (ranks - 1) / ranks
    times = [(n, 2 * (ranks - 1) * latency + share * n / bandwidth) for n in sizes]
    return [Point(n, t, n / t, share * n / t) for n, t in times]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("bandwidth", "latency"), [(1.25e8, 50e-6), (1.25e9, 5e-6), (1.25e7, 0.0)])
def test_the_fit_finds_the_link_of_exact_times(ranks, bandwidth, latency):
    found = fit(points(ranks, bandwidth, latency), ranks)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert found.latency == pytest.approx(latency, rel=1e-6, abs=1e-9)


def test_the_fit_of_noisy_times_is_near():
    random = np.random.default_rng(3)
    noisy = [p._replace(seconds=p.seconds * random.uniform(0.95, 1.05)) for p in points(4, 1.25e8, 100e-6)]
    found = fit(noisy, 4)
    assert found.bandwidth == pytest.approx(1.25e8, rel=0.1)
    assert found.latency == pytest.approx(100e-6, rel=0.1)


def test_no_figure_of_a_link_is_negative():
    """Large allreduces that are slower per byte than small ones show no latency; equal times show no bandwidth."""
    convex = [Point(n, t, n / t, n / t) for n, t in ((1000, 1e-5), (10_000, 2e-4), (100_000, 4e-3))]
    assert fit(convex, 2).latency == 0 < fit(convex, 2).bandwidth
    flat = [Point(n, t, n / t, n / t) for n, t in ((1000, 1e-3), (10_000, 9e-4), (20_000, 8e-4))]
    found = fit(flat, 2)
    assert found.bandwidth == max(p.busbw for p in flat)
    assert 0 < found.latency < 1e-3


def test_the_points_have_the_columns_of_nccl_tests():
    """Three ranks of which only this one exists: the stand-in sums equal buffers, and takes 2 ms per call."""
    settled = []

    def allreduce(x):
        time.sleep(0.002)
        return 3 * x

    (point,) = measure(allreduce, zeros, 3, [4002], settle=lambda: settled.append(1))
    assert point.nbytes == 4000
    assert 0.002 <= point.seconds < 0.02
    assert point.algbw == pytest.approx(4000 / point.seconds)
    assert point.busbw == pytest.approx(4 / 3 * point.algbw)
    assert len(settled) >= 2 * (probe.LEAST + 2)
    head, units, row = probe.lines([point], 3)
    assert head.split() == ["size", "count", "time", "algbw", "busbw"]
    assert row.split()[:2] == ["4000", "1000"]
    assert len(units.split()) == len(row.split()) == 5


def test_all_ranks_repeat_equally_often():
    """A rank that is alone in being slow would otherwise call the allreduce less often than the others, which wait."""
    counts = []
    for delay in (0.0, 0.004):
        calls = []

        def allreduce(x, calls=calls, delay=delay):
            calls.append(len(x))
            time.sleep(delay)
            # The other rank says 40 ms of every time, so the mean is at least 20 ms.
            return x + 0.04 if len(x) == 1 else 2 * x

        measure(allreduce, zeros, 2, [400])
        counts.append(calls.count(100))
    assert abs(counts[0] - counts[1]) <= 4
    assert counts[0] < probe.MOST


@pytest.mark.parametrize(
    ("ranks", "sizes", "expected"),
    [(1, [1024], "at least 2 ranks, received 1"), (2, [1024, 3], "at least 4 bytes"), (2, [], "at least 4 bytes")],
)
def test_what_cannot_be_measured_is_refused(ranks, sizes, expected):
    with pytest.raises(ConfigError, match=expected):
        measure(lambda x: x, zeros, ranks, sizes)


def test_a_link_needs_two_sizes():
    with pytest.raises(ConfigError, match="two sizes or more"):
        fit(points(2, 1e8, 0.0, [1024]), 2)
