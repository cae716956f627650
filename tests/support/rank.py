"""One rank of a pool: it runs the scenarios that the test process names, until the test process hangs up.

`python -m WORKER SOCKET RANKS` starts one. Messages are lines of JSON: the rank sends its number and its process id,
and for every `[name, arguments]` what the scenario of that name returned, or {"error": ..., "trace": ...}. Assertions
about results belong to the tests; a scenario only reports what happened on its rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any


def ranks() -> int:
    """Return the number of ranks of this launch, which is known before the launcher is asked."""
    return int(sys.argv[2])


def serve(rank: int, modules: Iterable[ModuleType], after: Callable[[], Any] = lambda: None) -> None:
    """Run scenarios, which are functions of `modules`, and call `after` when one is over."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        with connection.makefile("rw") as stream:
            _send(stream, {"rank": rank, "pid": os.getpid()})
            for line in stream:
                name, arguments = json.loads(line)
                started = time.monotonic(), time.process_time()
                try:
                    result = next(getattr(module, name) for module in modules if hasattr(module, name))(*arguments)
                except Exception as error:
                    result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
                after()
                seconds = time.monotonic() - started[0], time.process_time() - started[1]
                print(f"{name}: {seconds[0]:.1f} s, {seconds[1]:.1f} s of the processor", flush=True)
                _send(stream, result)


def _send(stream: Any, message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
