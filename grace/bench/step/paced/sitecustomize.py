"""The pacing of this process' TCP connections; see `grace.bench.step.paced`. Python imports it when it starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
import threading
import time
from importlib.machinery import PathFinder
from pathlib import Path

# Of Linux, in bytes per second. The module socket does not know it.
SO_MAX_PACING_RATE = 47
# Seconds between two looks for new sockets. Those that a paced socket accepts are paced from the start.
PERIOD_S = 0.02


def pace(rate: int, known: dict[str, str]) -> None:
    """Limit the rate of all TCP sockets of this process that are not in `known`, by descriptor, and add them."""
    for name in os.listdir("/proc/self/fd"):
        # A descriptor may be closed, or become another one, at any time.
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:") or known.get(name) == target:
                continue
            known[name] = target
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    found.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate.to_bytes(8, sys.byteorder))


def keep_pacing(rate: int) -> None:
    """Pace new sockets as long as the process runs."""
    known: dict[str, str] = {}
    while True:
        pace(rate, known)
        time.sleep(PERIOD_S)


def import_hidden() -> None:
    """Import the `sitecustomize` that this one hides, if there is one."""
    here = Path(__file__).parent
    found = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != here.resolve()])
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


if "GRACE_PACE" in os.environ:
    threading.Thread(target=keep_pacing, args=(int(os.environ["GRACE_PACE"]),), daemon=True).start()
    import_hidden()
