"""Up to which bandwidth a method pays: a chart and a table, from measured codec times and the bytes of the methods.

A method pays if the time of its codec and of its bytes is less than the time of the bytes of a plain allreduce. The
time of a codec is linear between the two sizes that were measured, with the payloads of 2 ranks. The bytes are those of
the communicator that `auto` takes for the number of ranks.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import measurements
import methods
import numpy as np
from matplotlib.figure import Figure
from registry import WIDTH, Block, figure, kind, row, svg

from grace.core.config.registry import compressors
from grace.listing import communicator, taken

SOURCE = "codec"
METHODS = ("fp16", "qsgd", "eden", "powersgd", "topk", "randomk", "efsignsgd", "signsgd")
RANKS = (2, 4, 8, 16)
# The sizes of the table, in parameters.
SMALL, LARGE = 3e5, 350e6
COLORS = ["#0a7d91", "#d1495b", "#b07d00", "#66a182", "#2e4057", "#8d5b9b", "#b0612f", "#5b8bd0"]


class Codec(NamedTuple):
    """Seconds of a step of a codec: `fixed` and per element."""

    fixed: float
    per_element: float

    def seconds(self, elements: float) -> float:
        return self.fixed + self.per_element * elements


@cache
def codec(method: str) -> Codec:
    """Return the measured codec of a method, in PyTorch."""
    data, row = measurements.load(SOURCE), measurements.rows_of(SOURCE)[method]
    copy, small, large = sum(data["copy_ms"]) / 2e3, 1000, data["elements"]
    short = row["small_torch"] / 1e6
    per_element = (row["torch"] * copy - short) / (large - small)
    return Codec(short - small * per_element, per_element)


@cache
def saved_bytes(method: str, ranks: int) -> float:
    """Return the bytes per element by which a rank receives less than in a plain allreduce of float32."""
    return 4 * 2 * (ranks - 1) / ranks - methods.received(method, ranks)


def codec_seconds(method: str, ranks: int, parameters: float) -> float:
    """Return the seconds that a rank compresses and merges in a step."""
    of_method = codec(method)
    if taken(compressors.example(method), ranks) != "two_shot":
        return of_method.seconds(parameters)
    # One shard for every rank, and once more the mean of the one that it owns.
    return (ranks + 1) * of_method.seconds(parameters / ranks)


def break_even(method: str, ranks: int, parameters: float) -> float:
    """Return the bandwidth in Gbit/s below which a method pays."""
    return 8e-9 * saved_bytes(method, ranks) * parameters / codec_seconds(method, ranks, parameters)


def draw(ranks: int) -> bytes:
    """Draw a line per method, with its name at its end."""
    sizes = np.geomspace(1e4, 1e9, 60)
    drawn = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    axes = drawn.add_subplot()
    ends = {}
    for method, color in zip(METHODS, COLORS, strict=True):
        line = [break_even(method, ranks, size) for size in sizes]
        axes.plot(sizes, line, color=color)
        ends[method] = line[-1]
    for (method, end), place in zip(ends.items(), spread(list(ends.values())), strict=True):
        color = COLORS[METHODS.index(method)]
        axes.plot([1, 1.03], [end, place], color=color, transform=axes.get_yaxis_transform(), clip_on=False, lw=0.8)
        axes.text(1.04, place, method, color=color, transform=axes.get_yaxis_transform(), va="center")
    axes.set_title(f"{ranks} ranks: Gbit/s below which a method pays", loc="left", fontsize=9)
    axes.set_xlabel("parameters of the model")
    axes.set(xscale="log", yscale="log", xlim=(1e4, 1e9), ylim=(1, 100))
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xticks([1e4, 1e5, 1e6, 1e7, 1e8, 1e9], ["10 k", "100 k", "1 M", "10 M", "100 M", "1 G"])
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    return svg(drawn)


for _ranks in RANKS:
    figure(f"docs/figures/break_even_{_ranks}.svg")(partial(draw, _ranks))


def spread(ends: list[float], apart: float = 1.3) -> list[float]:
    """Return places near the ends of lines whose ratios are at least `apart`: each group around its middle."""
    order = sorted(range(len(ends)), key=lambda index: ends[index])
    groups: list[list[int]] = []

    def places(group: list[int]) -> list[float]:
        middle = np.mean([np.log(ends[index]) for index in group])
        return [middle + np.log(apart) * (place - (len(group) - 1) / 2) for place in range(len(group))]

    for index in order:
        groups.append([index])
        while len(groups) > 1 and places(groups[-1])[0] - places(groups[-2])[-1] < np.log(apart) - 1e-9:
            groups[-2:] = [groups[-2] + groups[-1]]
    found = {index: place for group in groups for index, place in zip(group, places(group), strict=True)}
    return [float(np.exp(found[index])) for index in range(len(ends))]


def table(block: Block) -> list[str]:
    """Return the lines of a Markdown table: break-even bandwidths by method, number of ranks and size."""
    lines = [row("method", "communicator", *(f"{n} ranks" for n in RANKS))]
    lines.append(row("---", "---", *["---:"] * len(RANKS)))
    for method in METHODS:
        cells = []
        for n in RANKS:
            low, high = (f"{break_even(method, n, size):.2g}" for size in (SMALL, LARGE))
            cells.append(low if low == high else f"{low} to {high}")
        lines.append(row(methods.link(method, block), communicator(compressors.example(method)), *cells))
    return lines


@kind("break-even")
def break_evens(block: Block) -> list[str]:
    """Return the table, and where its figures come from."""
    return [*table(block), "", *measurements.origin(SOURCE, block)]
