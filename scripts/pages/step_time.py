"""The figure of step times, and its caption."""

from __future__ import annotations

import json
from typing import Any

from registry import ROOT, Block, figure, kind, wrapped

FIGURE = "docs/figures/step_time.svg"
# The first of these files that exists is shown: times of one figure are of one run.
SOURCES = ("step_original", "step_torch")
LINKS = {"1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
# Bars from top to bottom; those that were not measured are left out.
BARS = {
    "horovod": ("Horovod", "other"),
    "ddp": ("PyTorch DDP", "other"),
    "grace2021-topk": ("original GRACE, topk", "other"),
    "grace2021-signsgd": ("original GRACE, signsgd", "other"),
    "qsgd": ("grace, qsgd", "own"),
    "powersgd": ("grace, powersgd", "own"),
    "topk": ("grace, topk", "own"),
    "signsgd": ("grace, signsgd", "own"),
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.small { font-size: 11px; fill: #59636e; }
.own { fill: #0a7d91; }
.other { fill: #9aa4af; }
.line { stroke: #59636e; stroke-dasharray: 3 3; }
.page { fill: #ffffff; }
""".strip()
LABELS, PANEL, GAP, ROW, TOP, NUMBERS = 170, 230, 40, 24, 34, 42


def measurements() -> dict[str, Any]:
    """Return the measurements that the figure shows."""
    paths = [ROOT / "docs" / "results" / f"{name}.json" for name in SOURCES]
    return json.loads(next(path for path in paths if path.exists()).read_text(encoding="utf-8"))


@figure(FIGURE)
def draw() -> bytes:
    """Draw the figure from the measurements."""
    return picture(measurements()).encode()


def picture(data: dict[str, Any]) -> str:
    """Return an SVG with a bar per method and link, and a line where a step without exchange ends."""
    rows = {row["method"]: row for row in data["rows"]}
    bars = [(method, *BARS[method]) for method in BARS if method in rows]
    width = LABELS + len(LINKS) * PANEL + (len(LINKS) - 1) * GAP + 10
    bottom = TOP + ROW * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 24}" '
        f'viewBox="0 0 {width} {bottom + 24}" role="img">',
        "<title>Milliseconds of a training step</title>",
        f"<style>{STYLE}</style>",
        # Dark pages would hide the text.
        f'<rect class="page" width="{width}" height="{bottom + 24}" rx="6"/>',
    ]
    for index, (_, label, _) in enumerate(bars):
        y = TOP + ROW * index + 16
        parts.append(f'<text x="{LABELS - 10}" y="{y}" text-anchor="end">{label}</text>')
    for panel, (link, title) in enumerate(LINKS.items()):
        left = LABELS + panel * (PANEL + GAP)
        scale = (PANEL - NUMBERS) / max(rows[method][link] for method, *_ in bars)
        parts.append(f'<text class="title" x="{left}" y="18">{title}: ms per step</text>')
        for index, (method, _, whose) in enumerate(bars):
            y, length = TOP + ROW * index, scale * rows[method][link]
            parts.append(f'<rect class="{whose}" x="{left}" y="{y + 3}" width="{length:.1f}" height="{ROW - 6}"/>')
            parts.append(f'<text x="{left + length + 5:.1f}" y="{y + 16}">{rows[method][link]}</text>')
        x = left + scale * rows["compute"][link]
        parts.append(f'<line class="line" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}">no exchange: {rows["compute"][link]}</text>')
    return "\n".join([*parts, "</svg>", ""])


@kind("step-time")
def step_time(block: Block) -> list[str]:
    """Return the figure and its conditions."""
    data = measurements()
    million = data["parameters"] / 1e6
    caption = (
        f"Milliseconds of a training step in PyTorch: a perceptron with {million:.1f} million parameters, "
        f"{data['batch']} examples per rank and step, {data['ranks']} ranks, default options. So few examples mean "
        "little computation per byte, the case in which compression gains most. One run per link, on one machine "
        f"({data['machine']}) with slowed-down links. [docs/speed.md]({block.link('docs/speed.md')}) has other methods "
        "and models."
    )
    return [
        f"![Milliseconds of a training step by method, at {' and at '.join(LINKS.values())}]({block.link(FIGURE)})",
        "",
        *wrapped(caption),
    ]
