"""Bar chart of the step times, with the compute time in front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from grace.bench.step.run import Result
from grace.bench.step.table import lines


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the figure: one bar per method, with the 10th and 90th percentile. A dashed line shows the reference."""
    compute, reference = results[0], results[1]
    shown = results[1:]
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(shown)), layout="constrained")
    panel = figure.subplots()
    low, high = zip(*(result.spread for result in shown), strict=True)
    medians = [result.median for result in shown]
    spread = [
        [max(0.0, m - a) for m, a in zip(medians, low, strict=True)],
        [max(0.0, b - m) for m, b in zip(medians, high, strict=True)],
    ]
    names = [result.method.label for result in shown]
    panel.barh(names, medians, xerr=spread, color="tab:blue", ecolor="gray")
    panel.barh(names, [min(compute.median, m) for m in medians], color="tab:orange", label="compute")
    panel.axvline(reference.median, color="gray", linestyle="--", linewidth=1, label=reference.method.label)
    panel.invert_yaxis()
    panel.set_xlabel("seconds per step")
    panel.legend()
    figure.suptitle(lines(results)[0], fontsize="small", wrap=True)
    figure.savefig(path, dpi=120)
