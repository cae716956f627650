"""The probe of a link: allreduces of several sizes between all ranks, and bandwidth and latency fitted to their times.

The columns are those of nccl-tests: of n ranks that reduce S bytes in t seconds, algbw is S / t, and busbw is
2 (n - 1) / n S / t, the bytes per second that each rank of a ring sends, which does not depend on n.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from grace.core.errors import ConfigError
from grace.core.spec import Array
from grace.core.transport.collectives import copies
from grace.core.transport.transport import Transport

# From 1 KiB to 16 MiB, by factors of four.
SIZES = tuple(1024 * 4**i for i in range(8))
# Seconds of timed allreduces per size, and their number at least and at most.
SECONDS, LEAST, MOST = 0.4, 3, 50
_ELEMENT = 4


class Point(NamedTuple):
    """The allreduce of one size: bytes per rank, seconds (the mean over the ranks of their medians), and bytes/s."""

    nbytes: int
    seconds: float
    algbw: float
    busbw: float


class Fit(NamedTuple):
    """A link: bytes per second that a rank sends, and seconds per message."""

    bandwidth: float
    latency: float


def over(transport: Transport) -> Callable[[Array], Array]:
    """Return the allreduce of a transport: it sums a buffer over all ranks, waits, and returns the result."""
    number = itertools.count()
    # Equal on all ranks, because all of them call it equally often.
    return lambda x: transport.allreduce(x, op="sum", name=f"grace/probe/{next(number)}").wait()


def measure(
    allreduce: Callable[[Array], Array],
    zeros: Callable[[int], Array],
    ranks: int,
    sizes: Iterable[int] = SIZES,
    settle: Callable[[], Any] = lambda: None,
) -> list[Point]:
    """Time the allreduce of float32 buffers of the sizes, in bytes. All ranks call it, and get the same points.

    `zeros(n)` returns n float32 zeros of the array type that `allreduce` takes. `settle` waits for the device, if the
    data are on one. The number of repetitions follows from the first time of a size, averaged over the ranks.

    Raises ConfigError with fewer than two ranks, or for a size below 4 bytes.
    """
    sizes = list(sizes)
    if ranks < 2:
        raise ConfigError(f"a link is measured between at least 2 ranks, received {ranks}; start more.")
    if min(sizes, default=0) < _ELEMENT:
        raise ConfigError(f"expected sizes of at least {_ELEMENT} bytes, one float32, received {sizes}.")

    def timed(x: Array) -> float:
        settle()
        begin = time.perf_counter()
        allreduce(x)
        settle()
        return time.perf_counter() - begin

    def mean(seconds: float) -> float:
        return float(allreduce(zeros(1) + seconds)[0]) / ranks

    points = []
    for size in sizes:
        x = zeros(size // _ELEMENT)
        # The first one makes connections and buffers.
        timed(x)
        count = round(min(MOST, max(LEAST, SECONDS / mean(timed(x)))))
        seconds = mean(statistics.median(timed(x) for _ in range(count)))
        nbytes = size // _ELEMENT * _ELEMENT
        points.append(point(nbytes, seconds, ranks))
    return points


def point(nbytes: int, seconds: float, ranks: int) -> Point:
    """Return the point of an allreduce of so many bytes."""
    return Point(nbytes, seconds, nbytes / seconds, float(copies("allreduce", ranks)) * nbytes / seconds)


def fit(points: Sequence[Point], ranks: int) -> Fit:
    """Fit seconds = 2 (n - 1) latency + 2 (n - 1) / n nbytes / bandwidth by least squares of relative errors.

    The latency of a message includes what its rank computes for it. It is 0 if the points grow faster than their bytes.
    Raises ConfigError unless there are two sizes or more.
    """
    if len({point.nbytes for point in points}) < 2:
        raise ConfigError("bandwidth and latency follow from two sizes or more; measure more sizes.")
    messages = 2 * (ranks - 1)
    # Each row is divided by its time, so that short allreduces count as much as long ones.
    rows = [
        (messages / seconds, float(copies("allreduce", ranks)) * nbytes / seconds) for nbytes, seconds, *_ in points
    ]
    aa, ab, bb = (math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (math.fsum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency, per_byte = (bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    if per_byte <= 0:
        # Latency hides the bytes. The fastest point is a lower bound of the bandwidth.
        return Fit(max(point.busbw for point in points), a / aa)
    return Fit(1 / per_byte, latency)


def lines(points: Sequence[Point], ranks: int) -> list[str]:
    """Return the table of the points in nccl-tests' columns, and the fitted link."""
    table = [f"{'size':>12} {'count':>12} {'time':>10} {'algbw':>8} {'busbw':>8}"]
    table.append(f"{'(B)':>12} {'(elements)':>12} {'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8}")
    for nbytes, seconds, algbw, busbw in points:
        table.append(
            f"{nbytes:>12} {nbytes // _ELEMENT:>12} {seconds * 1e6:>10.1f} {algbw / 1e9:>8.3f} {busbw / 1e9:>8.3f}"
        )
    if len(points) > 1:
        bandwidth, latency = fit(points, ranks)
        table.append(
            f"fit: {bandwidth / 1e9:.3f} GB/s ({8 * bandwidth / 1e9:.3g} Gbit/s) that a rank sends, and "
            f"{latency * 1e6:.0f} us per message"
        )
    return table
