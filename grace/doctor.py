"""The command `grace doctor`: what is installed, and whether two ranks can add a tensor.

This module imports no framework. Versions come from the metadata of the installed packages. Every other check runs in a
child process, which may fail without harm. The children run side by side, because imports of frameworks take seconds.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grace import __version__
from grace.core.errors import ConfigError
from grace.machine import FRAMEWORKS, SAFE_PATH, installed, python

# Where a child says what it has found: a JSON object after this mark. horovodrun writes the rank before each line.
MARK = "grace doctor: "
TELL = f"import json\ndef tell(**facts): print({MARK!r} + json.dumps(facts), flush=True)"
# A fault of the kernels is none of Horovod.
KERNELS = """
try:
    from grace.backends.native_tensorflow import describe
    tell(kernels=describe())
except Exception:
    import traceback
    traceback.print_exc()
"""
BUILD = """
import horovod.{0} as hvd
tell(built=[name for name, there in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built())) if there])
"""
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
PLUGINS = "from grace.core.config.plugins import states\nfor found in states(): print(*found, sep='\\t')"
OPEN_MPI_FLAGS = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
# What Horovod's launchers need of its build.
CONTROLLERS = {"horovodrun": "Gloo", "mpirun": "MPI"}
LAUNCHERS = ("torchrun", *CONTROLLERS)


class Pair(NamedTuple):
    """A framework and a launcher that starts its ranks."""

    framework: str
    launcher: str


# The order in which pairs are tried until every framework and every launcher has had one: cheap ones first. TensorFlow
# takes the longest to import, and horovodrun imports it as well.
PAIRS = (
    Pair("torch", "torchrun"),
    Pair("torch", "horovodrun"),
    Pair("tensorflow", "mpirun"),
    Pair("torch", "mpirun"),
    Pair("tensorflow", "horovodrun"),
)


class Ended(NamedTuple):
    """The exit status of a child (None: the timeout ended it), its output, and what it said of itself."""

    status: int | None
    output: str
    facts: dict[str, Any]


class Doctor:
    """Checks of this machine, printed line by line.

    They are about all frameworks and launchers that are installed, or about those that are named. What is named must be
    there; else, what is missing is no problem if training works without it. Every child process is killed after
    `timeout` seconds.
    """

    def __init__(self, timeout: float, framework: str | None = None, launcher: str | None = None) -> None:
        if launcher == "torchrun":
            if framework not in (None, "torch"):
                raise ConfigError(f"--launcher torchrun starts ranks of PyTorch, received --framework {framework}.")
            framework = "torch"
        self._timeout, self._framework, self._launcher = timeout, framework, launcher
        self._frameworks = [name for name in FRAMEWORKS if installed(name) and framework in (None, name)]
        self._problems: list[str] = []
        # Frameworks for which Horovod cannot be imported.
        self._broken: set[str] = set()
        self._running: set[subprocess.Popen[str]] = set()
        self._ending = False
        # A launcher in the same folder as this Python works even if the environment is not activated.
        own = str(Path(sys.executable).parent)
        self._path = os.pathsep.join([os.environ.get("PATH", os.defpath), own])
        # Horovod's launcher imports TensorFlow, which logs a lot.
        self._environment = {**os.environ, **SAFE_PATH, "PATH": self._path, "TF_CPP_MIN_LOG_LEVEL": "3"}

    def examine(self, *, launch: bool) -> int:
        """Run all checks and print the problems. Return 0 if training with grace works on this machine, else 1."""
        self._versions()
        found, flags = self._launchers()
        workers = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 1)
        try:
            plugins = workers.submit(self._run, python(PLUGINS))
            ended = self._launch(found, flags, workers) if launch else {}
            self._horovod(ended, workers)
            self._plugins(plugins.result())
            self._say_launched(ended, found, launch)
        finally:
            # After Ctrl-C, nobody waits for the children.
            self._ending = True
            for process in list(self._running):
                _kill(process)
            workers.shutdown(cancel_futures=True)
        if self._problems:
            print(f"\n{len(self._problems)} problem(s):", *self._problems, sep="\n  - ")
            return 1
        print("\nno problem found")
        return 0

    def _say(self, topic: str, finding: str, problem: str = "") -> None:
        print(f"{topic:<20}{finding}", flush=True)
        if problem:
            self._problems.append(problem)

    # --- what is installed ------------------------------------------------------------------------------------------

    def _versions(self) -> None:
        framework, launcher = self._framework, self._launcher
        self._say("python", f"{sys.version.split()[0]} ({sys.executable})")
        self._say("grace", __version__)
        # PyTorch can do without Horovod.
        horovod = launcher in CONTROLLERS or framework == "tensorflow" or not (framework or installed("torch"))
        build = "horovod is missing: run scripts/setup.sh, or build Horovod for your framework with MPI or Gloo"
        needed = {
            "numpy": "numpy is missing: install it",
            "torch": "torch is missing: install PyTorch" if framework == "torch" else "",
            "tensorflow": "tensorflow is missing: install TensorFlow" if framework == "tensorflow" else "",
            "keras": "",
            "horovod": build if horovod else "",
            "mpi4py": "",
        }
        for package, problem in needed.items():
            version = installed(package)
            self._say(package, version or "not installed", "" if version else problem)
        if not self._frameworks and framework is None:
            self._problems.append("torch and tensorflow are missing: install PyTorch or TensorFlow (or both)")

    def _launchers(self) -> tuple[dict[str, str], list[str]]:
        """Return the paths of the launchers that are installed and asked for, and the flags for mpirun."""
        mpirun = shutil.which("mpirun", path=self._path)
        lines = self._run([mpirun, "--version"]).output.strip().splitlines() if mpirun else []
        version = lines[0] if lines else ""
        self._say("MPI", version or "not found (without it, only horovodrun --gloo can start ranks with Horovod)")
        found: dict[str, str] = {}
        for name in LAUNCHERS:
            if self._launcher not in (None, name) or (name == "torchrun" and not installed("torch")):
                continue
            path = shutil.which(name, path=self._path)
            if path is None:
                self._say(name, "not found", f"{name} is not found: install it" if self._launcher else "")
                continue
            found[name] = path
            note = "" if shutil.which(name) else " (not on PATH: activate the environment first)"
            self._say(name, f"{path}{note}")
        # A local import: this module imports NumPy, and `grace bench` sets the number of threads before that.
        from grace.core.ops.native import describe

        try:
            self._say("kernels", describe())
        except ConfigError as error:
            self._say("kernels", "not usable", str(error))
        return found, OPEN_MPI_FLAGS if "Open MPI" in version or "OpenRTE" in version else []

    def _plugins(self, ended: Ended) -> None:
        found = [line.split("\t") for line in ended.output.splitlines() if line.count("\t") == 2]
        for name, distribution, fault in found:
            self._say("plugin", f"{name} of {distribution}: {'cannot be loaded' if fault else 'works'}", fault)
        if ended.status != 0:
            self._say("plugin", "unknown: the check failed", "the entry points of other packages cannot be checked")
            print(_indented(ended.output))
        elif not found:
            self._say("plugin", "none")

    def _horovod(self, launched: dict[Pair, Ended], workers: concurrent.futures.Executor) -> None:
        """Say how Horovod was built and which kernels TensorFlow has. The ranks, if started, have reported it."""
        facts: dict[str, dict[str, Any]] = {name: {} for name in self._frameworks}
        for pair, ended in launched.items():
            facts[pair.framework].update(ended.facts)
        programs = {name: _program(name) for name in facts if not {*facts[name]} >= _expected(name)}
        alone = {name: workers.submit(self._run, python(program)) for name, program in programs.items()}
        for framework, known in facts.items():
            output = ""
            if framework in alone:
                ended = alone[framework].result()
                output = ended.output
                known.update(ended.facts)
            topic = f"horovod.{framework}"
            if "built" in known:
                self._say(topic, f"built with {' and '.join(known['built']) or 'neither MPI nor Gloo'}")
            elif installed("horovod"):
                self._broken.add(framework)
                self._say(topic, "does not load", f"{topic} cannot be imported: rebuild Horovod (scripts/setup.sh)")
                print(_indented(output))
            if framework == "tensorflow":
                self._say("kernels.tensorflow", known.get("kernels", "unknown: the check failed"))

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _launch(
        self, found: dict[str, str], flags: list[str], workers: concurrent.futures.Executor
    ) -> dict[Pair, Ended]:
        """Start two ranks with pairs of frameworks and launchers. Return how they ended."""
        horovod = bool(installed("horovod"))
        possible = [
            pair
            for pair in PAIRS
            if pair.framework in self._frameworks
            and pair.launcher in found
            and (horovod or pair.launcher not in CONTROLLERS)
        ]
        ended: dict[Pair, Ended] = {}
        while batch := self._next([pair for pair in possible if pair not in ended], ended):
            futures = {pair: workers.submit(self._run, _command(pair, found, flags)) for pair in batch}
            ended |= {pair: future.result() for pair, future in futures.items()}
        return ended

    def _next(self, pairs: Sequence[Pair], ended: dict[Pair, Ended]) -> list[Pair]:
        """Return the next pairs to try: all if the user named any, else those with what had no possible pair yet."""
        if self._framework or self._launcher:
            return list(pairs)
        had = {name for pair, each in ended.items() if not _impossible(pair, each) for name in pair}
        batch = []
        for pair in pairs:
            if not {*pair} <= had:
                batch.append(pair)
                had |= {*pair}
        return batch

    def _say_launched(self, ended: dict[Pair, Ended], found: dict[str, str], launch: bool) -> None:
        """Say how the ranks ended. It is a problem if no launcher fits a framework, or if one fails."""
        if not launch:
            self._say("2-rank allreduce", "not checked (--no-launch)")
            return
        for pair, (status, output, _) in ended.items():
            if pair.framework in self._broken and pair.launcher in CONTROLLERS:
                continue
            how = "horovodrun --gloo" if pair.launcher == "horovodrun" else pair.launcher
            what = f"{pair.framework}, {how}"
            if why := _impossible(pair, ended[pair]):
                self._say(f"2-rank allreduce, {what}: ", f"not possible, {why}")
            elif status == 0:
                print(f"2-rank allreduce, {what}: works", flush=True)
            else:
                end = f"no answer in {self._timeout:g} s" if status is None else f"exit status {status}"
                print(f"2-rank allreduce, {what}: FAILED, {end}\n{_indented(output)}", flush=True)
                self._problems.append(f"the 2-rank allreduce failed ({what}): see its output above")
        for framework in self._frameworks:
            # What is missing was reported, if it matters.
            without = not installed("horovod") and (framework != "torch" or self._launcher in CONTROLLERS)
            if without or framework in self._broken or (self._launcher and self._launcher not in found):
                continue
            if all(pair.framework != framework or _impossible(pair, each) for pair, each in ended.items()):
                self._say(
                    f"2-rank allreduce, {framework}: ",
                    "not possible",
                    f"no installed launcher fits {framework} ({', '.join(found) or 'none found'}): horovodrun needs "
                    "Horovod's build with Gloo, mpirun one with MPI, and torchrun needs PyTorch",
                )

    def _run(self, command: list[str]) -> Ended:
        """Run a command; at the timeout, its child processes are killed with it."""
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
        self._running.add(process)
        if self._ending:
            _kill(process)
        status: int | None = None
        try:
            output = process.communicate(timeout=self._timeout)[0]
            status = process.returncode
        except subprocess.TimeoutExpired:
            _kill(process)
            output = process.communicate()[0]
        self._running.discard(process)
        return Ended(status, output, _facts(output))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a child with its own children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _expected(framework: str) -> set[str]:
    """Return the names of what a child of a framework tells."""
    horovod = {"built"} if installed("horovod") else set()
    return horovod | ({"kernels"} if framework == "tensorflow" else set())


def _program(framework: str) -> str:
    """Return the code by which a child tells what it knows of the framework."""
    parts = {"kernels": KERNELS, "built": BUILD.format(framework)}
    return "\n".join([TELL, *(code for fact, code in parts.items() if fact in _expected(framework))])


def _facts(output: str) -> dict[str, Any]:
    """Return what a child has reported. Lines of several ranks may be mixed up, but each of them says the same."""
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            with contextlib.suppress(json.JSONDecodeError):
                facts.update(json.loads(text))
    return facts


def _command(pair: Pair, found: dict[str, str], flags: Sequence[str]) -> list[str]:
    """Return the command that starts two ranks."""
    start = found[pair.launcher]
    if pair.launcher == "torchrun":
        return [start, "--standalone", "--nproc-per-node", "2", "--no-python", *python(GLOO)]
    program = python(f"{_program(pair.framework)}\n{ALLREDUCE.format(pair.framework)}")
    if pair.launcher == "horovodrun":
        return [start, "-np", "2", "--gloo", *program]
    return [start, *flags, "-np", "2", *program]


def _impossible(pair: Pair, ended: Ended) -> str:
    """Return why the rendezvous failed: Horovod's build lacks what the launcher needs. Empty if it does not."""
    controller, built = CONTROLLERS.get(pair.launcher), ended.facts.get("built")
    if ended.status == 0 or controller is None or built is None or controller in built:
        return ""
    return f"Horovod's build for {pair.framework} has no {controller}"


def _indented(output: str, most: int = 30) -> str:
    """Return the last lines of an output, indented."""
    return "\n".join(f"    | {line}" for line in output.strip().splitlines()[-most:])
