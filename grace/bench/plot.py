"""Violin plot of the times, after Figure 8 of the GRACE paper: one panel per size, one violin per method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from grace.bench.measure import Result
from grace.bench.table import Table

COLUMNS = 2


def formats() -> list[str]:
    """Return the suffixes of the image formats that matplotlib can write."""
    return sorted(Figure().canvas.get_supported_filetypes())


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the figure. The time axis is logarithmic; a dashed line shows the copy."""
    sizes = list(dict.fromkeys(result.numel for result in results))
    most = max(sum(result.numel == numel for result in results) for numel in sizes)
    columns = min(COLUMNS, len(sizes))
    rows = -(-len(sizes) // columns)
    figure = Figure(figsize=(columns * max(4.0, 1.5 + 0.3 * most), 3.6 * rows), layout="constrained")
    figure.suptitle(Table([]).title(results[0].setting), fontsize="medium")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for numel, panel in zip(sizes, panels, strict=False):
        of_size = [result for result in results if result.numel == numel]
        # Estimate the densities on the logarithmic scale that the axis shows.
        logs = [[math.log10(seconds) for seconds in result.times] for result in of_size]
        panel.violinplot(logs, widths=0.8, showmedians=True)
        copy = sorted(result.copy for result in of_size)[len(of_size) // 2]
        panel.axhline(math.log10(copy), color="gray", linestyle="--", linewidth=1)
        panel.set_title(f"{_size(of_size[0].unit.spec.nbytes)} ({numel:,} float32)", fontsize="medium")
        panel.set_xticks(range(1, len(of_size) + 1), [result.variant.label for result in of_size], rotation=90)
        panel.set_ylabel("seconds")
        panel.yaxis.set_major_locator(MultipleLocator(1))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda power, _: f"$10^{{{power:.0f}}}$"))
        panel.grid(axis="y", alpha=0.3)
    for panel in panels:
        panel.set_axis_off()
    figure.savefig(path, dpi=120)


def _size(nbytes: int) -> str:
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"
