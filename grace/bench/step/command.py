"""The command `grace bench step`: its arguments, their checks, and its outputs."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from grace.bench.command import INTERRUPTED, add_variants, check_plot, check_writable, set_completer
from grace.bench.progress import Progress
from grace.bench.step import original
from grace.bench.step.methods import BASELINES, LAUNCHERS, Method, with_references
from grace.bench.step.models import NAMES
from grace.bench.step.network import LINKS, MOST_RANKS, check_link
from grace.bench.step.own import check_model
from grace.bench.variants import import_own, parse_variants, read_value
from grace.core.errors import ConfigError, nearest
from grace.machine import FRAMEWORKS, installed

if TYPE_CHECKING:
    from grace.bench.step.run import Setting

COMPRESSORS = ("none", "fp16", "topk", "randomk", "qsgd", "efsignsgd", "powersgd")
ROUNDS = 3
# For each option, the options that have no effect with it.
IDLE = {
    "memory": ("sweep", "account", "rounds", "plot"),
    "sweep": ("account", "baselines", "plot"),
    "account": ("plot",),
}

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Run:
    """A checked run, ready to start. `steps` is the number of its progress reports."""

    steps: int
    # Takes the progress callback; returns the lines to print and the objects for --json.
    act: Callable[[Callable[[str], None]], tuple[list[str], list[dict[str, Any]]]]


def add_step(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "step",
        help="time whole training steps over a network with limited bandwidth",
        description="Time training steps of several ranks on this machine. Every rank has its own network link with "
        "limited bandwidth. The methods take turns with a baseline and with a step without exchange. The ranks do not "
        "return freed memory to the system (glibc's MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_), so that no step "
        "waits for new pages.",
    )
    add = parser.add_argument
    add_network(parser)
    own = "FILE.py:FUNCTION of your own, which returns a model and a function that returns the loss of a batch"
    model = add("--model", default="mlp", help=f"{', '.join(NAMES)}, or {own} (default: mlp)")
    add_variants(parser, " ".join(COMPRESSORS))
    options = "configuration of all compressors, such as bucket_bytes=8388608"
    add("--options", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=options)
    names = ", ".join(BASELINES)
    baseline = add("--baselines", nargs="+", metavar="NAME", help=f"{names} (default: the plain one of the launcher)")
    launchers = (
        "how grace is used: torch (register with DDP), torch-module (register with a plain model), torch-optimizer "
        "(DistributedOptimizer over torch.distributed), torch-one-bit-adam (OneBitAdam after its warm-up), "
        "torch-fsdp (register with FSDP2), torch-fsdp-zero2 (the same with reshard_after_forward=False), horovod "
        "(DistributedOptimizer over Horovod); the first one decides which baseline is compared with "
        "(default: torch; with TensorFlow horovod)"
    )
    launcher = add("--launcher", nargs="+", metavar="NAME", help=launchers)
    framework = add("--framework", help="torch or tensorflow (default: the first that is installed)")
    for action, words in (
        (model, NAMES),
        (baseline, BASELINES),
        (launcher, LAUNCHERS),
        (framework, FRAMEWORKS),
    ):
        set_completer(action, lambda _, words=words: words)
    add("--rounds", type=int, metavar="N", help=f"turns per method (default: {ROUNDS})")
    add("--steps", type=int, default=5, metavar="N", help="timed steps per turn (default: 5)")
    sweep = "tune bucket_bytes, split_bytes, granularity and, with Horovod, its cycle time, one after the other"
    add("--sweep", action="store_true", help=sweep)
    add("--bucket-bytes", nargs="+", metavar="N", help="values for --sweep, in bytes (default: 1, 2, 4, 8, 16, 32 MiB)")
    add("--split-bytes", nargs="+", metavar="N", help="values for --sweep, in bytes (default: 0, 8, 16, 32, 64 MiB)")
    add("--cycle-times", nargs="+", metavar="MS", help="values for --sweep, in ms (default: 0.5, 1, 2, 5)")
    memory = "measure peak memory instead of time: every method in new processes that return freed memory to the system"
    add("--memory", action="store_true", help=memory)
    parts = (
        "split the time beyond a step without exchange into passes over memory, arithmetic, Python, waiting and so on"
    )
    add("--account", action="store_true", help=parts)
    add("--json", type=Path, metavar="FILE", help="write the results, one object per method (--sweep: per value)")
    add("--plot", type=Path, metavar="FILE", help="plot the step times as bars")
    parser.set_defaults(run=run_step)


def add_network(parser: argparse.ArgumentParser, default: str | None = "1gbit") -> None:
    """Add the options that describe ranks and links; `read_network` reads them."""
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="processes, each with a link of its own (default: 2)")
    nodes = (
        "nodes with R ranks each in place of --ranks, such as 2x4; a node's ranks share its link, and have no limit "
    )
    add("--nodes", metavar="NxR", help=f"{nodes}among each other")
    shown = "" if default is None else f" (default: {default})"
    link = add("--link", default=default, help=f"{', '.join(LINKS)}, or another rate such as 300mbit{shown}")
    set_completer(link, lambda _: LINKS)
    add("--latency", metavar="TIME", help="additional delay per packet, such as 100us; needs netem in the kernel")


def read_network(args: argparse.Namespace, least: int = 2) -> tuple[int, int]:
    """Return the number of ranks, in all and on each node. Raises ConfigError if this machine cannot make them."""
    ranks, local_size = _ranks(args)
    if ranks < least:
        raise ConfigError(f"--ranks: expected at least {least}, received {ranks}.")
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"--ranks: expected at most {MOST_RANKS}, the number of addresses in the test network, received "
            f"{ranks}. Every rank is a process of several hundred megabytes."
        )
    check_link(args.link, args.latency, local_size)
    return ranks, local_size


def run_step(args: argparse.Namespace) -> int:
    """Measure, print and write the results. Return the exit status.

    Raises GraceError for wrong arguments, before anything is measured, and if a rank fails.
    """
    run = _make_run(args)
    try:
        with interrupt_on_signals(), Progress(run.steps) as progress:
            lines, found = run.act(progress.next)
    except KeyboardInterrupt:
        print("grace bench: interrupted; all ranks and namespaces are removed", file=sys.stderr)
        return INTERRUPTED
    print("\n".join(lines), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt for the signals whose default action would leave ranks behind."""
    # nohup ignores SIGHUP; so it stays ignored.
    ends = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# --- checks -----------------------------------------------------------------------------------------------------------


