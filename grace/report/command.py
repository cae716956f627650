"""The command `grace report`: its arguments, their checks, and its outputs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grace.bench.command import INTERRUPTED, add_import, set_completer
from grace.bench.progress import Progress
from grace.bench.variants import import_own
from grace.core.errors import ConfigError
from grace.report.data_sets import DATA_SETS
from grace.report.task import MODULES

if TYPE_CHECKING:
    from grace.report.cell import Cell

FOLDER, QUICK_FOLDER = Path("grace-report"), Path("grace-report-quick")
# What the page shows of the result of a codec.
OF_CODECS = {
    "compressor", "options", "numel", "framework", "threads", "repetitions", "times", "copy_times", "machine", "command"
}  # fmt: skip


def add_report(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="train tasks with many methods on simulated ranks, and compare quality and bytes",
        description="Train every task with every method, number of ranks and seed, on simulated ranks. Each run has a "
        "result file of its own: start the command again, and it trains what is missing. report.html shows all.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="few methods and short runs: 15 minutes on two cores")
    names = add("--tasks", nargs="+", metavar="NAME", help=f"{', '.join(MODULES)} (default: all)")
    help_text = "labels of the study, or compressors with options, such as qsgd:quantum_num=7; "
    help_text += "none, bf16 and fp16 always take part (default: as in the study)"
    methods = add("--methods", nargs="+", metavar="NAME", help=help_text)
    sets = ", ".join(f"{name} for {task}" for task, name in DATA_SETS.items())
    add("--data", type=Path, metavar="FOLDER", help=f"train these tasks on data sets of a folder: {sets}")
    add("--seeds", nargs="+", type=int, metavar="N", help="seeds of weights and data (default: as in the study)")
    add("--ranks", nargs="+", type=int, metavar="N", help="numbers of simulated ranks (default: as in the study)")
    add("--jobs", type=int, metavar="N", help="processes that train, each with one thread (default: one per core)")
    folder = f"folder of the results (default: {FOLDER}, with --quick {QUICK_FOLDER})"
    add("--output", type=Path, metavar="FOLDER", help=folder)
    add("--codec", type=Path, metavar="FILE", help="results of `grace bench codec --json`, for the page")
    add_import(parser)
    set_completer(names, lambda _: MODULES)
    set_completer(methods, lambda _: _labels())
    parser.set_defaults(run=run_report)


def _labels() -> list[str]:
    from grace.report.methods import methods

    return list(methods())


def run_report(args: argparse.Namespace) -> int:
    """Train what is missing, print the tables and write all results. Return the exit status.

    Raises GraceError for wrong arguments, before anything is trained.
    """
    for option, least in (("seeds", 0), ("ranks", 1), ("jobs", 1)):
        given = getattr(args, option)
        for value in given if isinstance(given, list) else [given] * (given is not None):
            if value < least:
                raise ConfigError(f"--{option}: expected at least {least}, received {value}.")
    from grace.report.study import cells

    modules = import_own(args.modules)
    wanted = cells(
        dict.fromkeys(args.tasks or (DATA_SETS if args.data else MODULES)),
        quick=args.quick,
        methods=args.methods,
        seeds=_once(args.seeds),
        ranks=_once(args.ranks),
        data=args.data,
    )
    codec = args.codec and _codec(args.codec)
    folder = args.output or (QUICK_FOLDER if args.quick else FOLDER)
    jobs = args.jobs or len(os.sched_getaffinity(0))
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        return _study(wanted, folder, jobs, codec, modules)
    except BrokenPipeError:
        # Of the output: the command ends as others do.
        raise
    except OSError as error:
        # A full disk has no name.
        raise ConfigError(f"--output: '{error.filename or folder}' cannot be written: {error.strerror}.") from None


def _codec(path: Path) -> list[dict[str, Any]]:
    """Return the results of `grace bench codec` in a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--codec: '{path}' cannot be read: {error}.") from None
    if not (isinstance(found, list) and found and all(isinstance(x, dict) and x.keys() >= OF_CODECS for x in found)):
        raise ConfigError(f"--codec: '{path}' has no results of codecs; write it by `grace bench codec --json {path}`.")
    return found


def _once(values: Sequence[int] | None) -> list[int] | None:
    return None if values is None else list(dict.fromkeys(values))


def _study(
    wanted: Sequence[Cell],
    folder: Path,
    jobs: int,
    codec: Sequence[Mapping[str, Any]] | None,
    modules: Sequence[str],
) -> int:
    from grace.report.cell import read, write, write_text
    from grace.report.comparison import cases
    from grace.report.findings import findings
    from grace.report.page import page
    from grace.report.runner import TimeLeft, provenance, run
    from grace.report.table import printed, tables

    results = {cell.file: found for cell in wanted if (found := read(cell, folder / "cells"))}
    # What raised an error may succeed now.
    missing = [cell for cell in wanted if "error" in results.get(cell.file, {"error": ""})]
    waiting, left = len(missing), TimeLeft(missing, jobs)
    for cell in wanted:
        if cell.file in results:
            left.learn(cell, results[cell.file])
    print(
        f"{len(wanted)} cells, {len(wanted) - len(missing)} of them done; about "
        f"{duration(left.seconds())} left with {jobs} {'process' if jobs == 1 else 'processes'}",
        flush=True,
    )
    with Progress(len(missing)) as progress:

        def report(cell: Cell, found: Mapping[str, Any]) -> None:
            nonlocal waiting
            waiting -= 1
            results[cell.file] = dict(found)
            left.finish(cell, found)
            progress.update(1)
            rest = duration(left.seconds())
            progress.say(f"about {rest} left")
            outcome = (
                found.get("error") or f"loss {found['loss'] if found['loss'] is None else round(found['loss'], 4)}"
            )
            number = len(wanted) - waiting
            progress.write(f"{number}/{len(wanted)} {cell}: {outcome}; about {rest} left")

        try:
            run(missing, folder / "cells", jobs, report, modules)
        except KeyboardInterrupt:
            print(
                f"grace report: interrupted with {waiting} of {len(wanted)} cells left; the same command goes on",
                file=sys.stderr,
            )
            return INTERRUPTED
    every = [results[cell.file] for cell in wanted]
    print(f"\n{printed(every)}", flush=True)
    everything = {
        **provenance(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "tables": [table.to_dict() for table in tables(every)],
        "findings": [line.to_dict() for line in findings(cases(every))],
        "cells": every,
    }
    write(everything, folder / "results.json")
    write_text(page(every, codec), folder / "report.html")
    print(f"\n{folder / 'report.html'}", flush=True)
    return int(any("error" in result for result in every))


def duration(seconds: float) -> str:
    """Return a time for people: seconds, minutes or hours."""
    if seconds < 100:
        return f"{round(seconds)} s"
    return f"{round(seconds / 60)} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
