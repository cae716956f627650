"""One rank of a pool. It runs scenarios for the test process until that closes the connection.

`python -m WORKER SOCKET RANKS` starts one. Messages are lines of JSON: the rank sends its number and its process id,
and for every `[name, arguments]` the result of the scenario with this name, or {"error": ..., "trace": ...}. A scenario
only reports what happened on its rank. The tests make the assertions.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tests.support.launch import ROOT


def ranks() -> int:
    """Return the number of ranks of this launch, which is known before the launcher reports it."""
    return int(sys.argv[2])


def let_gloo_give_way() -> None:
    """Give the threads that wait for Gloo's sockets the lowest priority.

    Such a thread asks again and again, without a pause, while another one of its rank holds the lock of a connection.
    With more threads than cores, it so keeps the other from going on.
    """
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, IndexError):
            # The number of the system call and its arguments, or "running".
            words = (thread / "syscall").read_text().split()
            if os.readlink(f"/proc/self/fd/{int(words[1], 16)}") == "anon_inode:[eventpoll]":
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)


def serve(rank: int, modules: Iterable[ModuleType], after: Callable[[], Any] = lambda: None) -> None:
    """Run scenarios, which are functions of `modules`, and call `after` at the end of each."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        with connection.makefile("rw") as stream:
            _send(stream, {"rank": rank, "pid": os.getpid()})
            for line in stream:
                name, arguments = json.loads(line)
                started = time.monotonic(), time.process_time()
                scenario = next(getattr(module, name) for module in modules if hasattr(module, name))
                try:
                    with _measured(name):
                        result = scenario(*arguments)
                except Exception as error:
                    result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
                after()
                seconds = time.monotonic() - started[0], time.process_time() - started[1]
                print(f"{name}: {seconds[0]:.1f} s, {seconds[1]:.1f} s of the processor", flush=True)
                _send(stream, result)


@contextlib.contextmanager
def _measured(name: str) -> Iterator[None]:
    """Record the lines of grace that a scenario runs, if scripts/alone.py asks for them."""
    if "GRACE_TEST_COVERAGE" not in os.environ:
        yield
        return
    import coverage

    # Ranks run the same scenario at the same time, and some of them end by a signal: each scenario has its own file.
    lines = coverage.Coverage(
        data_file=os.environ["GRACE_TEST_COVERAGE"], data_suffix=True, config_file=False, source_pkgs=["grace"]
    )
    lines.start()
    lines.switch_context(f"scenario.{name}")
    started = time.monotonic()
    try:
        yield
    finally:
        lines.stop()
        lines.save()
        with open(os.environ["GRACE_TEST_COVERAGE"] + ".seconds", "a", encoding="utf-8") as file:
            file.write(f"scenario.{name}\t{(time.monotonic() - started) / ranks()}\n")


def _send(stream: Any, message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def run_digits(framework: str, arguments: list[str]) -> int:
    """Run a digits example in this process, and return its exit status."""
    sys.path.append(str(ROOT / "examples"))
    shared, example = (importlib.import_module(name) for name in ("digits", f"{framework}_digits"))
    hvd = example.hvd if hasattr(example, "hvd") else example.Torchrun
    # `ranks` reads the arguments of this rank afterwards.
    with mock.patch.object(sys, "argv", [sys.argv[0], *arguments]):
        return int(shared.main(framework, "", hvd, example.train))


def run_program(code: str) -> str:
    """Run a program in this process, which need not import a framework again."""
    exec(code, {})
    return "ended"
