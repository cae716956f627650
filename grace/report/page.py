"""The HTML page of a study: one file without scripts, fonts or pictures of elsewhere, for wide and narrow screens."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from grace.report import figures
from grace.report.advice import advice, usual_ranks
from grace.report.comparison import Case, cases, feedback_pairs
from grace.report.findings import Line, findings
from grace.report.methods import DENSE
from grace.report.speed import FASTER, LATENCY, LINKS
from grace.report.table import HEAD, LEGEND, cells_of

VERDICTS = {True: ("yes", "✓ reproduced"), False: ("no", "✗ not reproduced"), None: ("open", "○ not tested")}
# Links of the table of speed; the figures have all.
SPEED_LINKS = (1, 10)
STYLE = """
:root { color-scheme: light dark; --ink: #1b1d21; --paper: #fff; --line: #d5d8dd; --soft: #f3f4f6; --link: #0b57a4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7ea; --paper: #17191d; --line: #3b3f46; --soft: #22252b; --link: #8ab8f0; }
}
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--paper); font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 78rem; margin: 0 auto; padding: 1rem 1.25rem 4rem; }
h1 { line-height: 1.2; } h2 { margin: 2.5rem 0 0.5rem; padding-top: 0.5rem; border-top: 1px solid var(--line); }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; margin: 1rem 0; }
.advice { background: var(--soft); padding: 0.75rem 1.25rem; border-radius: 0.5rem; font-size: 1.1rem; }
.advice li { margin: 0.35rem 0; }
figure { margin: 1rem 0 1.5rem; }
figcaption, .note { font-size: 0.875rem; max-width: 60rem; }
.panels { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 1rem; }
.panels > * { min-width: 0; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
.numbers th { vertical-align: bottom; } .numbers td { white-space: nowrap; }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right; }
.numbers th:first-child, .numbers td:first-child { position: sticky; left: 0; background: var(--paper); }
.findings td:first-child, .findings td:nth-child(3) { white-space: nowrap; }
.yes { font-weight: 600; } .no { font-weight: 600; } .open { opacity: 0.75; }
ul.signs { list-style: none; display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; padding: 0; }
code { padding: 0 0.25em; border: 1px solid var(--line); border-radius: 0.25em; font-size: 0.9em; }
details { margin: 0.75rem 0; } summary { cursor: pointer; } figcaption details { margin: 0; }
@media (max-width: 48rem) {
  main { padding: 0.5rem 0.75rem 3rem; }
  .panels { grid-template-columns: minmax(0, 1fr); }
  .numbers td:first-child { white-space: normal; }
  .findings thead { display: none; }
  .findings tr { display: block; padding: 0.5rem 0; border-bottom: 1px solid var(--line); }
  .findings td { display: block; border: 0; padding: 0.1rem 0; }
}
"""


def page(results: Sequence[Mapping[str, Any]], codec: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the page of results, with the latency of codecs if their measurements are given.

    The same results give the same page.
    """
    found, numbers = cases(results), itertools.count()
    tasks = list(dict.fromkeys(case.table.task for case in found))
    links = [*((f"#{task}", task) for task in tasks), ("#feedback", "error feedback"), ("#codecs", "latency of codecs")]
    links += [("#findings", "findings of the papers"), ("#law", "how times are computed")]
    said = "".join(f"<li>{_text(sentence)}</li>" for sentence in advice(found))
    parts = [
        "<h1>Gradient compression: what to take</h1>",
        f'<ul class="advice">{said}</ul>',
        "<nav>" + "".join(f'<a href="{target}">{_text(name)}</a>' for target, name in links) + "</nav>",
        _note(_origin(results)),
        *(_task([case for case in found if case.table.task == task], numbers) for task in tasks),
        _feedback(found, numbers),
        _codecs(codec, numbers),
        _findings(findings(found)),
        _law(found),
        _errors(results),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Gradient compression: what to take</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main>\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """Return HTML of a text, whose parts between backticks are code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def _quoted(methods: Iterable[str]) -> str:
    return ", ".join(f"`{method}`" for method in methods) or "no method"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _origin(results: Iterable[Mapping[str, Any]]) -> str:
    """Return machine, date, command, version and seeds of results, each once."""
    known = [found for found in results if "error" not in found]
    if not known:
        return "There are no results."
    dates = sorted(found["date"] for found in known)
    seeds = sorted({found["cell"]["seed"] for found in known})
    machines, commands, versions = (
        list(dict.fromkeys(str(found[key]) for found in known)) for key in ("machine", "command", "version")
    )
    commits = list(dict.fromkeys(found["commit"] for found in known if found["commit"]))
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    version = f"grace {_list(versions)}" + (f", commit {_list(commits)}" if commits else "")
    return (
        f"Machine: {_list(machines)}, one thread per run. Date: {when}. Command: {_list(commands)}. {version}. "
        f"{'Seeds' if len(seeds) > 1 else 'Seed'}: {_list(map(str, seeds))}."
    )


def _runs(found: Iterable[Case]) -> list[Mapping[str, Any]]:
    return [run for case in found for run in case.runs.values()]


def _figure(panels: Sequence[str], caption: str, origin: str) -> str:
    """Return a figure of panels, each SVG or HTML, with its caption and, folded, where its numbers come from."""
    inner = "".join(f"<div>{panel}</div>" for panel in panels)
    folded = f"<details><summary>origin</summary>{_text(origin)}</details>"
    return f'<figure><div class="panels">{inner}</div><figcaption>{_text(caption)}{folded}</figcaption></figure>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return _scrolled(kind, top, body)


def _scrolled(kind: str, head: str, body: str) -> str:
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


# --- the parts of the page ------------------------------------------------------------------------------------------


def _findings(lines: Sequence[Line]) -> str:
    count = [sum(line.holds is verdict for line in lines) for verdict in (True, False, None)]
    rows = []
    for line in lines:
        name, verdict = VERDICTS[line.holds]
        cells = f'<br><span class="note">{_text(line.cells)}</span>' if line.cells else ""
        rows.append(
            f"<tr><td>{_text(f'{line.paper}, {line.section}')}</td><td>{_text(line.says)}</td>"
            f'<td class="{name}">{verdict}</td><td>{_text(line.number)}{cells}</td></tr>'
        )
    head = "".join(f"<th>{name}</th>" for name in ("paper", "finding", "here", "number, and the cells it comes from"))
    return (
        '<h2 id="findings">Findings of the papers</h2>'
        f"<p>{count[0]} reproduced, {count[1]} not reproduced, {count[2]} not tested. A cell is a method with its "
        "default error feedback, on a task and a number of ranks. Within the noise: as good as uncompressed training "
        'with the same seeds, but for the noise. Speeds follow from <a href="#law">a law</a>, and verdicts on them are '
        f'those of the computer that trained; "at {FASTER[1]} x" means: with compute and codecs so many times as fast.'
        "</p>" + _scrolled("findings", head, "".join(rows))
    )


def _task(found: Sequence[Case], numbers: Iterator[int]) -> str:
    """Return the section of a task: figures and tables of the usual number of ranks, and folded those of others."""
    table, usual = found[0].table, usual_ranks(found)
    name, optimizer = table.task, found[0].task.optimizer
    ranks = sorted({case.ranks for case in found}, key=lambda number: (number != usual, number))
    parts = [f'<h2 id="{name}">{_text(f"{name}: {table.title}, {optimizer}")}</h2>']
    for number in ranks:
        section = _ranks([case for case in found if case.ranks == number], numbers)
        if number == usual:
            parts.append(section)
        else:
            parts.append(f"<details><summary>{name} on {number} ranks</summary>{section}</details>")
    return "".join(parts)


def _ranks(found: Sequence[Case], numbers: Iterator[int]) -> str:
    """Return figures and tables of one task on one number of ranks."""
    table, task, dense = found[0].table, found[0].task, found[0].dense_parts
    drawn = [case for case in found if not case.switched]
    missing, name = figures.left_out(drawn), f"{table.task}, {table.ranks} ranks"
    parts = []
    # A rank alone sends nothing.
    if dense is not None and dense.link_bytes and len(missing) < len(drawn):
        origin = _origin(_runs(drawn))
        sent = figures.scatter(drawn, _percent_sent, "bytes on the link, % of uncompressed", next(numbers), fewer=True)
        parts = [
            _note(
                "Points are means over the seeds, lines go from the lowest to the highest, and the gray strip is the "
                "range of uncompressed training. Point at a marker for its name. Left out, because they diverged or "
                f"are below {100 * figures.CUT:.0f} % of uncompressed: {_quoted(missing)}."
            ),
            _figure([sent, _signs(drawn)], f"{name}: quality over the bytes that leave a rank.", origin),
        ]
        for faster in FASTER:
            panels = [
                figures.scatter(
                    drawn, _throughput(gbit, faster), f"relative throughput at {gbit} Gbit/s", next(numbers)
                )
                for gbit in LINKS
            ]
            times = "on one core" if faster == 1 else f"with compute and codecs {faster} times as fast"
            shares = ", ".join(f"{100 * dense.link_share(gbit, faster):.0f} % at {gbit} Gbit/s" for gbit in LINKS)
            caption = (
                f"{name}: quality over throughput relative to uncompressed training, computed {times}. Of an "
                f"uncompressed step, the link takes {shares}."
            )
            parts.append(_figure(panels, caption, origin))
    better = "higher" if task.higher_is_better else "lower"
    noise = "unknown" if table.noise is None else f"{table.noise:.4g}"
    parts += [
        f"<p>{_text(task.metric)} ({better} is better) on {table.ranks} ranks; noise {noise}. {_text(LEGEND)}</p>",
        _table(HEAD, [[case.method, *cells_of(case.row, table)[1:]] for case in found]),
        _speed(found),
    ]
    return "".join(parts)


def _signs(found: Iterable[Case]) -> str:
    """Return the key of colours and markers."""
    signs = "".join(
        f'<li><span style="color:{colour.replace(figures.INK, "currentColor")}">{sign}</span> {_text(name)}</li>'
        for name, colour, _, sign in dict.fromkeys(map(figures.style, found))
    )
    return f'<ul class="signs">{signs}</ul>'


def _percent_sent(case: Case) -> float | None:
    return None if case.sent is None else 100 * case.sent


def _throughput(gbit: float, faster: float) -> Callable[[Case], float | None]:
    return lambda case: case.throughput(gbit, faster)


def _speed(found: Sequence[Case]) -> str:
    """Return the table of the time of a step, and of the quality at equal time."""
    if found[0].dense_parts is None:
        return _note("Speeds need uncompressed training on the same task.")
    head = ["method", "codecs, ms"]
    for faster in FASTER:
        of = "" if faster == 1 else f", {faster} x faster"
        head += [f"step at {gbit} Gbit/s, ms{of}" for gbit in SPEED_LINKS]
        head += [f"{found[0].task.metric} at equal time, 1 Gbit/s{of}"]
    rows = []
    for case in found:
        row = [case.method, f"{1e3 * case.parts.exchange:.3g}"]
        for faster in FASTER:
            row += [f"{1e3 * case.parts.seconds(gbit, faster):.3g}" for gbit in SPEED_LINKS]
            pair = case.qualities_at_equal_time(1, faster)
            row.append(
                "-" if pair is None else f"{pair[0]:.4f}" if case.method == DENSE else f"{pair[0]:.4f} / {pair[1]:.4f}"
            )
        rows.append(row)
    return (
        "<details><summary>time of a step, and quality at equal time</summary>"
        + _note(
            "Computed by the law below. Quality at equal time: of the method / of `none`, when the faster of the two "
            "has ended; the learning rate of the slower one has then not yet fallen as far."
        )
        + f"{_table(head, rows)}</details>"
    )


def _feedback(found: Sequence[Case], numbers: Iterator[int]) -> str:
    title = '<h2 id="feedback">Error feedback on and off</h2>'
    groups: dict[str, list[tuple[Case, Case]]] = {}
    usual = usual_ranks(found)
    for pair in feedback_pairs(found):
        if pair[0].ranks == usual and any(case.row.relative is not None for case in pair):
            groups.setdefault(pair[0].table.task, []).append(pair)
    if not groups:
        return f"{title}<p>There is no method both with and without error feedback.</p>"
    panels = [figures.feedback(pairs, next(numbers)) for pairs in groups.values()]
    runs = _runs(case for pairs in groups.values() for pair in pairs for case in pair)
    caption = (
        f"Quality relative to uncompressed training on {usual} ranks, without error feedback (hollow) and with it "
        "(filled). A side that diverged is left out; the gray strip is the range of uncompressed training."
    )
    return title + _figure(panels, caption, _origin(runs))


def _codecs(codec: Sequence[Mapping[str, Any]] | None, numbers: Iterator[int]) -> str:
    title = '<h2 id="codecs">Latency of codecs</h2>'
    if not codec:
        return (
            f"{title}<p>Not measured. <code>grace bench codec --numel 2500 250K 25M --json codec.json</code> measures "
            "it, and <code>grace report --codec codec.json</code> draws it here.</p>"
        )
    sizes: dict[int, list[Mapping[str, Any]]] = {}
    for entry in codec:
        sizes.setdefault(entry["numel"], []).append(entry)
    panels = [figures.latencies(entries, next(numbers)) for _, entries in sorted(sizes.items())]
    machine, count = codec[0]["machine"], [entry["repetitions"] for entry in codec]
    repetitions = f"{max(count)}" if min(count) == max(count) else f"{min(count)} to {max(count)}"
    caption = (
        f"Time of the local work of a step: compression, decompression and error feedback, {repetitions} repetitions; "
        "the line is the median. Gradients are drawn with a fixed seed."
    )
    origin = (
        f"Machine: {machine['gpu'] or machine['cpu']}, {_count(codec[0]['threads'], 'thread')}, "
        f"{codec[0]['framework']}. Command: {codec[0]['command']}."
    )
    return title + _figure(panels, caption, origin)


def _law(found: Sequence[Case]) -> str:
    compute = {}
    for case in found:
        compute[f"{case.table.task} on {case.ranks} ranks"] = f"{1e3 * case.parts.compute:.3g} ms"
    times = _list(f"{place} {time}" for place, time in compute.items())
    machines = list(dict.fromkeys(run["machine"] for run in _runs(found)))
    several = f" The runs are from several machines, so times of methods may differ by them: {_list(machines)}."
    return (
        '<h2 id="law">How times are computed</h2>'
        "<p>The times of steps on this page are computed by a law from measured parts. They are not measured on a "
        "network; <code>grace bench step</code> measures.</p>"
        "<p>Time of a step = (compute + exchange) / f + the sum over collectives of (messages &times; latency + bytes "
        f"on the link / bandwidth). The latency is {1e6 * LATENCY:.0f} µs. For n ranks and B bytes that a rank hands "
        "to a collective, 2 (n &minus; 1) / n &middot; B leave it in an allreduce, by 2 (n &minus; 1) messages; "
        "(n &minus; 1) B in an allgather or broadcast and B in an alltoall, by n &minus; 1 messages. Nothing overlaps, "
        "and all ranks send at once. Compute and exchange are measured on one core; f is 1, or "
        f"{FASTER[1]} for the balance of a GPU.</p>"
        f"<p>Compute per step: {_text(times)}.{_text(several) if len(machines) > 1 else ''}</p>"
    )


def _errors(results: Iterable[Mapping[str, Any]]) -> str:
    failed = [found for found in results if "error" in found]
    if not failed:
        return ""
    # One cause often ends many runs.
    groups: dict[tuple[str, int, str], list[str]] = {}
    for found in failed:
        cell = found["cell"]
        run = f"{cell['method']}, seed {cell['seed']}"
        groups.setdefault((cell["task"], cell["ranks"], found["error"]), []).append(run)
    rows = [
        (f"{task}, {ranks} ranks, {runs[0] if len(runs) == 1 else _count(len(runs), 'run')}", error)
        for (task, ranks, error), runs in groups.items()
    ]
    return "<h2>Errors</h2>" + _table(("run", "error"), rows, "errors")
