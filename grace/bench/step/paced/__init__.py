"""A limit of bandwidth without namespaces: the kernel paces every TCP connection of a rank at the rate of its link.

A rank starts with this folder on PYTHONPATH, so that Python imports the `sitecustomize` in it. That one sets
SO_MAX_PACING_RATE on the sockets of its process. TCP then sends no faster. What is not limited: what a rank receives
from several others at once, and what it sends to several others at once, because each connection has the full rate.
In a ring, and between two ranks, there is one connection in each direction.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GRACE_PACE"


def environment(rate: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that pace a Python process and its children at `rate` bytes per second."""
    folders = [str(Path(__file__).parent), *filter(None, [given.get("PYTHONPATH")])]
    return {VARIABLE: str(rate), "PYTHONPATH": os.pathsep.join(folders)}
