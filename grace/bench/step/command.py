"""`grace bench step`: its arguments, what is refused before anything runs, and its outputs."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from grace.bench.command import INTERRUPTED, check_plot, check_writable
from grace.bench.progress import Progress
from grace.bench.step import original
from grace.bench.step.methods import BASELINES, REFERENCE, Method, compared
from grace.bench.step.models import NAMES
from grace.bench.step.network import LINKS, check_link
from grace.core.config import make_config
from grace.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from grace.bench.step.run import Setting

COMPRESSORS = ("none", "fp16", "topk", "randomk", "qsgd", "efsignsgd", "powersgd")
ROUNDS = 3
# What says nothing beside an option.
IDLE = {"memory": ("sweep", "rounds", "plot"), "sweep": ("baselines", "plot")}

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Run:
    """What is to be done once everything is checked; `steps` is how often it tells of its progress."""

    steps: int
    # Takes whom to tell; returns lines to print and objects to write.
    act: Callable[[Callable[[str], None]], tuple[list[str], list[dict[str, Any]]]]


def add_step(commands: Any) -> None:
    """Tell argparse of the command."""
    parser = commands.add_parser(
        "step",
        help="time of whole training steps over a shaped network",
        description="Times training steps of several ranks on this machine, each behind a link of its own, "
        "method by method in turns, beside plain Horovod and a step without exchange. The ranks keep the memory that "
        "they free (glibc's MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_), so that no step has to ask for fresh pages.",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, metavar="N", help="processes (default: 2)")
    add("--link", default="1gbit", help=f"{', '.join(LINKS)}; all but none need root (default: 1gbit)")
    add("--latency", metavar="TIME", help="more delay per packet, such as 100us, where the kernel has netem")
    add("--model", default="mlp", help=f"{', '.join(NAMES)} (default: mlp)")
    add("--compressors", nargs="+", metavar="NAME", help=f"by spaces or commas (default: {' '.join(COMPRESSORS)})")
    options = "options of all compressors' configurations, such as bucket_bytes=8388608"
    add("--options", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=options)
    add("--baselines", nargs="+", metavar="NAME", help=f"{', '.join(BASELINES)} (default: {REFERENCE})")
    add("--framework", default="torch", help="torch or tensorflow (default: torch)")
    add("--rounds", type=int, metavar="N", help=f"turns of all methods (default: {ROUNDS})")
    add("--steps", type=int, default=5, metavar="N", help="timed steps per turn (default: 5)")
    sweep = "try the engine's choices one after the other: bytes of buckets and cuts, granularities, cycle times"
    add("--sweep", action="store_true", help=sweep)
    add("--bucket-bytes", nargs="+", metavar="N", help="bytes that --sweep tries (default: 1, 2, 4, 8, 16, 32 MiB)")
    add("--split-bytes", nargs="+", metavar="N", help="bytes that --sweep tries (default: 0, 8, 16, 32, 64 MiB)")
    add("--cycle-times", nargs="+", metavar="MS", help="milliseconds that --sweep tries (default: 0.5, 1, 2, 5)")
    memory = "measure peak memory and no time: every method in fresh processes, which give back what they free"
    add("--memory", action="store_true", help=memory)
    add("--json", type=Path, metavar="FILE", help="write one object per method, with --sweep one per choice")
    add("--plot", type=Path, metavar="FILE", help="draw the steps' times as bars")
    parser.set_defaults(run=run_step)


def run_step(args: argparse.Namespace) -> int:
    """Measure, print and write; the exit status. Raises GraceError before anything is measured."""
    run = _checked(args)
    # A signal that ends the process would leave namespaces and ranks behind; nohup has some of them ignored.
    ends = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in ends}
    try:
        with Progress(run.steps) as progress:
            lines, found = run.act(progress.next)
    except KeyboardInterrupt:
        print("grace bench: interrupted; everything that was made is removed", file=sys.stderr)
        return INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print("\n".join(lines), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# --- what is refused --------------------------------------------------------------------------------------------------


def _checked(args: argparse.Namespace) -> Run:
    """The run that the arguments ask for. Raises ConfigError for arguments that no run can follow."""
    _check_together(args)
    rounds = ROUNDS if args.rounds is None else args.rounds
    for option, value, least in (("ranks", args.ranks, 2), ("rounds", rounds, 1), ("steps", args.steps, 1)):
        if value < least:
            raise ConfigError(f"--{option}: expected at least {least}, received {value}.")
    _check("--model", args.model, NAMES)
    _check("--framework", args.framework, ("torch", "tensorflow"))
    baselines = [REFERENCE] if args.baselines is None else _split(args.baselines)
    for name in baselines:
        _check("--baselines", name, tuple(BASELINES))
        if BASELINES[name] == "ddp" and args.framework != "torch":
            raise ConfigError(f"--baselines: '{name}' is PyTorch's; leave it out with --framework tensorflow.")
        _check_original(name, args.framework)
    compressors = list(COMPRESSORS) if args.compressors is None else _split(args.compressors)
    if not compressors:
        raise ConfigError(f"--compressors: expected names, received {args.compressors!r}.")
    options = parse_options(args.options)
    for name in compressors:
        make_config({**options, "compressor": name})
    check_link(args.link, args.latency)
    for path in filter(None, (args.json, args.plot)):
        check_writable(path)
    if args.plot:
        check_plot(args.plot)
    from grace.bench.step.run import Setting

    setting = Setting(args.framework, args.model, args.ranks, args.link, args.latency, rounds, args.steps, options)
    if args.sweep:
        return _sweep(setting, compressors, args)
    methods = compared([Method(name) for name in (*baselines, *compressors)])
    return _memory(setting, methods) if args.memory else _time(setting, methods, args.plot)


def _check_together(args: argparse.Namespace) -> None:
    for option, others in IDLE.items():
        for other in others:
            if getattr(args, option) and getattr(args, other) not in (None, False):
                raise ConfigError(f"--{other} says nothing beside --{option}; leave one of them out.")
    for option in ("bucket_bytes", "split_bytes", "cycle_times"):
        if getattr(args, option) is not None and not args.sweep:
            raise ConfigError(f"--{option.replace('_', '-')} says what --sweep tries; add --sweep, or leave it out.")


def _check_original(name: str, framework: str) -> None:
    if name not in original.PARAMETERS:
        return
    if framework != "torch":
        raise ConfigError(f"--baselines: '{name}' runs with PyTorch only; leave it out with --framework tensorflow.")
    if original.missing():
        raise ConfigError(
            f"--baselines: '{name}' needs the original GRACE, and the package 'grace_dl' is not installed. "
            "Install it, or put its sources on PYTHONPATH."
        )


def _check(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"{option}: '{name}' is not known.{nearest(name, known)}")


def _split(given: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for text in given for name in text.split(",") if name))


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE texts as a mapping; a value is read as JSON, or else is the text itself. Raises ConfigError."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--options: expected KEY=VALUE, such as bucket_bytes=8388608; received '{text}'.")
        if key == "compressor":
            raise ConfigError("--options: compressors are named by --compressors; leave 'compressor' out.")
        if key in options:
            raise ConfigError(f"--options: '{key}' is given twice; keep one.")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def parse_numbers(option: str, given: Sequence[str], kind: type[T]) -> list[T]:
    """Numbers by spaces or commas, none twice. Raises ConfigError for others than finite ones of the kind from 0 on."""
    try:
        numbers = list(dict.fromkeys(kind(text) for text in _split(given)))
    except ValueError:
        numbers = []
    if not numbers or not all(0 <= number < float("inf") for number in numbers):
        name = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option}: expected {name} from 0 on, received '{' '.join(given)}'.")
    return numbers


# --- the kinds of run -------------------------------------------------------------------------------------------------


def _time(setting: Setting, methods: list[Method], plot: Path | None) -> Run:
    from grace.bench.step.run import measure
    from grace.bench.step.table import lines

    def act(progress: Callable[[str], None]) -> tuple[list[str], list[dict[str, Any]]]:
        results = measure(setting, methods, progress)
        if plot:
            from grace.bench.step.plot import draw

            draw(results, plot)
        compute, reference = results[0], results[1]
        return lines(results), [result.to_dict(compute, reference) for result in results]

    return Run(setting.rounds * len(methods) + len({method.family for method in methods}), act)


def _memory(setting: Setting, methods: list[Method]) -> Run:
    from grace.bench.step.memory import lines, weigh

    def act(progress: Callable[[str], None]) -> tuple[list[str], list[dict[str, Any]]]:
        weights = weigh(setting, methods, progress)
        return lines(weights), [weight.to_dict(weights[0]) for weight in weights]

    return Run(len(methods), act)


def _sweep(setting: Setting, compressors: list[str], args: argparse.Namespace) -> Run:
    from grace.bench.step.sweep import BUCKET_BYTES, CYCLES_MS, SPLIT_BYTES, choices, lines, sweep, visits

    def given(option: str, kind: type, default: Sequence[Any]) -> Sequence[Any]:
        values = getattr(args, option)
        return default if values is None else parse_numbers(f"--{option.replace('_', '-')}", values, kind)

    tried = choices(
        given("bucket_bytes", int, BUCKET_BYTES),
        given("split_bytes", int, SPLIT_BYTES),
        given("cycle_times", float, CYCLES_MS),
    )
    for key in setting.options:
        if key in tried:
            raise ConfigError(f"--options: '{key}' is what --sweep tries; leave it out.")

    def act(progress: Callable[[str], None]) -> tuple[list[str], list[dict[str, Any]]]:
        trials = sweep(setting, compressors, tried, progress)
        return lines(trials), [trial.to_dict() for trial in trials]

    return Run(visits(setting, compressors, tried), act)
