"""A chart of the error of every method against the bits that it sends, from docs/results/errors.json."""

from __future__ import annotations

import measurements
import numpy as np
from matplotlib.figure import Figure
from registry import figure, svg

SOURCE = "errors"
PANELS = {"normal": "normal numbers", "recorded": "a recorded gradient"}
# With a name in the chart; the others are grey.
COLORS = {
    "eden": "#d1495b",
    "qsgd": "#0a7d91",
    "rotated": "#edae49",
    "topk": "#66a182",
    "powersgd": "#8d5b9b",
    "eightbit": "#b0612f",
}
LEAST = 1e-5


def limit(bits: np.ndarray) -> np.ndarray:
    """Return the least error of normal numbers at a number of bits (Shannon): 4^-bits."""
    return 4.0**-bits


@figure("docs/figures/errors.svg")
def draw() -> bytes:
    """Draw a panel per kind of gradient, with a point per method and setting."""
    drawn = Figure(figsize=(9, 4.5), layout="constrained")
    bits = np.linspace(0.05, 10, 200)
    rows = measurements.load(SOURCE)["rows"]
    panels = drawn.subplots(1, 2, sharex=True, sharey=True)
    for axes, (kind, title) in zip(panels, PANELS.items(), strict=True):
        axes.plot(bits, limit(bits), color="0.3", linewidth=1, label="limit for normal numbers")
        others = [row for row in rows if row["method"] not in COLORS]
        axes.plot([r["bits"] for r in others], [r[kind] for r in others], "o", color="0.75", ms=4, label="others")
        for method, color in COLORS.items():
            mine = [row for row in rows if row["method"] == method]
            axes.plot([r["bits"] for r in mine], [r[kind] for r in mine], "o", color=color, ms=5, label=method)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(yscale="log", xlim=(0, 10), ylim=(LEAST, 3))
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    drawn.supxlabel("bits per element", fontsize=10)
    drawn.supylabel("error, relative to |x|²", fontsize=10)
    return svg(drawn)
