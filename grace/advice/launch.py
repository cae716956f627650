"""The command `grace advise`: measures a script of the user under its launcher, and says whether compression pays."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grace.advice.candidates import NONE
from grace.advice.hook import ADVICE, FIRST, FOLDER, LINE, MEASURED, REFUSED, SEEN
from grace.advice.hosts import elsewhere
from grace.bench.command import INTERRUPTED, check_writable
from grace.bench.step.command import interrupt_on_signals
from grace.core.config.config import ENVIRONMENT_VARIABLE
from grace.core.errors import ConfigError, GraceError

# Seconds that a launcher has to end its ranks.
_PATIENCE_S = 40.0
# Seconds between two looks at what the ranks have left, and those that a launcher has after a rank cannot go on.
_LOOK_S, _REFUSED_S = 0.2, 3.0
# The first line of a file that may be replaced.
_MARK = "# Written by grace advise."
_CUSTOMIZE = '"""Written by grace advise."""\n\nfrom grace.advice.hook import install\n\ninstall(__file__)\n'


def add_advise(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "advise",
        help="run your script for some steps, and say whether compression pays and which method",
        description="Run a training script under its launcher for about 25 steps, unchanged, and measure its backward "
        "pass, its network, and the methods on its gradients. Then all ranks end, and the advice follows. Example: "
        "grace advise -- torchrun --nproc-per-node 2 train.py",
    )
    add = parser.add_argument
    written = "file for the configuration of the best method (default: grace.toml)"
    add("--output", type=Path, default=Path("grace.toml"), metavar="FILE", help=written)
    add("--json", type=Path, metavar="FILE", help="write the advice with all its figures as well")
    add("--timeout", type=float, default=600, metavar="SECONDS", help="limit for the whole run (default: 600)")
    add("program", nargs="+", metavar="PROGRAM", help="launcher, script and arguments, after '--'")
    parser.set_defaults(run=run_advise)


def run_advise(args: argparse.Namespace) -> int:
    """Run the script, print the advice and write the configuration.

    Return 0, or the status of a script that fails. Raises ConfigError for wrong arguments, and GraceError if the script
    ends without an exchange that could be measured.
    """
    if shutil.which(args.program[0]) is None:
        raise ConfigError(f"the program '{args.program[0]}' was not found; name one that is on the PATH, or its path.")
    if hosts := elsewhere(args.program):
        launcher = os.path.basename(args.program[0])
        raise ConfigError(
            f"{launcher} would start ranks on {', '.join(hosts)}, where grace advise cannot measure them: what it adds "
            f"to a script lies on this machine. Let {launcher} start grace advise on every rank, as in '{launcher} ... "
            "grace advise -- python train.py'; or start ranks on this machine only, by the option -H localhost:N."
        )
    for path in filter(None, (args.output, args.json)):
        check_writable(path)
    if args.output.exists() and not args.output.read_bytes().startswith(_MARK.encode()):
        raise ConfigError(f"--output: '{args.output}' exists, and grace advise has not written it; name another file.")
    with tempfile.TemporaryDirectory(prefix="grace-advise-") as folder:
        Path(folder, "sitecustomize.py").write_text(_CUSTOMIZE, encoding="utf-8")
        try:
            with interrupt_on_signals():
                status = _run(args.program, folder, args.timeout)
        except KeyboardInterrupt:
            print("grace advise: interrupted", file=sys.stderr)
            return INTERRUPTED
        left = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir() if path.is_file()}
    if REFUSED in left:
        raise GraceError(left[REFUSED])
    if ADVICE not in left and (FIRST in left or MEASURED not in left or status):
        return _without(status, SEEN in left, args.timeout)
    if status:
        return _failed(status, "after")
    if ADVICE not in left:
        print("Measured. The command that has started rank 0 prints the advice.")
        return 0
    found = json.loads(left[ADVICE])
    print(found.pop("text"))
    print(f"\n{_what_to_do(found, left.get(LINE), args)}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _run(program: Sequence[str], folder: str, timeout: float) -> int | None:
    """Run the program with the hook in all its processes. Return its status, or None after the time limit."""
    paths = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, FOLDER: folder}
    process = subprocess.Popen(program, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + timeout
    try:
        while time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_S)
            if os.path.exists(os.path.join(folder, REFUSED)):
                # The other ranks may wait for the one that has left it.
                until = min(until, time.monotonic() + _REFUSED_S)
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)


def _failed(status: int, when: str) -> int:
    """Say that the script has failed, and return its status as a shell does."""
    number = status if status > 0 else 128 - status
    print(f"grace advise: the script ended with status {number} {when} it was measured", file=sys.stderr)
    return number


def _without(status: int | None, seen: bool, timeout: float) -> int:
    """Say why there is no advice, and return the status of a script that failed; raise GraceError for others."""
    if status:
        return _failed(status, "before")
    ended = f"took more than {timeout:.4g} s" if status is None else "ended"
    if seen:
        raise GraceError(
            f"the script {ended} before enough steps were measured; let it train for at least 30 steps, with "
            "Keras by fit(), or raise --timeout."
        )
    raise GraceError(
        f"the script {ended}, and no exchange of gradients was seen; expected a script that trains a model in "
        "DistributedDataParallel or FSDP2, uses Horovod's optimizer for PyTorch or Keras, or uses grace, on at least "
        "2 ranks. The Python of the script must be able to import grace."
    )


def _what_to_do(found: dict[str, Any], line: str | None, args: argparse.Namespace) -> str:
    """Write the configuration, and return how it is used: by a line of the script, if that does not call grace."""
    none = found["best"] == NONE
    if none and not args.output.exists():
        return "Train without compression. No configuration was written."
    args.output.write_text(f"{_MARK}\n{found['toml']}", encoding="utf-8")
    if none:
        # A script may read the file.
        return f"Train without compression. {args.output}, of an earlier advice, now says so."
    command = shlex.join(args.program)
    if line is not None:
        return f"{args.output} has this method. {line.format(file=json.dumps(str(args.output)))}"
    return (
        f"{args.output} has this method. If the script names no compressor:\n\n"
        f"    {ENVIRONMENT_VARIABLE}={args.output} {command}"
    )
