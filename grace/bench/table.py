"""The table of `grace bench codec`, printed line by line."""

from __future__ import annotations

from collections.abc import Sequence

from grace.bench.measure import Result, Setting, machine
from grace.core.observe.table import align

HEAD = ("numel", "median", "p10", "p90", "copy", "x copy", "GB/s", "bits/elem.", "error", "break-even", "reps")
WIDTHS = (11, 7, 7, 7, 7, 7, 8, 10, 7, 11, 4)
SECONDS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))
GBITS = ((1.0, "Gbit/s"), (1e3, "Mbit/s"), (1e6, "Kbit/s"), (1e9, "bit/s"))


class Table:
    """The lines of a table, all of one width, for methods with these labels."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._first = max(len(label) for label in ("compressor", *labels))

    def title(self, setting: Setting) -> str:
        """Return the title: framework, device, ranks, and whether the kernels are in use."""
        framework, facts = setting.framework, machine(setting.framework)
        place = facts["gpu"] or f"{facts['cpu']}, {_format_count(setting.threads, 'thread')}"
        return (
            f"{framework.name} {facts[framework.name]} on {framework.device} ({place}); "
            f"{_format_count(setting.ranks, 'rank')}; {'kernels' if framework.native else 'reference implementation'}"
        )

    def head(self) -> str:
        """Return the line with the names of the columns."""
        return self._line("compressor", HEAD)

    def row(self, result: Result) -> str:
        """Return the line of one method at one size."""
        low, high = result.spread
        cells = (
            f"{result.numel:,}",
            *(format_scaled(value, SECONDS) for value in (result.median, low, high, result.copy)),
            format_digits(result.ratio),
            format_digits(result.gb_per_s),
            format_digits(result.bits_per_element),
            f"{result.error:.2g}",
            "never" if result.break_even is None else format_scaled(result.break_even, GBITS),
            str(len(result.times)),
        )
        note = f"  not compressed: {result.unit.reason}" if result.unit.reason else ""
        return self._line(result.variant.label, cells) + note

    def _line(self, first: str, cells: Sequence[str]) -> str:
        return align([[first, *cells]], range(1, len(WIDTHS) + 1), (self._first, *WIDTHS))[0]


def _format_count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def format_scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Format a value with three digits, in the first unit that gives at least 1.

    A unit is a pair: its factor (how many of it make 1) and its name.
    """
    factor, unit = next((u for u in units if value * u[0] >= 0.9995), units[-1])
    return f"{format_digits(value * factor)} {unit}"


def format_digits(value: float) -> str:
    """Format a value with three digits."""
    # For 999.5 and more, :.3g would use powers of ten.
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
