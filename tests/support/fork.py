"""Ranks and launchers as forks of processes that have imported their framework: the import is paid once.

`python -m tests.support.fork serve WORKER SOCKET` imports a worker and forks it for every connection. What a launcher
starts is `python -m tests.support.fork start FOLDER ARGUMENTS`, or `run FOLDER SCRIPT ARGUMENTS`, which runs a script
in place of the worker. It hands its environment, its working directory and its output to the server of its rank, and
ends as the fork does. Neighbouring ranks have different servers, so that they differ in the seeds of Python's hashes
and generators. More servers would only import the framework again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Where launchers tell a process its rank; without any of them there is only one.
RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
# The number of servers. That of a rank has the socket FOLDER/(rank % SERVERS).
SERVERS = 2
_NO_ORDER = b""


def order(verb: str, folder: str, *arguments: str) -> int:
    """Let the server of this rank fork a worker ("start") or a script ("run"). End as it does, by exit or by signal."""
    rank = int(next((os.environ[name] for name in RANK if name in os.environ), 0))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/{rank % SERVERS}")
        words = {"verb": verb, "environment": dict(os.environ), "folder": os.getcwd(), "arguments": arguments}
        socket.send_fds(connection, [json.dumps(words).encode() + b"\n"], [sys.stdout.fileno(), sys.stderr.fileno()])
        told = connection.makefile().readline()
    status = int(told) if told else 1
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def serve(name: str, path: str) -> None:
    """Fork a worker for every connection, until standard input ends. A worker ends when it has done its work."""
    # While modules are imported, there is little garbage, and a look for it takes a fifth of the time. Afterwards the
    # garbage collector of a fork would write to every page of what was imported, and so copy it.
    gc.disable()
    worker = importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    Path(f"{path}.ready").touch()
    workers: dict[int, socket.socket] = {}
    while True:
        # Standard input ends with the tests.
        ready, _, _ = select.select([sys.stdin, server, woken, *workers.values()], [], [])
        if sys.stdin in ready:
            return
        if woken in ready:
            os.read(woken, 1024)
            while workers:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                # The process that waits for this worker may have ended.
                with workers.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        for pid, connection in workers.items():
            # The launcher has ended the process that waits for this worker.
            if connection in ready and connection.recv(1, socket.MSG_DONTWAIT) == _NO_ORDER:
                os.kill(pid, signal.SIGKILL)
        if server in ready:
            connection, _ = server.accept()
            words, outputs = _receive(connection)
            pid = os.fork()
            if pid:
                workers[pid] = connection
                for output in outputs:
                    os.close(output)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for opened in (server, connection, *workers.values()):
                opened.close()
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            for number, output in enumerate(outputs, 1):
                os.dup2(output, number)
                os.close(output)
            os.environ.clear()
            os.environ.update(words["environment"])
            os.chdir(words["folder"])
            if words["verb"] == "run":
                sys.argv[:] = words["arguments"]
                _end(_status(runpy.run_path, sys.argv[0], None, "__main__"))
            sys.argv[1:] = words["arguments"]
            _end(_status(worker.main))


def _status(program: Callable[..., Any], *arguments: Any) -> int:
    """Run a program, and return the exit status that Python would give it."""
    try:
        program(*arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """End this process as Python does, but let the kernel free the memory.

    Python would free module by module what the server has imported, and so copy every page of it first: a quarter of a
    second of the processor. mpi4py ends MPI after that.
    """
    if "mpi4py.MPI" in sys.modules:
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    order, outputs, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    while not order.endswith(b"\n"):
        order += connection.recv(1 << 16)
    return json.loads(order), outputs


if __name__ == "__main__":
    _, verb, *words = sys.argv
    if verb == "serve":
        serve(*words)
    else:
        sys.exit(order(verb, *words))
