"""The command `grace bench run`: a program of the user on several ranks, each behind a link of its own."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from grace.bench.command import INTERRUPTED
from grace.bench.step.command import add_network, interrupt_on_signals, read_network
from grace.bench.step.network import Network, limit_kind
from grace.bench.step.ranks import (
    RENDEZVOUS,
    end_with_parent,
    horovod_environment,
    torch_environment,
    without_launcher,
)
from grace.core.errors import ConfigError, GraceError
from grace.machine import installed, python

# Seconds that ranks have to end by themselves, after Ctrl-C or after another rank has failed.
GRACE_PERIOD_S = 5.0
POLL_S = 0.05
# The lines of a failed rank that are shown if its output was not.
TAIL = 30
LAUNCHERS = ("torch", "horovod")


def add_run(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="run a program on several ranks, each behind a link with limited bandwidth",
        description="Run a program on several ranks of this machine, with the environment of torchrun. Every rank has "
        "a network link of its own with limited bandwidth. Root is not needed: without it, the links lie within a user "
        "namespace; if the kernel allows none, each connection of a rank is paced. Example: grace bench run "
        "--link 1gbit --ranks 4 -- python train.py",
    )
    add_network(parser)
    launcher = "environment of torchrun (torch) or of horovodrun (horovod) (default: torch)"
    parser.add_argument("--launcher", choices=LAUNCHERS, default="torch", help=launcher)
    prefix = "show the output of all ranks, each line after its rank; without it that of rank 0"
    parser.add_argument("--prefix", action="store_true", help=prefix)
    parser.add_argument("program", nargs="+", metavar="PROGRAM", help="program and arguments, after '--'")
    parser.set_defaults(run=run_program)


def run_program(args: argparse.Namespace) -> int:
    """Run the program and return its exit status: that of the first rank that fails, else 0.

    Raises ConfigError for wrong arguments, and GraceError if the network cannot be made.
    """
    return run_on_ranks(args, args.program, args.launcher, prefix=args.prefix)


def run_on_ranks(args: argparse.Namespace, program: Sequence[str], launcher: str, *, prefix: bool = False) -> int:
    """Run a program on the ranks that the options of `add_network` describe. Return the exit status."""
    ranks, local_size = read_network(args, least=1)
    if shutil.which(program[0]) is None:
        raise ConfigError(f"the program '{program[0]}' was not found; name one that is on the PATH, or its path.")
    if not installed(launcher):
        raise ConfigError(f"--launcher: '{launcher}' is not installed; install it, or choose another launcher.")
    if limit_kind(args.link) == "pacing":
        print(
            "grace bench: no network namespaces for this user here; each connection of a rank is paced at "
            f"{args.link} instead",
            file=sys.stderr,
        )
    try:
        with (
            interrupt_on_signals(),
            Network(ranks, args.link, args.latency, local_size) as network,
            _rendezvous(network, launcher) as environments,
            Job(network, environments, program, prefix) as job,
        ):
            return job.wait()
    except KeyboardInterrupt:
        print("grace bench: interrupted; all ranks and namespaces are removed", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def _rendezvous(network: Network, launcher: str) -> Iterator[list[dict[str, str]]]:
    """Give the variables of each rank, for Horovod with a rendezvous server that serves meanwhile."""
    if launcher == "torch":
        yield torch_environment(network)
        return
    local_size = network.local_size if network.nodes[0].namespace is not None else len(network.nodes)
    hosts = ",".join(f"{node.address}:{local_size}" for node in network.nodes[::local_size])
    with subprocess.Popen(
        network.hub.command(python(RENDEZVOUS, network.hub.address, hosts)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent(),
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            if not port:
                raise GraceError("Horovod's rendezvous server did not start; its last lines are above.")
            yield horovod_environment(network, port)
        finally:
            server.kill()


class Job:
    """The processes of a program, one per rank: a context manager that starts them and kills them on exit.

    If this process is killed, the kernel kills them.
    """

    def __init__(
        self, network: Network, environments: Sequence[dict[str, str]], program: Sequence[str], prefix: bool
    ) -> None:
        self._network, self._environments, self._program, self._prefix = network, environments, program, prefix
        self._ranks: list[subprocess.Popen[bytes]] = []
        # Of each rank whose output is not shown.
        self._logs: dict[int, IO[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Job:
        try:
            for rank in range(len(self._environments)):
                self._ranks.append(self._start(rank))
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *failed: object) -> None:
        if failed[0] is KeyboardInterrupt:
            self._end(signal.SIGINT)
        self._kill()

    def wait(self) -> int:
        """Wait for all ranks, and return 0, or the status of the first that fails; the others then end as well."""
        while True:
            states = [process.poll() for process in self._ranks]
            failed = next((rank for rank, state in enumerate(states) if state), None)
            if failed is not None:
                self._end(signal.SIGTERM)
                return self._report_failure(failed, states[failed] or 0)
            if None not in states:
                self._drain()
                return 0
            time.sleep(POLL_S)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        cores = len(os.sched_getaffinity(0))
        own = {"OMP_NUM_THREADS": str(max(1, cores // len(self._environments))), **without_launcher(os.environ)}
        output: Any = None
        if self._prefix:
            output = subprocess.PIPE
            # Else a program in Python writes its lines late, as it does to files.
            own.setdefault("PYTHONUNBUFFERED", "1")
        elif rank > 0:
            output = self._logs[rank] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _kill
        process = subprocess.Popen(
            self._network.nodes[rank].command(self._program),
            env={**own, **self._network.environment(), **self._environments[rank]},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        if self._prefix:
            reader = threading.Thread(target=self._show, args=(rank, process.stdout), daemon=True)
            reader.start()
            self._readers.append(reader)
        return process

    def _show(self, rank: int, lines: IO[bytes]) -> None:
        for line in lines:
            with self._lock:
                sys.stdout.write(f"[{rank}] {line.decode(errors='replace').rstrip()}\n")
                sys.stdout.flush()

    def _report_failure(self, rank: int, state: int) -> int:
        """Say which rank has failed, and how. Return the exit status."""
        self._drain()
        status = state if state > 0 else 128 - state
        how = f"with status {state}" if state > 0 else f"by signal {signal.Signals(-state).name}"
        print(f"grace bench: rank {rank} ended {how}", file=sys.stderr)
        if rank in self._logs:
            log = self._logs[rank].fileno()
            lines = os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace").splitlines()
            print("\n".join(f"    | {line}" for line in lines[-TAIL:]), file=sys.stderr)
        return status

    def _drain(self) -> None:
        """Show the rest of the output. A process that a rank left behind may keep a pipe open."""
        for reader in self._readers:
            reader.join(1.0)

    def _end(self, number: signal.Signals) -> None:
        """Ask the ranks to end, and wait a while."""
        self._signal(number)
        end = time.monotonic() + GRACE_PERIOD_S
        while any(process.poll() is None for process in self._ranks) and time.monotonic() < end:
            time.sleep(POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._ranks:
            # The group outlives its first process if that has left others.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self._ranks:
            process.wait()
        for log in self._logs.values():
            log.close()
