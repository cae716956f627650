"""The figures of step times, one per link, and their caption."""

from __future__ import annotations

from functools import partial
from typing import Any

from measurements import load
from registry import Block, figure, kind, wrapped

FIGURE = "docs/figures/step_time_{}.svg"
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
WIDTH, LABELS, ROW, TOP, NUMBERS = 400, 175, 24, 34, 42


def draw(link: str) -> bytes:
    """Draw the figure of a link."""
    return picture(load("step_original"), link).encode()


def picture(data: dict[str, Any], link: str) -> str:
    """Return an SVG with a bar per method, and a line where a step without exchange ends."""
    times = {row["method"]: row[link] for row in data["rows"]}
    bars = [(times[method], *BARS[method]) for method in BARS if method in times]
    bottom = TOP + ROW * len(bars)
    scale = (WIDTH - LABELS - NUMBERS) / max(time for time, *_ in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 24}" '
        f'viewBox="0 0 {WIDTH} {bottom + 24}" role="img">',
        f"<title>Milliseconds of a training step at {LINKS[link]}</title>",
        f"<style>{STYLE}</style>",
        # Dark pages would hide the text.
        f'<rect class="page" width="{WIDTH}" height="{bottom + 24}" rx="6"/>',
        f'<text class="title" x="{LABELS}" y="18">{LINKS[link]}: ms per step</text>',
    ]
    for index, (time, label, whose) in enumerate(bars):
        y, length = TOP + ROW * index, scale * time
        parts.append(f'<text x="{LABELS - 10}" y="{y + 16}" text-anchor="end">{label}</text>')
        parts.append(f'<rect class="{whose}" x="{LABELS}" y="{y + 3}" width="{length:.1f}" height="{ROW - 6}"/>')
        parts.append(f'<text x="{LABELS + length + 5:.1f}" y="{y + 16}">{time}</text>')
    x = LABELS + scale * times["compute"]
    parts.append(f'<line class="line" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom + 4}"/>')
    parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}">no exchange: {times["compute"]}</text>')
    return "\n".join([*parts, "</svg>", ""])


for _link in LINKS:
    figure(FIGURE.format(_link))(partial(draw, _link))


@kind("step-time")
def step_time(block: Block) -> list[str]:
    """Return the figures and their conditions."""
    data = load("step_original")
    million = data["parameters"] / 1e6
    caption = (
        f"Milliseconds of a training step in PyTorch: a perceptron with {million:.1f} million parameters, "
        f"{data['batch']} examples per rank and step, {data['ranks']} ranks, default options. So few examples mean "
        "little computation per byte, the case in which compression gains most. One run per link, on one machine "
        f"({data['machine']}) with slowed-down links. [How fast it is]({block.link('docs/speed.md')}) has other "
        "methods and models."
    )
    return [
        *(
            f"![Milliseconds of a training step by method, at {speed}]({block.link(FIGURE.format(link))})"
            for link, speed in LINKS.items()
        ),
        "",
        *wrapped(caption),
    ]
