"""`grace bench step`: its arguments, what is refused before anything runs, and its outputs."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from grace.bench.command import INTERRUPTED, check_plot, check_writable, names_of
from grace.bench.progress import Progress
from grace.bench.step.methods import BASELINES, REFERENCE
from grace.bench.step.models import NAMES
from grace.bench.step.network import LINKS, check_link
from grace.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from grace.bench.step.run import Result

COMPRESSORS = ("none", "fp16", "topk", "randomk", "qsgd", "efsignsgd", "powersgd")


def add_step(commands: Any) -> None:
    """Tell argparse of the command."""
    parser = commands.add_parser(
        "step",
        help="time of whole training steps over a shaped network",
        description="Times training steps of several ranks on this machine, each behind a link of its own, "
        "method by method in turns, beside plain Horovod and a step without exchange.",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, metavar="N", help="processes (default: 2)")
    add("--link", default="1gbit", help=f"{', '.join(LINKS)}; all but none need root (default: 1gbit)")
    add("--latency", metavar="TIME", help="more delay per packet, such as 100us, where the kernel has netem")
    add("--model", default="mlp", help=f"{', '.join(NAMES)} (default: mlp)")
    add("--compressors", nargs="+", metavar="NAME", help=f"by spaces or commas (default: {' '.join(COMPRESSORS)})")
    add("--baselines", nargs="+", default=[REFERENCE], metavar="NAME", help=f"{', '.join(BASELINES)}")
    add("--framework", default="torch", help="torch or tensorflow (default: torch)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of all methods (default: 3)")
    add("--steps", type=int, default=5, metavar="N", help="timed steps per turn (default: 5)")
    add("--json", type=Path, metavar="FILE", help="write one object per method")
    add("--plot", type=Path, metavar="FILE", help="draw the steps' times as bars")
    parser.set_defaults(run=run_step)


def run_step(args: argparse.Namespace) -> int:
    """Measure, print and write; the exit status. Raises GraceError before anything is measured."""
    for option, least in (("ranks", 2), ("rounds", 1), ("steps", 1)):
        if getattr(args, option) < least:
            raise ConfigError(f"--{option}: expected at least {least}, received {getattr(args, option)}.")
    _check("--model", args.model, NAMES)
    _check("--framework", args.framework, ("torch", "tensorflow"))
    baselines = _split(args.baselines)
    for name in baselines:
        _check("--baselines", name, tuple(BASELINES))
        if BASELINES[name] == "ddp" and args.framework != "torch":
            raise ConfigError(f"--baselines: '{name}' is PyTorch's; leave it out with --framework tensorflow.")
    compressors = list(COMPRESSORS) if args.compressors is None else names_of(args.compressors)
    check_link(args.link, args.latency)
    for path in filter(None, (args.json, args.plot)):
        check_writable(path)
    if args.plot:
        check_plot(args.plot)
    from grace.bench.step.run import Setting, measure

    setting = Setting(args.framework, args.model, args.ranks, args.link, args.latency, args.rounds, args.steps)
    methods = [*baselines, *compressors]
    # A signal that ends the process would leave namespaces and ranks behind; nohup has some of them ignored.
    ends = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in ends}
    try:
        with Progress((len(methods) + 2) * args.rounds + 2) as progress:
            results = measure(setting, methods, progress.next)
    except KeyboardInterrupt:
        print("grace bench: interrupted; everything that was made is removed", file=sys.stderr)
        return INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _write(args, results)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _check(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"{option}: '{name}' is not known.{nearest(name, known)}")


def _split(given: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for text in given for name in text.split(",") if name))


def _write(args: argparse.Namespace, results: Sequence[Result]) -> None:
    from grace.bench.step.table import lines

    print("\n".join(lines(results)), flush=True)
    compute, reference = results[0], results[1]
    if args.json:
        found = [result.to_dict(compute, reference) for result in results]
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from grace.bench.step.plot import draw

        draw(results, args.plot)
