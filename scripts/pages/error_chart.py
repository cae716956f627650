"""Charts of the error of every method against the bits that it sends, from docs/results/errors.json."""

from __future__ import annotations

from functools import partial

import measurements
import numpy as np
from matplotlib.figure import Figure
from registry import WIDTH, figure, svg

KINDS = {"normal": "normal numbers", "recorded": "a recorded gradient"}
# With a name in the chart; the others are grey.
COLORS = {
    "eden": "#d1495b",
    "qsgd": "#0a7d91",
    "rotated": "#b07d00",
    "topk": "#66a182",
    "powersgd": "#8d5b9b",
    "eightbit": "#b0612f",
}
LEAST = 1e-5


def limit(bits: np.ndarray) -> np.ndarray:
    """Return the least error of normal numbers at a number of bits (Shannon): 4^-bits."""
    return 4.0**-bits


def draw(kind: str) -> bytes:
    """Draw a point per method and setting."""
    rows = measurements.load("errors")["rows"]
    bits = np.linspace(0.05, 10, 200)
    drawn = Figure(figsize=(WIDTH, 4), layout="constrained")
    axes = drawn.add_subplot()
    others = [row for row in rows if row["method"] not in COLORS]
    axes.plot([r["bits"] for r in others], [r[kind] for r in others], "o", color="0.75", ms=4, label="others")
    for method, color in COLORS.items():
        mine = [row for row in rows if row["method"] == method]
        axes.plot([r["bits"] for r in mine], [r[kind] for r in mine], "o", color=color, ms=5, label=method)
    axes.plot(bits, limit(bits), color="0.3", linewidth=1, label="limit for normal numbers")
    axes.set_title(f"{KINDS[kind]}: error, relative to |x|²", loc="left", fontsize=9)
    axes.set_xlabel("bits per element")
    axes.set(yscale="log", xlim=(0, 10), ylim=(LEAST, 3))
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    drawn.legend(loc="outside lower center", ncols=3, frameon=False)
    return svg(drawn)


for _kind in KINDS:
    figure(f"docs/figures/errors_{_kind}.svg")(partial(draw, _kind))
