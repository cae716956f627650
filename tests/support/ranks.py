"""A pool of ranks that a launcher starts once. It runs one scenario after another, for many tests.

Starting ranks and importing a framework on each of them takes longer than most scenarios. A test process has one pool
at a time, because Horovod's and Open MPI's threads take processor time even when nothing is exchanged; `grouped` orders
the tests by their parameter `launch`, so that every pool starts once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork
from tests.support.covering import ALL
from tests.support.launch import MPI, ROOT, TENSORFLOW, TORCH, Launch, command, environment

# Time limits in seconds. They are long, for a busy machine; a healthy pool never reaches them. Under `--all` a scenario
# may have hundreds of exchanges, whose graphs TensorFlow traces one by one.
START_S, SCENARIO_S, END_S = 240, 5400 if ALL else 600, 60
# The seconds that a rank gets after another one has raised an error, because it may wait for that rank forever.
AFTER_ERROR_S = 30
# How long a launcher may take to notice that a rank has died.
AFTER_DEATH_S = 10


# The launches of a test without --all, unless it is about launches: a rank alone, and two ranks of each library.
USUAL = {
    *(Launch(TORCH, *launch) for launch in (("python", 1), ("horovodrun-gloo", 2), ("torchrun", 2))),
    Launch(TENSORFLOW, "horovodrun-gloo", 2),
    Launch(MPI, "mpirun", 2),
}


def on(*launches: Launch, usual: Collection[Launch] = USUAL) -> Any:
    """Parametrize a test by the launches whose ranks it uses; without --all, by the usual ones or else the first."""
    chosen = [launch for launch in launches if launch in usual] or launches[:1]
    cases = [pytest.param(x, id=str(x), marks=() if x in chosen else pytest.mark.slow) for x in launches]
    return pytest.mark.parametrize("launch", cases)


def grouped(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sort tests by launch, in the order of the launches' first tests. Tests without a launch come first, in order."""
    by_launch: dict[Launch | None, list[pytest.Item]] = {None: []}
    for item in items:
        by_launch.setdefault(_launch_of(item), []).append(item)
    return [item for group in by_launch.values() for item in group]


def _launch_of(item: pytest.Item) -> Launch | None:
    launch = item.callspec.params.get("launch") if hasattr(item, "callspec") else None
    return launch if isinstance(launch, Launch) else None


@functools.cache
def _ask(launch: Launch, name: str, arguments: str) -> str:
    # Keep the results as text, so that no test can change the results of the next one.
    return json.dumps(_running(launch).ask(name, json.loads(arguments)))


def scenario(name: str, launch: Launch, *arguments: Any) -> list[Any]:
    """Run a scenario once and return the reports of all ranks. Fail if a rank raised an error, died or hung."""
    results = json.loads(_ask(launch, name, json.dumps(arguments)))
    for rank, result in enumerate(results):
        assert not (isinstance(result, dict) and "trace" in result), f"rank {rank}: {result['trace']}"
    return results


def same(values: list[Any]) -> bool:
    """Return whether all ranks report the same."""
    return all(value == values[0] for value in values)


