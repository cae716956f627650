"""A picture of a recorded timeline, with the rows that chrome://tracing and Perfetto show."""

from __future__ import annotations

import json

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from registry import ROOT, WIDTH, figure, svg

TRACE = ROOT / "docs" / "figures" / "timeline.json"
COLORS = {
    "ready": "#c9ced4",
    "compress": "#0a7d91",
    "negotiate": "#7fc4cf",
    "send": "#edae49",
    "wait": "#d1495b",
    "merge": "#66a182",
}
# The row of the gradients of a bucket has the number of the bucket and this.
GRADIENTS = 1_000_000


@figure("docs/figures/timeline.svg")
def draw() -> bytes:
    """Draw the phases of all buckets of the trace: a row per bucket and rank, the gradients above the other phases."""
    events = [event for event in json.loads(TRACE.read_text(encoding="utf-8")) if event["ph"] == "X"]
    start = min(event["ts"] for event in events)
    rows = sorted({(event["pid"], event["tid"] % GRADIENTS) for event in events})
    drawn = Figure(figsize=(1.25 * WIDTH, 0.7 + 0.28 * len(rows)), layout="constrained")
    axes = drawn.add_subplot()
    for event in sorted(events, key=lambda event: event["name"] == "negotiate"):
        row = rows.index((event["pid"], event["tid"] % GRADIENTS)) + (event["pid"] - rows[0][0]) * 0.6
        top, height = (row - 0.4, 0.2) if event["name"] == "ready" else (row - 0.15, 0.5)
        span = [((event["ts"] - start) / 1e3, event["dur"] / 1e3)]
        axes.broken_barh(span, (top, height), facecolor=COLORS[event["name"]])
    labels = [f"rank {rank}, bucket {bucket}" for rank, bucket in rows]
    axes.set_yticks([index + (rank - rows[0][0]) * 0.6 for index, (rank, _) in enumerate(rows)], labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the first gradient")
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    used = {event["name"] for event in events if event["dur"]}
    handles = [Patch(color=color, label=name) for name, color in COLORS.items() if name in used]
    drawn.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), columnspacing=1, handlelength=1, frameon=False
    )
    return svg(drawn)
