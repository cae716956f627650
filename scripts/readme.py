"""Write what README.md repeats from data: the figure of step times and its block between comments.

python scripts/readme.py            # writes docs/figures/step_time.svg and the block
python scripts/readme.py --check    # changes nothing; exit status 1 if something is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

README = ROOT / "README.md"
FIGURE = ROOT / "docs" / "figures" / "step_time.svg"
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


def figure(data: dict[str, Any]) -> str:
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
        for index, (method, _, kind) in enumerate(bars):
            y, length = TOP + ROW * index, scale * rows[method][link]
            parts.append(f'<rect class="{kind}" x="{left}" y="{y + 3}" width="{length:.1f}" height="{ROW - 6}"/>')
            parts.append(f'<text x="{left + length + 5:.1f}" y="{y + 16}">{rows[method][link]}</text>')
        x = left + scale * rows["compute"][link]
        parts.append(f'<line class="line" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}">no exchange: {rows["compute"][link]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def step_time(data: dict[str, Any]) -> list[str]:
    """Return the block with the figure and its conditions."""
    million = data["parameters"] / 1e6
    caption = (
        f"Milliseconds of a training step in PyTorch: a perceptron with {million:.1f} million parameters, "
        f"{data['batch']} examples per rank and step, {data['ranks']} ranks, default options. So few examples mean "
        "little computation per byte, the case in which compression gains most. One run per link, on one machine "
        f"({data['machine']}) with slowed-down links. [docs/speed.md](docs/speed.md) has other methods and models."
    )
    return [
        f"![Milliseconds of a training step by method, at {' and at '.join(LINKS.values())}]"
        f"({FIGURE.relative_to(ROOT).as_posix()})",
        "",
        *textwrap.wrap(caption, 120, break_on_hyphens=False),
    ]


def with_block(text: str, name: str, lines: list[str]) -> str:
    """Return a text with other lines between the comments `<!-- begin NAME ... -->` and `<!-- end NAME -->`."""
    pattern = re.compile(rf"(<!-- begin {name}\b[^>]*-->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md has no comments <!-- begin {name} --> and <!-- end {name} -->; add them.")
    return pattern.sub(lambda match: "\n".join([match[1], *lines, "", match[2]]), text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated parts of README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something is out of date")
    check = parser.parse_args().check
    data = measurements()
    text = README.read_text(encoding="utf-8")
    text = with_block(text, "step-time", step_time(data))
    status = 0
    for path, wanted in ((FIGURE, figure(data)), (README, text)):
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        if check:
            print(f"{path.relative_to(ROOT)} is out of date; run: python scripts/readme.py", file=sys.stderr)
            status = 1
        else:
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
