"""The command `grace bench codec`: its arguments, their checks, and its outputs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grace.bench.progress import Progress
from grace.bench.variants import Variant, candidates, import_own, parse_variants
from grace.core.config.config import TOP_LEVEL_KEYS
from grace.core.config.registry import compressors
from grace.core.errors import ConfigError, nearest
from grace.machine import FRAMEWORKS

if TYPE_CHECKING:
    from grace.bench.measure import Result, Setting
    from grace.core.plan.unit import Unit

NUMEL = 25_000_000
# 1 KB to 100 MB of float32, the sizes of GRACE's Figure 8.
FIGURE = tuple(250 * 10**i for i in range(6))
SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9}
INTERRUPTED = 130
# Keys of a configuration that say nothing about the codec of one tensor.
IDLE_KEYS = TOP_LEVEL_KEYS - {"index_coding"}


def add_codec(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "codec",
        help="time compression, decompression and error feedback, relative to a copy of the gradient",
        description="Time the local work of one rank in a step, method by method, and compare it with a plain copy.",
    )
    add = parser.add_argument
    add_variants(parser, "all methods that need no options")
    add("--numel", nargs="+", metavar="N", help="elements, such as 1000 or 25M (default: 25M; with --plot: 250 to 25M)")
    framework = add("--framework", default="numpy", help="numpy, torch or tensorflow (default: numpy)")
    device = add("--device", default="cpu", help="cpu, or cuda with torch (default: cpu)")
    set_completer(framework, lambda _: ("numpy", *FRAMEWORKS))
    set_completer(device, lambda _: ("cpu", "cuda"))
    add("--ranks", type=int, default=2, metavar="N", help="ranks whose payloads are merged (default: 2)")
    add("--threads", type=int, default=1, metavar="N", help="threads of the framework (default: 1)")
    add("--repetitions", type=int, default=30, metavar="N", help="timed steps, fewer for slow methods (default: 30)")
    add("--json", type=Path, metavar="FILE", help="write the results, one object per method and size")
    add("--plot", type=Path, metavar="FILE", help="plot the times as violins, one panel per size")
    add("--no-native", action="store_true", help="time the reference implementation instead of the kernels")
    parser.set_defaults(run=run_codec)


def run_codec(args: argparse.Namespace) -> int:
    """Measure, print and write the results. Return the exit status.

    Raises GraceError for wrong arguments, before anything is measured.
    """
    for option in ("ranks", "threads", "repetitions"):
        if getattr(args, option) < 1:
            raise ConfigError(f"--{option}: expected at least 1, received {getattr(args, option)}.")
    sizes = _sizes(args.numel) if args.numel else FIGURE if args.plot else (NUMEL,)
    for path in filter(None, (args.json, args.plot)):
        check_writable(path)
    # Local imports: NumPy reads the number of threads when it is imported.
    from grace.bench.frameworks import set_threads, set_up

    set_threads(args.threads)
    import_own(args.modules)
    variants = _variants(args.compressors)
    from grace.bench.codec import make_unit, on_ranks

    framework = set_up(args.framework, args.device, args.threads, not args.no_native)
    from grace.bench.measure import Setting

    if args.plot:
        check_plot(args.plot)
    setting = Setting(framework, args.ranks, args.threads, args.repetitions)
    units = [(v, make_unit(v.name, numel, args.device, **v.options)) for numel in sizes for v in variants]
    for _, unit in units:
        on_ranks(unit, args.ranks)
    results: list[Result] = []
    try:
        _measure(units, setting, results)
        status = 0
    except KeyboardInterrupt:
        print(f"grace bench: interrupted after {len(results)} of {len(units)} results", file=sys.stderr)
        status = INTERRUPTED
    finally:
        # After an error or Ctrl-C, the results so far are written.
        _write(args, results)
    return status


def add_variants(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the arguments that name methods: --compressors and --import."""
    named = f"separated by spaces or commas, with options after colons, such as qsgd:quantum_num=7 (default: {default})"
    set_completer(parser.add_argument("--compressors", nargs="+", metavar="NAME", help=named), candidates)
    add_import(parser)


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the argument --import."""
    own = "module, or .py file, that registers components of your own"
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=own)


def set_completer(action: argparse.Action, candidates: Callable[[str], Iterable[str]]) -> None:
    """Let a shell complete an argument: `candidates` returns words for the beginning of one (argcomplete)."""
    action.completer = lambda prefix, **_: candidates(prefix)  # type: ignore[attr-defined]


def _variants(given: Sequence[str] | None) -> list[Variant]:
    """Return the given methods, or all that need no options."""
    if given is None:
        return [Variant(name) for name, _ in compressors.ready()]
    variants = parse_variants(given)
    for variant in variants:
        for key in variant.options:
            if key in IDLE_KEYS:
                raise ConfigError(
                    f"--compressors: '{key}' has no effect on the codec of one tensor; remove it from "
                    f"'{variant.label}', or use it with `grace bench step`."
                )
    return variants


def _sizes(given: Sequence[str]) -> list[int]:
    sizes = list(dict.fromkeys(_size(unit) for text in given for unit in text.split(",") if unit))
    if not sizes:
        raise ConfigError(f"--numel: expected numbers of elements, received {given!r}.")
    return sizes


def _size(text: str) -> int:
    """Return the number of elements that a text such as 1000, 25M or 2.5K gives."""
    factor = SUFFIXES.get(text[-1:].upper(), 1)
    try:
        numel = Decimal(text[:-1] if factor > 1 else text) * factor
    except InvalidOperation:
        numel = Decimal(0)
    if not (numel.is_finite() and numel >= 1 and numel == int(numel)):
        raise ConfigError(
            f"--numel: expected a whole number of elements, at least 1, such as 1000, 25M or 2.5K; received '{text}'."
        )
    return int(numel)


def check_writable(path: Path) -> None:
    """Raise ConfigError if the file cannot be written. An existing file stays as it is."""
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}; name another file.") from None
    if not existed:
        # Another process may have checked the same file.
        path.unlink(missing_ok=True)


def check_plot(path: Path) -> None:
    """Raise ConfigError if matplotlib is missing or cannot write files with this suffix."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; install it, or leave --plot out.")
    from grace.bench.plot import formats

    if path.suffix[1:] not in formats():
        raise ConfigError(f"--plot: '{path}' has no known image format.{nearest(path.suffix[1:], formats())}")


def _measure(units: Sequence[tuple[Variant, Unit]], setting: Setting, results: list[Result]) -> None:
    """Time the units in order. Append each result to `results` and print it."""
    from grace.bench.measure import WARM_UP, Bench
    from grace.bench.table import Table

    table = Table([variant.label for variant, _ in units])
    print(table.title(setting), table.head(), sep="\n", flush=True)
    with Progress(len(units) * (WARM_UP + setting.repetitions)) as progress:
        bench, shape = None, ()
        for variant, unit in units:
            if bench is None or unit.spec.shape != shape:
                # Free the old gradients before new ones are made.
                bench, shape = None, unit.spec.shape
                bench = Bench(shape, setting)
            progress.say(f"{variant.label}, {unit.spec.numel:,}")
            results.append(bench.measure(variant, unit, progress.update))
            progress.write(table.row(results[-1]))


def _write(args: argparse.Namespace, results: Sequence[Result]) -> None:
    if args.json:
        args.json.write_text(json.dumps([result.to_dict() for result in results], indent=1) + "\n", encoding="utf-8")
    if args.plot and results:
        from grace.bench.plot import draw

        draw(results, args.plot)
