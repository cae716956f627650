"""The table of `grace bench step`."""

from __future__ import annotations

from collections.abc import Sequence

from grace.bench.step.run import Result
from grace.bench.table import SECONDS, digits, scaled
from grace.machine import processor

HEAD = ("median", "p10", "p90", "sent/step", "said", "x Horovod", "codecs free", "peak")
WIDTHS = (8, 8, 8, 10, 7, 10, 12, 9)
BYTES = ((1e-9, "GB"), (1e-6, "MB"), (1e-3, "KB"), (1.0, "B"))


def lines(results: Sequence[Result]) -> list[str]:
    """Title, head and a line per method; the first result is the step without exchange, the second plain Horovod."""
    compute, reference = results[0], results[1]
    setting = compute.setting
    first = max(len(name) for name in ("method", *(result.method for result in results)))
    delay = f" with {setting.latency} more delay" if setting.latency else ""
    title = (
        f"{setting.model} in {setting.framework}; {setting.ranks} ranks on {processor()}; link {setting.link}{delay}; "
        f"{setting.rounds} rounds of {setting.steps} steps"
    )
    return [title, _line(first, "method", HEAD), *(_row(first, result, compute, reference) for result in results)]


def _row(first: int, result: Result, compute: Result, reference: Result) -> str:
    found = result.to_dict(compute, reference)
    sent, reported = found["wire_bytes"], found["reported_bytes"]
    low, high = result.spread
    cells = (
        *(scaled(value, SECONDS) for value in (result.median, low, high)),
        "-" if sent is None else scaled(sent, BYTES),
        "-" if reported is None or not sent else f"{reported / sent:.1%}",
        digits(found["speedup_over_horovod"]),
        digits(found["speedup_bound"]),
        scaled(result.peak_bytes, BYTES),
    )
    return _line(first, result.method, cells)


def _line(first: int, name: str, cells: Sequence[str]) -> str:
    aligned = (cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return "  ".join([name.ljust(first), *aligned])
