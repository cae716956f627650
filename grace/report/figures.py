"""The figures of the page, as SVG within its text: no fonts and no scripts of their own, and the page's text colour."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, NullFormatter

from grace.report.comparison import Case
from grace.report.methods import BASELINES, DENSE, RECOMMENDED

# Stands for the colour of the page's text, which differs between a light and a dark page.
INK = "#010203"
# By family: a colour that colour-blind people can tell from the others (Okabe and Ito), and a marker, with its sign.
STYLES: Mapping[str, tuple[str, str, str, str]] = {
    "other": ("baseline", INK, "o", "●"),
    "quantization": ("quantization", "#0072b2", "s", "■"),
    "sparsification": ("sparsification", "#d55e00", "^", "▲"),
    "hybrid": ("hybrid", "#cc79a7", "D", "◆"),
    "low_rank": ("low rank", "#009e73", "v", "▼"),
    "": ("from outside grace", "#e69f00", "X", "✖"),
}
# In inches, of 72 units of the page each; text in units.
WIDTH, HEIGHT, FONT = 4.6, 3.5, 9.0
# A method whose quality is less than this share of the uncompressed one is left out, as in the GRACE paper's figures.
CUT = 0.75
LONGEST = 26
_RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "grace report",
    # A label may have dollar signs.
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
_POINT = re.compile(r'<g id="point-(\d+)">')


def style(case: Case) -> tuple[str, str, str, str]:
    """Return name, colour, marker and sign of the family of a method."""
    return STYLES.get(case.family, STYLES[""])


def left_out(cases: Sequence[Case]) -> list[str]:
    """Return the labels of the methods that `scatter` leaves out: their quality is too low, or unknown."""
    return [case.method for case in cases if not _shown(case)]


def _shown(case: Case) -> bool:
    return case.row.relative is not None and case.row.relative >= CUT


def scatter(
    cases: Sequence[Case], x: Callable[[Case], float | None], axis: str, number: int, *, fewer: bool = False
) -> str:
    """Draw the quality of methods on one task over something, with ranges over the seeds, and the noise as a strip.

    `number` tells figures of a page apart; `fewer` says that less is better on the x axis. Methods that no other
    surpasses in both get their labels first; a label without a free place is left out.
    """
    task = cases[0].task
    names: list[str] = []
    points = [(case, place) for case in cases if _shown(case) and (place := x(case)) is not None]
    with rc_context(_RC):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        panel = figure.subplots()
        panel.set_xscale("log")
        panel.set_xlabel(axis)
        panel.set_ylabel(f"{task.metric} ({'higher' if task.higher_is_better else 'lower'} is better)")
        panel.grid(alpha=0.2)
        if dense := [case.row for case, _ in points if case.method == DENSE and len(case.row.seeds) > 1]:
            panel.axhspan(_known(dense[0].low), _known(dense[0].high), color="gray", alpha=0.25, linewidth=0)
        for case, place in points:
            _, colour, marker, _ = style(case)
            quality = _known(case.row.quality)
            if len(case.row.seeds) > 1:
                panel.plot([place] * 2, [_known(case.row.low), _known(case.row.high)], color=colour, linewidth=1.2)
            (line,) = panel.plot(place, quality, marker, color=colour, markersize=5.5, markeredgewidth=0)
            line.set_gid(f"point-{len(names)}")
            names.append(f"{case.method}: {quality:.4g} at {place:.3g}")
        panel.margins(0.15, 0.08)
        _plain_numbers(panel)
        _label(figure, panel, points, fewer)
        return _svg(figure, f"{task.metric} on {task.name} over {axis}", number, names)


def _plain_numbers(panel: Axes) -> None:
    """Write the numbers of a logarithmic x axis without powers, and not more than fit."""
    low, high = panel.get_xlim()
    steps = (1.0, 2.0, 5.0) if math.log10(high / low) < 2 else (1.0,)
    if math.log10(high / low) < 0.5:
        ticks = [float(tick) for tick in MaxNLocator(5).tick_values(low, high)]
    else:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps]
    panel.set_xticks([tick for tick in ticks if low <= tick <= high])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.minorticks_off()
    panel.set_xlim(low, high)


def _label(figure: Figure, panel: Axes, points: Sequence[tuple[Case, float]], fewer: bool) -> None:
    """Write labels beside points, where no point and no other label is."""
    # Only now are the places known.
    figure.draw_without_rendering()
    inverse, scale = figure.dpi_scale_trans.inverted(), 72.0
    frame = panel.get_window_extent()

    def units(x: float, y: float) -> tuple[float, float]:
        at = inverse.transform((x, y))
        return float(at[0]) * scale, float(at[1]) * scale

    (left, bottom), (right, top) = units(frame.x0, frame.y0), units(frame.x1, frame.y1)
    places = [units(*panel.transData.transform((place, _known(case.row.quality)))) for case, place in points]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in places]
    for index in sorted(range(len(points)), key=lambda i: (_importance(i, points, fewer), i)):
        (x, y), name = places[index], _short(points[index][0].method)
        # A mean letter is about half as wide as the text is high, and two labels need a gap.
        width, height = 0.5 * FONT * (len(name) + 1), FONT
        for dx, dy, sides in (
            (5, -height / 2, "left"),
            (-5 - width, -height / 2, "right"),
            (-width / 2, 5, "center"),
            (-width / 2, -5 - height, "center"),
            (4, 3, "left"),
            (4, -3 - height, "left"),
            (-4 - width, 3, "right"),
            (-4 - width, -3 - height, "right"),
        ):
            box = (x + dx, y + dy, x + dx + width, y + dy + height)
            within = left <= box[0] and box[2] <= right and bottom <= box[1] and box[3] <= top
            others = taken[:index] + taken[index + 1 :]
            if within and not any(_overlap(box, other) for other in others):
                taken.append(box)
                anchor = {"left": box[0], "right": box[2], "center": (box[0] + box[2]) / 2}[sides]
                at = figure.transFigure.inverted().transform(
                    figure.dpi_scale_trans.transform((anchor / scale, (box[1] + 1.5) / scale))
                )
                figure.text(float(at[0]), float(at[1]), name, fontsize=FONT - 1, ha=sides, va="baseline")
                break


def _importance(index: int, points: Sequence[tuple[Case, float]], fewer: bool) -> int:
    """Return 0 for uncompressed training, 1 for methods that no other surpasses, 2 for usual ones, 3 for others."""
    case, place = points[index]
    if case.method == DENSE:
        return 0
    sign = -1 if fewer else 1
    better = [
        sign * at > sign * place and _known(other.row.relative) >= _known(case.row.relative) for other, at in points
    ]
    if not any(better):
        return 1
    return 2 if case.method in (*BASELINES, *RECOMMENDED) else 3


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _short(label: str) -> str:
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 3]}..."


def feedback(pairs: Sequence[tuple[Case, Case]], number: int) -> str:
    """Draw the relative quality of methods on one task without error feedback (hollow) and with it (filled)."""
    task, names = pairs[0][0].task, list[str]()
    with rc_context(_RC):
        figure = Figure(figsize=(WIDTH, 0.9 + 0.22 * len(pairs)), layout="constrained")
        panel = figure.subplots()
        dense = pairs[0][0].dense
        ended = [run["quality"] for run in dense.values() if not run["diverged"]]
        if len(ended) > 1:
            mean = sum(ended) / len(ended)
            edges = [100 * (q / mean if task.higher_is_better else mean / q) for q in (min(ended), max(ended))]
            panel.axvspan(min(edges), max(edges), color="gray", alpha=0.25, linewidth=0)
        for place, (without, with_it) in enumerate(pairs):
            _, colour, marker, _ = style(without)
            found = [None if case.row.relative is None else 100 * case.row.relative for case in (without, with_it)]
            if None not in found:
                panel.plot([_known(x) for x in found], [place] * 2, color=colour, linewidth=1.2)
            for x, fill, case in zip(found, ("none", "full"), (without, with_it), strict=True):
                if x is not None:
                    (line,) = panel.plot(x, place, marker, color=colour, fillstyle=fill, markersize=5.5)
                    line.set_gid(f"point-{len(names)}")
                    names.append(f"{case.method}: {x:.1f} %")
        ticks = [_short(min((pair[0].method, pair[1].method), key=len)) for pair in pairs]
        panel.set_yticks(range(len(pairs)), ticks)
        panel.set_ylim(len(pairs) - 0.4, -0.6)
        panel.grid(axis="x", alpha=0.2)
        panel.set_xlabel(f"{task.name}: quality, % of uncompressed training")
        return _svg(figure, f"quality on {task.name} with and without error feedback", number, names)


def latencies(entries: Sequence[Mapping[str, Any]], number: int) -> str:
    """Draw violins of the times of codecs at one size, from entries of `grace bench codec --json`."""
    logs = [[math.log10(seconds) for seconds in entry["times"]] for entry in entries]
    with rc_context(_RC):
        figure = Figure(figsize=(WIDTH, 0.9 + 0.2 * len(entries)), layout="constrained")
        panel = figure.subplots()
        # Densities are estimated on the logarithmic scale that the axis shows.
        bodies = panel.violinplot(logs, orientation="horizontal", widths=0.9, showmedians=True, showextrema=False)
        for body in bodies["bodies"]:
            body.set(facecolor=STYLES["quantization"][1], alpha=0.6)
        bodies["cmedians"].set(color=INK, linewidth=1.5)
        copy = sorted(math.log10(seconds) for entry in entries for seconds in entry["copy_times"])
        panel.axvline(copy[len(copy) // 2], color=INK, linestyle="--", linewidth=1)
        names = [
            _short(entry["compressor"] + "".join(f":{k}={v}" for k, v in entry["options"].items())) for entry in entries
        ]
        panel.set_yticks(range(1, len(entries) + 1), names)
        panel.set_ylim(len(entries) + 0.6, 0.4)
        panel.xaxis.set_major_locator(MultipleLocator(1))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda power, _: f"{1e3 * 10.0**power:g}"))
        panel.grid(axis="x", alpha=0.2)
        panel.set_xlabel(f"{entries[0]['numel']:,} elements: milliseconds (dashed: a copy)")
        return _svg(figure, f"latency of codecs for {entries[0]['numel']:,} elements", number, ())


def _svg(figure: Figure, label: str, number: int, names: Sequence[str]) -> str:
    """Return the text of a figure for a page, whose ids differ from those of figures with another number.

    A drawn element with the gid `point-N` gets the N-th name as a title.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\s+(width|height)="[\d.]+pt"', "", text, count=2)
    text = _POINT.sub(lambda found: f"<g><title>{html.escape(names[int(found[1])])}</title>", text)
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    referred = {name for pair in used for name in pair if name}

    def named(found: re.Match[str]) -> str:
        return f' id="f{number}-{found[1]}"' if found[1] in referred else ""

    text = re.sub(r'\s+id="([^"]*)"', named, text)
    text = text.replace('href="#', f'href="#f{number}-').replace("url(#", f"url(#f{number}-")
    text = text.replace("'DejaVu Sans'", "system-ui, sans-serif").replace(INK, "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1).strip()


def _known(value: float | None) -> float:
    assert value is not None
    return value