def _make_run(args: argparse.Namespace) -> Run:
    """Return the run that the arguments describe. Raises ConfigError if they are wrong."""
    _check_together(args)
    rounds = ROUNDS if args.rounds is None else args.rounds
    for option, value in (("rounds", rounds), ("steps", args.steps)):
        if value < 1:
            raise ConfigError(f"--{option}: expected at least 1, received {value}.")
    ranks, local_size = read_network(args)
    check_model(args.model)
    framework = _framework(args.framework)
    launchers = _split_names(args.launcher or ["torch" if framework == "torch" else "horovod"])
    for name in launchers:
        _check("--launcher", name, tuple(LAUNCHERS))
        _check_library("--launcher", name, LAUNCHERS[name].library, framework)
    baselines = _split_names(args.baselines or [])
    for name in baselines:
        _check("--baselines", name, tuple(BASELINES))
        _check_original(name, framework)
        _check_library("--baselines", name, BASELINES[name], framework)
    options = parse_options(args.options)
    modules = import_own(args.modules)
    variants = parse_variants(COMPRESSORS if args.compressors is None else args.compressors, **options)
    for path in filter(None, (args.json, args.plot)):
        check_writable(path)
    if args.plot:
        check_plot(args.plot)
    from grace.bench.step.run import Setting

    setting = Setting(
        framework, args.model, ranks, args.link, args.latency, rounds, args.steps, local_size, options, modules
    )
    compressing = [
        Method(variant.name, variant.options, launcher=launcher) for variant in variants for launcher in launchers
    ]
    if args.sweep:
        return _sweep(setting, compressing, args)
    methods = with_references([*map(Method, baselines), *compressing], launchers[0])
    if args.account:
        if setting.framework != "torch":
            raise ConfigError("--account: a graph of TensorFlow does not tell its parts; use --framework torch.")
        return _account(setting, methods)
    return _memory(setting, methods) if args.memory else _time(setting, methods, args.plot)


def _ranks(args: argparse.Namespace) -> tuple[int, int]:
    """Return the number of ranks, in all and on each node."""
    if args.nodes is None:
        return 2 if args.ranks is None else args.ranks, 1
    if args.ranks is not None:
        raise ConfigError("--nodes says how many ranks there are; leave --ranks out.")
    found = re.fullmatch(r"(\d+)x(\d+)", args.nodes)
    if not found or not int(found[1]) or not int(found[2]):
        raise ConfigError(f"--nodes: expected nodes x ranks, such as 2x4, received '{args.nodes}'.")
    return int(found[1]) * int(found[2]), int(found[2])


def _check_together(args: argparse.Namespace) -> None:
    for option, others in IDLE.items():
        for other in others:
            if getattr(args, option) and getattr(args, other) not in (None, False):
                raise ConfigError(f"--{other} has no effect with --{option}; leave one of them out.")
    for option in ("bucket_bytes", "split_bytes", "cycle_times"):
        if getattr(args, option) is not None and not args.sweep:
            raise ConfigError(f"--{option.replace('_', '-')} needs --sweep; add --sweep, or leave it out.")