class Pool:
    """The ranks of one launch, each connected by a socket."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.broken = False
        # Ranks that are being killed may still write files there.
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._output = Path(self._folder.name) / "output"
        path = f"{self._folder.name}/socket"
        started = [sys.executable, "-m", launch.worker]
        if launch.worker in FORKED:
            started = forked(launch.worker)
        self._words = [*launcher(launch.launcher, launch.ranks), *started]
        with socket.socket(socket.AF_UNIX) as server, self._output.open("wb") as output:
            server.bind(path)
            server.listen(launch.ranks)
            # mpirun names its files by its process id, and does not start if those of a killed mpirun are in its way.
            self._process = subprocess.Popen(
                [*self._words, path, str(launch.ranks)],
                cwd=ROOT,
                env=environment(TMPDIR=self._folder.name),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._connections: list[socket.socket] = []
            self._pids: dict[int, int] = {}
            try:
                server.settimeout(1.0)
                deadline = time.monotonic() + START_S
                while len(self._connections) < launch.ranks:
                    try:
                        self._connections.append(server.accept()[0])
                    except TimeoutError:
                        self._check(deadline, "did not start")
                hellos = self._receive(deadline, "did not start")
            except BaseException:
                self.kill()
                raise
        order = sorted(range(launch.ranks), key=lambda i: hellos[i]["rank"])
        self._connections = [self._connections[i] for i in order]
        self._pids = {hello["rank"]: hello["pid"] for hello in hellos}

    def ask(self, name: str, arguments: list[Any]) -> list[Any]:
        """Run a scenario and return the report of each rank. After an error the pool cannot be used again."""
        for connection in self._connections:
            connection.sendall(json.dumps([name, arguments]).encode() + b"\n")
        try:
            results = self._receive(time.monotonic() + SCENARIO_S, f"did not finish {name}")
        except BaseException:
            self.kill()
            raise
        # Some ranks may have started collectives that other ranks will never start.
        self.broken = any(_failed(result) for result in results)
        return results

    def _receive(self, deadline: float, failure: str) -> list[Any]:
        """Receive one message from every rank."""
        received: list[Any] = [None] * len(self._connections)
        texts = [b""] * len(self._connections)
        with selectors.DefaultSelector() as selector:
            for i, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, i)
            while selector.get_map():
                for key, _ in selector.select(1.0):
                    part = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                    texts[key.data] += part
                    if not part or part.endswith(b"\n"):
                        selector.unregister(key.fileobj)
                        if not part:
                            # The launcher passes on the last words of the rank, and has some itself.
                            with contextlib.suppress(subprocess.TimeoutExpired):
                                self._process.wait(AFTER_DEATH_S)
                            raise AssertionError(self._failed(f"{failure}: a rank died"))
                        received[key.data] = json.loads(texts[key.data])
                        if _failed(received[key.data]):
                            deadline = min(deadline, time.monotonic() + AFTER_ERROR_S)
                errors = "\n".join(f"a rank raised: {r['trace']}" for r in received if _failed(r))
                self._check(deadline, f"{failure}{errors and ': '}{errors}")
        return received

    def _check(self, deadline: float, failure: str) -> None:
        assert self._process.poll() is None, self._failed(f"{failure}: it exited with {self._process.returncode}")
        assert time.monotonic() < deadline, self._failed(f"{failure} in time")

    def _failed(self, failure: str) -> str:
        text = self._output.read_bytes().decode(errors="replace")
        return f"{' '.join(self._words)} {failure}\n{text[-8000:]}"

    def stop(self) -> None:
        """Wait until the ranks have ended. Fail if one does not end with status 0."""
        if self.broken or self._process.returncode is not None:
            self.kill()
            return
        for connection in self._connections:
            connection.close()
        try:
            self._process.wait(END_S)
            assert self._process.returncode == 0, self._failed(f"exited with {self._process.returncode} at its end")
        except subprocess.TimeoutExpired:
            raise AssertionError(self._failed(f"did not end within {END_S} s")) from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all processes that still run."""
        self.broken = True
        for connection in self._connections:
            connection.close()
        if self._process.poll() is None:
            # Kill the launcher first, because it would report the death of its ranks. Then kill remaining ranks.
            os.killpg(self._process.pid, signal.SIGKILL)
            for pid in self._pids.values():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._process.wait()
        self._folder.cleanup()


def _failed(result: Any) -> bool:
    return isinstance(result, dict) and "trace" in result


class Servers:
    """The processes that fork the ranks of a worker, or launchers; see fork.py."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> str:
        """Start the servers if they do not run yet, and return the folder of their sockets."""
        words = [sys.executable, "-m", "tests.support.fork", "serve", self._worker]
        for number in range(len(self._processes), fork.SERVERS):
            path = f"{self._folder.name}/{number}"
            self._processes.append(subprocess.Popen([*words, path], cwd=ROOT, env=environment(), stdin=subprocess.PIPE))
        deadline = time.monotonic() + START_S
        for number, process in enumerate(self._processes):
            while not Path(f"{self._folder.name}/{number}.ready").exists():
                assert process.poll() is None, f"{' '.join(words)} exited with {process.returncode}"
                assert time.monotonic() < deadline, f"{' '.join(words)} did not start in {START_S} s"
                time.sleep(0.02)
        return self._folder.name

    def stop(self) -> None:
        """End the servers, which serve nobody any more."""
        for process in self._processes:
            process.kill()
            process.communicate()
        self._folder.cleanup()


# The worker of MPI imports no framework, and mpi4py starts MPI when it is imported.
FORKED = (TORCH, TENSORFLOW)
# The launchers in Python, and the worker of which they are forks.
LAUNCHERS = {"torchrun": TORCH, "horovodrun": TENSORFLOW}
_servers: dict[str, Servers] = {}
_pool: Pool | None = None


def forked(module: str, verb: str = "start") -> list[str]:
    """Return the command that forks a process of a module's servers, which start if they do not run yet.

    The process starts the module, or runs the script that follows the command if the verb is "run".
    """
    if module not in _servers:
        _servers[module] = Servers(module)
    return [sys.executable, "-m", "tests.support.fork", verb, _servers[module].start()]


def launcher(name: str, ranks: int) -> list[str]:
    """Return the command of a launcher. One in Python is a fork of ranks that have imported what it imports."""
    words = command(name, ranks)
    if words and words[0] in LAUNCHERS:
        return [*forked(LAUNCHERS[words[0]], "run"), f"{ROOT}/tests/support/{words[0]}.py", *words[1:]]
    return words


def run_script(path: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the PyTorch tests on ranks that torchrun starts."""
    return subprocess.run(
        [*launcher("torchrun", ranks), *forked(TORCH, "run"), f"{ROOT}/{path}", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SCENARIO_S,
        check=False,
    )


def _running(launch: Launch) -> Pool:
    """Return the pool of a launch. Start it if it does not run, and stop the previous pool."""
    global _pool
    if _pool is None or _pool.launch != launch or _pool.broken:
        stop()
        _pool = Pool(launch)
    return _pool


def stop() -> None:
    """Stop the running pool, if there is one."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.stop()


def end() -> None:
    """Stop all that the tests have started."""
    try:
        stop()
    finally:
        while _servers:
            _servers.popitem()[1].stop()
