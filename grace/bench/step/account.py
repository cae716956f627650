"""The command `grace bench step --account`: the parts of what a step takes beyond a step without exchange."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grace.bench.step.methods import Method
from grace.bench.step.run import Bed, Result, Setting
from grace.bench.step.table import describe_run, figures
from grace.bench.table import format_digits

# The parts of the overhead, in the order of the table.
PARTS = ("passes", "arithmetic", "Python", "compute", "waiting", "threads", "faults")
HEAD = ("step", "overhead", "copies", *PARTS, "limit", "wire")
MS = 1e3


@dataclass(frozen=True)
class Account:
    """The parts of a method's overhead over `compute`, a step without exchange, in seconds per step and rank.

    `parts` adds up to the overhead of the mean step. `limit` is the time to read the gradient, to write the mean, and
    to read and write what the memories keep, `wire` that of the sent bytes on the link.
    """

    method: Method
    setting: Setting
    step: float
    overhead: float
    copies: float
    parts: dict[str, float]
    limit: float
    wire: float

    def to_dict(self) -> dict[str, Any]:
        """Return the settings and figures as an object for JSON."""
        setting = self.setting
        return {
            "method": self.method.name,
            "launcher": self.method.launcher if self.method.compresses else None,
            "options": setting.options_of(self.method),
            "framework": setting.framework,
            "link": setting.link,
            "ranks": setting.ranks,
            "model": setting.model,
            "step_s": self.step,
            "overhead_s": self.overhead,
            "overhead_copies": self.copies,
            "parts_s": self.parts,
            "limit_s": self.limit,
            "wire_s": self.wire,
        }


def account(setting: Setting, methods: list[Method], progress: Callable[[str], None]) -> tuple[Result, list[Account]]:
    """Measure the methods in turns, as `measure` does. Return the first result, and the accounts of the others."""
    with Bed(setting, progress, metered=True) as bed:
        results = bed.measure(methods)
    compute, *others = results
    return compute, [_split_time(result, compute) for result in others]


def _split_time(result: Result, compute: Result) -> Account:
    mine, base = _mean(result), _mean(compute)
    bandwidth, fault = mine["copy_bandwidth"], mine["fault_s"]
    in_kernels = mine["kernels"] - mine["kernel_faults"] * fault
    passes = min(in_kernels, mine["kernel_bytes"] / bandwidth)
    faults = (mine["faults"] - base["faults"]) * fault
    other_faults = mine["faults"] - mine["kernel_faults"] - base["faults"]
    python = mine["steps"] - mine["kernels"]
    waiting, before = (each["wall"] - each["cpu"] - each["delayed"] for each in (mine, base))
    parts = {
        "passes": passes,
        "arithmetic": in_kernels - passes,
        "Python": python,
        "compute": mine["cpu"] - mine["steps"] - base["cpu"] - other_faults * fault,
        "waiting": waiting - before,
        "threads": mine["delayed"] - base["delayed"],
        "faults": faults,
    }
    copy = 2 * result.gradient_bytes / bandwidth
    overhead = result.median - compute.median
    rate, wire = result.setting.rate, result.wire_bytes
    return Account(
        method=result.method,
        setting=result.setting,
        step=result.median,
        overhead=overhead,
        copies=overhead / copy,
        parts=parts,
        limit=copy * (1 + mine["kept_bytes"] / result.gradient_bytes),
        wire=0.0 if rate is None or wire is None else 8 * wire / rate,
    )


def _mean(result: Result) -> dict[str, float]:
    """Return the mean of every figure over ranks and turns."""
    return {name: statistics.fmean(spent[name] for spent in result.spent) for name in result.spent[0]}


def lines(compute: Result, accounts: Sequence[Account]) -> list[str]:
    """Return the title, the headings and one line per method; times in milliseconds."""
    bandwidth = _mean(compute)["copy_bandwidth"]
    title = (
        f"{describe_run(compute.setting)}; ms per step; compute {compute.median * MS:.1f} ms; "
        f"copy {2e3 * compute.gradient_bytes / bandwidth:.1f} ms ({bandwidth * 1e-9:.1f} GB/s per rank)"
    )
    return [title, *figures(["method", *HEAD], *([each.method.label, *_cells(each)] for each in accounts))]


def _cells(found: Account) -> list[str]:
    times = (*(found.parts[name] for name in PARTS), found.limit, found.wire)
    return [
        f"{found.step * MS:.1f}",
        f"{found.overhead * MS:.1f}",
        format_digits(found.copies),
        *(f"{seconds * MS:.1f}" for seconds in times),
    ]