def _framework(name: str | None) -> str:
    """Return the framework of the ranks. Raises ConfigError if it is unknown or not installed."""
    if name is None:
        name = next(filter(installed, FRAMEWORKS), None)
        if name is None:
            raise ConfigError("grace bench step needs PyTorch or TensorFlow, and neither is installed; install one.")
    _check("--framework", name, FRAMEWORKS)
    if not installed(name):
        raise ConfigError(f"--framework: '{name}' is not installed; install it, or choose another framework.")
    return name


def _check_library(option: str, name: str, library: str, framework: str) -> None:
    """Raise ConfigError if the library of a launcher or baseline does not serve the framework, or is not installed."""
    if library == "torch" and framework != "torch":
        raise ConfigError(f"{option}: '{name}' needs PyTorch; leave it out, or use --framework torch.")
    if not installed(library):
        way_out = "use --framework torch" if framework != "torch" else "name another"
        raise ConfigError(f"{option}: '{name}' needs {library}, which is not installed; install it, or {way_out}.")


def _check_original(name: str, framework: str) -> None:
    if name not in original.PARAMETERS:
        return
    if framework != "torch":
        raise ConfigError(f"--baselines: '{name}' needs PyTorch; leave it out, or use --framework torch.")
    if original.is_missing():
        raise ConfigError(
            f"--baselines: '{name}' needs the original GRACE, and the package 'grace_dl' is not installed. "
            "Install it, or put its sources on PYTHONPATH."
        )


def _check(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"{option}: unknown name '{name}'.{nearest(name, known)}")


def _split_names(given: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for text in given for name in text.split(",") if name))


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Return texts of the form KEY=VALUE as a mapping. A value that is not valid JSON is a string.

    Raises ConfigError for texts of another form, for a repeated key, and for the key `compressor`.
    """
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--options: expected KEY=VALUE, such as bucket_bytes=8388608; received '{text}'.")
        if key == "compressor":
            raise ConfigError("--options: 'compressor' is not allowed here; use --compressors.")
        if key in options:
            raise ConfigError(f"--options: '{key}' is given twice; keep one of them.")
        options[key] = read_value(value)
    return options


def parse_numbers(option: str, given: Sequence[str], kind: type[T]) -> list[T]:
    """Return the numbers that are separated by spaces or commas, without duplicates.

    Raises ConfigError unless all are finite numbers of the kind, 0 or more, and there is at least one.
    """
    try:
        numbers = list(dict.fromkeys(kind(text) for text in _split_names(given)))
    except ValueError:
        numbers = []
    if not numbers or not all(0 <= number < float("inf") for number in numbers):
        name = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option}: expected {name}, 0 or more, received '{' '.join(given)}'.")
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

    return Run(setting.rounds * len(methods) + len({method.library for method in methods}), act)


def _memory(setting: Setting, methods: list[Method]) -> Run:
    from grace.bench.step.memory import lines, measure_memory

    def act(progress: Callable[[str], None]) -> tuple[list[str], list[dict[str, Any]]]:
        weights = measure_memory(setting, methods, progress)
        return lines(weights), [weight.to_dict(weights[0]) for weight in weights]

    return Run(len(methods), act)


def _account(setting: Setting, methods: list[Method]) -> Run:
    from grace.bench.step.account import account, lines

    def act(progress: Callable[[str], None]) -> tuple[list[str], list[dict[str, Any]]]:
        compute, accounts = account(setting, methods, progress)
        return lines(compute, accounts), [each.to_dict() for each in accounts]

    return Run(setting.rounds * len(methods) + len({method.library for method in methods}), act)


def _sweep(setting: Setting, methods: list[Method], args: argparse.Namespace) -> Run:
    from grace.bench.step.sweep import BUCKET_BYTES, CYCLES_MS, SPLIT_BYTES, choices, count_visits, lines, sweep

    def parse_option(option: str, kind: type, default: Sequence[Any]) -> Sequence[Any]:
        values = getattr(args, option)
        return default if values is None else parse_numbers(f"--{option.replace('_', '-')}", values, kind)

    if len({method.launcher for method in methods}) > 1:
        raise ConfigError(f"--sweep tunes one launcher at a time, received {' '.join(args.launcher)}; name one.")
    horovod = methods[0].library == "horovod"
    if args.cycle_times is not None and not horovod:
        raise ConfigError("--cycle-times are Horovod's; add --launcher horovod, or leave them out.")
    tried = choices(
        parse_option("bucket_bytes", int, BUCKET_BYTES),
        parse_option("split_bytes", int, SPLIT_BYTES),
        parse_option("cycle_times", float, CYCLES_MS) if horovod else (),
    )
    for method in methods:
        for key in setting.options_of(method):
            if key in tried:
                where = "--options" if key in setting.options else "--compressors"
                raise ConfigError(f"{where}: --sweep sets '{key}' itself; leave it out.")

    def act(progress: Callable[[str], None]) -> tuple[list[str], list[dict[str, Any]]]:
        trials = sweep(setting, methods, tried, progress)
        return lines(trials), [trial.to_dict() for trial in trials]

    return Run(count_visits(setting, methods, tried), act)
