"""The registry of what is generated: functions that write blocks of a kind, and functions that draw figures."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.dpi": 110,
        "savefig.facecolor": "white",
        # The same bytes each time, with letters of the reader's own font.
        "svg.hashsalt": "grace",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
    }
)
# Width of a figure in inches, 400 pixels: two stand side by side on a page, and one fits a phone at its full size.
WIDTH = 400 / 96
# Signs that Markdown does not take as they are; an underscore within a word and a lone < are no markup.
SPECIAL = re.compile(r"[\\*$\[\]~]|(?<!\w)_|_(?!\w)|<(?=[A-Za-z/!?])")


class Block(NamedTuple):
    """A block that is to be written: its arguments, the path of its page, and the text that follows it there."""

    arguments: list[str]
    page: Path
    after: str

    def link(self, path: str) -> str:
        """Return a path of the repository as the page links to it."""
        return Path(os.path.relpath(ROOT / path, self.page.parent)).as_posix()


Writer = Callable[[Block], list[str]]
Drawer = Callable[[], bytes]
kinds: dict[str, Writer] = {}
figures: dict[Path, Drawer] = {}


def kind(name: str) -> Callable[[Writer], Writer]:
    """Register the function that returns the lines of the blocks of a kind."""

    def register(writer: Writer) -> Writer:
        kinds[name] = writer
        return writer

    return register


def figure(path: str) -> Callable[[Drawer], Drawer]:
    """Register the function that draws a figure, by the figure's path in the repository."""

    def register(drawer: Drawer) -> Drawer:
        figures[ROOT / path] = drawer
        return drawer

    return register


def row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def wrapped(text: str) -> list[str]:
    """Return the lines of a paragraph; a line that began with the sign of a list or heading would become one."""
    kept = re.sub(r" (?=(?:[-+*=>#]+|\d+[.)])(?: |$))", "\0", text)
    lines = textwrap.wrap(kept, 120, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def markdown(text: str) -> str:
    """Return plain text as Markdown; what stands in backticks stays code."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(p if p.startswith("`") else SPECIAL.sub(r"\\\g<0>", p) for p in parts)


def svg(drawn: Figure) -> bytes:
    """Return a figure as SVG, with coordinates to a hundredth of a point and a path on one line."""
    buffer = BytesIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"-?\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", buffer.getvalue().decode())
    text = re.sub(r'"[^"]*"', lambda match: " ".join(match[0].split()), text)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).encode()


def png(drawn: Figure) -> bytes:
    """Return a figure as PNG of 16 colors."""
    buffer, small = BytesIO(), BytesIO()
    drawn.savefig(buffer, format="png")
    Image.open(buffer).convert("RGB").quantize(16).save(small, format="png", optimize=True)
    return small.getvalue()
