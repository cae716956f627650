"""The HTML page of `grace what-if`: one file without scripts, fonts or pictures of elsewhere."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Mapping, Sequence

from grace.advice.model import Link, Machine, predict
from grace.advice.what_if import Answer, lines
from grace.report.page import STYLE

# Bits per second of the links of the figure, and points per factor of ten.
SLOWEST, FASTEST, POINTS = 1e8, 4e11, 8
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 360, 62, 44, 14
# Colours that the colour-blind can tell apart, and dashes for whoever prints the page.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#332288")
_DASHES = ("", "6 3", "2 2", "8 3 2 3")


def page(answer: Answer) -> str:
    """Return the page of an answer: its text, and the step over bandwidth and over the number of ranks."""
    title = html.escape(f"What if: {answer.model.name} on {answer.machine.ranks} ranks")
    text = "\n".join(lines(answer)[1:])
    figures = [_figure("Step over the bandwidth of the link", _over_links(answer), "Gbit/s", "s")]
    if len(answer.by_ranks) > 1:
        figures.append(_figure("Step over the number of ranks", _over_ranks(answer), "ranks", "s"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{title}</title><style>{STYLE}</style></head>'
        f'<body><main><h1>{title}</h1><p class="advice">{html.escape(answer.sentence)}</p>'
        f'<div class="scroll"><pre>{html.escape(text)}</pre></div>{"".join(figures)}</main></body></html>\n'
    )


def _over_links(answer: Answer) -> dict[str, list[tuple[float, float]]]:
    count = round(POINTS * math.log10(FASTEST / SLOWEST))
    rates = [SLOWEST * (FASTEST / SLOWEST) ** (i / count) for i in range(count + 1)]

    def at(rate: float) -> Machine:
        return dataclasses.replace(answer.machine, link=Link(rate / 8, answer.machine.link.latency))

    return {
        label: [(rate / 1e9, predict(step, at(rate)).seconds) for rate in rates] for label, step in answer.steps.items()
    }


def _over_ranks(answer: Answer) -> dict[str, list[tuple[float, float]]]:
    return {
        row.label: [(float(n), found[row.label].seconds) for n, found in answer.by_ranks.items()] for row in answer.rows
    }


def _figure(title: str, series: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Return a figure with two logarithmic axes and a line per series."""
    xs, ys = ([p[i] for points in series.values() for p in points] for i in range(2))
    x_of, y_of = _scale(xs, _LEFT, _WIDTH - 10), _scale(ys, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for value in _ticks(xs):
        x = x_of(value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="grid"/>'
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
        )
    for value in _ticks(ys):
        y = y_of(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    keys = []
    for i, (label, points) in enumerate(series.items()):
        look = f'stroke="{_COLOURS[i % len(_COLOURS)]}" stroke-dasharray="{_DASHES[i % len(_DASHES)]}"'
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2" {look}/>')
        line = f'<svg width="28" height="8" class="key"><path d="M0 4H28" stroke-width="2" {look}/></svg>'
        keys.append(f"<li>{line} {html.escape(label)}</li>")
    parts.append(
        f'<text x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{html.escape(across)}</text>'
        f'<text x="12" y="{_TOP + 10}">{html.escape(up)}</text>'
    )
    style = (
        "text { font: 12px system-ui, sans-serif; fill: currentColor; } .grid { stroke: currentColor; opacity: 0.15; }"
    )
    return (
        f'<h2>{html.escape(title)}</h2><figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}" style="max-width:46rem"><style>{style}</style>{"".join(parts)}</svg>'
        f'<ul class="signs">{"".join(keys)}</ul></figure>'
    )


def _scale(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    """Return the function from values to places, by their logarithms."""
    least, most = math.log(min(values)), math.log(max(values))
    width = (most - least) or 1.0
    return lambda value: low + (high - low) * (math.log(value) - least) / width


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers in the range of the values: 1, 2 and 5 times powers of ten, or only the powers if many."""
    least, most = min(values), max(values)
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    for steps in ((1, 2, 5), (1,)):
        found = [float(f"{m}e{p}") for p in powers for m in steps if least <= float(f"{m}e{p}") <= most]
        if len(found) <= 9:
            break
    return found
