"""The command `grace`: list the methods, check the machine, run benchmarks.

This module imports no framework. Versions come from the metadata of the installed packages. Every other check runs in a
child process, which may fail without harm.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from grace import __version__, listing
from grace.bench.command import add_codec
from grace.bench.step.command import add_step
from grace.core.values.errors import ConfigError, GraceError
from grace.machine import FRAMEWORKS, SAFE_PATH, installed, python


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="grace", description="Gradient compression for distributed training.")
    parser.add_argument("--version", action="version", version=f"grace {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    methods = commands.add_parser("compressors", help="list the methods with their flags, sizes and options")
    methods.set_defaults(run=lambda args: _print(listing.as_text()))

    doctor = commands.add_parser("doctor", help="check the versions, Horovod's build, MPI, and an allreduce of 2 ranks")
    doctor.add_argument("--no-launch", action="store_true", help="skip the allreduce of 2 ranks")
    doctor.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="limit per check (default: 120)")
    doctor.set_defaults(run=lambda args: Doctor(args.timeout).examine(launch=not args.no_launch))

    bench = commands.add_parser("bench", help="measure what compression costs and saves on this machine")
    benchmarks = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    add_codec(benchmarks)
    add_step(benchmarks)

    args = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except GraceError as error:
        print(f"grace: error: {error}", file=sys.stderr)
        return 2


def _print(text: str) -> int:
    print(text)
    return 0


# --- grace doctor ---------------------------------------------------------------------------------------------------

ALLREDUCE = """
import horovod.{0} as hvd, numpy, {0} as framework
hvd.init()
mine = numpy.full(1000, hvd.rank() + 1.0, numpy.float32)
convert = framework.tensor if hasattr(framework, "tensor") else framework.constant
# Horovod counts collectives without a name, and ranks that serve several tests may have made different numbers of them.
total = hvd.allreduce(convert(mine), op=hvd.Sum, name="grace_doctor").numpy()
assert hvd.size() == 2, "expected 2 ranks, found %d" % hvd.size()
assert (total == 3).all(), "expected the sum 1 + 2 = 3, received %r" % total[0]
"""
GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(total)
assert dist.get_world_size() == 2, "expected 2 ranks, found %d" % dist.get_world_size()
assert (total == 3).all(), "expected the sum 1 + 2 = 3, received %r" % total[0]
dist.destroy_process_group()
"""
BUILD = "import horovod.{0} as hvd; print('MPI' * hvd.mpi_built(), 'Gloo' * hvd.gloo_built())"
KERNELS = "from grace.backends.native_tensorflow import described; print(described())"
PLUGINS = "from grace.core.values.plugins import states\nfor found in states(): print(*found, sep='\\t')"
OPEN_MPI_FLAGS = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


