"""Facts about this machine: installed packages and the processor; how to run Python. No framework is imported."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

FRAMEWORKS = ("torch", "tensorflow")
# For the processes that a child starts. Python 3.10 does not know it.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def python(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code in a new Python, which imports nothing from the current folder.

    Root runs `grace bench step`: a file numpy.py in the folder where it is called must not run as root. The option -P
    exists from Python 3.11 on, and -I would also ignore PYTHONPATH.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = filter(None, sys.path)\n{code}", *arguments]


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    Builds for one kind of device (`tensorflow-cpu`) count as the package; the version then shows their name.
    """
    for name in (package, f"{package}-cpu", f"{package}-gpu"):
        try:
            return f"{metadata.version(name)}" + (f" ({name})" if name != package else "")
        except metadata.PackageNotFoundError:
            continue
    return None


def processor() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the checkout that grace is imported from, "-dirty" if it was changed; None if there is none.

    An installed grace may lie within a checkout of something else, which does not track it.
    """
    folder = Path(__file__).parent
    try:
        tracked, found = (
            subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["ls-files", Path(__file__).name], ["describe", "--always", "--dirty", "--abbrev=12"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found if tracked else None
