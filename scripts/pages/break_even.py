"""Up to which bandwidth a method pays: a chart and a table, from measured codec times and the bytes of the methods.

A method pays if the time of its codec and of its bytes is less than the time of the bytes of a plain allreduce. The
time of a codec is linear between the two sizes that were measured, with the payloads of 2 ranks. The bytes are those of
the communicator that `auto` takes for the number of ranks.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import measurements
import methods
import numpy as np
from matplotlib.figure import Figure
from registry import Block, figure, kind, row, svg

from grace.core.values.registry import compressors
from grace.listing import communicator, taken

SOURCE = "codec"
METHODS = ("fp16", "qsgd", "eden", "powersgd", "topk", "randomk", "efsignsgd", "signsgd")
RANKS = (2, 4, 8, 16)
# The sizes of the table, in parameters.
SMALL, LARGE = 3e5, 350e6
COLORS = ["#0a7d91", "#d1495b", "#edae49", "#66a182", "#2e4057", "#8d5b9b", "#b0612f", "#5b8bd0"]


class Codec(NamedTuple):
    """Seconds of a step of a codec: `fixed` and per element."""

    fixed: float
    per_element: float

    def seconds(self, elements: float) -> float:
        return self.fixed + self.per_element * elements


@cache
def codecs() -> dict[str, Codec]:
    """Return the measured codecs by method, in PyTorch."""
    data = measurements.load(SOURCE)
    copy, small, large = sum(data["copy_ms"]) / 2e3, 1000, data["elements"]
    found = {}
    for method in METHODS:
        row = measurements.rows_of(SOURCE)[method]
        short = row["small_torch"] / 1e6
        per_element = (row["torch"] * copy - short) / (large - small)
        found[method] = Codec(short - small * per_element, per_element)
    return found


@cache
def saved_bytes(method: str, ranks: int) -> float:
    """Return the bytes per element by which a rank receives less than in a plain allreduce of float32."""
    return 4 * 2 * (ranks - 1) / ranks - methods.received(method, ranks)


def codec_seconds(method: str, ranks: int, parameters: float) -> float:
    """Return the seconds that a rank compresses and merges in a step."""
    codec = codecs()[method]
    if taken(compressors.make(method), ranks) != "two_shot":
        return codec.seconds(parameters)
    # One shard for every rank, and once more the mean of the one that it owns.
    return (ranks + 1) * codec.seconds(parameters / ranks)


def break_even(method: str, ranks: int, parameters: float) -> float:
    """Return the bandwidth in Gbit/s below which a method pays."""
    return 8e-9 * saved_bytes(method, ranks) * parameters / codec_seconds(method, ranks, parameters)


@figure("docs/figures/break_even.svg")
def draw() -> bytes:
    """Draw a panel per number of ranks, with a line per method."""
    sizes = np.geomspace(1e4, 1e9, 60)
    drawn = Figure(figsize=(9, 7), layout="constrained")
    panels = drawn.subplots(2, 2, sharex=True, sharey=True).ravel()
    for axes, ranks in zip(panels, RANKS, strict=True):
        for method, color in zip(METHODS, COLORS, strict=True):
            line = [break_even(method, ranks, size) for size in sizes]
            axes.plot(sizes, line, color=color, label=method)
        axes.set_title(f"{ranks} ranks", loc="left", fontsize=10)
        axes.set(xscale="log", yscale="log", xlim=(1e4, 1e9), ylim=(1, 100))
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
        axes.label_outer()
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    drawn.supxlabel("parameters of the model", fontsize=10)
    drawn.supylabel("bandwidth in Gbit/s: a method pays below its line", fontsize=10)
    return svg(drawn)


def table(block: Block) -> list[str]:
    """Return the lines of a Markdown table: break-even bandwidths by method, number of ranks and size."""
    lines = [row("method", "communicator", *(f"{n} ranks" for n in RANKS))]
    lines.append(row("---", "---", *["---:"] * len(RANKS)))
    for method in METHODS:
        cells = []
        for n in RANKS:
            low, high = (f"{break_even(method, n, size):.2g}" for size in (SMALL, LARGE))
            cells.append(low if low == high else f"{low} to {high}")
        lines.append(row(methods.link(method, block), communicator(compressors.make(method)), *cells))
    return lines


@kind("break-even")
def break_evens(block: Block) -> list[str]:
    """Return the table, and where its figures come from."""
    return [*table(block), "", *measurements.origin(SOURCE, block)]