class Doctor:
    """Checks of this machine, printed one line each.

    Every child process is killed after `timeout` seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._problems: list[str] = []
        self._tensorflow_kernels = ""
        # A launcher in the same folder as this Python works even if the environment is not activated.
        own = str(Path(sys.executable).parent)
        self._path = os.pathsep.join([os.environ.get("PATH", os.defpath), own])
        # Horovod's launcher imports TensorFlow, which logs a lot.
        self._environment = {**os.environ, **SAFE_PATH, "PATH": self._path, "TF_CPP_MIN_LOG_LEVEL": "3"}

    def examine(self, *, launch: bool) -> int:
        """Run all checks and print the problems. Return 0 if training with grace works on this machine, else 1."""
        self._versions()
        mpi = self._mpi_version()
        built = self._horovod()
        self._kernels()
        self._plugins()
        launchers = self._launchers()
        if not launch:
            self._say("2-rank allreduce", "not checked (--no-launch)")
        else:
            self._launch(launchers, built, mpi)
        if self._problems:
            print(f"\n{len(self._problems)} problem(s):", *self._problems, sep="\n  - ")
            return 1
        print("\nno problem found")
        return 0

    def _say(self, topic: str, finding: str, problem: str = "") -> None:
        print(f"{topic:<20}{finding}", flush=True)
        if problem:
            self._problems.append(problem)

    def _versions(self) -> None:
        self._say("python", f"{sys.version.split()[0]} ({sys.executable})")
        self._say("grace", __version__)
        horovod = "horovod is missing: run scripts/setup.sh, or build Horovod for your framework with MPI or Gloo"
        needed = {
            "numpy": "numpy is missing: install it",
            "torch": "",
            "tensorflow": "",
            "keras": "",
            # PyTorch can do without it.
            "horovod": "" if installed("torch") else horovod,
            "mpi4py": "",
        }
        for package, problem in needed.items():
            version = installed(package)
            self._say(package, version or "not installed", "" if version else problem)
        if not any(map(installed, FRAMEWORKS)):
            self._problems.append("torch and tensorflow are missing: install PyTorch or TensorFlow (or both)")

    def _mpi_version(self) -> str:
        mpirun = shutil.which("mpirun", path=self._path)
        lines = self._run([mpirun, "--version"])[1].strip().splitlines() if mpirun else []
        version = lines[0] if lines else ""
        self._say("MPI", version or "not found (without it, only horovodrun --gloo can start ranks)")
        return version

    def _horovod(self) -> dict[str, list[str]]:
        """Return the controllers ("MPI", "Gloo") in Horovod's build, for each installed framework."""
        built: dict[str, list[str]] = {}
        if not installed("horovod"):
            return built
        for framework in filter(installed, FRAMEWORKS):
            topic = f"horovod.{framework}"
            # TensorFlow takes seconds to import, so one process answers both questions about it, if it can.
            both = framework == "tensorflow"
            status, output = self._run(python(BUILD.format(framework) + f"\n{KERNELS}" * both))
            if both and status == 0:
                output, _, self._tensorflow_kernels = output.strip().rpartition("\n")
            elif both:
                status, output = self._run(python(BUILD.format(framework)))
            if status == 0:
                built[framework] = output.strip().splitlines()[-1].split()
                self._say(topic, f"built with {' and '.join(built[framework]) or 'neither MPI nor Gloo'}")
            else:
                self._say(topic, "does not load", f"{topic} cannot be imported: rebuild Horovod (scripts/setup.sh)")
                print(_indented(output))
        return built

    def _kernels(self) -> None:
        # A local import: this module imports NumPy, and `grace bench` sets the number of threads before that.
        from grace.core.ops.native import described

        try:
            self._say("kernels", described())
        except ConfigError as error:
            self._say("kernels", "not usable", str(error))
            return
        if installed("tensorflow"):
            found = self._tensorflow_kernels
            if not found:
                # Only TensorFlow itself can load its kernels; so a child process checks them.
                status, output = self._run(python(KERNELS))
                found = output.strip().rpartition("\n")[2] if status == 0 else ""
            self._say("kernels.tensorflow", found or "unknown: the check failed")

    def _plugins(self) -> None:
        # An import may do anything, so a child process does it.
        status, output = self._run(python(PLUGINS))
        found = [line.split("\t") for line in output.splitlines() if line.count("\t") == 2]
        for name, distribution, fault in found:
            self._say("plugin", f"{name} of {distribution}: {'cannot be loaded' if fault else 'works'}", fault)
        if status != 0:
            self._say("plugin", "unknown: the check failed", "the entry points of other packages cannot be checked")
            print(_indented(output))
        elif not found:
            self._say("plugin", "none")

    def _launchers(self) -> dict[str, str]:
        """Return the names and paths of the launchers that are installed."""
        found: dict[str, str] = {}
        for name in ("horovodrun", "mpirun", *(["torchrun"] if installed("torch") else [])):
            path = shutil.which(name, path=self._path)
            if path is None:
                self._say(name, "not found")
                continue
            found[name] = path
            note = "" if shutil.which(name) else " (not on PATH: activate the environment first)"
            self._say(name, f"{path}{note}")
        return found

    def _launch(self, launchers: dict[str, str], built: dict[str, list[str]], mpi: str) -> None:
        flags = OPEN_MPI_FLAGS if "Open MPI" in mpi or "OpenRTE" in mpi else []
        for framework, controllers in built.items():
            program = python(ALLREDUCE.format(framework))
            commands: dict[str, list[str]] = {}
            if "horovodrun" in launchers and "Gloo" in controllers:
                commands["horovodrun --gloo"] = [launchers["horovodrun"], "-np", "2", "--gloo", *program]
            if "mpirun" in launchers and "MPI" in controllers:
                commands["mpirun"] = [launchers["mpirun"], *flags, "-np", "2", *program]
            for name, command in commands.items():
                self._try(f"{framework}, {name}", command)
            if not commands:
                self._say(
                    f"2-rank allreduce, {framework}: ",
                    "not possible",
                    f"no installed launcher fits Horovod's build for {framework} "
                    f"({' and '.join(controllers) or 'neither MPI nor Gloo'}): horovodrun needs Gloo, mpirun needs MPI",
                )

        if "torchrun" in launchers:
            command = [launchers["torchrun"], "--standalone", "--nproc-per-node", "2", "--no-python", *python(GLOO)]
            self._try("torch, torchrun", command)

    def _try(self, what: str, command: list[str]) -> None:
        status, output = self._run(command)
        topic = f"2-rank allreduce, {what}: "
        if status == 0:
            print(f"{topic}works", flush=True)
            return
        end = f"no answer in {self._timeout:g} s" if status is None else f"exit status {status}"
        print(f"{topic}FAILED, {end}\n{_indented(output)}")
        self._problems.append(f"the 2-rank allreduce failed ({what}): see its output above")

    def _run(self, command: list[str]) -> tuple[int | None, str]:
        """Run a command and return its exit status and its output.

        The status is None if the timeout ended it; its child processes are killed with it.
        """
        process = subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=self._timeout)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        return process.returncode, output


def _indented(output: str, most: int = 30) -> str:
    """Return the last lines of an output, indented."""
    return "\n".join(f"    | {line}" for line in output.strip().splitlines()[-most:])


if __name__ == "__main__":
    sys.exit(main())
