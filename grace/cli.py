"""The command `grace`: list the methods, check the machine, run benchmarks.

This module imports no framework.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from grace import __version__, listing
from grace.advice.launch import add_advise, run_advise
from grace.advice.what_if import add_what_if
from grace.bench.command import INTERRUPTED, add_codec, add_import, set_completer
from grace.bench.link import add_link
from grace.bench.run import add_run, run_program
from grace.bench.step.command import add_step
from grace.bench.variants import import_own
from grace.core.config.config import ENVIRONMENT_VARIABLE
from grace.core.errors import ConfigError, GraceError, meant
from grace.doctor import LAUNCHERS, Doctor
from grace.machine import FRAMEWORKS
from grace.report.command import add_report

SHELLS = ("bash", "zsh", "fish")
# The status of a process that SIGPIPE ends.
BROKEN_PIPE = 128 + signal.SIGPIPE


class Parser(argparse.ArgumentParser):
    """A parser that refuses unknown arguments itself, so that the usage shown is that of the subcommand."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. Exit with status 2 and the usage if some are unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option[2:] for action in self._actions for option in action.option_strings]
            similar = meant(unknown[0].lstrip("-"), filter(None, options)) if unknown[0].startswith("-") else []
            hint = f" (did you mean --{similar[0]}?)" if similar else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("grace: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    if run not in (run_program, run_advise):
        # All other commands name their methods themselves.
        os.environ.pop(ENVIRONMENT_VARIABLE, None)
    try:
        return run(args)
    except GraceError as error:
        print(f"grace: error: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if (error.name or "grace").split(".")[0] == "grace":
            raise
        print(f"grace: error: the package '{error.name}' is not installed; install it.", file=sys.stderr)
    return 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command with all its subcommands."""
    parser = Parser(prog="grace", description="Gradient compression for distributed training.")
    parser.add_argument("--version", action="version", version=f"grace {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    methods = commands.add_parser("compressors", help="list the methods and where to start, or describe some of them")
    add = methods.add_argument
    names = add("names", nargs="*", metavar="NAME", help="describe these: options, flags, bytes")
    add("--all", action="store_true", help="list all methods, also those of the literature, with their sizes")
    pages = [family.page for family in listing.FAMILIES]
    family = add("--family", metavar="NAME", help=f"list one family: {', '.join(pages)}")
    set_completer(names, lambda _: listing.names())
    set_completer(family, lambda _: pages)
    add_import(methods)
    methods.set_defaults(run=_compressors)

    doctor = commands.add_parser("doctor", help="check what is installed, and an allreduce of 2 ranks")
    add = doctor.add_argument
    add("--framework", choices=FRAMEWORKS, help="check only this one, with all launchers")
    launch = doctor.add_mutually_exclusive_group()
    launch.add_argument("--launcher", choices=LAUNCHERS, help="check only this one, with all frameworks")
    launch.add_argument("--no-launch", action="store_true", help="skip the allreduce of 2 ranks")
    add("--timeout", type=float, default=120, metavar="SECONDS", help="limit per check (default: 120)")
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser("bench", help="measure what compression costs and saves on this machine")
    benchmarks = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    add_codec(benchmarks)
    add_step(benchmarks)
    add_link(benchmarks)
    add_run(benchmarks)
    add_report(commands)
    add_what_if(commands)
    add_advise(commands)

    how = 'Print the script with which a shell completes arguments. In bash: eval "$(grace completion bash)"'
    completion = commands.add_parser("completion", help="print a script for the shell's completion", description=how)
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion)
    return parser


def _compressors(args: argparse.Namespace) -> int:
    import_own(args.modules)
    if args.names and args.family:
        raise ConfigError("--family lists a family, and names describe methods; leave one of them out.")
    if args.names:
        print("\n\n".join(map(listing.describe, dict.fromkeys(args.names))))
    elif args.family:
        print(listing.one_family(args.family))
    else:
        print(listing.everything() if args.all else listing.overview())
    return 0


def _doctor(args: argparse.Namespace) -> int:
    return Doctor(args.timeout, args.framework, args.launcher).examine(launch=not args.no_launch)


def _completion(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("argcomplete") is None:
        raise ConfigError("grace completion needs argcomplete, which is not installed: pip install argcomplete")
    import argcomplete

    print(argcomplete.shellcode(["grace"], shell=args.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
